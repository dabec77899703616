"""`moe_prefetch::kv_encode`: append tokens to pages in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import ShapeError
from ...kv.format import PAGE, PageLayout, format_of
from .records import Book, encode_naive

# Which of `fused`, `general`, `general_planes` the op may use: those whose bytes have been compared with the law's on a GPU
# (benchmarks/kv_encode.py, which calls them itself; docs/kernels.md says in which layouts). For others the law writes the pages there too.
PROVEN: tuple[str, ...] = ("fused", "general", "general_planes")


def fused_for(device: torch.device, layout: PageLayout) -> Callable[..., torch.Tensor] | None:
    """The fused function that writes such pages on this device, if one does. It writes the bytes of the law. Where V has a format of its
    own, K and V are a launch each.
    """
    if device.type != "cuda":
        return None
    from . import fused, general, general_planes

    proven = lambda module: module.__name__.rpartition(".")[2] in PROVEN  # noqa: E731
    if layout.format.values:
        k, v = (next((m for m in (general, general_planes) if m.serves_side(layout, side)), None) for side in (0, 1))
        return partial(_encode_sides, k.encode, v.encode) if k and v and proven(k) and proven(v) else None
    for module in (fused, general, general_planes):
        if module.serves(layout):
            return module.encode if proven(module) else None
    return None


def _encode_sides(k_side: Callable[..., torch.Tensor], v_side: Callable[..., torch.Tensor], *args: Any, most: int) -> torch.Tensor:
    return k_side(*args, most=most, side=0) + v_side(*args, most=most, side=1)


@torch.library.custom_op("moe_prefetch::kv_encode", mutates_args=("pool_PNb",))
def _kv_encode(
    pool_PNb: torch.Tensor,
    k_TNd: torch.Tensor,
    v_TNd: torch.Tensor,
    runs_R4: torch.Tensor,
    channels_NO: torch.Tensor,
    k_mean: torch.Tensor,
    k_gain: torch.Tensor,
    k_weight: torch.Tensor,
    v_gain: torch.Tensor,
    v_weight: torch.Tensor,
    format: str,
    k_dim: int,
    v_dim: int,
    outliers: int,
    rope: int,
    most: int = PAGE,
) -> torch.Tensor:
    layout = PageLayout(format_of(format), k_dim, v_dim, outliers, rope)
    book = (channels_NO, k_mean, k_gain, k_weight, v_gain, v_weight)
    if fused := fused_for(pool_PNb.device, layout):
        return fused(pool_PNb, k_TNd, v_TNd, runs_R4.to(torch.int32).contiguous(), book, layout, most=most)
    return encode_naive(pool_PNb, k_TNd, v_TNd, runs_R4, book, layout)


@_kv_encode.register_fake
def _(pool_PNb, k_TNd, v_TNd, runs_R4, *rest):
    return k_TNd.new_empty(2, dtype=torch.int64)


def kv_encode(
    pool_PNb: torch.Tensor,
    k_TNd: torch.Tensor,
    v_TNd: torch.Tensor,
    runs_R4: torch.Tensor,
    book: Book,
    layout: PageLayout,
    *,
    most: int = PAGE,
) -> torch.Tensor:
    """Append tokens to pages in place; see `encode_naive` for shapes. Returns int64 [2]: elements saturated, NaNs zeroed.

    No run may have more than `most` tokens: 1 takes a kernel of its own on a GPU.
    Raises ShapeError when the tensors do not fit the layout; nothing has been written then.
    """
    heads = pool_PNb.shape[1] if pool_PNb.dim() == 3 else -1
    want = {
        "pool": (pool_PNb, torch.uint8, (pool_PNb.shape[0], heads, layout.page_bytes)),
        "k": (k_TNd, None, (k_TNd.shape[0], heads, layout.k_dim + layout.rope)),
        "v": (v_TNd, None, (k_TNd.shape[0], heads, layout.v_dim)),
        "runs": (runs_R4, None, (runs_R4.shape[0], 4)),
        "channels": (book[0], torch.int32, (heads, layout.outliers)),
    }
    for what, (t, dtype, shape) in want.items():
        if tuple(t.shape) != shape or (dtype is not None and t.dtype != dtype):
            raise ShapeError(
                f"{what} is {t.dtype} {tuple(t.shape)}",
                where=f"kv_encode, {layout.format.name}",
                expected=f"{dtype or 'float'} {shape}",
                do="build pages and tokens from the same layout",
            )
    name, dims = layout.format.name, (layout.k_dim, layout.v_dim, layout.outliers, layout.rope)
    return _kv_encode(pool_PNb, k_TNd, v_TNd, runs_R4, *book, name, *dims, most)
