"""`moe_prefetch::kv_turn`: rows of each head times its matrix (`kv/basis.py`)."""

from __future__ import annotations

import torch

from ...errors import ShapeError
from .naive import turn_naive

# Rows of a head up to which `fused` is used: it reads the matrix again for every few of them.
FEW = 1024


def _kv_turn(x_BHTd: torch.Tensor, m_Ndd: torch.Tensor, wide: bool) -> torch.Tensor:
    if x_BHTd.device.type == "cuda" and x_BHTd.shape[0] * x_BHTd.shape[1] * x_BHTd.shape[2] <= FEW * len(m_Ndd):
        from .fused import turn

        return turn(x_BHTd, m_Ndd, wide)
    return turn_naive(x_BHTd, m_Ndd, wide).contiguous()


_LIBRARY = torch.library.Library("moe_prefetch", "FRAGMENT")
_LIBRARY.define("kv_turn(Tensor x, Tensor m, bool wide) -> Tensor")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("kv_turn", _kv_turn, _key)


@torch.library.register_fake("moe_prefetch::kv_turn", lib=_LIBRARY)
def _(x, m, wide):
    return x.new_empty(x.shape, dtype=torch.float32)


def kv_turn(x_BHTd: torch.Tensor, m_Ndd: torch.Tensor, wide: bool) -> torch.Tensor:
    """See `turn_naive`; FP32 [B, H, T, d], contiguous. Raises ShapeError when heads or head dims do not fit, before any work."""
    H, d = x_BHTd.shape[1], x_BHTd.shape[3]
    if m_Ndd.dim() != 3 or H % len(m_Ndd) or tuple(m_Ndd.shape[1:]) != (d, d):
        raise ShapeError(f"rows {tuple(x_BHTd.shape)} for matrices {tuple(m_Ndd.shape)}", where="kv_turn",
                         expected=f"[N, {d}, {d}] with {H} heads a multiple of N", do="make the basis from this layer's calibration")
    return torch.ops.moe_prefetch.kv_turn.default(x_BHTd.detach(), m_Ndd, wide)
