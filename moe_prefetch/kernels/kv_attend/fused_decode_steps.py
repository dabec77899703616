"""What `fused_decode.attend_decode` does with a page in registers, in Gluon: codes to FP8, scales, terms of p, outliers, columns' order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hi_plane(x):
    y = gl.inline_asm_elementwise("and.b32 $0, $1, 0x8E8E8E8E;", "=r,r", [x], dtype=gl.uint8, is_pure=True, pack=4)
    return y.to(gl.float8e5, bitcast=True)


@gluon.jit
def lo_plane(x):
    y = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; shr.u32 a, $1, 3; shl.b32 b, $1, 7; and.b32 a, a, 0x0E0E0E0E; lop3.b32 $0, b, 0x80808080, a, 0xEA; }",
        "=r,r", [x], dtype=gl.uint8, is_pure=True, pack=4)
    return y.to(gl.float8e5, bitcast=True)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scale(word, i: gl.constexpr):
    return ((word >> (8 * i) & 0x7F) << 20).to(gl.float32, bitcast=True)


@gluon.jit
def terms(p_TR, R: gl.constexpr):
    """p as E4M3 hi, lo: uint8 [2 planes, 64 tokens in the order of tau, R] each."""
    a, b = gl.split(gl.permute(gl.reshape(p_TR, [2, 4, 2, 8, R]), [0, 1, 3, 4, 2]))
    x = gl.join(a, b)
    hi, lo = gl.inline_asm_elementwise(
        """{ .reg .b32 e, g;
        cvt.rn.f16x2.f32 g, $3, $2; add.u32 e, g, 0x00400040; and.b32 e, e, 0xFF80FF80; sub.rn.f16x2 g, g, e;
        cvt.rn.satfinite.e4m3x2.f16x2 $0, e; cvt.rn.satfinite.e4m3x2.f16x2 $1, g; }""",
        "=h,=h,f,f", [x], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=2)
    return gl.reshape(gl.permute(hi, [0, 1, 2, 4, 3]), [2, 64, R]), gl.reshape(gl.permute(lo, [0, 1, 2, 4, 3]), [2, 64, R])


@gluon.jit
def by_row(x, RP: gl.constexpr):
    """[128, 8] with columns as lanes hold them, to [128, RP]: 4 rows have every second column, of 8 rows r has 2 (r % 4) + r // 4."""
    if RP == 4:
        y, _ = gl.split(gl.reshape(x, [128, 4, 2]))
    else:
        y = gl.reshape(gl.permute(gl.reshape(x, [128, 4, 2]), [0, 2, 1]), [128, 8])
    return y


@gluon.jit
def own(o, V_MMA: gl.constexpr, X: gl.constexpr):
    """Of [128 channels, 2 X] what the two halves have in their own columns: [64, X] each."""
    a, b = gl.split(gl.permute(gl.reshape(o, [2, 64, 2, X]), [1, 3, 0, 2]))
    a0, _ = gl.split(a)
    _, b1 = gl.split(b)
    return gl.convert_layout(a0, V_MMA), gl.convert_layout(b1, V_MMA)


@gluon.jit
def outliers(tail_1, D: gl.constexpr, OUT: gl.constexpr, TAIL: gl.constexpr):
    """FP16 [128, 16]: the outlier channels of K, up to 8, twice."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if OUT == 8:
        KO_L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [8, 0], [64, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, 8])
        ko = tail_1._reinterpret(gl.float16, [TAIL, 8, 8], FLAT2).index(D * 6 // 128)._reinterpret(gl.float16, [128, 8], FLAT2).load(KO_L)
    else:
        # as pairs of channels in 32-bit words
        W_L: gl.constexpr = gl.DistributedLinearLayout(
            [[8, 0], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, 4])
        T_L: gl.constexpr = gl.SliceLayout(1, W_L)
        j_J = gl.arange(0, 4, gl.SliceLayout(0, W_L))
        if OUT == 1:
            a_T = tail_1._reinterpret(gl.int16, [TAIL, 64], FLAT).index(D * 6 // 128)._reinterpret(gl.int16, [128], FLAT).load(T_L)
            w_TJ = gl.where((j_J == 0)[None, :], (a_T.to(gl.int32) & 0xFFFF)[:, None], 0)
        else:
            # two rows of 6 bytes are three words: the one that a row begins in, and the next
            PAIRS: gl.constexpr = gl.PaddedSharedLayout([[2, 1]], [[1], [2], [4], [8], [16], [32], [64]], [], [128])
            words = tail_1._reinterpret(gl.int32, [TAIL * 32, 1], FLAT)
            odd_T = gl.arange(0, 128, T_L) % 2 == 1
            a_T = words.index(D * 3 // 2)._reinterpret(gl.int32, [128], PAIRS).load(T_L)
            b_T = words.index(D * 3 // 2 + 1)._reinterpret(gl.int32, [128], PAIRS).load(T_L)
            first_T = gl.where(odd_T, (a_T >> 16 & 0xFFFF) | b_T << 16, a_T)
            third_T = gl.where(odd_T, b_T >> 16, b_T) & 0xFFFF
            w_TJ = gl.where((j_J == 0)[None, :], first_T[:, None], gl.where((j_J == 1)[None, :], third_T[:, None], 0))
        low = w_TJ.to(gl.int16).to(gl.float16, bitcast=True)
        high = (w_TJ >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        ko = gl.reshape(gl.join(low, high), [128, 8])
    return gl.reshape(gl.permute(gl.join(ko, ko), [0, 2, 1]), [128, 16])
