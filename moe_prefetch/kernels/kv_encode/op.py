"""`moe_prefetch::kv_encode`: append tokens to pages in place."""

from __future__ import annotations

import torch

from ...errors import ShapeError
from ...kv.format import PageLayout, format_of
from .records import Book, encode_naive


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
) -> torch.Tensor:
    layout = PageLayout(format_of(format), k_dim, v_dim, outliers, rope)
    return encode_naive(pool_PNb, k_TNd, v_TNd, runs_R4, (channels_NO, k_mean, k_gain, k_weight, v_gain, v_weight), layout)


@_kv_encode.register_fake
def _(pool_PNb, k_TNd, v_TNd, runs_R4, *rest):
    return k_TNd.new_empty(2, dtype=torch.int64)


def kv_encode(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: Book, layout: PageLayout
) -> torch.Tensor:
    """Append tokens to pages in place; see `encode_naive` for shapes. Returns int64 [2]: elements saturated, NaNs zeroed.

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
    return _kv_encode(pool_PNb, k_TNd, v_TNd, runs_R4, *book, layout.format.name, layout.k_dim, layout.v_dim, layout.outliers, layout.rope)
