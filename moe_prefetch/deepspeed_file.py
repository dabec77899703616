"""A DeepSpeed configuration that holds our section: the two halves, and what they must not say together.

Pure reading: DeepSpeed is not imported, so `moe-prefetch validate` answers anywhere. The names of its keys are those of DeepSpeed 0.19.
"""
from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import config as config_module
from .config import Config, ExpertsConfig, KVConfig, ProbeConfig
from .errors import ConfigError

SECTION = "moe_prefetch"
EXAMPLE = '"moe_prefetch": {"experts": {"home": "disk", "resident": "50%"}} among its top-level keys'
# What `deepspeed.init_inference` takes; it refuses everything else itself, but only after a model has been loaded for it.
INFERENCE_KEYS = frozenset((
    "args", "base_dir", "checkpoint", "checkpoint_config", "ckpt_config", "config", "dtype", "enable_cuda_graph", "ep_group", "ep_mp_group",
    "ep_size", "expert_group", "expert_mp_group", "injection_dict", "injection_policy", "injection_policy_tuple", "keep_module_on_host",
    "kernel_inject", "max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens", "moe", "moe_experts", "moe_type", "mp_size", "mpu",
    "quant", "replace_method", "replace_with_kernel_inject", "return_tuple", "save_mp_checkpoint_path", "set_empty_params",
    "tensor_parallel", "tm", "tp", "training_mp_size", "transposed_mode", "triangular_masking", "triton_autotune", "use_triton", "zero"))
# Two names of one key: it refuses both together.
SYNONYMS = (("kernel_inject", "replace_with_kernel_inject"), ("tp", "tensor_parallel"), ("tm", "triangular_masking"),
            ("ckpt_config", "checkpoint_config"), ("injection_dict", "injection_policy"), ("args", "config"),
            ("max_tokens", "max_out_tokens"), ("min_tokens", "min_out_tokens"), ("expert_group", "ep_group"),
            ("expert_mp_group", "ep_mp_group"))
# What DeepSpeed 0.19 accepts and then does not do for these models: with its kernels alone it would, and it has none for them. Per key (and
# its other names) the value that asks for nothing, and what to do instead.
UNREAD: Mapping[tuple[str, ...], tuple[Any, str]] = {
    ("quant",): ({}, "nothing would be quantised; use dtype bf16 or fp16"),
    ("checkpoint",): (None, "nothing would be loaded; load the weights into the model first"),
    ("checkpoint_config", "ckpt_config"): ({}, "nothing would be loaded; load the weights into the model first"),
    ("base_dir",): ("", "it belongs to checkpoint; drop it"),
    ("set_empty_params",): (False, "drop it"),
    ("training_mp_size",): (1, "it belongs to checkpoint; drop it"),
    ("use_triton",): (False, "drop it"), ("triton_autotune",): (False, "drop it"), ("transposed_mode",): (False, "drop it"),
    ("triangular_masking", "tm"): (True, "attention is the model's own; drop it"), ("return_tuple",): (True, "drop it"),
    ("injection_policy_tuple",): (None, "use injection_policy"), ("min_out_tokens", "min_tokens"): (1, "give min_new_tokens to generate"),
    ("moe_experts", "moe.moe_experts", "moe.num_experts"): ([1], "drop it"), ("moe_type", "moe.type"): ("standard", "drop it"),
    ("ep_group", "expert_group", "moe.ep_group", "moe.expert_group"): (None, "use ep_size"),
    ("ep_mp_group", "expert_mp_group", "moe.ep_mp_group"): (None, "use ep_size"),
    ("config", "args"): (None, "put its keys at the top level")}
# Any of these says that a file is for `deepspeed.initialize`, which takes unknown keys.
TRAINING_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
                 "zero_optimization", "expert_parallel")
BATCH_KEYS = TRAINING_KEYS[:3]
# `deepspeed.initialize` passes over a top-level key that it does not know: what is almost one of these was meant.
TRAINING_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "expert_parallel", "fp16", "bf16", "tensor_parallel",
                     "activation_checkpointing", "flops_profiler", "comms_logger", "compile", "hybrid_engine", "tensorboard",
                     "wandb", "csv_monitor", "aio", "elasticity")
KNOWN_TRAINING = (*BATCH_KEYS, *TRAINING_SECTIONS, "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "prescale_gradients",
                  "sparse_gradients", "communication_data_type", "zero_allow_untested_optimizer", "gradient_predivide_factor")


def is_training(stock: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's half of a file belongs to `deepspeed.initialize`."""
    return any(key in stock for key in TRAINING_KEYS)


def split(source: Mapping[str, Any] | str | Path | None, extra: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """(our section, DeepSpeed's half) of a file or a dict, merged with keyword arguments; the caller's objects are left as they are.

    Raises ConfigError: no section, a section that is wrong, a key given twice with different values.
    """
    where = str(source) if isinstance(source, str | Path) else "config"
    if isinstance(source, str | Path):
        whole = config_module.parse_file(Path(source))
    elif source is None or isinstance(source, Mapping):
        whole = dict(source or {})
    else:
        raise ConfigError(f"a configuration can't be a {type(source).__name__}", where="config", expected="a path or a dict",
                          do="pass one of these")
    if not all(isinstance(key, str) for key in whole):
        raise ConfigError("a key is no text", where=where, expected="DeepSpeed's keys and moe_prefetch", do="mend the keys")
    for key in whole.keys() & extra.keys():
        if whole[key] != extra[key]:
            raise ConfigError(f"{key} is {whole[key]!r} in the configuration and {extra[key]!r} as an argument", where=where,
                              expected="one value", do="drop one of them")
    whole |= extra
    if problems := misspelt(whole):
        raise ConfigError("; ".join(problems), problems=tuple(problems), where=where, do="mend the key")
    if SECTION not in whole:
        raise ConfigError(f"there is no {SECTION} section", where=where, expected=EXAMPLE,
                          do="add the section, or call DeepSpeed itself to run without us")
    section = whole.pop(SECTION)
    if isinstance(section, Config):
        return section, whole
    if not isinstance(section, dict):
        raise ConfigError(f"the {SECTION} section is a {type(section).__name__}", where=where,
                          expected="an object with keys such as experts, probe, kv, fit", do="see docs/config.md")
    return config_module.load(section, base=Path(source).parent if isinstance(source, str | Path) else None), whole


def misspelt(whole: Mapping[str, Any]) -> list[str]:
    """Top-level names that must have been meant for our section: DeepSpeed's training side would pass over them without a word."""
    plain = [(key, re.sub(r"[^a-z]", "", key.lower())) for key in whole if isinstance(key, str) and key != SECTION]
    return [f"{key}: unknown key; did you mean {SECTION!r}?" for key, name in plain
            if difflib.get_close_matches(name, ["moeprefetch"], cutoff=0.8)]


def contradictions(stock: Mapping[str, Any], ours: Config) -> list[str]:
    """Every reason why DeepSpeed's half and ours can't hold at once, one line each."""
    found = _training(stock, ours) if is_training(stock) else _inference(stock, ours)
    if ours.experts.home == "host":
        found.append(f"{SECTION}.experts.home: DeepSpeed's experts can't be read from the host's memory yet; use local or disk")
    return found


def _serves(ours: Config) -> bool:
    return (ours.experts, ours.probe, ours.kv) != (ExpertsConfig(), ProbeConfig(), KVConfig())


def _object(stock: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if isinstance(stock.get(name), Mapping):
            return stock[name]
    return {}


def _tp_size(stock: Mapping[str, Any]) -> Any:
    return _object(stock, "tensor_parallel", "tp").get("tp_size", stock.get("mp_size", 1))


def _asks_for_nothing(value: Any, nothing: Any) -> bool:
    return value is None or value == nothing or (isinstance(value, Mapping) and value.get("enabled") is False)


def _inference(stock: Mapping[str, Any], ours: Config) -> list[str]:
    found = []
    for key in stock:
        if key not in INFERENCE_KEYS:
            near = difflib.get_close_matches(key, INFERENCE_KEYS, n=1)
            found.append(f"{key}: no key of deepspeed.init_inference; " + (f"did you mean {near[0]!r}?" if near else "drop it"))
    found += [f"{a} and {b}: two names of one key, refused together; keep one" for a, b in SYNONYMS if {a, b} <= stock.keys()]
    for names, (nothing, instead) in UNREAD.items():
        for key in names:
            of, _, name = key.rpartition(".")
            asked = _object(stock, of) if of else stock
            if asked.get("enabled") is not False and not _asks_for_nothing(asked.get(name, nothing), nothing):
                found.append(f"{key}: DeepSpeed takes it and passes over it for these models; {instead}")
    for key in ("injection_policy", "injection_dict"):
        if any(isinstance(block, str) for block in _object(stock, key)):
            found.append(f"{key}: its keys are classes, which a file can't hold; give it to init_inference as an argument")
    if stock.get("save_mp_checkpoint_path") is not None and _tp_size(stock) == 1:
        found.append("save_mp_checkpoint_path: without tensor parallelism DeepSpeed writes nothing there; drop it")
    for key in ("replace_with_kernel_inject", "kernel_inject"):
        if stock.get(key):
            found.append(f"{key}: DeepSpeed has no kernels for these MoE families and would go on without a word; drop it")
    if stock.get("enable_cuda_graph"):
        found.append("enable_cuda_graph: hooks do not fire in a replayed graph, so nothing would be fetched or kept; drop it")
    if str(stock.get("dtype")) in ("int8", "torch.int8"):
        found.append("dtype: int8 experts have no record layout; use fp32, bf16 or fp16")
    zero = stock.get("zero")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else getattr(zero, "stage", 0)
    if stage not in (0, 1, 2):
        found.append(f"zero.stage: {stage!r} takes routers and experts apart between uses; use stage 0, 1 or 2, or drop it")
    size = _tp_size(stock)
    if isinstance(size, int) and size > 1 and ours.kv.calibration is not None:
        found.append(f"kv.calibration: it describes all heads, but under tensor parallelism each rank holds 1/{size} of them; drop it "
                     "(outlier channels are then chosen from the prompt)")
    if ours.fit is not None:
        found.append(f"{SECTION}.fit: it belongs to training; use deepspeed.initialize, or name what inference needs (experts, probe, kv)")
    return found


def _half_read(stock: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed would refuse with an assertion or an attribute error, or pass over, once it has begun."""
    found = []
    for key, value in stock.items():
        if key not in KNOWN_TRAINING and (near := difflib.get_close_matches(key, KNOWN_TRAINING, n=1, cutoff=0.85)):
            found.append(f"{key}: DeepSpeed would pass over it; did you mean {near[0]!r}?")
        elif key in TRAINING_SECTIONS and value is not None and not isinstance(value, Mapping):
            found.append(f"{key}: {value!r} is no section; give an object with its keys")
    given = {key: stock[key] for key in BATCH_KEYS if stock.get(key) is not None}
    if wrong := {k: v for k, v in given.items() if not isinstance(v, int) or isinstance(v, bool) or v < 1}:
        found += [f"{key}: {value!r}; give a whole number from 1 on" for key, value in wrong.items()]
    elif not given.keys() - {"gradient_accumulation_steps"}:
        found.append("train_micro_batch_size_per_gpu: DeepSpeed needs it, or train_batch_size; name one")
    elif "train_batch_size" in given:
        step = math.prod(v for k, v in given.items() if k != "train_batch_size")
        if given["train_batch_size"] % step:
            whole = given["train_batch_size"]
            found.append(f"train_batch_size: {whole} is no multiple of {step}, micro-batch times accumulation; correct one")
    if _object(stock, "fp16").get("enabled") and _object(stock, "bf16").get("enabled"):
        found.append("fp16, bf16: both are enabled; keep one of the two")
    return found


def _training(stock: Mapping[str, Any], ours: Config) -> list[str]:
    found = _half_read(stock)
    stage = _object(stock, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2):
        found.append(f"zero_optimization.stage: {stage!r} takes routers and experts apart between uses; use stage 0, 1 or 2")
    if _object(stock, "hybrid_engine").get("enabled"):
        found.append("hybrid_engine: it generates through DeepSpeed's own containers, past our hooks; drop it")
    if _object(stock, "compile").get("deepcompile"):
        found.append("compile.deepcompile: hooks do not fire in a compiled graph; drop it")
    if ours.fit is None and not _serves(ours):
        found.append(f"{SECTION}: the section asks for nothing; name fit to learn a probe, or experts, probe, kv to evaluate")
    if _serves(ours) and "optimizer" in stock:
        found.append(f"{SECTION}: experts, probe and kv serve inference, but the file names an optimizer; drop it, or use fit")
    return found
