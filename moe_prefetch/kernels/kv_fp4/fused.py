"""What the kernels over FP4 pages share: elements of a page on their way to the tensor cores, exponentials, masks.

A byte of `planes` codes is two E2M1 values whose bits, masked, are E5M2 (docs/kv.md). Inline assembly does not run under Triton's
interpreter; there the same bits are made with uint8 arithmetic, dots run in FP32, and loop bounds are Python numbers (NumPy 2.4 takes no
index from Triton 3.6's tensors).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
NONE = tl.constexpr(-1.0e30)  # a maximum before anything was seen: finite, so that no difference is Inf - Inf


@triton.jit
def hi_plane(x):
    if ASM:
        y = tl.inline_asm_elementwise("and.b32 $0, $1, 0x8E8E8E8E;", "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        y = x & 0x8E
    return y.to(tl.float8e5, bitcast=True)


@triton.jit
def lo_plane(x):
    if ASM:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shr.u32 a, $1, 3; shl.b32 b, $1, 7; and.b32 a, a, 0x0E0E0E0E; lop3.b32 $0, b, 0x80808080, a, 0xEA; }",
            "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        y = ((x >> 3) & 0x0E) | ((x << 7) & 0x80)
    return y.to(tl.float8e5, bitcast=True)


@triton.jit
def dot(a, b, acc):
    if ASM:
        return tl.dot(a, b, acc)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def to_e4m3(x):
    """FP32 to E4M3; in the interpreter, whose own cast is wrong by up to half a value, FP32 rounded to E4M3's values."""
    if ASM:
        y = x.to(tl.float8e4nv)
    else:
        bits = x.to(tl.int32, bitcast=True)
        y = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(x) < 0.015625, ((x * 512.0 + 12582912.0) - 12582912.0) / 512.0, y)
    return y


@triton.jit
def terms(x):
    """x as hi + lo, hi exact in E4M3, in FP32."""
    hi = to_e4m3(x).to(tl.float32)
    return hi, x - hi


@triton.jit
def p8(p_TX, X: tl.constexpr, TERM_LAST: tl.constexpr, PAD: tl.constexpr, ONE: tl.constexpr):
    """FP32 p [128, X] as E4M3 [128, 2 X], columns (term, X) or (X, term), then as many zeros if PAD.

    Rows are the low plane of V (tokens 0..63) and the high one, tokens in the order of `tau`.
    """
    # rows of the MMA that lie 8 apart are neighbours in the order of `tau`: side by side they leave as one 16-bit store
    a, b = tl.split(tl.permute(tl.reshape(p_TX, (2, 4, 2, 8, X)), (0, 1, 3, 4, 2)))
    p_IWGXH = tl.join(a, b)
    if ASM:
        # hi is FP16 rounded to four bits with integers: when it is made by conversion to FP8 and back, ptxas of CUDA 12.8 reads the
        # register of the way back before it is written
        hi, lo = tl.inline_asm_elementwise(
            """{ .reg .b32 e, g;
            cvt.rn.f16x2.f32 g, $3, $2; add.u32 e, g, 0x00400040; and.b32 e, e, 0xFF80FF80; sub.rn.f16x2 g, g, e;
            cvt.rn.satfinite.e4m3x2.f16x2 $0, e; cvt.rn.satfinite.e4m3x2.f16x2 $1, g; }""",
            "=h,=h,f,f", [p_IWGXH], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=2)
        hi = hi.to(tl.float8e4nv, bitcast=True)
        lo = lo.to(tl.float8e4nv, bitcast=True)
    else:
        hi = to_e4m3(p_IWGXH)
        lo = to_e4m3(p_IWGXH - hi)
    both = tl.join(hi, lo)
    if ONE:
        lo = tl.reshape(tl.permute(both, (0, 1, 2, 4, 3, 5) if TERM_LAST else (0, 1, 2, 4, 5, 3)), (128, X * 2))
        if PAD:
            lo = tl.reshape(tl.permute(tl.join(lo, tl.zeros_like(lo)), (0, 2, 1)), (128, X * 4))
        hi = lo
    else:
        lo, hi = tl.split(tl.reshape(tl.permute(both, (1, 2, 4, 3, 5, 0) if TERM_LAST else (1, 2, 4, 5, 3, 0)), (64, X * 2, 2)))
    return lo, hi


@triton.jit
def twice(k_TB, KB: tl.constexpr):
    """Side by side, to meet both terms of q in one MMA."""
    return tl.reshape(tl.permute(tl.join(k_TB, k_TB), (0, 2, 1)), (128, 2 * KB))


@triton.jit
def pv(v_CB, p_lo, p_hi, C: tl.constexpr, X: tl.constexpr, ONE: tl.constexpr):
    """Values of a page times p: [C, X]; both planes of V in one MMA if ONE, else one after the other, which takes fewer registers."""
    if ONE:
        v_CT = tl.reshape(tl.permute(tl.join(lo_plane(v_CB), hi_plane(v_CB)), (0, 2, 1)), (C, 128))
        acc = dot(v_CT, p_lo, tl.zeros((C, X), tl.float32))
    else:
        acc = dot(hi_plane(v_CB), p_hi, dot(lo_plane(v_CB), p_lo, tl.zeros((C, X), tl.float32)))
    return acc


@triton.jit
def exp2(x):
    if ASM:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.constexpr_function
def place_of(o, scales):
    """The place that entry o of a head's outlier channels swaps its own for: `PageLayout.reserved`."""
    return 32 - scales + o if o < scales else 64 - 2 * scales + o


@triton.jit
def swapped(place, n, channels_ptr, OUT: tl.constexpr, SWAPS: tl.constexpr):
    """Channels of head n whose codes lie in some places, or the other way round; the first SWAPS outliers swap places."""
    ch = place
    for o in tl.static_range(SWAPS):
        out = tl.load(channels_ptr + n * OUT + o)
        own = place_of(o, SWAPS // 2)
        ch = tl.where(place == out, own, tl.where(place == own, out, ch))
    return ch


@triton.jit
def coded(place, SWAPS: tl.constexpr):
    """Whether codes lie in these places, not scales."""
    return (place >= 64) | (place % 32 < 32 - SWAPS // 2)


@triton.jit
def scale_of(word, i: tl.constexpr):
    """Byte i of an int32, a positive E4M3, as value * 2^-120 (FP32 denormals included)."""
    return ((word >> (8 * i) & 0x7F) << 20).to(tl.float32, bitcast=True)


@triton.jit
def half_of(word):
    """The low 16 bits, an FP16 number, in FP32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def word_of(at, t_T, WIDTH: tl.constexpr):
    """`WIDTH` <= 4 bytes of each token's row at byte pointer `at`, in the low bits of an int32.

    A copy to shared memory takes 4 bytes at least.
    """
    w_T = tl.load(at.to(tl.pointer_type(tl.int32)) + t_T * WIDTH // 4)
    if WIDTH < 4:
        w_T = w_T >> (t_T * WIDTH % 4 * 8)
    return w_T


@triton.jit
def three_of(at, t_T):
    """Three halves of each token's row of 6 bytes at byte pointer `at`: the first two in a word, the third in the low bits of one."""
    w_T = at.to(tl.pointer_type(tl.int32)) + t_T * 3 // 2
    a_T = tl.load(w_T)
    b_T = tl.load(w_T + 1)
    odd_T = t_T % 2 == 1
    return tl.where(odd_T, (a_T >> 16 & 0xFFFF) | b_T << 16, a_T), tl.where(odd_T, b_T >> 16, b_T)


@triton.jit
def seen(s_TR, kpos_T, there_T, qpos_R, T: tl.constexpr, SLIDING: tl.constexpr):
    """-inf where a key is absent, or not visible to its query."""
    if T == 1 and SLIDING == 0:
        return tl.where(there_T[:, None], s_TR, float("-inf"))
    seen_TR = there_T[:, None] & (kpos_T[:, None] <= qpos_R[None, :])
    if SLIDING > 0:
        seen_TR = seen_TR & (kpos_T[:, None] > qpos_R[None, :] - SLIDING)
    return tl.where(seen_TR, s_TR, float("-inf"))


@triton.jit
def bend(s_TR, SOFTCAP: tl.constexpr):
    """Soft-cap of scores in log2 units: c tanh(s / c)."""
    c: tl.constexpr = SOFTCAP * 1.4426950408889634
    e = exp2(-tl.abs(s_TR) * (2.0 / SOFTCAP))
    y = (1.0 - e) / (1.0 + e) * c
    return tl.where(s_TR < 0, -y, y)


@triton.jit
def fetch(at, BYTES: tl.constexpr):
    """Ask L2 for a record, 128 bytes a thread."""
    if ASM:
        line = tl.arange(0, 128)
        for i in tl.static_range((BYTES + 16383) // 16384):
            off = tl.minimum((line + i * 128) * 128, BYTES - 1)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at + off], dtype=tl.int32, is_pure=False, pack=1)
