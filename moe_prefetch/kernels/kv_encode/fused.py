"""Tokens into FP4 pages, in Triton: the bytes of `records.encode_naive`, for layouts in `planes` order with scales per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import PAGE, PageLayout
from ..kv_fp4.fused import swapped
from .fused_elements import (
    ASM,
    _book_k,
    _byte,
    _clean,
    _codes,
    _exponent,
    _louder,
    _outliers,
    _scale_byte,
    _scales,
    _settle,
    _shared_table,
    _tally,
    place_keys,
    table_on,
)

REGISTERS = 128  # of a thread: four programs share a multiprocessor
# Gluon is experimental: another version's may differ
GLUON = triton.__version__.startswith("3.6.")
if GLUON:
    from . import fused_pages
PAGES = ASM.value and GLUON


# one token -------------------------------------------------------------------------------------------------------------
@triton.jit
def _append_k(
    record, row, slot, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, SWAPS: tl.constexpr, KS_AT: tl.constexpr,
    KS_ROW: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    C: tl.constexpr = D // 32
    ch_D = swapped(tl.arange(0, D), n, channels_ptr, OUT, SWAPS)
    x_D, big, nan = _clean(tl.load(k_ptr + (row.to(tl.int64) * N + n) * D + ch_D).to(tl.float32))
    _tally(counts_ptr, big, nan)
    gain_D, w_D = _book_k(ch_D, n, channels_ptr, k_gain_ptr, k_weight_ptr, D, OUT)
    x = tl.reshape((x_D - tl.load(k_mean_ptr + n * D + ch_D)) * gain_D, (C, 32))
    scale_C, inverse_C = _scales((x,), (tl.reshape(w_D, (C, 32)),), table_ptr, 0, False)
    lo, hi = tl.split(tl.permute(tl.reshape(_codes(x, inverse_C), (D // 64, 2, 32)), (0, 2, 1)))
    tl.store(record + slot * (D // 2) + tl.arange(0, D // 64)[:, None] * 32 + tl.arange(0, 32)[None, :], _byte(lo, hi))
    # behind a barrier: scales may lie where codes were written
    factor = _settle(record, KS_AT, TRAILER_AT, tl.max(_exponent(scale_C), axis=0), slot, C, KS_ROW)
    tl.store(record + KS_AT + slot * KS_ROW + tl.arange(0, C), _scale_byte(scale_C, factor))
    if OUT > 0:
        one = tl.arange(0, 1)
        _outliers(record, row - slot, n, slot + one, one == 0, k_ptr, channels_ptr, k_mean_ptr, N, D, OUT, OUTP, KO_AT)
    fill = (record + TRAILER_AT + 8).to(tl.pointer_type(tl.int32))
    tl.store(fill, tl.maximum(tl.load(fill), slot + 1))


@triton.jit
def _append_v(
    record, row, slot, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, D: tl.constexpr, V_AT: tl.constexpr, VS_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    G: tl.constexpr = D // 64
    d_D = tl.arange(0, D)
    x_D, big, nan = _clean(tl.load(v_ptr + (row.to(tl.int64) * N + n) * D + d_D).to(tl.float32))
    _tally(counts_ptr, big, nan)
    x = tl.reshape(x_D * tl.load(v_gain_ptr + n * D + d_D), (G, 64))
    w_D = tl.load(v_weight_ptr + n * D + d_D).to(tl.int32)
    scale_G, inverse_G = _scales((x,), (tl.reshape(w_D, (G, 64)),), table_ptr, 0, False)
    code_D = tl.reshape(_codes(x, inverse_G), (D,))
    none_D = tl.zeros((D,), tl.uint8)
    t = slot % 64
    at_D = record + V_AT + d_D * 64 + t // 16 * 16 + t % 8 * 2 + t % 16 // 8
    old_D = tl.load(at_D).to(tl.int32)
    new_D = tl.where(slot >= 64, _byte(none_D, code_D), _byte(code_D, none_D)).to(tl.int32)
    tl.store(at_D, ((old_D & tl.where(slot >= 64, 0x71, 0x8E)) | new_D).to(tl.uint8))
    factor = _settle(record, VS_AT, TRAILER_AT + 4, tl.max(_exponent(scale_G), axis=0), slot, G, G)
    tl.store(record + VS_AT + slot * G + tl.arange(0, G), _scale_byte(scale_G, factor))


@triton.jit
def append_one(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, SWAPS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    V_AT: tl.constexpr, KS_AT: tl.constexpr, KS_ROW: tl.constexpr, VS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    """Runs of one token each: program (run, head, K or V)."""
    run = tl.program_id(0)
    n = tl.program_id(1)
    page = tl.load(runs_ptr + run * 4)
    slot = tl.load(runs_ptr + run * 4 + 1)
    row = tl.load(runs_ptr + run * 4 + 2)
    if tl.load(runs_ptr + run * 4 + 3) == 0:
        return
    record = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
    if tl.program_id(2) == 0:
        _append_k(record, row, slot, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr, table_ptr, N, D, OUT, OUTP,
                  SWAPS, KS_AT, KS_ROW, KO_AT, TRAILER_AT)
    else:
        _append_v(record, row, slot, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, table_ptr, N, D, V_AT, VS_AT, TRAILER_AT)


@triton.jit
def prepare_book(
    channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, v_weight_ptr, out_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, SWAPS: tl.constexpr,
):
    """What pages read of a book for every element, int32: K gains without outliers [N, D], then weights [2 (K, V), N, 4, D], where row i's
    lie in byte i; where outliers swap places then K means [N, D], K's all by place. Nothing has been counted yet.
    """
    n = tl.program_id(0)
    d_D = tl.arange(0, D)
    if n == 0:
        tl.store(counts_ptr + tl.arange(0, 2), 0)
    ch_D = swapped(d_D, n, channels_ptr, OUT, SWAPS)
    gain_D, w_D = _book_k(ch_D, n, channels_ptr, k_gain_ptr, k_weight_ptr, D, OUT)
    if SWAPS > 0:
        tl.store(out_ptr + (9 * N + n) * D + d_D, tl.load(k_mean_ptr + n * D + ch_D).to(tl.int32, bitcast=True))
    tl.store(out_ptr + n * D + d_D, gain_D.to(tl.int32, bitcast=True))
    at = out_ptr + N * D + tl.arange(0, 4)[:, None] * D + d_D[None, :]
    shift = tl.arange(0, 4)[:, None] * 8
    tl.store(at + n * 4 * D, w_D[None, :] << shift)
    tl.store(at + (N + n) * 4 * D, tl.load(v_weight_ptr + n * D + d_D).to(tl.int32)[None, :] << shift)


@triton.jit
def count_nothing(counts_ptr, PDL: tl.constexpr):
    """What is launched next may start beside this, once what was launched before has ended."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(counts_ptr + tl.arange(0, 2), 0)


# whole pages -----------------------------------------------------------------------------------------------------------
@triton.jit
def _tiles(ptr, row, n, t_T, on_T, first, loud_T, counts_ptr, N: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, CLEAN: tl.constexpr):
    """FP32 [T, 16] tiles of neighbouring channels from `first` on, and the loudest number of each token so far, NaN included."""
    at = ptr + ((row + t_T).to(tl.int64) * N + n)[:, None] * D + (first + tl.arange(0, 16))[None, :]
    xs = ()
    for i in tl.static_range(TILES):
        x = tl.load(at + i * 16, mask=on_T[:, None], other=0).to(tl.float32)
        if CLEAN:
            x, big, nan = _clean(x)
            _tally(counts_ptr, big, nan)
        else:
            loud_T = _louder(loud_T, tl.reduce(tl.abs(x), 1, _louder))
        xs = xs + (x,)
    return xs, loud_T


@triton.jit
def _codes_k(
    record, row, slot, count, n, k_ptr, k_mean_ptr, ready_ptr, counts_ptr, table_ptr, lane_table,
    N: tl.constexpr, D: tl.constexpr, CLEAN: tl.constexpr,
):
    """Write K codes. Returns scales FP32 [64] by group, then tokens from 64 on, then half, and the loudest numbers."""
    ch = tl.arange(0, 16)
    loud_T = tl.zeros((64,), tl.float32)
    scales = ()
    for g in tl.static_range(D // 64):
        for upper in tl.static_range(2):
            t_T = upper * 64 + tl.arange(0, 64)
            on_T = (t_T >= slot) & (t_T < slot + count)
            planes = ()
            for half in tl.static_range(2):
                first = g * 64 + half * 32
                xs, loud_T = _tiles(k_ptr, row, n, t_T, on_T, first, loud_T, counts_ptr, N, D, 2, CLEAN)
                ys = ()
                ws = ()
                for i in tl.static_range(2):
                    at = n * D + first + i * 16 + ch
                    gain = tl.load(ready_ptr + at).to(tl.float32, bitcast=True)
                    ys = ys + ((xs[i] - tl.load(k_mean_ptr + at)[None, :]) * gain[None, :],)
                    ws = ws + (tl.load(ready_ptr + N * D + n * 3 * D + at)[None, :],)
                scale_T, inverse_T = _scales(ys, ws, table_ptr, lane_table, True)
                planes = planes + (_codes(ys[0], inverse_T), _codes(ys[1], inverse_T))
                scales = scales + (scale_T,)
            at = record + t_T[:, None] * (D // 2) + g * 32 + ch[None, :]
            tl.store(at, _byte(planes[0], planes[2]), mask=on_T[:, None])
            tl.store(at + 16, _byte(planes[1], planes[3]), mask=on_T[:, None])
    return scales, loud_T


@triton.jit
def _top(scales, on_T):
    e = _exponent(scales[0])
    for i in tl.static_range(1, len(scales)):
        e = tl.maximum(e, _exponent(scales[i]))
    return tl.max(tl.where(on_T, e, -1000), axis=0)


@triton.jit
def _pages_k(
    record, row, slot, count, n, k_ptr, placed_ptr, channels_ptr, k_mean_ptr, ready_ptr, counts_ptr, table_ptr, lane_table,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, SWAPS: tl.constexpr, KS_AT: tl.constexpr,
    KS_ROW: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    C: tl.constexpr = D // 32
    mean_ptr = (ready_ptr + 9 * N * D).to(tl.pointer_type(tl.float32)) if SWAPS > 0 else k_mean_ptr
    scales, loud_T = _codes_k(record, row, slot, count, n, placed_ptr, mean_ptr, ready_ptr, counts_ptr, table_ptr, lane_table, N, D, False)
    # NaN is not within either
    if tl.reduce(loud_T, 0, _louder) <= 65504.0:
        pass
    else:
        scales, loud_T = _codes_k(record, row, slot, count, n, placed_ptr, mean_ptr, ready_ptr, counts_ptr, table_ptr, lane_table, N, D,
                                  True)
    t_T = tl.arange(0, 64)
    lo_T = (t_T >= slot) & (t_T < slot + count)
    hi_T = (t_T + 64 >= slot) & (t_T + 64 < slot + count)
    # scales come by group, then upper tokens, then half
    top = tl.maximum(tl.maximum(_top(scales[0::4], lo_T), _top(scales[1::4], lo_T)),
                     tl.maximum(_top(scales[2::4], hi_T), _top(scales[3::4], hi_T)))
    # behind a barrier: scales may lie where codes were written
    factor = _settle(record, KS_AT, TRAILER_AT, top, slot, C, KS_ROW)
    for g in tl.static_range(C // 2):
        for half in tl.static_range(2):
            at = record + KS_AT + t_T * KS_ROW + 2 * g + half
            tl.store(at, _scale_byte(scales[4 * g + half], factor), mask=lo_T)
            tl.store(at + 64 * KS_ROW, _scale_byte(scales[4 * g + 2 + half], factor), mask=hi_T)
    if OUT > 0:
        for upper in tl.static_range(2):
            on_T = hi_T if upper else lo_T
            _outliers(record, row, n, t_T + 64 * upper, on_T, k_ptr, channels_ptr, k_mean_ptr, N, D, OUT, OUTP, KO_AT)
    fill = (record + TRAILER_AT + 8).to(tl.pointer_type(tl.int32))
    tl.store(fill, tl.maximum(tl.load(fill), slot + count))


@triton.jit
def _tau(b_B):
    """Token of the low plane of byte b of a V channel; the high plane's is 64 more."""
    return b_B // 16 * 16 + b_B % 2 * 8 + b_B % 16 // 2


@triton.jit
def _codes_v(
    record, row, slot, count, n, v_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr, lane_table,
    N: tl.constexpr, D: tl.constexpr, V_AT: tl.constexpr, CLEAN: tl.constexpr,
):
    """Write V codes. Returns the scales of tokens tau(b) and 64 + tau(b) in turn for each group, FP32 [64], and the loudest numbers."""
    ch = tl.arange(0, 16)
    b_B = tl.arange(0, 64)
    t_B = _tau(b_B)
    lo_B = (t_B >= slot) & (t_B < slot + count)
    hi_B = (t_B + 64 >= slot) & (t_B + 64 < slot + count)
    loud_B = tl.zeros((64,), tl.float32)
    scales = ()
    for g in tl.static_range(D // 64):
        planes = ()
        for half in tl.static_range(2):
            on_B = hi_B if half else lo_B
            xs, loud_B = _tiles(v_ptr, row, n, t_B + half * 64, on_B, g * 64, loud_B, counts_ptr, N, D, 4, CLEAN)
            ys = ()
            ws = ()
            for i in tl.static_range(4):
                at = n * D + g * 64 + i * 16 + ch
                ys = ys + (xs[i] * tl.load(v_gain_ptr + at)[None, :],)
                ws = ws + (tl.load(ready_ptr + 5 * N * D + n * 3 * D + at)[None, :],)
            scale_B, inverse_B = _scales(ys, ws, table_ptr, lane_table, True)
            for i in tl.static_range(4):
                planes = planes + (_codes(ys[i], inverse_B),)
            scales = scales + (scale_B,)
        for i in tl.static_range(4):
            at = record + V_AT + (g * 64 + i * 16 + ch)[None, :] * 64 + b_B[:, None]
            byte = _byte(planes[i], planes[4 + i])
            if count < 128:
                mine_B = tl.where(lo_B, 0x71, 0) | tl.where(hi_B, 0x8E, 0)
                old = tl.load(at).to(tl.int32)
                byte = ((old & ~mine_B[:, None]) | (byte.to(tl.int32) & mine_B[:, None])).to(tl.uint8)
            tl.store(at, byte)
    return scales, loud_B


@triton.jit
def _pages_v(
    record, row, slot, count, n, v_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr, lane_table,
    N: tl.constexpr, D: tl.constexpr, V_AT: tl.constexpr, VS_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    G: tl.constexpr = D // 64
    t_B = _tau(tl.arange(0, 64))
    lo_B = (t_B >= slot) & (t_B < slot + count)
    hi_B = (t_B + 64 >= slot) & (t_B + 64 < slot + count)
    scales, loud_B = _codes_v(record, row, slot, count, n, v_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr, lane_table, N, D, V_AT,
                              False)
    if tl.reduce(loud_B, 0, _louder) <= 65504.0:
        pass
    else:
        scales, loud_B = _codes_v(record, row, slot, count, n, v_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr, lane_table, N, D,
                                  V_AT, True)
    top = tl.maximum(_top(scales[0::2], lo_B), _top(scales[1::2], hi_B))
    factor = _settle(record, VS_AT, TRAILER_AT + 4, top, slot, G, G)
    for g in tl.static_range(G):
        tl.store(record + VS_AT + t_B * G + g, _scale_byte(scales[2 * g], factor), mask=lo_B)
        tl.store(record + VS_AT + (t_B + 64) * G + g, _scale_byte(scales[2 * g + 1], factor), mask=hi_B)


@triton.jit
def encode_pages(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, placed_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, SWAPS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    V_AT: tl.constexpr, KS_AT: tl.constexpr, KS_ROW: tl.constexpr, VS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    """Runs of up to 128 tokens: program (run, head, K or V). `placed`: k by place."""
    run = tl.program_id(0)
    n = tl.program_id(1)
    page = tl.load(runs_ptr + run * 4)
    slot = tl.load(runs_ptr + run * 4 + 1)
    row = tl.load(runs_ptr + run * 4 + 2) - slot
    count = tl.load(runs_ptr + run * 4 + 3)
    if count == 0:
        return
    lane_table = _shared_table(table_ptr)
    record = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
    if tl.program_id(2) == 0:
        _pages_k(record, row, slot, count, n, k_ptr, placed_ptr, channels_ptr, k_mean_ptr, ready_ptr, counts_ptr, table_ptr, lane_table,
                 N, D, OUT, OUTP, SWAPS, KS_AT, KS_ROW, KO_AT, TRAILER_AT)
    else:
        _pages_v(record, row, slot, count, n, v_ptr, v_gain_ptr, ready_ptr, counts_ptr, table_ptr, lane_table, N, D, V_AT, VS_AT,
                 TRAILER_AT)


# launch ----------------------------------------------------------------------------------------------------------------
def serves(layout: PageLayout) -> bool:
    """Whether `encode` writes this layout."""
    f = layout.format
    return (f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.v_axis == "token" and f.v_group == 64
            and f.search and layout.rope == 0 and layout.k_dim == layout.v_dim and layout.k_dim in (64, 128))


def encode(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: tuple[torch.Tensor, ...],
    layout: PageLayout, *, most: int = PAGE,
) -> torch.Tensor:
    """As `records.encode_naive`, for layouts that it `serves`; int32 runs.

    `most`: no run has more tokens; 1 takes a kernel of its own.

    The host reads nothing. Returns int64 [2]: elements saturated, NaNs zeroed.
    """
    dev = pool_PNb.device
    if not len(runs_R4):
        return torch.zeros(2, dtype=torch.int64, device=dev)
    channels, k_mean, k_gain, k_weight, v_gain, v_weight = book
    at = {k: v[0] for k, v in layout.offsets.items()}
    N, D, out = pool_PNb.shape[1], layout.k_dim, layout.outliers
    # a run is one load of 16 bytes
    runs = runs_R4 if runs_R4.data_ptr() % 16 == 0 else runs_R4.clone()
    tensors = (pool_PNb, k_TNd.contiguous(), v_TNd.contiguous(), runs, channels, k_mean)
    constants = {
        "N": N, "D": D, "OUT": out, "OUTP": triton.next_power_of_2(max(1, out)), "PAGE_BYTES": layout.page_bytes, "V_AT": at["v_codes"],
        "KS_AT": at["k_scales"], "VS_AT": at["v_scales"], "KO_AT": at["k_outliers"], "TRAILER_AT": at["trailer"], "enable_fp_fusion": False,
    }  # fmt: skip
    swaps = {"SWAPS": len(layout.reserved), "KS_ROW": layout.k_scale_row}
    if most == 1:
        counts = torch.zeros(2, dtype=torch.int64, device=dev)
        append_one[(len(runs_R4), N, 2)](
            *tensors, k_gain, k_weight, v_gain, v_weight, counts, table_on(dev), **constants, **swaps, num_warps=1)
        return counts
    pages = PAGES and not layout.reserved and fused_pages.serves(k_TNd, v_TNd, layout.outliers)
    counts = torch.empty(2, dtype=torch.int64, device=dev)
    if pages:
        step, apart = fused_pages.grid(dev, N, len(runs_R4))
        pdl = {"launch_pdl": True} if ASM.value else {}
        count_nothing[(1,)](counts, PDL=ASM.value, num_warps=1, **pdl)
        fused_pages.encode_pages[(2 * N * step,)](
            *tensors, k_gain, k_weight, v_gain, v_weight, counts, fused_pages.table_on(dev), len(runs_R4), step, 128, apart, **constants,
            num_warps=4, maxnreg=REGISTERS, **pdl)
    else:
        ready = torch.empty(10, N, D, dtype=torch.int32, device=dev)
        shape = {"N": N, "D": D, "OUT": out, "SWAPS": len(layout.reserved)}
        prepare_book[(N,)](channels, k_mean, k_gain, k_weight, v_weight, ready, counts, **shape, num_warps=1)
        placed = tensors[1]
        if layout.reserved:
            placed = torch.empty_like(placed)
            place_keys[(-(-len(placed) // 32), N)](tensors[1], channels, placed, len(placed), **shape, TT=32, num_warps=4)
        encode_pages[(len(runs_R4), N, 2)](
            *tensors, placed, v_gain, ready, counts, table_on(dev), **constants, **swaps, num_warps=4, maxnreg=REGISTERS)
    return counts
