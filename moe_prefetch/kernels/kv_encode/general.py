"""Tokens into pages of fp16, fp8, nvfp4 and mxfp4, in Triton, at every head dim, MLA's latent and rotary part among them.

The bytes of `records.encode_naive`. Program (run, head, K or V): the run's tokens against 64 channels at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.format import PAGE, PageLayout
from .fused_elements import _exponent, _pow2, _scale_byte, _shift_byte, _tally

FORMATS = ("fp16", "fp8", "nvfp4", "mxfp4")
FP16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FP4 = tl.constexpr(2)


@triton.jit
def _clean(x):
    """FP32 [T, C] without NaN and within FP16, and how many were beyond it, and NaN."""
    nan = x != x
    big = tl.abs(x) > 65504.0
    x = tl.minimum(tl.maximum(tl.where(nan, 0.0, x), -65504.0), 65504.0)
    return x, tl.sum(tl.sum(big.to(tl.int32), axis=1), axis=0), tl.sum(tl.sum(nan.to(tl.int32), axis=1), axis=0)


@triton.jit
def _four_bits(x):
    """FP32 >= 0 to four significant bits, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(x):
    """FP32 of at most 448 as the nearest E4M3, ties to even, in integers: the same bits everywhere."""
    bits = x.to(tl.int32, bitcast=True)
    mag = bits & 0x7FFFFFFF
    normal = ((mag + 0x7FFFF + (mag >> 20 & 1)) >> 20) - 960
    small = (mag.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    return (tl.where(mag >= 0x3C800000, normal, small) | (bits >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def _e2m1(x, scale):
    """The E2M1 code of x / scale, ties to even, sign in bit 3 (none for zero); all products are exact."""
    mag = tl.abs(x)
    c = (mag > scale * 0.25).to(tl.int32) + (mag >= scale * 0.75).to(tl.int32) + (mag > scale * 1.25).to(tl.int32)
    c += (mag >= scale * 1.75).to(tl.int32) + (mag > scale * 2.5).to(tl.int32)
    c += (mag >= scale * 3.5).to(tl.int32) + (mag > scale * 5.0).to(tl.int32)
    return tl.where((x < 0) & (c > 0), c + 8, c)


@triton.jit
def _settle(record, scale_at, factor_at, top, slot, NB: tl.constexpr, ROW: tl.constexpr):
    """Let a page's factor admit exponent `top`: the new factor's exponent; scales of tokens before `slot`, ROW bytes apart, follow it."""
    at = (record + factor_at).to(tl.pointer_type(tl.int32))
    old = (tl.load(at) >> 23 & 0xFF) - 127
    new = tl.maximum(old, top - 7)
    # every warp must have read the old factor before one writes the new
    tl.debug_barrier()
    if new > old:
        for i in tl.static_range(NB):
            p = record + scale_at + tl.arange(0, 128) * ROW + i
            there = tl.arange(0, 128) < slot
            tl.store(p, _shift_byte(tl.load(p, mask=there, other=8), new - old), mask=there)
        tl.store(at, (new + 127) << 23)
    return new


@triton.jit
def _rows(ptr, row_T, on_T, n, c_C, N: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """FP32 [T, C]: channels c, less than D, of rows W wide."""
    at = ptr + (row_T.to(tl.int64) * N + n)[:, None] * W + c_C[None, :]
    return _clean(tl.load(at, mask=on_T[:, None] & (c_C < D)[None, :], other=0).to(tl.float32))


@triton.jit
def _blocks(x_TC, BLOCK: tl.constexpr, TT: tl.constexpr, E8M0: tl.constexpr):
    """Codes int32 [T, 64] of x [T, 64], and scales FP32 [T, 64 / BLOCK]."""
    x_TGB = tl.reshape(x_TC, (TT, 64 // BLOCK, BLOCK))
    amax_TG = tl.max(tl.abs(x_TGB), axis=2)
    zero_TG = amax_TG < 7.888609052210118e-31
    if E8M0:
        scale_TG = _pow2(_exponent(tl.maximum(amax_TG, 7.888609052210118e-31)) - 2)
    else:
        scale_TG = _four_bits(amax_TG * 0.1666666716337204)
    code = tl.where(tl.expand_dims(zero_TG, 2), 0, _e2m1(x_TGB, tl.expand_dims(scale_TG, 2)))
    return tl.reshape(code, (TT, 64)), tl.where(zero_TG, 3.0814879110195774e-33, scale_TG)


@triton.jit
def _times_gain(x_TC, n, ch_C, mean_ptr, gain_ptr, D: tl.constexpr, MEAN: tl.constexpr):
    """What is coded of channels ch; beyond D zero."""
    on_C = ch_C < D
    if MEAN:
        x_TC = x_TC - tl.load(mean_ptr + n * D + ch_C, mask=on_C, other=0)[None, :]
    return x_TC * tl.load(gain_ptr + n * D + ch_C, mask=on_C, other=0)[None, :]


@triton.jit
def _encode_side(
    record, row_T, on_T, t_T, slot, n, ptr, mean_ptr, gain_ptr, counts_ptr,
    N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, TT: tl.constexpr, CODE: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
    CODES_AT: tl.constexpr, SCALES_AT: tl.constexpr, FACTOR_AT: tl.constexpr, MEAN: tl.constexpr, BY_CHANNEL: tl.constexpr,
):
    """K or V of a run: D channels of rows W wide."""
    c_C = tl.arange(0, 64)
    on_TC = on_T[:, None]
    big = tl.full((), 0, tl.int32)
    nan = tl.full((), 0, tl.int32)
    amax_T = tl.full((TT,), 7.888609052210118e-31, tl.float32)
    top = -1000
    NB: tl.constexpr = (D + BLOCK - 1) // BLOCK if BLOCK > 0 else 1
    if CODE == FP8:
        for g in tl.range((D + 63) // 64, num_stages=1):
            x_TC, _b, _m = _rows(ptr, row_T, on_T, n, 64 * g + c_C, N, W, D)
            amax_T = tl.maximum(amax_T, tl.max(tl.abs(x_TC), axis=1))
        # the least power of two that keeps the row within 448 = 1.75 * 2^8
        above_T = (amax_T.to(tl.int32, bitcast=True) & 0x7FFFFF) > 0x600000
        e_T = _exponent(amax_T) - 8 + above_T.to(tl.int32)
        tl.store(record + SCALES_AT + t_T, (e_T + 127).to(tl.uint8), mask=on_T)
    # Loops and not one piece of code: what MLA's 512 channels unrolled to took minutes to compile.
    for g in tl.range((D + 63) // 64, num_stages=1):
        ch_C = 64 * g + c_C
        x_TC, b, m = _rows(ptr, row_T, on_T, n, ch_C, N, W, D)
        big += b
        nan += m
        on_C = ch_C < D
        if CODE == FP16:
            at_TC = (record + CODES_AT).to(tl.pointer_type(tl.float16)) + t_T[:, None] * D + ch_C[None, :]
            tl.store(at_TC, x_TC.to(tl.float16), mask=on_TC & on_C[None, :])
        elif CODE == FP8:
            y_TC = _e4m3(x_TC * _pow2(-e_T)[:, None])
            if BY_CHANNEL:
                tl.store(record + CODES_AT + ch_C[None, :] * 128 + t_T[:, None], y_TC, mask=on_TC & on_C[None, :])
            else:
                tl.store(record + CODES_AT + t_T[:, None] * D + ch_C[None, :], y_TC, mask=on_TC & on_C[None, :])
        else:
            x_TC = _times_gain(x_TC, n, ch_C, mean_ptr, gain_ptr, D, MEAN)
            code_TC, scale_TG = _blocks(x_TC, BLOCK, TT, E8M0)
            lo, hi = tl.split(tl.reshape(code_TC, (TT, 32, 2)))
            j_C = 32 * g + tl.arange(0, 32)
            byte_TC = (lo | hi << 4).to(tl.uint8)
            tl.store(record + CODES_AT + t_T[:, None] * (D // 2) + j_C[None, :], byte_TC, mask=on_TC & (j_C < D // 2)[None, :])
            g_G = 64 // BLOCK * g + tl.arange(0, 64 // BLOCK)
            on_TG = on_TC & (g_G < NB)[None, :]
            if E8M0:
                at_TG = record + SCALES_AT + t_T[:, None] * NB + g_G[None, :]
                tl.store(at_TG, (_exponent(scale_TG) + 127).to(tl.uint8), mask=on_TG)
            else:
                top = tl.maximum(top, tl.max(tl.max(tl.where(on_TG, _exponent(scale_TG), -1000), axis=1), axis=0))
    if CODE == FP4 and not E8M0:
        factor = _settle(record, SCALES_AT, FACTOR_AT, top, slot, NB, NB)
        # The scales again, now that the page's factor is known.
        for g in tl.range((D + 63) // 64, num_stages=1):
            x_TC, _b, _m = _rows(ptr, row_T, on_T, n, 64 * g + c_C, N, W, D)
            _code_TC, scale_TG = _blocks(_times_gain(x_TC, n, 64 * g + c_C, mean_ptr, gain_ptr, D, MEAN), BLOCK, TT, E8M0)
            g_G = 64 // BLOCK * g + tl.arange(0, 64 // BLOCK)
            at_TG = record + SCALES_AT + t_T[:, None] * NB + g_G[None, :]
            tl.store(at_TG, _scale_byte(scale_TG, factor), mask=on_TC & (g_G < NB)[None, :])
    _tally(counts_ptr, big, nan)


@triton.jit
def encode_general(
    pool_ptr, k_ptr, v_ptr, runs_ptr, k_mean_ptr, k_gain_ptr, v_gain_ptr, counts_ptr,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROPE: tl.constexpr, TT: tl.constexpr, CODE: tl.constexpr, E8M0: tl.constexpr,
    BLOCK: tl.constexpr, PAGE_BYTES: tl.constexpr, V_AT: tl.constexpr, KS_AT: tl.constexpr, VS_AT: tl.constexpr, ROPE_AT: tl.constexpr,
    TRAILER_AT: tl.constexpr, FIRST: tl.constexpr,
):
    """Runs of up to TT tokens: program (run, head, K or V); FIRST 1: V alone."""
    run = tl.program_id(0)
    n = tl.program_id(1)
    page = tl.load(runs_ptr + run * 4)
    slot = tl.load(runs_ptr + run * 4 + 1)
    row = tl.load(runs_ptr + run * 4 + 2)
    count = tl.load(runs_ptr + run * 4 + 3)
    if count == 0:
        return
    record = pool_ptr + (page.to(tl.int64) * N + n) * PAGE_BYTES
    i_T = tl.arange(0, TT)
    on_T = i_T < count
    if tl.program_id(2) + FIRST == 0:
        _encode_side(record, row + i_T, on_T, slot + i_T, slot, n, k_ptr, k_mean_ptr, k_gain_ptr, counts_ptr, N, D + ROPE, D, TT, CODE,
                     E8M0, BLOCK, 0, KS_AT, TRAILER_AT, True, False)
        if ROPE > 0:
            c_C = tl.arange(0, 64)
            for g in tl.static_range((ROPE + 63) // 64):
                x_TC, big, nan = _rows(k_ptr + D, row + i_T, on_T, n, 64 * g + c_C, N, D + ROPE, ROPE)
                at_TC = (record + ROPE_AT).to(tl.pointer_type(tl.float16)) + (slot + i_T)[:, None] * ROPE + 64 * g + c_C[None, :]
                tl.store(at_TC, x_TC.to(tl.float16), mask=on_T[:, None] & (64 * g + c_C < ROPE)[None, :])
                _tally(counts_ptr, big, nan)
        fill = (record + TRAILER_AT + 8).to(tl.pointer_type(tl.int32))
        tl.store(fill, tl.maximum(tl.load(fill), slot + count))
    else:
        _encode_side(record, row + i_T, on_T, slot + i_T, slot, n, v_ptr, k_mean_ptr, v_gain_ptr, counts_ptr, N, DV, DV, TT, CODE,
                     E8M0, BLOCK, V_AT, VS_AT, TRAILER_AT + 4, False, True)


# launch ----------------------------------------------------------------------------------------------------------------
def serves(layout: PageLayout) -> bool:
    """Whether `encode` writes this layout."""
    return layout.format.name in FORMATS


def serves_side(layout: PageLayout, side: int) -> bool:
    """Whether `encode` writes K (side 0) or V (1) of this layout alone."""
    return (layout.format.k, layout.format.v)[side].name in FORMATS


def constants(layout: PageLayout, heads: int, most: int, side: int | None = None) -> dict[str, object]:
    """Compile-time arguments of `encode_general` for runs of at most `most` tokens."""
    at, f = {k: v[0] for k, v in layout.offsets.items()}, layout.format.v if side == 1 else layout.format
    return {
        "N": heads, "D": layout.k_dim, "DV": layout.v_dim, "ROPE": layout.rope, "TT": 4 if most <= 4 else PAGE,
        "CODE": ["fp16", "fp8", "fp4"].index(f.code), "E8M0": f.scale == "e8m0", "BLOCK": max(f.block, 0),
        "PAGE_BYTES": layout.page_bytes, "V_AT": at["v_codes"], "KS_AT": at["k_scales"], "VS_AT": at["v_scales"],
        "ROPE_AT": at["k_rope"], "TRAILER_AT": at["trailer"], "FIRST": int(side == 1),
    }


def encode(
    pool_PNb: torch.Tensor, k_TNd: torch.Tensor, v_TNd: torch.Tensor, runs_R4: torch.Tensor, book: tuple[torch.Tensor, ...],
    layout: PageLayout, *, most: int = PAGE, side: int | None = None,
) -> torch.Tensor:
    """As `records.encode_naive`, for layouts that it `serves`; int32 runs. `most`: no run has more tokens. The host reads nothing.
    `side` 0: only K and the count of tokens, 1: only V.

    Returns int64 [2]: elements saturated, NaNs zeroed.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=pool_PNb.device)
    if not len(runs_R4):
        return counts
    N = pool_PNb.shape[1]
    encode_general[(len(runs_R4), N, 2 if layout.v_dim and side is None else 1)](
        pool_PNb, k_TNd.contiguous(), v_TNd.contiguous(), runs_R4, book[1], book[2], book[4], counts, **constants(layout, N, most, side),
        num_warps=1 if most <= 4 else 4, enable_fp_fusion=False)
    return counts
