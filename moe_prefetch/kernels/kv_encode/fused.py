"""Tokens into FP4 pages, in Triton: the bytes of `records.encode_naive`, for layouts in `planes` order with scales per token.

Launch with `enable_fp_fusion=False`: the law has no fused multiply-add. Sums are trees of neighbours, written as sums over axes of two.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...kv.format import PAGE, PageLayout

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")


# elements --------------------------------------------------------------------------------------------------------------
@triton.jit
def _four_bits(x):
    """FP32 >= 0 to four significant bits, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(x):
    return (x.to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127


@triton.jit
def _tree(x, X: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over the last axis of [X, BLOCK], 32 or 64 wide: neighbours, then neighbours of these."""
    if BLOCK == 64:
        x = tl.sum(tl.reshape(x, (X, 32, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (X, 16, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (X, 8, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (X, 4, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (X, 2, 2)), axis=2)
    return tl.sum(x, axis=1)


@triton.jit
def _level(mag, half):
    """E2M1 magnitude nearest to mag / (2 half), times 2 half, ties to the even code; `half` is half a scale. All products are exact."""
    y = tl.where(mag > half * 0.5, half, 0.0)
    y = tl.where(mag >= half * 1.5, half * 2.0, y)
    y = tl.where(mag > half * 2.5, half * 3.0, y)
    y = tl.where(mag >= half * 3.5, half * 4.0, y)
    y = tl.where(mag > half * 5.0, half * 6.0, y)
    y = tl.where(mag >= half * 7.0, half * 8.0, y)
    return tl.where(mag > half * 10.0, half * 12.0, y)


@triton.jit
def _code(x, half):
    """The E2M1 code: sign in bit 3, none for zero."""
    mag = tl.abs(x)
    c = (
        (mag > half * 0.5).to(tl.int32)
        + (mag >= half * 1.5).to(tl.int32)
        + (mag > half * 2.5).to(tl.int32)
        + (mag >= half * 3.5).to(tl.int32)
    )
    c += (mag > half * 5.0).to(tl.int32) + (mag >= half * 7.0).to(tl.int32) + (mag > half * 10.0).to(tl.int32)
    return tl.where((x < 0) & (c > 0), c + 8, c)


@triton.jit
def _try(mag, w, amax, INVERSE: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr):
    s = _four_bits(amax * INVERSE)
    miss = _level(mag, (s * 0.5)[:, None]) - mag
    return s, _tree(miss * w * miss, X, BLOCK)


@triton.jit
def _better(best, error, s, e):
    return tl.where(e < error, s, best), tl.where(e < error, e, error)


@triton.jit
def _blocks(x, w, X: tl.constexpr, BLOCK: tl.constexpr):
    """FP32 x [X, BLOCK] -> E2M1 codes int32 [X, BLOCK] and scales FP32 [X].

    Eight divisors in the order of format.SEARCH: the least error, the first on a tie.
    """
    mag = tl.abs(x)
    amax = tl.max(mag, axis=1)
    best, error = _try(mag, w, amax, 0.1666666716337204, X, BLOCK)
    s, e = _try(mag, w, amax, 0.25, X, BLOCK)
    best, error = _better(best, error, s, e)
    s, e = _try(mag, w, amax, 0.2222222238779068, X, BLOCK)
    best, error = _better(best, error, s, e)
    s, e = _try(mag, w, amax, 0.20000000298023224, X, BLOCK)
    best, error = _better(best, error, s, e)
    s, e = _try(mag, w, amax, 0.1818181872367859, X, BLOCK)
    best, error = _better(best, error, s, e)
    s, e = _try(mag, w, amax, 0.1538461595773697, X, BLOCK)
    best, error = _better(best, error, s, e)
    s, e = _try(mag, w, amax, 0.1428571492433548, X, BLOCK)
    best, error = _better(best, error, s, e)
    s, e = _try(mag, w, amax, 0.125, X, BLOCK)
    best, error = _better(best, error, s, e)
    zero = amax < 7.888609052210118e-31
    code = tl.where(zero[:, None], 0, _code(x, (best * 0.5)[:, None]))
    return code, tl.where(zero, 3.0814879110195774e-33, best)


@triton.jit
def _scale_byte(scale, factor):
    """E4M3 byte of scale / 2^factor: exact in the normal range, truncated below it, at least 1."""
    e = _exponent(scale) - factor + 7
    m = scale.to(tl.int32, bitcast=True) >> 20 & 7
    low = tl.maximum((8 + m) >> tl.minimum(tl.maximum(1 - e, 0), 31), 1)
    return tl.where(e >= 1, e * 8 + m, low).to(tl.uint8)


@triton.jit
def _shift_byte(code, by):
    """The same scale under a factor 2^by larger."""
    c = code.to(tl.int32)
    e = c >> 3
    m = c & 7
    normal = (8 + m) >> tl.minimum(tl.maximum(by - e + 1, 0), 31)
    low = tl.maximum(tl.where(e >= 1, normal, m >> tl.minimum(by, 31)), 1)
    return tl.where(e - by >= 1, c - 8 * by, low).to(tl.uint8)


@triton.jit
def _clean(x):
    """FP32 without NaN and within FP16, and how many were beyond it, and NaN."""
    nan = x != x
    big = tl.abs(x) > 65504.0
    x = tl.minimum(tl.maximum(tl.where(nan, 0.0, x), -65504.0), 65504.0)
    return x, big.to(tl.int32), nan.to(tl.int32)


@triton.jit
def _byte(lo, hi):
    return (((hi & 8) << 4) | ((lo & 7) << 4) | ((hi & 7) << 1) | (lo >> 3)).to(tl.uint8)


@triton.jit
def _tally(counts_ptr, big, nan):
    if big > 0:
        tl.atomic_add(counts_ptr, big.to(tl.int64))
    if nan > 0:
        tl.atomic_add(counts_ptr + 1, nan.to(tl.int64))


@triton.jit
def _is_outlier(ch_C, channels_ptr, OUT: tl.constexpr):
    """Channels that are among a head's outliers."""
    is_C = ch_C < 0
    for o in tl.static_range(OUT):
        is_C = is_C | (ch_C == tl.load(channels_ptr + o))
    return is_C


@triton.jit
def _settle(record, scale_at, factor_at, top, slot, ROWS: tl.constexpr, C: tl.constexpr):
    """Let a page's factor admit exponent `top`: the new factor's exponent; scales of the tokens before `slot` follow it."""
    at = (record + factor_at).to(tl.pointer_type(tl.int32))
    old = (tl.load(at) >> 23 & 0xFF) - 127
    new = tl.maximum(old, top - 7)
    # every warp must have read the old factor before one writes the new
    tl.debug_barrier()
    if new > old:
        i = tl.arange(0, 128 * ROWS)
        there = (i // ROWS < slot) & (i % ROWS < C)
        p = record + scale_at + i // ROWS * C + i % ROWS
        tl.store(p, _shift_byte(tl.load(p, mask=there, other=8), new - old), mask=there)
        tl.store(at, (new + 127) << 23)
    return new


@triton.jit
def _append_k(
    record, row, slot, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, KS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    d_D = tl.arange(0, D)
    G: tl.constexpr = D // 64
    C: tl.constexpr = D // 32
    x_D, big, nan = _clean(tl.load(k_ptr + (row.to(tl.int64) * N + n) * D + d_D).to(tl.float32))
    _tally(counts_ptr, tl.sum(big, axis=0), tl.sum(nan, axis=0))
    x_D = x_D - tl.load(k_mean_ptr + n * D + d_D)
    for o in tl.static_range(OUT):
        ch = tl.load(channels_ptr + n * OUT + o)
        value = tl.sum(tl.where(d_D == ch, x_D, 0.0), axis=0)
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0).to(tl.float16)
        tl.store((record + KO_AT).to(tl.pointer_type(tl.float16)) + slot * OUT + o, value)
    x_D = tl.where(_is_outlier(d_D, channels_ptr + n * OUT, OUT), 0.0, x_D * tl.load(k_gain_ptr + n * D + d_D))
    code, scale_C = _blocks(tl.reshape(x_D, (C, 32)), tl.reshape(tl.load(k_weight_ptr + n * D + d_D), (C, 32)), C, 32)
    lo, hi = tl.split(tl.permute(tl.reshape(code, (G, 2, 32)), (0, 2, 1)))
    tl.store(record + slot * (D // 2) + tl.arange(0, G)[:, None] * 32 + tl.arange(0, 32)[None, :], _byte(lo, hi))
    factor = _settle(record, KS_AT, TRAILER_AT, tl.max(_exponent(scale_C), axis=0), slot, C, C)
    tl.store(record + KS_AT + slot * C + tl.arange(0, C), _scale_byte(scale_C, factor))
    fill = (record + TRAILER_AT + 8).to(tl.pointer_type(tl.int32))
    tl.store(fill, tl.maximum(tl.load(fill), slot + 1))


@triton.jit
def _append_v(
    record, row, slot, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, V_AT: tl.constexpr, VS_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    d_D = tl.arange(0, D)
    G: tl.constexpr = D // 64
    x_D, big, nan = _clean(tl.load(v_ptr + (row.to(tl.int64) * N + n) * D + d_D).to(tl.float32))
    _tally(counts_ptr, tl.sum(big, axis=0), tl.sum(nan, axis=0))
    x_D = x_D * tl.load(v_gain_ptr + n * D + d_D)
    code, scale_G = _blocks(tl.reshape(x_D, (G, 64)), tl.reshape(tl.load(v_weight_ptr + n * D + d_D), (G, 64)), G, 64)
    code_D = tl.reshape(code, (D,))
    t = slot % 64
    at_D = record + V_AT + d_D * 64 + t // 16 * 16 + t % 8 * 2 + t % 16 // 8
    old_D = tl.load(at_D).to(tl.int32)
    high = slot >= 64
    new_D = tl.where(high, _byte(code_D * 0, code_D).to(tl.int32), _byte(code_D, code_D * 0).to(tl.int32))
    tl.store(at_D, ((old_D & tl.where(high, 0x71, 0x8E)) | new_D).to(tl.uint8))
    factor = _settle(record, VS_AT, TRAILER_AT + 4, tl.max(_exponent(scale_G), axis=0), slot, G, G)
    tl.store(record + VS_AT + slot * G + tl.arange(0, G), _scale_byte(scale_G, factor))


@triton.jit
def append_one(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, v_gain_ptr, v_weight_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr,
    VS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
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
        _append_k(record, row, slot, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr, N, D, OUT,
                 KS_AT, KO_AT, TRAILER_AT)
    else:
        _append_v(record, row, slot, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, N, D, V_AT, VS_AT, TRAILER_AT)


@triton.jit
def _rows_of(ptr, row, n, t_T, on_T, c_C, N: tl.constexpr, D: tl.constexpr):
    at = ptr + ((row + t_T).to(tl.int64) * N + n)[:, None] * D + c_C[None, :]
    return _clean(tl.load(at, mask=on_T[:, None], other=0).to(tl.float32))


@triton.jit
def _pages_k(
    record, row, slot, count, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, KS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    t_T = tl.arange(0, 128)
    on_T = (t_T >= slot) & (t_T < slot + count)
    G: tl.constexpr = D // 64
    c_C = tl.arange(0, 64)
    big = 0
    nan = 0
    top = -1000
    x_X = tl.arange(0, 256)
    on_X = (x_X // 2 >= slot) & (x_X // 2 < slot + count)
    scales = ()
    for g in tl.static_range(G):
        ch_C = g * 64 + c_C
        x_TC, b, m = _rows_of(k_ptr, row, n, t_T, on_T, ch_C, N, D)
        big += tl.sum(tl.sum(b, axis=1), axis=0)
        nan += tl.sum(tl.sum(m, axis=1), axis=0)
        x_TC = (x_TC - tl.load(k_mean_ptr + n * D + ch_C)[None, :]) * tl.load(k_gain_ptr + n * D + ch_C)[None, :]
        x_TC = tl.where(_is_outlier(ch_C, channels_ptr + n * OUT, OUT)[None, :], 0.0, x_TC)
        w_TC = tl.broadcast_to(tl.load(k_weight_ptr + n * D + ch_C)[None, :], (128, 64))
        code, scale_X = _blocks(tl.reshape(x_TC, (256, 32)), tl.reshape(w_TC, (256, 32)), 256, 32)
        lo, hi = tl.split(tl.permute(tl.reshape(code, (128, 2, 32)), (0, 2, 1)))
        at = record + t_T[:, None] * (D // 2) + g * 32 + tl.arange(0, 32)[None, :]
        tl.store(at, _byte(lo, hi), mask=on_T[:, None])
        top = tl.maximum(top, tl.max(tl.where(on_X, _exponent(scale_X), -1000), axis=0))
        scales = scales + (scale_X,)
    factor = _settle(record, KS_AT, TRAILER_AT, top, slot, 2 * G, 2 * G)
    for g in tl.static_range(G):
        tl.store(record + KS_AT + x_X // 2 * (2 * G) + 2 * g + x_X % 2, _scale_byte(scales[g], factor), mask=on_X)
    for o in tl.static_range(OUT):
        ch = tl.load(channels_ptr + n * OUT + o)
        at_T = k_ptr + ((row + t_T).to(tl.int64) * N + n) * D + ch
        y_T, b, m = _clean(tl.load(at_T, mask=on_T & (ch >= 0), other=0).to(tl.float32))
        y_T = y_T - tl.load(k_mean_ptr + n * D + ch, mask=ch >= 0, other=0)
        y_T = tl.where(ch >= 0, tl.minimum(tl.maximum(y_T, -65504.0), 65504.0), 0.0)
        tl.store((record + KO_AT).to(tl.pointer_type(tl.float16)) + t_T * OUT + o, y_T.to(tl.float16), mask=on_T)
    fill = (record + TRAILER_AT + 8).to(tl.pointer_type(tl.int32))
    tl.store(fill, tl.maximum(tl.load(fill), slot + count))
    _tally(counts_ptr, big, nan)


@triton.jit
def _pages_v(
    record, row, slot, count, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, V_AT: tl.constexpr, VS_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    t_T = tl.arange(0, 128)
    on_T = (t_T >= slot) & (t_T < slot + count)
    G: tl.constexpr = D // 64
    c_C = tl.arange(0, 64)
    big = 0
    nan = 0
    top = -1000
    # byte b of a channel holds tokens tau(b) and 64 + tau(b)
    b_B = tl.arange(0, 64)
    tau_B = b_B // 16 * 16 + b_B % 2 * 8 + b_B % 16 // 2
    lo_B = (tau_B >= slot) & (tau_B < slot + count)
    hi_B = (tau_B + 64 >= slot) & (tau_B + 64 < slot + count)
    mine_B = tl.where(lo_B, 0x71, 0) | tl.where(hi_B, 0x8E, 0)
    scales = ()
    for g in tl.static_range(G):
        ch_C = g * 64 + c_C
        x_TC, b, m = _rows_of(v_ptr, row, n, t_T, on_T, ch_C, N, D)
        big += tl.sum(tl.sum(b, axis=1), axis=0)
        nan += tl.sum(tl.sum(m, axis=1), axis=0)
        x_TC = x_TC * tl.load(v_gain_ptr + n * D + ch_C)[None, :]
        w_TC = tl.broadcast_to(tl.load(v_weight_ptr + n * D + ch_C)[None, :], (128, 64))
        code, scale_T = _blocks(x_TC, w_TC, 128, 64)
        lo, hi = tl.split(tl.permute(tl.reshape(code, (2, 64, 64)), (1, 2, 0)))
        byte_CB = tl.trans(tl.reshape(tl.permute(tl.reshape(_byte(lo, hi), (4, 2, 8, 64)), (0, 2, 1, 3)), (64, 64)))
        at = record + V_AT + ch_C[:, None] * 64 + b_B[None, :]
        old_CB = tl.load(at, mask=((lo_B | hi_B) & ~(lo_B & hi_B))[None, :], other=0).to(tl.int32)
        new_CB = (old_CB & ~mine_B[None, :]) | (byte_CB.to(tl.int32) & mine_B[None, :])
        tl.store(at, new_CB.to(tl.uint8), mask=(lo_B | hi_B)[None, :])
        top = tl.maximum(top, tl.max(tl.where(on_T, _exponent(scale_T), -1000), axis=0))
        scales = scales + (scale_T,)
    factor = _settle(record, VS_AT, TRAILER_AT + 4, top, slot, G, G)
    for g in tl.static_range(G):
        tl.store(record + VS_AT + t_T * G + g, _scale_byte(scales[g], factor), mask=on_T)
    _tally(counts_ptr, big, nan)


@triton.jit
def encode_pages(
    pool_ptr, k_ptr, v_ptr, runs_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, v_gain_ptr, v_weight_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr,
    VS_AT: tl.constexpr, KO_AT: tl.constexpr, TRAILER_AT: tl.constexpr,
):
    """Runs of up to 128 tokens: program (run, head, K or V)."""
    run = tl.program_id(0)
    n = tl.program_id(1)
    page = tl.load(runs_ptr + run * 4)
    slot = tl.load(runs_ptr + run * 4 + 1)
    row = tl.load(runs_ptr + run * 4 + 2) - slot
    count = tl.load(runs_ptr + run * 4 + 3)
    if count == 0:
        return
    record = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
    if tl.program_id(2) == 0:
        _pages_k(record, row, slot, count, n, k_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, k_weight_ptr, counts_ptr, N, D, OUT,
                 KS_AT, KO_AT, TRAILER_AT)
    else:
        _pages_v(record, row, slot, count, n, v_ptr, v_gain_ptr, v_weight_ptr, counts_ptr, N, D, V_AT, VS_AT, TRAILER_AT)


# launch ----------------------------------------------------------------------------------------------------------------
def serves(layout: PageLayout) -> bool:
    """Whether `encode` writes this layout."""
    f = layout.format
    return (f.code == "fp4" and f.order == "planes" and f.scale == "e4m3" and f.v_axis == "token" and f.v_group == 64
            and len(f.divisors) == 8 and layout.rope == 0 and layout.k_dim == layout.v_dim and layout.k_dim in (64, 128, 256))


def encode(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: tuple[torch.Tensor, ...],
    layout: PageLayout, *, most: int = PAGE,
) -> torch.Tensor:
    """As `records.encode_naive`, for layouts that it `serves`; int32 runs.

    `most`: no run has more tokens; 1 takes a kernel of its own.

    The host reads nothing. Returns int64 [2]: elements saturated, NaNs zeroed.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=pool_PNb.device)
    if not len(runs_R4):
        return counts
    at = {k: v[0] for k, v in layout.offsets.items()}
    N = pool_PNb.shape[1]
    kernel, warps = (append_one, 1) if most == 1 else (encode_pages, 8)
    kernel[(len(runs_R4), N, 2)](
        pool_PNb, k_TNd.contiguous(), v_TNd.contiguous(), runs_R4, *book, counts, N=N, D=layout.k_dim, OUT=layout.outliers,
        PAGE_BYTES=layout.page_bytes, V_AT=at["v_codes"], KS_AT=at["k_scales"],
        VS_AT=at["v_scales"], KO_AT=at["k_outliers"], TRAILER_AT=at["trailer"],
        num_warps=warps, enable_fp_fusion=False)
    return counts
