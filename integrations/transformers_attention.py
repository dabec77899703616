"""Stand in for a transformers model's attention for a while, through the library's own registry: for calibration and quality
measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_prefetch.errors import UnsupportedModelError

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@contextmanager
def replace_attention(model: Any, attention: Attention) -> Iterator[None]:
    """While open, the model's attention layers call `attention(own, module, q_BHTd, k_BNSd, v_BNSd, *args, **kwargs)` after RoPE and cache.

    `own` is what they would have called. It returns (out [B, T, H, dv], weights or None). The implementation is set back at the end.
    """
    before = model.config._attn_implementation
    name = f"moe_prefetch_{before}"

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

    AttentionInterface.register(name, run)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def watch_attention(model: Any, see: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Any:
    """While open, `see(layer, q_BHTd, k_BNSd, v_BNSd)` is shown what each attention layer computes on; nothing changes."""

    def attention(
        own: Attention, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        see(module.layer_idx, query, key, value)
        return own(module, query, key, value, *args, **kwargs)

    return replace_attention(model, attention)
