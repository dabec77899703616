"""`moe_prefetch::kv_attend`: attention of a few queries per sequence over pages, sinks and window.

On a GPU the first fused module that serves the layout runs, else (and on CPUs) the naive law.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import ShapeError
from ...kv.format import PageLayout, format_of
from ..kv_encode.records import Book
from .naive import attend_naive


def path_of(device: torch.device, layout: PageLayout, group: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Which function attends over such pages on this device: a fused one that serves them, else the law.

    A fused module has `serves(layout, group)` and `attend`, which takes what `attend_naive` takes.
    """
    if device.type == "cuda":
        from . import fused, general, general_latent

        for module in (fused, general, general_latent):
            if module.serves(layout, group):
                return module.attend
    return attend_naive


@torch.library.custom_op("moe_prefetch::kv_attend", mutates_args=())
def _kv_attend(
    q_BHTd: torch.Tensor,
    q_len_B: torch.Tensor,
    pool_PNb: torch.Tensor,
    table_BP: torch.Tensor,
    stored_B: torch.Tensor,
    length_B: torch.Tensor,
    sink_k: torch.Tensor,
    sink_v: torch.Tensor,
    recent_k: torch.Tensor,
    recent_v: torch.Tensor,
    recent_first_B: torch.Tensor,
    channels_NO: torch.Tensor,
    k_mean: torch.Tensor,
    k_gain: torch.Tensor,
    k_weight: torch.Tensor,
    v_gain: torch.Tensor,
    v_weight: torch.Tensor,
    sink_H: torch.Tensor | None,
    format: str,
    k_dim: int,
    v_dim: int,
    outliers: int,
    rope: int,
    scale: float,
    sliding: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = PageLayout(format_of(format), k_dim, v_dim, outliers, rope)
    attend = path_of(q_BHTd.device, layout, q_BHTd.shape[1] // pool_PNb.shape[1]) if q_BHTd.numel() else attend_naive
    return attend(
        q_BHTd,
        q_len_B.to(torch.int32),
        pool_PNb,
        table_BP.to(torch.int32).contiguous(),
        stored_B.to(torch.int32),
        length_B.to(torch.int32),
        sink_k.contiguous(),
        sink_v.contiguous(),
        recent_k.contiguous(),
        recent_v.contiguous(),
        recent_first_B.to(torch.int32),
        (channels_NO, k_mean, k_gain, k_weight, v_gain, v_weight),
        layout,
        scale=scale,
        sliding=sliding,
        softcap=softcap,
        sink_H=sink_H,
    )


@_kv_attend.register_fake
def _(q_BHTd, q_len_B, pool_PNb, table_BP, stored_B, length_B, *rest):
    k_dim, v_dim = rest[-7], rest[-6]
    return q_BHTd.new_empty(*q_BHTd.shape[:3], v_dim or k_dim, dtype=torch.float32), q_BHTd.new_empty(q_BHTd.shape[:3], dtype=torch.float32)


def kv_attend(
    q_BHTd: torch.Tensor,
    q_len_B: torch.Tensor,
    pool_PNb: torch.Tensor,
    table_BP: torch.Tensor,
    stored_B: torch.Tensor,
    length_B: torch.Tensor,
    sink_k: torch.Tensor,
    sink_v: torch.Tensor,
    recent_k: torch.Tensor,
    recent_v: torch.Tensor,
    recent_first_B: torch.Tensor,
    book: Book,
    layout: PageLayout,
    *,
    scale: float,
    sliding: int = 0,
    softcap: float = 0.0,
    sink_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attend_naive` for shapes. Raises ShapeError when the tensors do not fit the layout, before any work."""
    B, H = q_BHTd.shape[:2]
    N = pool_PNb.shape[1]
    dk = layout.k_dim + layout.rope
    want = {
        "q": (q_BHTd, (B, H, q_BHTd.shape[2], dk)),
        "pool": (pool_PNb, (pool_PNb.shape[0], N, layout.page_bytes)),
        "table": (table_BP, (B, table_BP.shape[-1])),
        "sink_k": (sink_k, (B, N, sink_k.shape[2], dk)),
        "sink_v": (sink_v, (B, N, sink_k.shape[2], layout.v_dim)),
        "recent_k": (recent_k, (B, N, recent_k.shape[2], dk)),
        "recent_v": (recent_v, (B, N, recent_k.shape[2], layout.v_dim)),
        "q_len": (q_len_B, (B,)),
        "stored": (stored_B, (B,)),
        "length": (length_B, (B,)),
        "recent_first": (recent_first_B, (B,)),
    }
    for what, (t, shape) in want.items():
        if tuple(t.shape) != shape:
            raise ShapeError(
                f"{what} is {tuple(t.shape)}",
                where=f"kv_attend, {layout.format.name}",
                expected=str(shape),
                do="build all of it from one layout",
            )
    if H % N:
        raise ShapeError(f"{H} query heads for {N} KV heads", where="kv_attend", expected="a multiple", do="check the model's head counts")
    return _kv_attend(
        q_BHTd,
        q_len_B,
        pool_PNb,
        table_BP,
        stored_B,
        length_B,
        sink_k,
        sink_v,
        recent_k,
        recent_v,
        recent_first_B,
        *book,
        sink_H,
        layout.format.name,
        layout.k_dim,
        layout.v_dim,
        layout.outliers,
        layout.rope,
        scale,
        sliding,
        softcap,
    )
