"""What `fused_latent.attend_latent` does with 32 tokens, in Gluon: decoding, scores, softmax, output.

Shared layouts are lists of bases: what element lies where each bit of an offset is set.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

# 16-bit words of codes [group of 64 channels, token, word], as a swizzled copy leaves them
WORDS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [0, 1, 8], [1, 2, 0], [2, 4, 0], [0, 8, 0], [0, 16, 0],
         [4, 0, 0]])
)
# rotary part [token, channel], likewise
ROTARY = gl.constexpr(
    gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32], [8, 0], [16, 0]])
)
# queries [head, channel], and of one code of a word [group, word, head]
QUERIES = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 64], [0, 128], [0, 256], [1, 16], [2, 64], [4, 128], [8, 0], [0, 1], [0, 32]])
)
QUERY_X = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 8, 1], [1, 0, 2], [2, 0, 4], [0, 0, 8]])
)
# of the rotary part [head, channel], and turned
QUERY_R = gl.constexpr(
    gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32], [8, 0]])
)
QUERY_RX = gl.constexpr(
    gl.SharedLinearLayout([[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [8, 1], [16, 2], [32, 4], [0, 8]])
)
# FP16 scales [group, token], of 32 tokens and of both 32: what a lane multiplies by lies together
READY = gl.constexpr(gl.SharedLinearLayout([[0, 1], [0, 8], [0, 16], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]))
READY_64 = gl.constexpr(gl.SharedLinearLayout([[0, 1], [0, 8], [0, 16], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [0, 32]]))
# scores of the latent [warp, token, head] and of the rotary part [token, head]: no conflicts for accumulators nor for `SUM`
PARTS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0], [0, 0, 1], [0, 8, 2], [0, 16, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0]])
)
TURN = gl.constexpr(gl.SharedLinearLayout([[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [0, 1], [8, 2], [16, 4], [0, 8]]))
P_S = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _decode(x, k7, k8):
    """Words of codes, int16, to FP16 times 2^-14: low nibble of byte 0, of byte 1, high nibble of byte 0, of byte 1.

    Shifts to the left are products with 2^7 and 2^8, which the compiler must not know: other units have those, and logic is scarce.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a, b; and.b32 $3, $4, 0x8E008E00; mul.lo.u32 b, $4, $7; and.b32 $2, b, 0x8E008E00;
        shr.u32 a, $4, 3; mul.lo.u32 b, $4, $5; and.b32 a, a, 0x0E0E0E0E; lop3.b32 a, b, 0x80808080, a, 0xEA;
        and.b32 $1, a, 0xFF00FF00; prmt.b32 $0, a, 0, 0x2404; }""",
        "=r,=r,=r,=r,r,r,r,r,r", [x, k7, k8], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _ready(word, i: gl.constexpr):
    """A positive E4M3 as FP16, times 2^7; any byte gives a finite number."""
    return ((word >> (8 * i) & 0x7F) << 7).to(gl.int16).to(gl.float16, bitcast=True) * 32768.0


@gluon.jit
def unit_matrix(k):
    """Of a unit matrix of 8 by 8 in FP16 what a lane has of it, and zero; made of a number that the compiler must not know."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 l, m, r; .reg .pred p; mov.u32 l, %laneid; add.u32 $1, l, $2; shr.u32 $1, $1, 20; and.b32 r, l, 3; shr.u32 m, l, 3;
        setp.eq.u32 p, m, r; and.b32 m, l, 4; shl.b32 m, m, 2; shl.b32 m, 0x3C00, m; selp.b32 m, m, 0, p; or.b32 $0, m, $1; }""",
        "=r,=r,r", [k], dtype=(gl.int32, gl.int32), is_pure=False, pack=1)


@gluon.jit
def _turned(v, one, A: gl.constexpr):
    """[group, token, word] in pairs of tokens, to pairs of words: a unit matrix times 16 tokens of 8 words. A product's result has rows in
    lanes and columns in registers, where its operand has it the other way round."""
    y = gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {$0, $1}, {$4, $8, $12, $16}, {$2, $3}, {z, z}; }",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [v, one[0], one[1], one[2], one[3]], dtype=gl.float16, is_pure=True, pack=4)
    y = gl.permute(gl.reshape(y, [8, 4, 8, 2, 8]), [0, 1, 4, 3, 2])
    return gl.convert_layout(gl.reshape(y, [8, 32, 16]), A, assert_trivial=True)


@gluon.jit
def prepare(four, lo_s, hi_s):
    """Scales of 64 tokens, four in a word, ready to be multiplied by."""
    lo_s._reinterpret(gl.float16, [8, 64], READY_64).permute([1, 0]).store(gl.reshape(gl.join(_ready(four, 0), _ready(four, 2)), [64, 8]))
    hi_s._reinterpret(gl.float16, [8, 64], READY_64).permute([1, 0]).store(gl.reshape(gl.join(_ready(four, 1), _ready(four, 3)), [64, 8]))


@gluon.jit
def halves(x, K: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """[8, K, N] as the first and the last four groups: a warp has one of each."""
    a, b = gl.split(gl.permute(gl.reshape(x, [2, 4, K, N]), [1, 2, 3, 0]))
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def scores(codes_1, rope_1, step: gl.constexpr, lo_s, hi_s, q_s, qr, k7, k8, part_s, turn_s, A: gl.constexpr, X: gl.constexpr,
            one, MMA: gl.constexpr, R_A: gl.constexpr, R_MMA: gl.constexpr):
    """Decode 32 tokens, [group, token, word] for each code of a word; their scores, as each warp has them, go to shared memory."""
    words = codes_1._reinterpret(gl.int16, [2, 4096], FLAT).index(step)._reinterpret(gl.int16, [8, 32, 16], WORDS)
    turned = rope_1._reinterpret(gl.float16, [2, 2048], FLAT).index(step)._reinterpret(gl.float16, [32, 64], ROTARY)
    K_L: gl.constexpr = gl.SliceLayout(2, X)
    x0, x1, x2, x3 = _decode(words.load(X), k7, k8)
    lo = gl.expand_dims(lo_s.index(step)._reinterpret(gl.float16, [8, 32], READY).load(K_L), 2)
    hi = gl.expand_dims(hi_s.index(step)._reinterpret(gl.float16, [8, 32], READY).load(K_L), 2)
    x0 = x0 * lo
    x1 = x1 * lo
    x2 = x2 * hi
    x3 = x3 * hi
    part = gl.zeros([4, 32, 16], gl.float32, MMA)
    xs = (x0, x1, x2, x3)
    for j in gl.static_range(4):
        y0, y1 = halves(_turned(xs[j], one, A), 32, 16, A)
        q0, q1 = halves(q_s.index(j)._reinterpret(gl.float16, [8, 16, 16], QUERY_X).load(X), 16, 16, X)
        part = mma_v2(y0, q0, part)
        part = mma_v2(y1, q1, part)
    part_s.store(part)
    turn_s.store(mma_v2(turned.load(R_A), qr, gl.zeros([32, 16], gl.float32, R_MMA)))
    return x0, x1, x2, x3


@gluon.jit
def softmax(t, stored, now, was, back_R, mean_R, m_R, l_R, part_s, turn_s, p_s, alpha_s, SUM: gl.constexpr):
    """p of tokens from t on, and what earlier sums are multiplied by, go to shared memory."""
    S_L: gl.constexpr = gl.SliceLayout(0, SUM)
    t_T = t + gl.arange(0, 32, gl.SliceLayout(1, S_L))
    s_TR = gl.sum(part_s.load(SUM), axis=0) * (back_R * (now * 128.0))[None, :]
    s_TR = s_TR + (turn_s.load(S_L) * back_R[None, :] + mean_R[None, :])
    s_TR = gl.where((t_T < stored)[:, None], s_TR, float("-inf"))
    # the reference moves when it is left behind by 8 only, so that sums are seldom multiplied
    most_R = gl.max(s_TR, axis=0)
    new_R = gl.where(most_R > m_R + 8.0, most_R, m_R)
    # accumulators are in units of the page's factor, a power of two
    alpha_R = _exp2(m_R - new_R)
    alpha_s.store(alpha_R * (was / now))
    p_TR = _exp2(s_TR + (6.0 - new_R)[None, :])
    p_s.permute([1, 0]).store(p_TR.to(gl.float16))
    lane: gl.constexpr = l_R.type.layout
    some = gl.convert_layout(gl.sum(gl.reshape(p_TR, [8, 4, 16]), axis=1), lane, assert_trivial=True)
    alpha_L = gl.convert_layout(alpha_R, gl.SliceLayout(0, lane), assert_trivial=True)
    return new_R, l_R * alpha_L[None, :] + some


def _rescale_text() -> str:
    """64 sums of a lane, of rows g and g + 8 in pairs, times $128 and $130 unless these are 1 in all lanes."""
    head = "{ .reg .pred p, q; setp.ne.f32 p, $128, 0f3F800000; setp.ne.or.f32 p, $130, 0f3F800000, p; vote.sync.any.pred q, p, 0xFFFFFFFF;"
    moves = " ".join(f"mov.f32 ${i}, ${64 + i};" for i in range(64))
    return f"{head} {moves} @!q bra done; " + " ".join(f"mul.f32 ${i}, ${i}, ${128 + i % 4 // 2 * 2};" for i in range(64)) + " done: }"


RESCALE = gl.constexpr(_rescale_text())
RESCALE_AT = gl.constexpr(",".join(["=f"] * 64 + ["f"] * 80))


@gluon.jit
def add_values(p_s, alpha_s, v0, v1, v2, v3, acc0, acc1, acc2, acc3, A: gl.constexpr, MMA: gl.constexpr):
    p = gl.expand_dims(p_s.load(gl.SliceLayout(0, A)), 0)
    p, _ = gl.broadcast(p, gl.zeros([8, 16, 32], gl.float16, A))
    alpha = gl.expand_dims(gl.expand_dims(alpha_s.load(gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0), 2)
    acc0, acc1, acc2, acc3 = gl.inline_asm_elementwise(
        RESCALE, RESCALE_AT, [acc0, acc1, acc2, acc3, alpha], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=16)
    acc0 = mma_v2(p, v0, acc0)
    acc1 = mma_v2(p, v1, acc1)
    acc2 = mma_v2(p, v2, acc2)
    acc3 = mma_v2(p, v3, acc3)
    return acc0, acc1, acc2, acc3


@gluon.jit
def write(out, mean_ptr, gain_ptr, acc, sums, unit_1):
    """Sums of one plane, [group, head, word, byte], with gains and means."""
    L: gl.constexpr = acc.type.layout
    G_L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    W_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    B_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    H_L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    ch = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 8, G_L) * 64, 1), 2), 3)
    ch = ch + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 16, W_L) * 2, 0), 1), 3)
    ch = ch + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, B_L), 0), 1), 2)
    row = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 16, H_L) * 512, 0), 2), 3)
    sums = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.convert_layout(sums, H_L), 0), 2), 3)
    gl.store(out + (ch + row), acc * (unit_1 / gl.load(gain_ptr + ch)) + sums * gl.load(mean_ptr + ch))
