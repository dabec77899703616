"""`slide_naive` in one launch: a program has a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import PAGE
from .naive import Slide

TILE = 4096  # bytes of a page made blank at once


@triton.jit
def _clean(x):
    x = tl.where(x != x, 0.0, x)
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _leave(ring_ptr, out_ptr, first, at, to, n_N, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    d_D = tl.arange(0, DP)
    on_ND = (n_N < N)[:, None] & (d_D < D)[None, :]
    x_ND = tl.load(ring_ptr + ((first + n_N) * R + at)[:, None] * D + d_D[None, :], mask=on_ND, other=0)
    tl.store(out_ptr + (to + n_N)[:, None] * D + d_D[None, :], x_ND, mask=on_ND)


@triton.jit
def _come(x_ptr, ring_ptr, sink_ptr, first, position, n_N, sn, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
          SINKS: tl.constexpr):
    d_D = tl.arange(0, DP)
    on_ND = (n_N < N)[:, None] & (d_D < D)[None, :]
    x_ND = _clean(tl.load(x_ptr + n_N[:, None] * sn + d_D[None, :], mask=on_ND, other=0).to(tl.float32))
    tl.store(ring_ptr + ((first + n_N) * R + position % R)[:, None] * D + d_D[None, :], x_ND, mask=on_ND)
    tl.store(sink_ptr + ((first + n_N) * SINKS + position)[:, None] * D + d_D[None, :], x_ND, mask=on_ND & (position < SINKS))


@triton.jit
def slide_tokens(
    ring_k_ptr, ring_v_ptr, sink_k_ptr, sink_v_ptr, pool_ptr, blank_ptr, table_ptr, spare_ptr, length_ptr, stored_ptr, now_ptr,
    out_k_ptr, out_v_ptr, runs_ptr, k_ptr, v_ptr, B, pages, window, k_sb, k_sn, k_st, v_sb, v_sn, v_st,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, R: tl.constexpr,
    SINKS: tl.constexpr, BYTES: tl.constexpr, T: tl.constexpr, PER_PAGE: tl.constexpr, CHUNK: tl.constexpr,
):
    """See `naive.Slide` for shapes; K [B, N, T, D] and V [B, N, T, DV] by strides, the last one 1. DV 0: no V."""
    b = tl.program_id(0).to(tl.int64)
    n_N = tl.arange(0, NP)
    first = b * N
    length = tl.load(length_ptr + b)
    stored = tl.load(stored_ptr + b)
    for t in tl.static_range(T):
        at = stored + SINKS
        due = at < length - window
        slot = tl.where(due, stored % PER_PAGE, 0)
        page = tl.load(table_ptr + b * pages + tl.minimum(stored // PER_PAGE, pages - 1)).to(tl.int64)
        page = tl.where(due, page, tl.load(spare_ptr + b))
        if due & (slot == 0):
            for c in range(0, N * BYTES, CHUNK):
                i = c + tl.arange(0, CHUNK)
                tl.store(pool_ptr + page * N * BYTES + i, tl.load(blank_ptr + i, mask=i < N * BYTES, other=0), mask=i < N * BYTES)
        to = (t * B + b) * N
        _leave(ring_k_ptr, out_k_ptr, first, at % R, to, n_N, N, D, DP, R)
        if DV > 0:
            _leave(ring_v_ptr, out_v_ptr, first, at % R, to, n_N, N, DV, DVP, R)
        run = runs_ptr + (t * B + b) * 4
        tl.store(run, page.to(tl.int32))
        tl.store(run + 1, slot.to(tl.int32))
        tl.store(run + 2, b.to(tl.int32))
        tl.store(run + 3, 1)
        stored += due.to(tl.int64)
    for t in tl.static_range(T):
        _come(k_ptr + b * k_sb + t * k_st, ring_k_ptr, sink_k_ptr, first, length + t, n_N, k_sn, N, D, DP, R, SINKS)
        if DV > 0:
            _come(v_ptr + b * v_sb + t * v_st, ring_v_ptr, sink_v_ptr, first, length + t, n_N, v_sn, N, DV, DVP, R, SINKS)
    # every warp has read what one of them writes now
    tl.debug_barrier()
    tl.store(length_ptr + b, length + T)
    tl.store(stored_ptr + b, stored)
    tl.store(now_ptr + b, stored.to(tl.int32))
    tl.store(now_ptr + B + b, (length + T).to(tl.int32))
    tl.store(now_ptr + 2 * B + b, ((stored + SINKS) % R).to(tl.int32))


def slide(s: Slide, out_k: torch.Tensor, out_v: torch.Tensor, runs: torch.Tensor, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor,
          window: int) -> None:
    """As `naive.slide_naive`, but for the last row of the sinks, which stays as it is."""
    B, N, T, D = k_BNTd.shape
    DV = v_BNTd.shape[3]
    if k_BNTd.numel() == 0:
        return
    k, v = (x if x.stride(3) == 1 or x.shape[3] == 0 else x.contiguous() for x in (k_BNTd, v_BNTd))
    slide_tokens[(B,)](
        *s, out_k, out_v, runs, k, v, B, s.table_BP.shape[1], window, *k.stride()[:3], *v.stride()[:3],
        N=N, NP=triton.next_power_of_2(N), D=D, DV=DV, DP=triton.next_power_of_2(D), DVP=triton.next_power_of_2(max(DV, 1)),
        R=s.ring_k.shape[2], SINKS=(len(s.sink_k) - 1) // (B * N), BYTES=s.pool_PNb.shape[2], T=T, PER_PAGE=PAGE, CHUNK=TILE, num_warps=4)
