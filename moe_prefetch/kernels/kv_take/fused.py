"""`take_naive` in one launch: both sides of a tile of tokens a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 16


@triton.jit
def _clean(x):
    """FP16 of FP32, and where it was too large or NaN."""
    nan = x != x
    big = tl.abs(x) > 65504.0
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return tl.where(nan, 0.0, x).to(tl.float16), big, nan


@triton.jit
def _side(x_ptr, out_ptr, item, b, n, t_T, T, at, SLOTS, sb, sn, st, D: tl.constexpr, DP: tl.constexpr):
    d_D = tl.arange(0, DP)
    on_TD = (t_T < T)[:, None] & (d_D < D)[None, :]
    x_TD = tl.load(x_ptr + b * sb + n * sn + t_T[:, None] * st + d_D[None, :], mask=on_TD, other=0).to(tl.float32)
    y_TD, big_TD, nan_TD = _clean(x_TD)
    out_TD = out_ptr + (item.to(tl.int64) * SLOTS + at + t_T)[:, None] * D + d_D[None, :]
    tl.store(out_TD, y_TD, mask=on_TD)
    return tl.sum(tl.sum(big_TD.to(tl.int32), axis=1), axis=0), tl.sum(tl.sum(nan_TD.to(tl.int32), axis=1), axis=0)


@triton.jit(do_not_specialize=["at", "T"])
def take_tokens(
    k_ptr, v_ptr, buffer_k_ptr, buffer_v_ptr, counts_ptr, at, T, SLOTS, k_sb, k_sn, k_st, v_sb, v_sn, v_st,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, TT: tl.constexpr,
):
    """K [B, N, T, D] and V [B, N, T, DV] by strides, the last one 1; buffers FP16 [B, N, SLOTS, d]; counts int64 [2]. DV 0: no V."""
    item = tl.program_id(0)
    b = (item // N).to(tl.int64)
    n = item % N
    t_T = tl.program_id(1).to(tl.int64) * TT + tl.arange(0, TT)
    big, nan = _side(k_ptr, buffer_k_ptr, item, b, n, t_T, T, at, SLOTS, k_sb, k_sn, k_st, D, DP)
    if DV > 0:
        big_v, nan_v = _side(v_ptr, buffer_v_ptr, item, b, n, t_T, T, at, SLOTS, v_sb, v_sn, v_st, DV, DVP)
        big += big_v
        nan += nan_v
    # rare, and then few
    if big + nan > 0:
        tl.atomic_add(counts_ptr, big.to(tl.int64))
        tl.atomic_add(counts_ptr + 1, nan.to(tl.int64))


def take(
    buffer_k: torch.Tensor, buffer_v: torch.Tensor, counts: torch.Tensor, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor, at: int
) -> None:
    """As `naive.take_naive`. Contiguous buffers."""
    B, N, T, D = k_BNTd.shape
    DV = v_BNTd.shape[3]
    if k_BNTd.numel() == 0:
        return
    k, v = (x if x.stride(3) == 1 or x.shape[3] == 0 else x.contiguous() for x in (k_BNTd, v_BNTd))
    tile = 1 if T == 1 else TILE
    take_tokens[(B * N, triton.cdiv(T, tile))](
        k, v, buffer_k, buffer_v, counts, at, T, buffer_k.shape[2], *k.stride()[:3], *v.stride()[:3],
        N=N, D=D, DV=DV, DP=triton.next_power_of_2(D), DVP=triton.next_power_of_2(max(DV, 1)), TT=tile, num_warps=1 if tile == 1 else 4)
