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
# FP16 scales [group, token]: what a lane multiplies by lies together
READY = gl.constexpr(gl.SharedLinearLayout([[0, 1], [0, 8], [0, 16], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]))
# scores of the latent [warp, token, head] and of the rotary part [token, head]: no conflicts for accumulators nor for `SUM`
PARTS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 8, 0], [0, 16, 0], [0, 4, 0], [0, 8, 2], [0, 16, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0]])
)
TURN = gl.constexpr(gl.SharedLinearLayout([[0, 1], [1, 0], [2, 0], [8, 0], [16, 0], [4, 0], [8, 2], [16, 4], [0, 8]]))
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
def _turned(v, A: gl.constexpr):
    """[group, token, word] in pairs of tokens, to pairs of words: the matrices of 8 by 8 in the registers of a warp are transposed."""
    y = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [v], dtype=gl.float16, is_pure=True, pack=2)
    y = gl.permute(gl.reshape(y, [8, 4, 8, 2, 8]), [0, 1, 4, 3, 2])
    return gl.convert_layout(gl.reshape(y, [8, 32, 16]), A, assert_trivial=True)


@gluon.jit
def scale_words(bytes, BYTES: gl.constexpr):
    """Scales of half a page, four in a word: [token, word] of both steps."""
    steps = bytes._reinterpret(gl.int32, [2, 128], FLAT)
    four_a = steps.index(0)._reinterpret(gl.int32, [32, 4], FLAT2).load(BYTES)
    return four_a, steps.index(1)._reinterpret(gl.int32, [32, 4], FLAT2).load(BYTES)


@gluon.jit
def prepare(four, lo_s, hi_s):
    """Scales of 32 tokens, ready to be multiplied by."""
    lo_s.permute([1, 0]).store(gl.reshape(gl.join(_ready(four, 0), _ready(four, 2)), [32, 8]))
    hi_s.permute([1, 0]).store(gl.reshape(gl.join(_ready(four, 1), _ready(four, 3)), [32, 8]))


@gluon.jit
def halves(x, K: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """[8, K, N] as the first and the last four groups: a warp has one of each."""
    a, b = gl.split(gl.permute(gl.reshape(x, [2, 4, K, N]), [1, 2, 3, 0]))
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def scores(codes_1, rope_1, step: gl.constexpr, lo_s, hi_s, qs, qr, k7, k8, part_s, turn_s, A: gl.constexpr, X: gl.constexpr,
            MMA: gl.constexpr, R_A: gl.constexpr, R_MMA: gl.constexpr):
    """Decode 32 tokens, [group, token, word] for each code of a word; their scores, as each warp has them, go to shared memory."""
    words = codes_1._reinterpret(gl.int16, [2, 4096], FLAT).index(step)._reinterpret(gl.int16, [8, 32, 16], WORDS)
    turned = rope_1._reinterpret(gl.float16, [2, 2048], FLAT).index(step)._reinterpret(gl.float16, [32, 64], ROTARY)
    K_L: gl.constexpr = gl.SliceLayout(2, X)
    x0, x1, x2, x3 = _decode(words.load(X), k7, k8)
    lo = gl.expand_dims(lo_s.load(K_L), 2)
    hi = gl.expand_dims(hi_s.load(K_L), 2)
    x0 = x0 * lo
    x1 = x1 * lo
    x2 = x2 * hi
    x3 = x3 * hi
    part = gl.zeros([4, 32, 16], gl.float32, MMA)
    vs = (x0, x1, x2, x3)
    for i in gl.static_range(4):
        y0, y1 = halves(_turned(vs[i], A), 32, 16, A)
        part = mma_v2(y0, qs[2 * i], part)
        part = mma_v2(y1, qs[2 * i + 1], part)
    part_s.store(part)
    turn_s.store(mma_v2(turned.load(R_A), qr, gl.zeros([32, 16], gl.float32, R_MMA)))
    return x0, x1, x2, x3


@gluon.jit
def softmax(t, stored, now, was, back_R, mean_R, m_R, l_TR, part_s, turn_s, p_s, alpha_s, SUM: gl.constexpr):
    """p of tokens from t on, and what earlier sums are multiplied by, go to shared memory."""
    S_L: gl.constexpr = gl.SliceLayout(0, SUM)
    t_T = t + gl.arange(0, 32, gl.SliceLayout(1, S_L))
    s_TR = gl.sum(part_s.load(SUM), axis=0) * (back_R * (now * 128.0))[None, :]
    s_TR = s_TR + turn_s.load(S_L) * back_R[None, :] + mean_R[None, :]
    s_TR = gl.where((t_T < stored)[:, None], s_TR, float("-inf"))
    # the reference moves when it is left behind by 8 only, so that sums are seldom multiplied
    most_R = gl.max(s_TR, axis=0)
    new_R = gl.where(most_R > m_R + 8.0, most_R, m_R)
    # accumulators are in units of the page's factor, a power of two
    alpha_R = _exp2(m_R - new_R)
    alpha_s.store(alpha_R * (was / now))
    p_TR = _exp2(s_TR + (6.0 - new_R)[None, :])
    p_s.permute([1, 0]).store(p_TR.to(gl.float16))
    return new_R, l_TR * alpha_R[None, :] + p_TR


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
