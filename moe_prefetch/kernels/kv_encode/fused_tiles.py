"""Tiles of the encoder of pages, in Gluon: how lanes share tokens and channels, how numbers come, what becomes of them.

A warp takes 16 rows of tokens at a time: four lanes share two rows, eight channels each of 32, as `mma.m16n8k32` wants them. Row b of a
page's half is token tau(b), so that the two rows of a lane are neighbours in a byte row of V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import assembly

TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0]], [[0, 1, 0], [0, 2, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]], [[16, 0, 0], [32, 0, 0]], [],
        [64, 4, 8])
)
PART = gl.constexpr(gl.SliceLayout(2, TILE))
ROW = gl.constexpr(gl.SliceLayout(1, PART))
LANE = gl.constexpr(gl.SliceLayout(0, PART))
CHANNEL = gl.constexpr(gl.SliceLayout(0, TILE))
OWN = gl.constexpr(gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Shared memory: rows of 128 bytes, 16 copies of a magnitude's errors under eight scales; those of window w (40 + 8 w magnitudes) from row
# 4 w (w + 9) on; then for each window what a choice makes of a maximum's exponent, 8 bytes each; then what is read next.
STAGE = gl.constexpr(210 * 128)
SCRATCH = gl.constexpr(210 * 128 + 16384)
READ_BF16, READ_FP16 = gl.constexpr(assembly.read("bf16")), gl.constexpr(assembly.read("f16"))
CHOOSE_1, CHOOSE_2 = gl.constexpr(assembly.choose(1)), gl.constexpr(assembly.choose(2))
SCALE_BYTE = gl.constexpr(assembly.scale_byte())
SPREAD = gl.constexpr(assembly.spread())
ASK = gl.constexpr(assembly.ask())
GIVE, TAKE = gl.constexpr(assembly.give()), gl.constexpr(assembly.take())
CODES = gl.constexpr(assembly.codes())
BYTES, PAIRS = gl.constexpr(assembly.bytes_of_planes()), gl.constexpr(assembly.in_pairs())
SIXTEEN = gl.constexpr((gl.float32,) * 16)
READ_IN = gl.constexpr(",".join(["=f"] * 32 + ["r"] * 2 + ["l"] * 2))
CHOOSE_IN_1 = gl.constexpr(",".join(["=f"] * 2 + ["=r"] * 2 + ["f"] * 32 + ["r"] * 36))
CHOOSE_IN_2 = gl.constexpr(",".join(["=f"] * 4 + ["=r"] * 2 + ["f"] * 32 + ["r"] * 36))
CODES_IN = gl.constexpr(",".join(["=r"] * 4 + ["f"] * 18))


@gluon.jit
def _tau(b):
    """Token of the low plane of byte b of a V channel; the high plane's is 64 more."""
    return b // 16 * 16 + b % 2 * 8 + b % 16 // 2


@gluon.jit
def _eight(x, ROWS: gl.constexpr):
    """[ROWS, 4, 8] as eight of [ROWS, 4]."""
    a, b = gl.split(gl.reshape(x, [ROWS, 4, 4, 2]))
    a0, a1 = gl.split(gl.reshape(a, [ROWS, 4, 2, 2]))
    b0, b1 = gl.split(gl.reshape(b, [ROWS, 4, 2, 2]))
    x0, x4 = gl.split(a0)
    x2, x6 = gl.split(a1)
    x1, x5 = gl.split(b0)
    x3, x7 = gl.split(b1)
    return (gl.convert_layout(x0, PART), gl.convert_layout(x1, PART), gl.convert_layout(x2, PART), gl.convert_layout(x3, PART),
            gl.convert_layout(x4, PART), gl.convert_layout(x5, PART), gl.convert_layout(x6, PART), gl.convert_layout(x7, PART))


@gluon.jit
def _shared(table_ptr):
    """Fill this program's table: its address, and where in 128 bytes a lane reads. The latter differs in each lane, unknown to Triton."""
    start = gl.inline_asm_elementwise(
        "{ .shared .align 128 .b8 fp4_pages[43296]; mov.u32 $0, fp4_pages; }", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False,
        pack=1)
    i = gl.arange(0, 256, FLAT)
    i = gl.where(i < 208, i, 0)
    gl.inline_asm_elementwise(SPREAD, "=r,r,l", [start + i * 128, (table_ptr + i * 2).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    i = gl.arange(0, 128, FLAT) % 32
    gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; ld.global.nc.v2.b32 {a, b}, [$2]; st.shared.v2.b32 [$1], {a, b}; mov.u32 $0, 0; }", "=r,r,l",
        [start + 208 * 128 + i * 8, (table_ptr + 416 + i * 2).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    lane = gl.inline_asm_elementwise(
        "{ .reg .b32 l; mov.u32 l, %laneid; and.b32 l, l, 15; shl.b32 $0, l, 3; }", "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)
    return start, lane


@gluon.jit
def _place(start, part: gl.constexpr):
    """Where a lane finds eight channels of each of its rows: part of four, tokens tau or tau + 64, channels 0 to 31 or 32 to 63."""
    b_B = gl.arange(0, 64, ROW)
    q_Q = gl.arange(0, 4, LANE)
    return start + STAGE + part * 4096 + ((b_B % 2 * 128 + b_B // 2 * 4)[:, None] + q_Q[None, :]) * 16


@gluon.jit
def _later(a, b, c):
    """The same, but nothing is made of them before this point."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $3; mov.b32 $1, $4; mov.b32 $2, $5;", "=r,=r,=r,r,r,r", [a, b, c], dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1)


@gluon.jit
def _ask(base, start, row, slot, count, n, first, N: gl.constexpr, D: gl.constexpr):
    """Have a page's tokens copied to this program's shared memory, 64 channels from `first` on; those that are not there as 0."""
    t_B = _tau(gl.arange(0, 64, ROW))
    at_B = ((row + t_B).to(gl.int64) * N + n) * D + first
    source = (base + at_B[:, None] + gl.arange(0, 4, LANE)[None, :] * 8).to(gl.int64)
    gl.inline_asm_elementwise(
        ASK, "=r,=r,r,r,l,l,r,r,r,r,r,r", [_place(start, 0), source, N * D * 16, (t_B - slot)[:, None], count],
        dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def _read(start, upper: gl.constexpr, ptr, counts_ptr):
    """Half the tokens as sixteen of [64, 4] FP32, NaN as 0 and all within FP16; what was not is counted."""
    if ptr.dtype.element_ty == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            READ_BF16, READ_IN, [_place(start, upper * 2), counts_ptr.to(gl.int64)], dtype=SIXTEEN, is_pure=False, pack=2)
    else:
        x = gl.inline_asm_elementwise(
            READ_FP16, READ_IN, [_place(start, upper * 2), counts_ptr.to(gl.int64)], dtype=SIXTEEN, is_pure=False, pack=2)
    return x


@gluon.jit
def _wait(start):
    gl.inline_asm_elementwise("cp.async.wait_all; mov.u32 $0, 0;", "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _columns(ptr):
    """Of 32 channels, eight of [1, 4]."""
    ch_QC = gl.arange(0, 4, gl.SliceLayout(1, CHANNEL))[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, CHANNEL))[None, :]
    return _eight(gl.expand_dims(gl.load(ptr + ch_QC), 0), 1)


@gluon.jit
def _weights(ptr, D: gl.constexpr):
    """Weights of 32 channels as the product's second operand holds them: a word each, eight of [64, 4]."""
    ch_QC = gl.arange(0, 4, gl.SliceLayout(1, CHANNEL))[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, CHANNEL))[None, :]
    lane_B = gl.arange(0, 64, ROW) // 2 % 4
    at = ptr + gl.expand_dims(lane_B[:, None], 2) * D + gl.expand_dims(ch_QC, 0)
    return _eight(gl.load(at), 64)


@gluon.jit
def _gained(x, gain):
    y = ()
    for j in gl.static_range(16):
        y = y + (x[j] * gain[j],)
    return y


@gluon.jit
def _centred(x, mean):
    y = ()
    for j in gl.static_range(16):
        y = y + (x[j] - mean[j],)
    return y


@gluon.jit
def _own(scale_BQ):
    """Of what both rows of a lane have, [64, 4], the first: [32, 4], row pairs."""
    scale_PQ, _ = gl.split(gl.permute(gl.reshape(scale_BQ, [32, 2, 4]), [0, 2, 1]))
    return gl.convert_layout(scale_PQ, OWN)



@gluon.jit
def _chosen(y, w, lane, start, wide, BLOCKS: gl.constexpr):
    """Of 16 channels a lane as BLOCKS blocks a row: 4 / scale of each [64, 4], then the scales, one a lane [32, 4] (`assembly.choose`)."""
    if BLOCKS == 1:
        inverse, scale = gl.inline_asm_elementwise(
            CHOOSE_1, CHOOSE_IN_1, y + (lane + start, wide) + w, dtype=(gl.float32, gl.int32), is_pure=False, pack=2)
        out = (inverse, _own(scale))
    else:
        inverse0, inverse1, scale = gl.inline_asm_elementwise(
            CHOOSE_2, CHOOSE_IN_2, y + (lane + start, wide) + w, dtype=(gl.float32, gl.float32, gl.int32), is_pure=False, pack=2)
        out = (inverse0, inverse1, _own(scale))
    return out


@gluon.jit
def _codes(y, inverse_BQ):
    """Two words of four codes."""
    return gl.inline_asm_elementwise(CODES, CODES_IN, y + (inverse_BQ,), dtype=(gl.int32, gl.int32), is_pure=True, pack=2)


@gluon.jit
def _put(start, a, b, c, d):
    """Four words a lane and row where it has read its first numbers."""
    gl.inline_asm_elementwise("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,r,r,r,r,r", [_place(start, 0), a, b, c, d],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _got(start):
    return gl.inline_asm_elementwise("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [_place(start, 0)],
                                     dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1)


@gluon.jit
def _bytes(lo, hi):
    """Both planes of four bytes."""
    return gl.inline_asm_elementwise(BYTES, "=r,r,r", [lo, hi], dtype=gl.int32, is_pure=True, pack=1)


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
            gl.store(p, _shift_byte(gl.load(p, mask=there, other=8), factor - was), mask=there)
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
    ch_O = gl.load(channels_ptr + n * OUT + o_O, mask=o_O < OUT, other=-1)
    return ch_O, gl.load(k_mean_ptr + n * D + ch_O, mask=ch_O >= 0, other=0)


@gluon.jit
def _outliers(row, slot, count, n, k_ptr, ch_O, N: gl.constexpr, D: gl.constexpr, OUTP: gl.constexpr):
    """Outliers of tokens from `slot` on, whose rows of k are row + slot and further, as they come: [128, OUTP]."""
    t_T = gl.arange(0, 128, gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32 // OUTP, OUTP], [4, 1], [1, 0])))
    on_T = (t_T >= slot) & (t_T < slot + count)
    at = ((row + t_T).to(gl.int64) * N + n)[:, None] * D + ch_O[None, :]
    return gl.load(k_ptr + at, mask=on_T[:, None] & (ch_O >= 0)[None, :], other=0)


@gluon.jit
def _store_outliers(record, x, mean_O, slot, count, OUT: gl.constexpr, OUTP: gl.constexpr, KO_AT: gl.constexpr):
    O_L: gl.constexpr = gl.BlockedLayout([1, 1], [32 // OUTP, OUTP], [4, 1], [1, 0])
    o_O = gl.arange(0, OUTP, gl.SliceLayout(0, O_L))
    t_T = gl.arange(0, 128, gl.SliceLayout(1, O_L))
    on_T = (t_T >= slot) & (t_T < slot + count)
    x = x.to(gl.float32)
    x = gl.minimum(gl.maximum(gl.where(x != x, 0.0, x), -65504.0), 65504.0) - mean_O[None, :]
    x = gl.minimum(gl.maximum(x, -65504.0), 65504.0).to(gl.float16)
    to = (record + KO_AT).to(gl.pointer_type(gl.float16)) + t_T[:, None] * OUT + o_O[None, :]
    gl.store(to, x, mask=on_T[:, None] & (o_O < OUT)[None, :])


@gluon.jit
def _pairs(w):
    """Words of four channels [64, 4] as four [32, 4] of two rows each, in 16 bits."""
    a, b = gl.split(gl.permute(gl.reshape(w, [32, 2, 4]), [0, 2, 1]))
    lo, hi = gl.inline_asm_elementwise(
        PAIRS, "=r,=r,r,r", [a, b], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return lo.to(gl.int16), (lo >> 16).to(gl.int16), hi.to(gl.int16), (hi >> 16).to(gl.int16)


@gluon.jit
def _store_v(to, w, first, slot, count, none):
    """Words [64, 4] of channels 8 q + first to first + 3; what belongs to other tokens stays.

    `none` is 0, unknown to the compiler: else it makes the masks of every page ahead of the branch.
    """
    four = _pairs(w)
    P: gl.constexpr = four[0].type.layout
    p_B = gl.arange(0, 32, gl.SliceLayout(1, P))
    ch_Q = gl.arange(0, 4, gl.SliceLayout(0, P)) * 8 + first
    at = to.to(gl.pointer_type(gl.int16)) + p_B[:, None] + (ch_Q * 32)[None, :]
    if count == 128:
        for j in gl.static_range(4):
            gl.store(at + j * 32, four[j])
    else:
        # bits of two rows' tokens, of the low plane and of the high one
        keep_B = p_B * 0
        for j in gl.static_range(4):
            t_B = _tau(p_B * 2 + j % 2) + j // 2 * 64
            keep_B = keep_B | gl.where((t_B >= slot + none) & (t_B < slot + count + none), 0, (0x71 if j < 2 else 0x8E) << (j % 2 * 8))
        for j in gl.static_range(4):
            old = gl.load(at + j * 32).to(gl.int32)
            gl.store(at + j * 32, ((old & keep_B[:, None]) | (four[j].to(gl.int32) & (keep_B ^ 0xFFFF)[:, None])).to(gl.int16))
