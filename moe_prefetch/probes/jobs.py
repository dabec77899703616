"""What the commands `trace` and `fit` do: a model and texts in, a trace or a probe out."""
from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import check_writable
from ..errors import ConfigError
from ..runtime import REAL, Runtime
from ..seam import open_model
from .batches import Memory, Source, ranks
from .collect import Collector, Step
from .fit import fit
from .probe import RoutingProbe, check_folder
from .targets import FitConfig, Taps
from .traces import Trace, TraceWriter, hash_of_first
from .traces import check_folder as check_trace_folder
from .trainer import check_gates

Progress = Callable[[int, int], None]
# Sized for two CPU cores and five minutes, of which recording takes the most.
QUICK = FitConfig(rank=40, linear=32, steps=30, batch=256, lr=3e-3, ema=0.9, warmup=5)
QUICK_TOKENS, QUICK_HELD_OUT, QUICK_WINDOW, QUICK_RECORD_S = 10_240, 2_048, 256, 90.0


def load_model(model: str) -> tuple[Any, Any]:
    """(model, tokenizer) of 'smolmoe' or of a local checkpoint folder. Raises ConfigError for anything else: nothing is downloaded."""
    if model == "smolmoe":
        return importlib.import_module("moe_prefetch.integrations.smolmoe").load()
    if not Path(model).is_dir():
        raise ConfigError(f"no model at {model!r}", where="--model", expected="smolmoe, or a checkpoint folder",
                          do="download the checkpoint first")
    hf = importlib.import_module("transformers")
    try:
        loaded = hf.AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True, trust_remote_code=False).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # safetensors, its config's checks and packages of quantised weights raise errors of their own
        raise ConfigError(f"transformers can't load it: {' '.join(str(e).split())[:300]}", where=f"--model {model}",
                          expected="a folder written by save_pretrained, with its tokenizer",
                          do="mend what transformers names, or download all of the checkpoint again") from e
    # Where there is none, transformers makes one without words.
    if len(tokenizer) < 2:
        raise ConfigError("there is no tokenizer, or one that knows no words", where=f"--model {model}",
                          expected="a folder written by save_pretrained, with its tokenizer", do="download all of the checkpoint")
    return loaded, tokenizer


def text_windows(tokenizer: Any, texts: Sequence[str], window: int) -> torch.Tensor:
    """Token windows int64 [N, window] of all texts in order, each text's shorter rest dropped. Raises ConfigError when none is left, or
    the tokenizer can't read a text."""
    rows = []
    for text in texts:
        try:
            ids = tokenizer(text)["input_ids"]
        except Exception as e:  # tokenizers raises nothing narrower
            raise ConfigError(f"the tokenizer can't read the text: {' '.join(str(e).split())[:300]}", where="--text",
                              expected="text in its words, or a tokenizer with a token for unknown ones",
                              do="give another text, or mend the checkpoint's tokenizer") from e
        rows += [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]
    if not rows:
        raise ConfigError(f"the texts are shorter than one window of {window} tokens", where="--text",
                          do="give more text, or texts that are longer")
    return torch.tensor(rows)


def builtin_texts() -> list[str]:
    """Python's own documentation: on every machine that runs this."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return ["\n\n".join(topics[k] for k in sorted(topics))]


def read_texts(paths: Sequence[Path]) -> list[str]:
    out = []
    for path in paths:
        try:
            out.append(Path(path).read_text("utf-8", "replace"))
        except OSError as e:
            raise ConfigError(f"can't be read: {e.strerror}", where=str(path), do="check the path") from e
    return out


def record(model: Any, windows: torch.Tensor, consume: Callable[[Step], None], *, batch: int = 1, stop: Callable[[], bool] = lambda: False,
           progress: Progress | None = None) -> None:
    """Run the windows through the model, teacher-forced, handing every pass's taps to `consume`."""
    host = open_model(model)
    device = next(model.parameters()).device
    with host.observe(Collector(host.num_layers, consume, dtype=torch.bfloat16)), torch.inference_mode():
        for start in range(0, windows.shape[0], batch):
            if stop():
                return
            model.base_model(input_ids=windows[start : start + batch].to(device), use_cache=False)
            if progress is not None:
                progress(min(start + batch, windows.shape[0]), windows.shape[0])


def run_trace(model: str, out: Path, *, texts: Sequence[Path] = (), cap_mb: float = 1024.0, tokens: int | None = None, window: int = 512,
              batch: int = 1, shard_tokens: int = 2048, progress: Progress | None = None, runtime: Runtime = REAL) -> Trace:
    """Command `trace`: record hidden states and router decisions of `texts` (Python's documentation by default) into `out`, at most
    `cap_mb` megabytes and `tokens` tokens, in whole windows. Started again on the same folder with the same texts it goes on where it
    stopped; with others it refuses (more of them after the same ones are the same)."""
    if tokens is not None and tokens < window:
        raise ConfigError(f"{tokens} tokens are less than one window", where="--tokens", expected=f"{window} or more",
                          do=f"text is recorded in windows of {window} tokens: ask for one at least")
    if not 0 < cap_mb < math.inf:
        raise ConfigError(f"a cap of {cap_mb:g} megabytes", where="--cap-mb", expected="a number above 0", do="leave it out for 1024")
    words = read_texts(texts) or builtin_texts()
    check_trace_folder(out)
    check_writable(out)
    loaded, tokenizer = load_model(model)
    windows = text_windows(tokenizer, words, window)
    writer = TraceWriter(out, open_model(loaded).gates, cap_bytes=int(cap_mb * 1e6), shard_tokens=shard_tokens,
                         text_hash=hash_of_first(windows), runtime=runtime)
    if tokens is not None:
        windows = windows[: tokens // window]
    record(loaded, windows[writer.position :], writer.add, batch=batch, stop=lambda: writer.full, progress=progress)
    writer.flush()
    return Trace(out)


class _Split:
    """Some shards of several traces as one source."""

    def __init__(self, parts: Sequence[tuple[Trace, int]]) -> None:
        self.parts = list(parts)

    def __len__(self) -> int:
        return len(self.parts)

    def shard(self, index: int) -> Step:
        trace, i = self.parts[index]
        return trace.shard(i)

    @property
    def tokens(self) -> int:
        return sum(trace.manifest["shards"][i]["tokens"] for trace, i in self.parts)

    @property
    def identity(self) -> str:
        return " ".join(trace.manifest["shards"][i]["sha256"] for trace, i in self.parts)


def check_traces(traces: Sequence[Trace], held_out: Sequence[Trace]) -> None:
    """Raises ConfigError when a trace has too few shards to hold one out, or a shard is given twice: tokens learnt from would be judged
    on, or a domain counted twice."""
    seen: dict[str, Path] = {}
    for trace in (*traces, *held_out):
        least = 1 if held_out else 2
        if len(trace) < least:
            raise ConfigError("the trace has too few shards" + " to hold one out" * (least > 1), where=str(trace.folder),
                              expected=f"{least} or more", do="record more" + ", or give --held-out" * (least > 1))
        for entry in trace.manifest["shards"]:
            if (other := seen.setdefault(entry["sha256"], trace.folder)) is not trace.folder:
                raise ConfigError("two of the traces hold the same tokens", where=f"{other} and {trace.folder}",
                                  expected="every token once: to learn from, or to judge by", do="leave one of them out")


def domains(traces: Sequence[Trace]) -> list[str]:
    """A name for each: its folder's, with as many of the folders above as it takes to tell it from the others."""
    paths = [trace.folder.resolve().parts for trace in traces]
    ends = [[p[-n:] for n in range(1, len(p) + 1)] for p in paths]
    return ["/".join(next(end for end in mine if sum(end in theirs for theirs in ends) == 1)) for mine in ends]


def split(traces: Sequence[Trace], held_out: Sequence[Trace], past_eps: float | None = None) -> tuple[Source, dict[str, Taps]]:
    """Training shards and held-out taps per domain (a trace is a domain, see `domains`), with the recent past where `past_eps` is given.
    Without traces for it, the last tenth of every trace's shards is held out. Raises ConfigError as `check_traces`."""
    check_traces(traces, held_out)
    parts: list[tuple[Trace, int]] = []
    held = {}
    for name, trace in zip(domains([*traces, *held_out]), (*traces, *held_out)):
        first = 0 if trace in held_out else len(trace) if held_out else len(trace) - max(1, len(trace) // 10)
        if trace not in held_out:
            parts += [(trace, i) for i in range(first)]
        if first < len(trace):
            held[name] = Taps.join([trace.shard(i).taps_with_past(past_eps) for i in range(first, len(trace))])
    return _Split(parts), held


def first_rank() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


def _fewest(count: int) -> int:
    """The smallest of the ranks' counts."""
    if not dist.is_initialized():
        return count
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, count)
    return min(found)


def run_fit(model: str, out: Path, *, traces: Sequence[Path] = (), held_out: Sequence[Path] = (), quick: bool = False,
            config: FitConfig | None = None, past: bool = False, device: str | None = None, force: bool = False, watch: Any = None,
            progress: Progress | None = None, stage: Callable[[str], None] = lambda text: None, runtime: Runtime = REAL) -> RoutingProbe:
    """Command `fit`: from recorded `traces`, or `quick`: record a little of Python's documentation and fit on it (SmolMoE on two CPU
    cores: under five minutes). `past` gives horizon 0 the recent past as a second input. Under torchrun (WORLD_SIZE > 1) the ranks share
    the shards; only the first tells `progress`. `stage` is told what is going on. Raises ConfigError (see `check_traces`; traces together
    with `quick`), and as `fit.fit`."""
    if not traces and not quick:
        raise ConfigError("nothing to learn from", where="fit", expected="--trace FOLDER or --quick",
                          do="record a trace first: moe-prefetch trace")
    check_traces([Trace(p) for p in traces], [Trace(p) for p in held_out])
    if quick and (traces or held_out):
        raise ConfigError("--quick records a text of its own", where="fit", expected="--trace or --quick", do="leave one of them out")
    check_writable(check_folder(out))
    if not first_rank():
        progress = None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    started = False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        started = True
    try:
        loaded, tokenizer = load_model(model)
        gates = open_model(loaded).gates
        check_gates(gates)
        config = config or (QUICK if quick else FitConfig())
        config = replace(config, past=past or config.past)
        past_eps = gates[0].norm_eps if config.past else None
        if quick:
            stage("recording")
            windows = text_windows(tokenizer, builtin_texts(), QUICK_WINDOW)
            # Spread over the whole text, so that the held-out windows at the end are of other chapters.
            pick = torch.linspace(0, windows.shape[0] - 1, (QUICK_TOKENS + QUICK_HELD_OUT) // QUICK_WINDOW).long().unique()
            steps: list[Step] = []
            deadline = runtime.now() + QUICK_RECORD_S
            kept = max(1, QUICK_HELD_OUT // QUICK_WINDOW)
            record(loaded, windows[pick[-kept:]], steps.append, progress=progress)
            held, steps = {"documentation": Taps.join([s.taps_with_past(past_eps) for s in steps])}, []
            record(loaded, windows[pick[:-kept]], steps.append, progress=progress,
                   stop=lambda: runtime.now() > deadline and len(steps) >= 16)
            # By the clock, so not as many every time; the text to judge by is always the same, and none of it is among them.
            source: Source = Memory(steps[: _fewest(len(steps))], name=hash_of_first(windows[pick])(len(pick)))
        else:
            source, held = split([Trace(p, gates) for p in traces], [Trace(p, gates) for p in held_out], past_eps)
            config = replace(config, batch=min(config.batch, max(64, source.tokens // (4 * ranks()[1]))))
        stage("fitting")
        return fit(gates, source, held, out, config, device=device, force=force, watch=watch, progress=progress, runtime=runtime)
    finally:
        if started:
            dist.destroy_process_group()

