"""What `fused_latent.attend_latent` does with 64 tokens, in Gluon: decoding, scores, softmax, output.

Shared layouts are lists of bases: what element lies where each bit of an offset is set. A 16-bit word of codes has four: the low nibbles of
its bytes, then the high ones. A group is 64 channels, 16 words; a quarter of the channels is two groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# words of codes as a swizzled copy leaves them, [token, group, word] and [group, word, token]
WORDS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [1, 0, 8], [2, 1, 0], [4, 2, 0], [8, 0, 0], [16, 0, 0],
         [0, 4, 0], [32, 0, 0]])
)
TURNED = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [0, 8, 1], [1, 0, 2], [2, 0, 4], [0, 0, 8], [0, 0, 16],
         [4, 0, 0], [0, 0, 32]])
)
# lines of 128 bytes, swizzled: queries [head, code of a word x group x word] of a quarter, and [head, channel] of all four
LINES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
QUERIES = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 64], [0, 1], [1, 16], [2, 64], [4, 1], [8, 0], [0, 32], [0, 128], [0, 256]])
)
# low nibbles of a quarter [token, half a group, byte of a word, word of 8]
TILE = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [2, 1, 0, 0], [4, 2, 0, 0],
         [8, 0, 0, 0], [16, 0, 0, 0], [32, 0, 0, 0]])
)
# scales: words of a group's two in FP16 [token, group], and FP16 of high nibbles [group, token]; no conflicts
PAIRS = gl.constexpr(gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 4], [8, 0], [16, 0], [32, 0]]))
HIGHS = gl.constexpr(gl.SharedLinearLayout([[0, 1], [0, 8], [0, 16], [0, 32], [0, 2], [0, 4], [1, 0], [2, 0], [4, 32]]))

# accumulators [token or channel, head], and an operand in registers
_MMA = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
MMA = gl.constexpr(_MMA)
A = gl.constexpr(gl.DotOperandLayout(0, _MMA, 2))
HEAD = gl.constexpr(gl.SliceLayout(0, _MMA))
# words as such an operand has them: of all channels and of a quarter [token, group, word], and turned [group, word, token]
_T = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
_W = [[16, 0, 0], [32, 0, 0]]
X8 = gl.constexpr(
    gl.DistributedLinearLayout([[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]], _T, _W, [], [64, 8, 16])
)
_X2 = gl.DistributedLinearLayout([[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0]], _T, _W, [], [64, 2, 16])
X2 = gl.constexpr(_X2)
XT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32], [4, 0, 0]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [8, 16, 64])
)
# a quarter's low nibbles in registers that matrices can be stored from
LOW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]], [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, 4, 2, 8])
)
# scales of a lane's two tokens [token, group], of a quarter
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8])
)
SCALES_2 = gl.constexpr(gl.SliceLayout(2, _X2))
# sums of p: [warp, lane's token, head]
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 8]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 16])
)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _decode(x, lo, hi, k7, k8):
    """Words of codes and their scales to FP16 times 2^-14: low nibble of byte 0, of byte 1, high nibble of byte 0, of byte 1.

    Shifts to the left are products with 2^7 and 2^8, which the compiler must not know: other units have those, and logic is scarce.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d, e; and.b32 c, $4, 0x8E008E00; mul.lo.u32 b, $4, $9; and.b32 d, b, 0x8E008E00;
        shr.u32 a, $4, 3; mul.lo.u32 b, $4, $7; and.b32 a, a, 0x0E0E0E0E; lop3.b32 a, b, 0x80808080, a, 0xEA;
        and.b32 b, a, 0xFF00FF00; prmt.b32 e, a, 0, 0x2404;
        mul.rn.f16x2 $0, e, $5; mul.rn.f16x2 $1, b, $5; mul.rn.f16x2 $2, d, $6; mul.rn.f16x2 $3, c, $6; }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r", [x, lo, hi, k7, k8], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _decode_high(x, hi, k8):
    """The high nibbles alone."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 b, c, d; and.b32 c, $2, 0x8E008E00; mul.lo.u32 b, $2, $4; and.b32 d, b, 0x8E008E00;
        mul.rn.f16x2 $0, d, $3; mul.rn.f16x2 $1, c, $3; }""",
        "=r,=r,r,r,r,r", [x, hi, k8], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _ready(four):
    """Four E4M3 in a word as two words of FP16; exact, and so are products with codes times 2^-14."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [four], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _zero():
    """Zero anew at each step: of addresses that it is added to nothing is kept in registers."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 y; mov.u32 y, %nctaid.y; sub.u32 $0, y, 1; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def declare():
    """A register of the whole kernel, by which `_vote` makes a scalar of what a barrier says."""
    gl.inline_asm_elementwise(".reg .b32 voted; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _vote(p):
    """A barrier that says whether any of p, 8 a thread, is above 2^14."""
    gl.inline_asm_elementwise(
        """{ .reg .f32 a, b, c, d; .reg .pred q; max.f32 a, $8, $9; max.f32 b, $10, $11; max.f32 c, $12, $13; max.f32 d, $14, $15;
        max.f32 a, a, b; max.f32 c, c, d; max.f32 a, a, c; setp.gt.f32 q, a, 0f46800000; bar.red.or.pred q, 1, 128, q;
        selp.b32 voted, 1, 0, q; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0;
        mov.b32 $7, 0; }""",
        "=r,=r,=r,=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f", [p], dtype=gl.int32, is_pure=False, pack=8)
    return gl.inline_asm_elementwise("mov.b32 $0, voted;", "=r", [], dtype=gl.int32, is_pure=False, pack=1) != 0


@gluon.jit
def prepare(four, t, stored, pairs_s, high_s):
    """Scales of the 64 tokens from t on to shared memory; those of no token are zero."""
    t_T = t + gl.arange(0, 64, gl.SliceLayout(1, four.type.layout))
    a, b = _ready(gl.where((t_T < stored)[:, None], four, 0))
    both = gl.reshape(gl.join(a, b), [64, 8])
    pairs_s.store(both)
    high_s.permute([1, 0]).store((both >> 16).to(gl.int16).to(gl.float16, bitcast=True))


@gluon.jit
def _halves(x, N: gl.constexpr):
    """Words [64, 2 N, 16] as the first and the last N groups."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, N, 16]), [0, 2, 3, 1]))


@gluon.jit
def _quarters(x):
    """Scales [64, 8] of all groups as four quarters'."""
    a, b = gl.split(gl.permute(gl.reshape(x, [64, 2, 4]), [0, 2, 1]))
    a0, a1 = gl.split(gl.permute(gl.reshape(a, [64, 2, 2]), [0, 2, 1]))
    b0, b1 = gl.split(gl.permute(gl.reshape(b, [64, 2, 2]), [0, 2, 1]))
    return (gl.convert_layout(a0, SCALES_2, assert_trivial=True), gl.convert_layout(a1, SCALES_2, assert_trivial=True),
            gl.convert_layout(b0, SCALES_2, assert_trivial=True), gl.convert_layout(b1, SCALES_2, assert_trivial=True))


@gluon.jit
def _over(x):
    """A quarter's scales over the words of a group."""
    y, _ = gl.broadcast(gl.expand_dims(x, 2), gl.zeros([64, 2, 16], gl.float16, X2))
    return y


@gluon.jit
def _times_sums(l_TR, alpha_R):
    """Sums of p times what each head has."""
    alpha_R = gl.convert_layout(alpha_R, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)), assert_trivial=True)
    return l_TR * gl.expand_dims(gl.expand_dims(alpha_R, 0), 0)


@gluon.jit
def step(
    codes_1, rope_1, codes_bar, rope_bar, phase, pairs_1, high_1, pairs_2, high_2, q_s, qr_s, p_s, tiles, four, t, stored, now, factor,
    back_R, m_R, l_TR, acc0, acc1, acc2, acc3, acc4, acc5, k7, k8, more,
):
    """64 tokens from t 64 on: a place of codes and rotary parts, its barriers, scales of these and (to be written) of the next tokens.

    m_R is the reference of the softmax, `factor` (its bits) what sums are in units of. Returns with products of the output on their way.
    """
    z = _zero()
    pairs = pairs_1.load(SCALES)
    lo = _quarters((pairs & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True))
    hi = _quarters((pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True))
    mbarrier.wait(codes_bar, phase)
    mbarrier.wait(rope_bar, phase)
    xa, xb = _halves(codes_1._reinterpret(gl.int16, [64, 8, 16], WORDS).load(X8), 4)
    x0, x1 = _halves(xa, 2)
    x2, x3 = _halves(xb, 2)
    xs = (x0, x1, x2, x3)
    s_TR = gl.zeros([64, 16], gl.float32, MMA)
    for i in gl.static_range(4):
        y0, y1, y2, y3 = _decode(gl.convert_layout(xs[i], X2, assert_trivial=True), _over(lo[i]), _over(hi[i]), k7, k8)
        if i == 0:
            acc0, acc1, acc2, acc3, acc4, acc5 = warpgroup_mma_wait(0, [acc0, acc1, acc2, acc3, acc4, acc5])
            # all warps have left tiles and p
            gl.thread_barrier()
        low = gl.permute(gl.reshape(gl.join(y0, y1), [64, 4, 8, 2]), [0, 1, 3, 2])
        tiles[i].index(0)._reinterpret(gl.float16, [64, 4, 2, 8], TILE).store(gl.convert_layout(low, LOW))
        y = gl.reshape(gl.permute(gl.join(gl.join(y0, y2), gl.join(y1, y3)), [0, 3, 4, 1, 2]), [64, 128])
        s_TR = warpgroup_mma(gl.convert_layout(y, A), q_s.index(i + z).permute([1, 0]), s_TR, use_acc=i > 0, is_async=True)
        if i > 0:
            # registers of the quarter before are wanted
            s_TR = warpgroup_mma_wait(1, [s_TR])
    prepare(four, t * 64 + 64, stored, pairs_2, high_2)
    r_TR = warpgroup_mma(rope_1._reinterpret(gl.float16, [64, 64], LINES), qr_s.index(z).permute([1, 0]),
                         gl.zeros([64, 16], gl.float32, MMA), use_acc=False, is_async=True)
    xt = codes_1._reinterpret(gl.int16, [8, 16, 64], TURNED).load(XT)
    ht, _ = gl.broadcast(gl.expand_dims(high_1.load(gl.SliceLayout(1, XT)), 1), gl.zeros([8, 16, 64], gl.float16, XT))
    v2, v3 = _decode_high(xt, ht, k8)
    s_TR, r_TR = warpgroup_mma_wait(0, [s_TR, r_TR])
    t_T = t * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    s_TR = s_TR * (back_R * (now * 16384.0))[None, :] + r_TR * back_R[None, :]
    s_TR = gl.where((t_T < stored)[:, None], s_TR, float("-inf"))
    # factors are powers of two: a page's goes into the exponent of its p
    bits = now.to(gl.int32, bitcast=True)
    by = ((bits - factor) >> 23).to(gl.float32)
    p_TR = _exp2(s_TR + (6.0 + by - m_R)[None, :])
    p_s.index(0).permute([1, 0]).store(p_TR.to(gl.float16))
    fence_async_shared()
    # the reference moves when it is left behind by 8 or so, units when they are far from the factor
    if _vote(p_TR) | (by > 3.0) | (by < -3.0):
        most_R = gl.max(s_TR, axis=0)
        new_R = gl.where(most_R > m_R + 8.0, most_R, m_R)
        alpha_R = _exp2(m_R - new_R)
        m_R = new_R
        l_TR = _times_sums(l_TR, alpha_R)
        alpha_R = alpha_R * _exp2(-by)
        acc0 = acc0 * alpha_R[None, :]
        acc1 = acc1 * alpha_R[None, :]
        acc2 = acc2 * alpha_R[None, :]
        acc3 = acc3 * alpha_R[None, :]
        acc4 = acc4 * alpha_R[None, :]
        acc5 = acc5 * alpha_R[None, :]
        factor = bits
        by = by * 0.0
        p_TR = _exp2(s_TR + (6.0 - m_R)[None, :])
        p_s.index(0).permute([1, 0]).store(p_TR.to(gl.float16))
        fence_async_shared()
    mbarrier.expect(codes_bar, 16384, pred=more)
    mbarrier.expect(rope_bar, 8192, pred=more)
    gl.thread_barrier()
    p = p_s.index(z).permute([1, 0])
    acc4 = warpgroup_mma(gl.convert_layout(gl.reshape(v2, [128, 64]), A, assert_trivial=True), p, acc4, is_async=True)
    acc5 = warpgroup_mma(gl.convert_layout(gl.reshape(v3, [128, 64]), A, assert_trivial=True), p, acc5, is_async=True)
    acc0 = warpgroup_mma(tiles[0].index(z).permute([1, 0]), p, acc0, is_async=True)
    acc1 = warpgroup_mma(tiles[1].index(z).permute([1, 0]), p, acc1, is_async=True)
    acc2 = warpgroup_mma(tiles[2].index(z).permute([1, 0]), p, acc2, is_async=True)
    acc3 = warpgroup_mma(tiles[3].index(z).permute([1, 0]), p, acc3, is_async=True)
    some = gl.convert_layout(gl.sum(gl.reshape(p_TR, [4, 2, 8, 16]), axis=1), SUMS, assert_trivial=True)
    return m_R, l_TR + some * _exp2(-by), factor, acc0, acc1, acc2, acc3, acc4, acc5


@gluon.jit
def write(out, acc, unit_1, N: gl.constexpr, L: gl.constexpr):
    """Sums of two codes of N words, [word, head, byte]."""
    W_L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    H_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    B_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
    w = gl.arange(0, N, W_L)
    ch = gl.expand_dims(gl.expand_dims(w // 16 * 64 + w % 16 * 2, 1), 2)
    ch = ch + gl.expand_dims(gl.expand_dims(gl.arange(0, 2, B_L), 0), 1)
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, H_L) * 512, 0), 2)
    gl.store(out + (ch + row), gl.convert_layout(acc, L, assert_trivial=True) * unit_1)
