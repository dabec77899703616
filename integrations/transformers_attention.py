"""Stand in for a transformers model's attention for a while, through the library's own registry: for calibration and quality
measurements. And whose calibration it is.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_prefetch.checkpoint import sha256_tensors
from moe_prefetch.errors import ConfigError, SessionError, UnsupportedModelError
from moe_prefetch.kv.codec import OutlierStats

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "kv_a_proj_with_mqa")
KEY_NORMS = ("k_norm", "kv_a_layernorm")
SAMPLED_ROWS = 32
# The registries are the process's: each stand-in has a name of its own there, so two models in it never meet.
STANDS_IN = "moe_prefetch_stands_in_"
_NUMBERS, _LOCK = itertools.count(), threading.Lock()


@contextmanager
def replace_attention(model: Any, attention: Attention) -> Iterator[None]:
    """While open, the model's attention layers call `attention(own, module, q_BHTd, k_BNSd, v_BNSd, *args, **kwargs)` after RoPE and cache.

    `own` is what they would have called. It returns (out [B, T, H, dv], weights or None). The implementation is set back at the end, and
    the registries are as they were. Raises SessionError while another one is open for the model, or for another with its config;
    UnsupportedModelError for a model whose attention does not come from the registry.
    """

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
        if own is None:
            raise UnsupportedModelError(
                f"attention implementation {before!r} is unknown",
                where=type(module).__name__,
                expected="one of transformers' registry",
                do="set another",
            )
        return attention(own, module, *args, **kwargs)

    with _LOCK:
        before = model.config._attn_implementation
        if str(before).startswith(STANDS_IN):
            raise SessionError(
                "this model is being calibrated or measured, or another with its config object", where=type(model).__name__,
                do="do one after the other, or give each model a config of its own",
            )  # fmt: skip
        name = f"{STANDS_IN}{next(_NUMBERS)}_{before}"
        AttentionInterface.register(name, run)
        if before in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
        model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise UnsupportedModelError(
                "its attention can't be exchanged", where=type(model).__name__, expected="a model of transformers' attention registry",
                do="do without a calibration",
            )  # fmt: skip
        yield
    finally:
        model.set_attn_implementation(before)
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(name, None)


def watch_attention(model: Any, see: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Any:
    """While open, `see(layer, q_BHTd, k_BNSd, v_BNSd)` is shown what each attention layer computes on; nothing changes."""

    def attention(
        own: Attention, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        see(module.layer_idx, query, key, value)
        return own(module, query, key, value, *args, **kwargs)

    return replace_attention(model, attention)


def are_ids(model: Any, ids: Any, dims: int) -> bool:
    """Whether this is a tensor of so many dims with token ids of the model's."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != dims or ids.is_floating_point() or not ids.numel():
        return False
    return 0 <= int(ids.min()) and int(ids.max()) < model.config.get_text_config(decoder=True).vocab_size


def key_hashes(model: Any) -> dict[int, str]:
    """Identity of each attention layer's keys: 32 rows of its key (or fused) projection, evenly spread, with bias and norm.

    Of values rounded to bfloat16, as the gates' of a probe, and without those below FP16's normal range: a bfloat16 checkpoint agrees in
    bfloat16, FP16 and FP32, an FP32 one in bfloat16 and FP32. A layer whose projection has another name, or no plain floating weights here
    (quantised, partitioned, on no device), is left out.
    """
    found: dict[int, str] = {}
    for module in model.modules():
        n = getattr(module, "layer_idx", None)
        part = next((x for name in KEY_PROJECTIONS if (x := getattr(module, name, None)) is not None), None)
        if not isinstance(n, int) or n in found or part is None:
            continue
        norm = next((x for name in KEY_NORMS if (x := getattr(module, name, None)) is not None), None)
        owned = {"weight": (part, "weight"), "bias": (part, "bias"), "norm": (norm, "weight")}
        tensors = {name: t for name, (owner, key) in owned.items() if (t := getattr(owner, key, None)) is not None}
        if "weight" in tensors and all(map(_plain, tensors.values())):
            found[n] = sha256_tensors({name: _sample(t) for name, t in tensors.items()})
    return found


def _plain(t: Any) -> bool:
    known = isinstance(t, torch.Tensor) and t.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return known and type(t.detach()) is torch.Tensor and t.device.type != "meta" and t.numel() > 0


def _sample(t: torch.Tensor) -> torch.Tensor:
    rows = t.detach()[:: max(1, len(t) // SAMPLED_ROWS)][:SAMPLED_ROWS].float()
    return rows.where(rows.abs() >= 2.0**-14, 0.0).bfloat16()


def refuse_another_models(stats: OutlierStats, model: Any, layers: Iterable[int]) -> None:
    """Raises ConfigError where the calibration has layers that the model (or its config) has not, or keys of one of `layers` are another
    model's. What either side does not know is not compared; a config alone has no weights.
    """
    whole = isinstance(model, torch.nn.Module)
    count = (model.config if whole else model).get_text_config(decoder=True).num_hidden_layers
    if more := [n for n in stats.layers if not 0 <= n < count]:
        raise ConfigError(
            f"the calibration is another model's: it has layer {more[0]}",
            where="kv.calibration", expected=f"layers 0 to {count - 1}", do="calibrate this model",
        )  # fmt: skip
    have = key_hashes(model) if whole and stats.keys else {}
    if other := [n for n in layers if n in have and n in stats.keys and have[n] != stats.keys[n]]:
        raise ConfigError(
            f"the calibration is another model's: keys of layer {other[0]} are made with other weights",
            where="kv.calibration", expected="the key projections of this model", do="calibrate this model, as it is loaded here",
        )  # fmt: skip
