"""What encoders of FP4 pages share: the law's elements in Triton, and how pages are found.

Scales are chosen with the law's table of integers. A program that encodes whole pages keeps it in shared memory, eight times, so that no
two lanes of a quarter warp meet in a bank; lookups are 16 bytes: the errors of one magnitude under eight scales.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl

from . import naive as law

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
ROWS = tl.constexpr(law.WINDOWS * law.BINS)


# elements --------------------------------------------------------------------------------------------------------------
@triton.jit
def _exponent(x):
    return (x.to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127


@triton.jit
def _pow2(e):
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _louder(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clean(x):
    """FP32 without NaN and within FP16, and how many were beyond it, and NaN."""
    nan = x != x
    big = tl.abs(x) > 65504.0
    x = tl.minimum(tl.maximum(tl.where(nan, 0.0, x), -65504.0), 65504.0)
    return x, tl.sum(big.to(tl.int32)), tl.sum(nan.to(tl.int32))


@triton.jit
def _shared_table(table_ptr):
    """Fill this program's table; the address of this lane's copy. It differs from thread to thread, unknown to Triton."""
    if not ASM:
        return 0
    start = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 fp4_errors[32768]; mov.u32 $0, fp4_errors; }", "=r,r", [tl.program_id(0)],
        dtype=tl.int32, is_pure=False, pack=1)
    i = tl.arange(0, ROWS * 8)
    tl.inline_asm_elementwise(
        "cp.async.ca.shared.global [$1], [$2], 16; mov.u32 $0, 0;", "=r,r,l", [start + i * 16, table_ptr + i // 8 * 4],
        dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise("cp.async.wait_all; mov.u32 $0, 0;", "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return tl.inline_asm_elementwise(
        "{ .reg .b32 l; mov.u32 l, %laneid; and.b32 l, l, 7; shl.b32 l, l, 4; add.u32 $0, l, $1; }", "=r,r", [start],
        dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _errors(x, e, window, table_ptr, lane_table, SHARED: tl.constexpr):
    """Four words per element of x: the errors of |x| under eight scales, in pairs. `e` and `window` of its block, broadcastable to x."""
    if SHARED and ASM:
        # |x| + 2^(e + 11), cut off, has the bin in bits 7 to 12
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a; .reg .b32 t; abs.f32 a, $4; add.rz.f32 a, a, $5; mov.b32 t, a; and.b32 t, t, 0x1F80; add.u32 t, t, $6;"
            " ld.shared.v4.b32 {$0, $1, $2, $3}, [t]; }",
            "=r,=r,=r,=r,f,f,r", [x, _pow2(e + 11), lane_table + window * 8192],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
    row = table_ptr + (window * 64 + ((tl.abs(x) * _pow2(5 - e)).to(tl.int32) & 63)) * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _lesser(best, word, PAIR: tl.constexpr):
    low = (word & 0xFFFF) * 8 + 2 * PAIR
    high = (word >> 16 & 0xFFFF) * 8 + 2 * PAIR + 1
    return tl.minimum(best, tl.minimum(low, high))


@triton.jit
def _scales(xs, ws, table_ptr, lane_table, SHARED: tl.constexpr):
    """FP32 parts xs of blocks, each [X, n], and their weights int32, broadcastable: scales FP32 [X], and 4 / scale (zero blocks: 0)."""
    amax = tl.max(tl.abs(xs[0]), axis=1)
    for i in tl.static_range(1, len(xs)):
        amax = tl.maximum(amax, tl.max(tl.abs(xs[i]), axis=1))
    bits = tl.maximum(amax, 7.888609052210118e-31).to(tl.int32, bitcast=True)
    e = (bits >> 23) - 127
    window = bits >> 21 & 3
    a, b, c, d = _errors(xs[0], e[:, None], window[:, None], table_ptr, lane_table, SHARED)
    w = ws[0]
    a, b, c, d = a * w, b * w, c * w, d * w
    for i in tl.static_range(1, len(xs)):
        p, q, r, s = _errors(xs[i], e[:, None], window[:, None], table_ptr, lane_table, SHARED)
        w = ws[i]
        a, b, c, d = a + p * w, b + q * w, c + r * w, d + s * w
    best = _lesser(0x7FFFFFFF, tl.sum(a, axis=1), 0)
    best = _lesser(best, tl.sum(b, axis=1), 1)
    best = _lesser(best, tl.sum(c, axis=1), 2)
    best = _lesser(best, tl.sum(d, axis=1), 3)
    step = (best & 7) + 2 * window + 2
    scale = ((e + 124) << 23) + (step << 20)
    inverse = tl.load(table_ptr + ROWS * 4 + (step & 7)) - ((scale >> 23) - 129 << 23)
    zero = amax < 7.888609052210118e-31
    return (tl.where(zero, 3.0814879110195774e-33, scale.to(tl.float32, bitcast=True)),
            tl.where(zero, 0.0, inverse.to(tl.float32, bitcast=True)))


@triton.jit
def _codes(x, inverse):
    """E2M1 codes of x [X, n] as they lie in a byte's high plane: sign in bit 7, magnitude in bits 1 to 3."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 a<4>; .reg .b32 v<2>, m<2>, z<2>, two, half, most;
            mov.b32 two, 0x40004000; mov.b32 half, 0x38003800; mov.b32 most, 0x4E004E00;
            mul.f32 a0, $1, $5; mul.f32 a1, $2, $6; mul.f32 a2, $3, $7; mul.f32 a3, $4, $8;
            cvt.rn.f16x2.f32 v0, a1, a0; cvt.rn.f16x2.f32 v1, a3, a2;
            and.b32 m0, v0, 0x7FFF7FFF; and.b32 m1, v1, 0x7FFF7FFF;
            fma.rn.f16x2 z0, m0, half, two; fma.rn.f16x2 z1, m1, half, two;
            max.f16x2 z0, z0, m0; max.f16x2 z1, z1, m1; min.f16x2 z0, z0, most; min.f16x2 z1, z1, most;
            add.u32 z0, z0, 0x01000100; add.u32 z1, z1, 0x01000100;
            lop3.b32 z0, v0, z0, 0x80008000, 0xE4; lop3.b32 z1, v1, z1, 0x80008000, 0xE4;
            prmt.b32 z0, z0, z1, 0x7531; and.b32 $0, z0, 0x8E8E8E8E; }""",
            "=r,f,f,f,f,f,f,f,f", [x, tl.broadcast_to(inverse[:, None], x.shape)], dtype=tl.uint8, is_pure=True, pack=4)
    v = (x * inverse[:, None]).to(tl.float16)
    mag = tl.abs(v)
    z = tl.minimum(tl.maximum((mag * 0.5 + 2.0).to(tl.float16), mag), 24.0).to(tl.float16)
    bits = (z.to(tl.int16, bitcast=True).to(tl.int32) + 0x100) & 0x0E00
    return ((bits | (v.to(tl.int16, bitcast=True).to(tl.int32) & 0x8000)) >> 8).to(tl.uint8)


@triton.jit
def _byte(lo, hi):
    """Both planes of a byte from codes as `_codes` returns them."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; shl.b32 a, $1, 3; lop3.b32 a, a, 0x70707070, $2, 0xEA;
            shr.b32 b, $1, 7; lop3.b32 $0, b, 0x01010101, a, 0xEA; }""",
            "=r,r,r", [lo, hi], dtype=tl.uint8, is_pure=True, pack=4)
    low = lo.to(tl.int32)
    return (hi.to(tl.int32) | (low << 3 & 0x70) | low >> 7).to(tl.uint8)


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
def _tally(counts_ptr, big, nan):
    if big > 0:
        tl.atomic_add(counts_ptr, big.to(tl.int64))
    if nan > 0:
        tl.atomic_add(counts_ptr + 1, nan.to(tl.int64))


@triton.jit
def _book_k(ch, n, channels_ptr, k_gain_ptr, k_weight_ptr, D: tl.constexpr, OUT: tl.constexpr):
    """Gain (0 for a head's outliers) and weight of some channels."""
    out = ch < 0
    for o in tl.static_range(OUT):
        out = out | (ch == tl.load(channels_ptr + n * OUT + o))
    return tl.where(out, 0.0, tl.load(k_gain_ptr + n * D + ch)), tl.load(k_weight_ptr + n * D + ch).to(tl.int32)


@triton.jit
def _outliers(
    record, row, n, t_T, on_T, k_ptr, channels_ptr, k_mean_ptr,
    N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, KO_AT: tl.constexpr,
):
    """FP16 outliers of tokens t_T, whose rows of k are row + t_T."""
    o = tl.arange(0, OUTP)
    ch = tl.load(channels_ptr + n * OUT + o, mask=o < OUT, other=-1)
    mask = on_T[:, None] & (ch >= 0)[None, :]
    x, _, _ = _clean(tl.load(k_ptr + ((row + t_T).to(tl.int64) * N + n)[:, None] * D + ch[None, :], mask=mask, other=0).to(tl.float32))
    x = x - tl.load(k_mean_ptr + n * D + ch, mask=ch >= 0, other=0)[None, :]
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    at = (record + KO_AT).to(tl.pointer_type(tl.float16)) + t_T[:, None] * OUT + o[None, :]
    tl.store(at, x, mask=on_T[:, None] & (o < OUT)[None, :])


@triton.jit
def _settle(record, scale_at, factor_at, top, slot, SCALES: tl.constexpr, ROW: tl.constexpr):
    """Let a page's factor admit exponent `top`: the new factor's exponent; scales of tokens before `slot`, ROW bytes apart, follow it."""
    at = (record + factor_at).to(tl.pointer_type(tl.int32))
    old = (tl.load(at) >> 23 & 0xFF) - 127
    new = tl.maximum(old, top - 7)
    # every warp must have read the old factor before one writes the new
    tl.debug_barrier()
    if new > old:
        if slot > 0:
            i = tl.arange(0, 128 * SCALES)
            there = i // SCALES < slot
            p = record + scale_at + (i if ROW == SCALES else i // SCALES * ROW + i % SCALES)
            tl.store(p, _shift_byte(tl.load(p, mask=there, other=8), new - old), mask=there)
        tl.store(at, (new + 127) << 23)
    return new


@triton.jit(do_not_specialize=["rows"])
def place_keys(
    k_ptr, channels_ptr, out_ptr, rows, N: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, SWAPS: tl.constexpr, TT: tl.constexpr,
):
    """TT rows of k [T, N, D], by place: whole pages are read in tiles of neighbours."""
    row_T = tl.program_id(0) * TT + tl.arange(0, TT)
    n = tl.program_id(1)
    at_T = (row_T.to(tl.int64) * N + n)[:, None] * D
    on_T = (row_T < rows)[:, None]
    at_TD = at_T + tl.arange(0, D)[None, :]
    tl.store(out_ptr + at_TD, tl.load(k_ptr + at_TD, mask=on_T), mask=on_T)
    o_O = tl.arange(0, SWAPS)
    out_TO = at_T + tl.load(channels_ptr + n * OUT + o_O)[None, :]
    own_TO = at_T + (o_O + tl.where(o_O < SWAPS // 2, 32 - SWAPS // 2, 64 - SWAPS))[None, :]
    # over what has been stored
    tl.debug_barrier()
    tl.store(out_ptr + out_TO, tl.load(k_ptr + own_TO, mask=on_T), mask=on_T)
    tl.store(out_ptr + own_TO, tl.load(k_ptr + out_TO, mask=on_T), mask=on_T)


@cache
def table_on(device: torch.device) -> torch.Tensor:
    """The law's table with its pairs in words, int32 [ROWS, 4], then FP32 8 / m for m = 8 to 15."""
    table = law.error_table().flatten(0, 1)
    inverse = (8.0 / torch.arange(8, 16, dtype=torch.float32)).view(torch.int32)
    return torch.cat([(table[:, 0::2] | table[:, 1::2] << 16).flatten(), inverse]).to(device)
