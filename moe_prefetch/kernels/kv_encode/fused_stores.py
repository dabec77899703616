"""What the encoder of pages writes, in Gluon: bytes of K and V, outliers, scales under a page's factor."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import assembly
from .fused_tiles import FLAT, KEPT, LANE, OWN, ROW, _tau

SCALE_BYTE = gl.constexpr(assembly.scale_byte())
GIVE, TAKE = gl.constexpr(assembly.give()), gl.constexpr(assembly.take())
BYTES, OVER, PAIRS = gl.constexpr(assembly.bytes_of_planes()), gl.constexpr(assembly.over()), gl.constexpr(assembly.in_pairs())
OUTLIER = gl.constexpr(assembly.outlier())


@gluon.jit
def _kept(start):
    b_B = gl.arange(0, 64, ROW)
    return start + KEPT + ((b_B % 2 * 128 + b_B // 2 * 4)[:, None] + gl.arange(0, 4, LANE)[None, :]) * 8


@gluon.jit
def _put(start, low):
    """Keep four words of codes of a lane and row, as two of both planes."""
    gl.inline_asm_elementwise("st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, 0;", "=r,r,r,r",
                              [_kept(start), _bytes(low[1], low[0]), _bytes(low[3], low[2])], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _over_kept(start, high):
    """Both planes of four words of bytes: of what is kept, and of these."""
    a, b = gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [_kept(start)], dtype=(gl.int32, gl.int32), is_pure=False, pack=1)
    return _bytes(a & -0x71717172, high[0]), _over(a, high[1]), _bytes(b & -0x71717172, high[2]), _over(b, high[3])


@gluon.jit
def _bytes(lo, hi):
    """Both planes of four bytes."""
    return gl.inline_asm_elementwise(BYTES, "=r,r,r", [lo, hi], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _over(lo, hi):
    """The same of bytes whose low plane is in its place."""
    return gl.inline_asm_elementwise(OVER, "=r,r,r", [lo, hi], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scale_byte(bits, factor):
    """E4M3 byte of a scale / 2^factor: exact in the normal range, truncated below it, at least 1."""
    return gl.inline_asm_elementwise(SCALE_BYTE, "=r,r,r", [bits, factor], dtype=gl.int32, is_pure=True, pack=1).to(gl.uint8)


@gluon.jit
def _shift_byte(code, by):
    """The same scale under a factor 2^by larger."""
    c = code.to(gl.int32)
    e = c >> 3
    m = c & 7
    normal = (8 + m) >> gl.minimum(gl.maximum(by - e + 1, 0), 31)
    low = gl.maximum(gl.where(e >= 1, normal, m >> gl.minimum(by, 31)), 1)
    return gl.where(e - by >= 1, c - 8 * by, low).to(gl.uint8)


@gluon.jit
def _finish(record, scale_at, factor_at, old, scales, slot, count, start, turn, BLOCKS: gl.constexpr, PER: gl.constexpr):
    """Let a page's factor, `old` so far, admit what was chosen, and write it: by group of channels, then upper tokens, [32, 4] each.

    Lane q of pair p has row 2 p + q // 2, block q % PER of the group's. Scales of tokens before `slot` follow the factor.
    """
    b_PQ = (gl.arange(0, 32, gl.SliceLayout(1, OWN)) * 2)[:, None] + (gl.arange(0, 4, gl.SliceLayout(0, OWN)) // 2)[None, :]
    q_Q = gl.arange(0, 4, gl.SliceLayout(0, OWN))
    lo_PQ = _tau(b_PQ)
    top_PQ = lo_PQ * 0
    for i in gl.static_range(len(scales)):
        t_PQ = lo_PQ + i % 2 * 64
        top_PQ = gl.maximum(top_PQ, gl.where((t_PQ >= slot) & (t_PQ < slot + count), scales[i] >> 23, 0))
    was = (old >> 23 & 0xFF) - 127
    # Between what warps read of a page and what one of them writes there is a barrier.
    gl.inline_asm_elementwise(GIVE, "=r,r,r", [gl.maximum(top_PQ - 134, was), turn], dtype=gl.int32, is_pure=False, pack=1)
    factor = gl.inline_asm_elementwise(TAKE, "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)
    if factor > was:
        if slot > 0:
            i_I = gl.arange(0, 128 * BLOCKS, FLAT)
            there = i_I // BLOCKS < slot
            p = record + scale_at + i_I
            gl.store(p, _shift_byte(gl.load(p, mask=there, other=8, cache_modifier=".cg"), factor - was), mask=there)
        gl.store((record + factor_at).to(gl.pointer_type(gl.int32)), (factor + 127) << 23)
    for i in gl.static_range(len(scales)):
        t_PQ = lo_PQ + i % 2 * 64
        on_PQ = (t_PQ >= slot) & (t_PQ < slot + count) & (q_Q % 2 < PER)[None, :]
        at = record + scale_at + t_PQ * BLOCKS + (q_Q % PER)[None, :] + i // 2 * PER
        gl.store(at, _scale_byte(scales[i], factor), mask=on_PQ)


@gluon.jit
def _store_k(to, w, first, slot, count, D: gl.constexpr):
    """Words [64, 4, 2] of tokens tau(b) + first."""
    P: gl.constexpr = w.type.layout
    t_B = _tau(gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, P)))) + first
    q_Q = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(0, P)))
    i_I = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, P)))
    at = gl.expand_dims((t_B * (D // 8))[:, None], 2) + gl.expand_dims(q_Q[:, None] * 2 + i_I[None, :], 0)
    gl.store(to.to(gl.pointer_type(gl.int32)) + at, w, mask=gl.expand_dims(((t_B >= slot) & (t_B < slot + count))[:, None], 2))


@gluon.jit
def _outlying(n, channels_ptr, k_mean_ptr, D: gl.constexpr, OUT: gl.constexpr, OUTP: gl.constexpr):
    """A head's outlier channels, -1 where it has none, and their means."""
    o_O = gl.arange(0, OUTP, gl.SliceLayout(0, gl.BlockedLayout([1, 1], [32 // OUTP, OUTP], [4, 1], [1, 0])))
    ch_O = gl.load(channels_ptr + n * OUT + o_O, mask=o_O < OUT, other=-1, cache_modifier=".cg")
    return ch_O, gl.load(k_mean_ptr + n * D + ch_O, mask=ch_O >= 0, other=0, cache_modifier=".cg")


@gluon.jit
def _outliers(row, slot, count, n, k_ptr, ch_O, N: gl.constexpr, D: gl.constexpr, OUTP: gl.constexpr):
    """Outliers of tokens from `slot` on, whose rows of k are row + slot and further, as they come: [128, OUTP]."""
    t_T = gl.arange(0, 128, gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32 // OUTP, OUTP], [4, 1], [1, 0])))
    on_T = (t_T >= slot) & (t_T < slot + count)
    at = ((row + t_T).to(gl.int64) * N + n)[:, None] * D + ch_O[None, :]
    return gl.load(k_ptr + at, mask=on_T[:, None] & (ch_O >= 0)[None, :], other=0, cache_modifier=".cg")


@gluon.jit
def _store_outliers(record, x, mean_O, slot, count, counts_ptr, OUT: gl.constexpr, OUTP: gl.constexpr, KO_AT: gl.constexpr):
    O_L: gl.constexpr = gl.BlockedLayout([1, 1], [32 // OUTP, OUTP], [4, 1], [1, 0])
    o_O = gl.arange(0, OUTP, gl.SliceLayout(0, O_L))
    t_T = gl.arange(0, 128, gl.SliceLayout(1, O_L))
    on_T = (t_T >= slot) & (t_T < slot + count)
    x = gl.inline_asm_elementwise(
        OUTLIER, "=r,f,f,l", [x.to(gl.float32), mean_O[None, :], counts_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    to = (record + KO_AT).to(gl.pointer_type(gl.int16)) + t_T[:, None] * OUT + o_O[None, :]
    gl.store(to, x.to(gl.int16), mask=on_T[:, None] & (o_O < OUT)[None, :])


@gluon.jit
def _pairs(w):
    """Words of four channels [64, 4] as four [32, 4] of two rows each, in 16 bits."""
    a, b = gl.split(gl.permute(gl.reshape(w, [32, 2, 4]), [0, 2, 1]))
    lo, hi = gl.inline_asm_elementwise(
        PAIRS, "=r,=r,r,r", [a, b], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return lo.to(gl.int16), (lo >> 16).to(gl.int16), hi.to(gl.int16), (hi >> 16).to(gl.int16)


@gluon.jit
def _store_v(to, words, first, slot, count, none):
    """Bytes of 64 channels from `first` on: [64, 4] words of channels 8 q + 0 to 3, 4 to 7, 32 to 35, 36 to 39.

    What belongs to other tokens stays. `none` is 0, unknown to the compiler: else it makes the masks of every page ahead of the branch.
    """
    four = _pairs(words[0]) + _pairs(words[1]) + _pairs(words[2]) + _pairs(words[3])
    P: gl.constexpr = four[0].type.layout
    p_B = gl.arange(0, 32, gl.SliceLayout(1, P))
    ch_Q = gl.arange(0, 4, gl.SliceLayout(0, P)) * 8 + first
    at = to.to(gl.pointer_type(gl.int16)) + p_B[:, None] + (ch_Q * 32)[None, :]
    if count == 128:
        for j in gl.static_range(16):
            gl.store(at + (j // 8 * 32 + j % 8) * 32, four[j])
    else:
        # bits of two rows' tokens, of the low plane and of the high one
        keep_B = p_B * 0
        for j in gl.static_range(4):
            t_B = _tau(p_B * 2 + j % 2) + j // 2 * 64
            keep_B = keep_B | gl.where((t_B >= slot + none) & (t_B < slot + count + none), 0, (0x71 if j < 2 else 0x8E) << (j % 2 * 8))
        for j in gl.static_range(16):
            to_j = at + (j // 8 * 32 + j % 8) * 32
            old = gl.load(to_j, cache_modifier=".cg").to(gl.int32)
            gl.store(to_j, ((old & keep_B[:, None]) | (four[j].to(gl.int32) & (keep_B ^ 0xFFFF)[:, None])).to(gl.int16))
