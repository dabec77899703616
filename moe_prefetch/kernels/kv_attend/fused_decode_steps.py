"""What `fused_decode.attend_decode` does with a page, in Gluon: codes to FP8, scales, products, weights as two terms, outliers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


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
def by_row(x, RP: gl.constexpr):
    """[128, 8] with columns as lanes hold them, to [128, RP]: 4 rows have every second column, of 8 rows r has 2 (r % 4) + r // 4."""
    if RP == 4:
        y, _ = gl.split(gl.reshape(x, [128, 4, 2]))
    else:
        y = gl.reshape(gl.permute(gl.reshape(x, [128, 4, 2]), [0, 2, 1]), [128, 8])
    return y


@gluon.jit
def products(k, q0_s, q1_s, part: gl.constexpr, S_MMA: gl.constexpr):
    """Codes [128 tokens, channels] times both terms of q, in flight."""
    s = warpgroup_mma(k, q0_s.index(part).permute([1, 0]), gl.zeros([128, 8], gl.float32, S_MMA), use_acc=False, is_async=True)
    return warpgroup_mma(k, q1_s.index(part).permute([1, 0]), s, is_async=True)


@gluon.jit
def outputs(v, p0_s, p1_s, V_MMA: gl.constexpr, X: gl.constexpr):
    """Codes [64 channels, tokens] times what `put` left for them, in flight."""
    o = warpgroup_mma(lo_plane(v), p0_s.permute([1, 0]), gl.zeros([64, X], gl.float32, V_MMA), use_acc=False, is_async=True)
    return warpgroup_mma(hi_plane(v), p1_s.permute([1, 0]), o, is_async=True)


@gluon.jit
def values(codes_1, half: gl.constexpr, D: gl.constexpr, V_S: gl.constexpr, V_A: gl.constexpr):
    """Codes of V, of 64 channels."""
    return codes_1.slice(D // 2 + 32 * half, 32, dim=0)._reinterpret(gl.uint8, [64, 64], V_S).load(V_A)


@gluon.jit
def weights(s_TR, c_R, L_L: gl.constexpr, RP: gl.constexpr):
    """2^(s + c), and sums of what a lane has."""
    p_TR = exp2(s_TR + c_R[None, :])
    return p_TR, gl.convert_layout(gl.sum(gl.sum(gl.reshape(p_TR, [2, 4, 2, 8, RP]), axis=2), axis=0), L_L)


@gluon.jit
def halves(x_TR, RP: gl.constexpr):
    """Of 16 tokens the first 8 and the others: [2 planes, 4, 8, RP] each."""
    return gl.split(gl.permute(gl.reshape(x_TR, [2, 4, 2, 8, RP]), [0, 1, 3, 4, 2]))


@gluon.jit
def terms(p, scales):
    """Two FP16 weights times two scales of V, times 2^8: E4M3 hi of both, then lo, which is 16 times what hi lacks.

    FP16 of four bits is E4M3 but for its exponent's first bit, subnormals too, so hi needs no conversion.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 e, g, t; .reg .b16 y, z;
        mul.rn.f16x2 g, $1, $2; add.u32 t, g, 0x00400040; and.b32 e, t, 0xFF80FF80; sub.rn.f16x2 g, g, e; mul.rn.f16x2 g, g, $3;
        cvt.rn.satfinite.e4m3x2.f16x2 y, g; shl.b32 t, t, 1; mov.b16 z, 0; mov.b32 e, {y, z}; prmt.b32 $0, t, e, 0x5431; }""",
        "=r,r,r,r", [p, scales, 0x6C006C00], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def among(D, OUT):
    """Whether K scales lie among the codes: `PageLayout.reserved`."""
    return OUT >= D // 16


@gluon.jit
def k_scales(codes_1, tail_1, T_L: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, TAIL: gl.constexpr):
    """A token's scales of K in a word, a byte for 32 places."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WORD: gl.constexpr = gl.int32 if D == 128 else gl.int16
    if among(D, OUT):
        # the last of the first 32 bytes of a row, which the copy has swizzled
        S64: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 4], [4, 8], [9, 0], [16, 0], [32, 0], [64, 0]]
        S32: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 8], [9, 0], [18, 0], [32, 0], [64, 0]]
        W_L: gl.constexpr = gl.DistributedLinearLayout(
            [[8, 0], [64, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, 1])
        rows = codes_1.slice(0, D // 2, dim=0)._reinterpret(WORD, [128, 16], gl.SharedLinearLayout(S64 if D == 128 else S32))
        ks_T = gl.convert_layout(gl.reshape(rows.slice(7 if D == 128 else 15, 1, dim=1).load(W_L), [128]), T_L)
    else:
        ks_T = tail_1._reinterpret(WORD, [TAIL * D // 512, 128], FLAT).index(0).load(T_L)
    return ks_T.to(gl.int32)


@gluon.jit
def v_scales(tail_1, T_L: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr, TAIL: gl.constexpr):
    """A token's scales of V, a byte for 64 channels."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if D == 128:
        vs_T = tail_1._reinterpret(gl.int16, [TAIL // 2, 128], FLAT).index(0 if among(D, OUT) else 2).load(T_L)
    else:
        vs_T = tail_1._reinterpret(gl.uint8, [TAIL, 128], FLAT).index(0 if among(D, OUT) else 2).load(T_L).to(gl.int16)
    return vs_T


@gluon.jit
def put(p_TR, vs_T, p0_s, p1_s, p2_s, p3_s, RP: gl.constexpr, D: gl.constexpr):
    """Weights up to 1 times scales of V, as two terms, to shared memory: [(row, term), tokens] of both planes, for a channel half each."""
    a, b = halves(p_TR, RP)
    p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)
    vs_TR, _ = gl.broadcast(vs_T[:, None], p_TR)
    a, b = halves(vs_TR, RP)
    # scales of two tokens as FP16 times 2^-8
    s0, s1 = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, {$2, $3}; shl.b32 $0, t, 7; shr.u32 $1, t, 1; and.b32 $0, $0, 0x3F803F80; and.b32 $1, $1, 0x3F803F80; }",
        "=&r,=r,h,h", [a, b], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    _columns(terms(p, s0), p0_s, p1_s, 2 * RP)
    if D == 128:
        _columns(terms(p, s1), p2_s, p3_s, 2 * RP)


@gluon.jit
def _columns(words, p0_s, p1_s, X: gl.constexpr):
    # two tokens are 16 bits, terms are neighbours
    P16: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    p = gl.reshape(gl.join(words.to(gl.int16), (words >> 16).to(gl.int16)), [2, 32, X])
    p0, p1 = gl.split(gl.permute(p, [1, 2, 0]))
    p0_s._reinterpret(gl.int16, [X, 32], P16).permute([1, 0]).store(p0)
    p1_s._reinterpret(gl.int16, [X, 32], P16).permute([1, 0]).store(p1)


@gluon.jit
def outliers(tail_1, D: gl.constexpr, OUT: gl.constexpr, TAIL: gl.constexpr):
    """FP16 [128, 16]: the outlier channels of K, up to 8, twice."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    AT: gl.constexpr = D * (2 if among(D, OUT) else 6)  # bytes
    if OUT == 8:
        KO_L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [8, 0], [64, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, 8])
        ko = tail_1._reinterpret(gl.float16, [TAIL, 8, 8], FLAT2).index(AT // 128)._reinterpret(gl.float16, [128, 8], FLAT2).load(KO_L)
    else:
        # as pairs of channels in 32-bit words
        W_L: gl.constexpr = gl.DistributedLinearLayout(
            [[8, 0], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, 4])
        T_L: gl.constexpr = gl.SliceLayout(1, W_L)
        j_J = gl.arange(0, 4, gl.SliceLayout(0, W_L))
        if OUT == 1:
            a_T = tail_1._reinterpret(gl.int16, [TAIL, 64], FLAT).index(AT // 128)._reinterpret(gl.int16, [128], FLAT).load(T_L)
            w_TJ = gl.where((j_J == 0)[None, :], (a_T.to(gl.int32) & 0xFFFF)[:, None], 0)
        elif OUT == 4:
            a_T = tail_1._reinterpret(gl.int64, [TAIL, 16], FLAT).index(AT // 128)._reinterpret(gl.int64, [128], FLAT).load(T_L)
            w_TJ = gl.where((j_J < 2)[None, :], (a_T[:, None] >> (j_J * 32)[None, :] % 64).to(gl.int32), 0)
        else:
            # two rows of 6 bytes are three words: the one that a row begins in, and the next
            PAIRS: gl.constexpr = gl.PaddedSharedLayout([[2, 1]], [[1], [2], [4], [8], [16], [32], [64]], [], [128])
            words = tail_1._reinterpret(gl.int32, [TAIL * 32, 1], FLAT)
            odd_T = gl.arange(0, 128, T_L) % 2 == 1
            a_T = words.index(AT // 4)._reinterpret(gl.int32, [128], PAIRS).load(T_L)
            b_T = words.index(AT // 4 + 1)._reinterpret(gl.int32, [128], PAIRS).load(T_L)
            first_T = gl.where(odd_T, (a_T >> 16 & 0xFFFF) | b_T << 16, a_T)
            third_T = gl.where(odd_T, b_T >> 16, b_T) & 0xFFFF
            w_TJ = gl.where((j_J == 0)[None, :], first_T[:, None], gl.where((j_J == 1)[None, :], third_T[:, None], 0))
        low = w_TJ.to(gl.int16).to(gl.float16, bitcast=True)
        high = (w_TJ >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        ko = gl.reshape(gl.join(low, high), [128, 8])
    return gl.reshape(gl.permute(gl.join(ko, ko), [0, 2, 1]), [128, 16])
