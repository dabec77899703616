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
OWN = gl.constexpr(gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Shared memory: rows of 128 bytes, 16 copies of a magnitude's errors under eight scales; those of window w (40 + 8 w magnitudes) from row
# 4 w (w + 9) on; then for each window what a choice makes of a maximum's exponent, 8 bytes each; then what is read next, in four parts;
# codes that wait for others; a page's factor; the head's part of the book.
STAGE = gl.constexpr(210 * 128)
KEPT = gl.constexpr(210 * 128 + 16384)
SCRATCH = gl.constexpr(210 * 128 + 16384 + 2048)
BOOK = gl.constexpr(210 * 128 + 16384 + 2048 + 32)
EIGHT = gl.constexpr((gl.int32,) * 8)
EIGHT_F = gl.constexpr((gl.float32,) * 8)
READ_BF16, READ_FP16 = gl.constexpr(assembly.read("bf16")), gl.constexpr(assembly.read("f16"))
CHOOSE_1, CHOOSE_2 = gl.constexpr(assembly.choose(1)), gl.constexpr(assembly.choose(2))
SPREAD = gl.constexpr(assembly.spread())
ASK = gl.constexpr(assembly.ask())
CODES = gl.constexpr(assembly.codes())
SIXTEEN = gl.constexpr((gl.float32,) * 16)
READ_IN = gl.constexpr(",".join(["=f"] * 32 + ["r"] * 2))
CLEAN_BF16, CLEAN_FP16 = gl.constexpr(assembly.clean("bf16")), gl.constexpr(assembly.clean("f16"))
CLEAN_IN = gl.constexpr(",".join(["=f"] * 32 + ["l"] * 2 + ["r"] * 2 + ["l"] * 2 + ["f"] * 32))
MOST_1, MOST_2 = gl.constexpr(assembly.most(1)), gl.constexpr(assembly.most(2))
MOST_IN = gl.constexpr(",".join(["=f"] * 2 + ["f"] * 32 + ["r"] * 2))
LOUD = gl.constexpr(assembly.loud())
LEAST_64, LEAST_128 = gl.constexpr(assembly.least(64)), gl.constexpr(assembly.least(128))
CHOOSE_IN_1 = gl.constexpr(",".join(["=f"] * 2 + ["=r"] * 2 + ["f"] * 32 + ["r"] * 38 + ["f"] * 2))
CHOOSE_IN_2 = gl.constexpr(",".join(["=f"] * 4 + ["=r"] * 2 + ["f"] * 32 + ["r"] * 38 + ["f"] * 2))
COLUMNS, WEIGHTS = gl.constexpr(assembly.columns()), gl.constexpr(assembly.weights())
WEIGHTS_IN = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 2))
CODES_IN = gl.constexpr(",".join(["=r"] * 4 + ["f"] * 18))


@gluon.jit
def _tau(b):
    """Token of the low plane of byte b of a V channel; the high plane's is 64 more."""
    return b // 16 * 16 + b % 2 * 8 + b % 16 // 2


@gluon.jit
def _shared(table_ptr):
    """Fill this program's table: its address."""
    start = gl.inline_asm_elementwise(
        ".reg .f32 encode_most; { .shared .align 128 .b8 fp4_pages[49008]; mov.u32 $0, fp4_pages; }", "=r,r", [gl.program_id(0)],
        dtype=gl.int32, is_pure=False, pack=1)
    i = gl.arange(0, 256, FLAT)
    i = gl.where(i < 208, i, 0)
    gl.inline_asm_elementwise(SPREAD, "=r,r,l", [start + i * 128, (table_ptr + i * 2).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    i = gl.arange(0, 128, FLAT) % 32
    gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; ld.global.cg.v2.b32 {a, b}, [$2]; st.shared.v2.b32 [$1], {a, b}; mov.u32 $0, 0; }", "=r,r,l",
        [start + 208 * 128 + i * 8, (table_ptr + 416 + i * 2).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    return start


@gluon.jit
def _lane():
    """Where in 128 bytes a lane reads: different in each lane, unknown to Triton."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 l; mov.u32 l, %laneid; and.b32 l, l, 15; shl.b32 $0, l, 3; }", "=r,r", [gl.program_id(0)], dtype=gl.int32,
        is_pure=False, pack=1)


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
def _source(base, row, n, first, upper, N: gl.constexpr, D: gl.constexpr):
    """Where eight channels of a lane's rows lie in global memory, from channel `first` on, and their tokens."""
    t_B = _tau(gl.arange(0, 64, ROW)) + 64 * upper
    at_B = ((row + t_B).to(gl.int64) * N + n) * D + first
    return (base + at_B[:, None] + gl.arange(0, 4, LANE)[None, :] * 8).to(gl.int64), t_B


@gluon.jit
def _ask(base, start, row, slot, count, n, first, upper: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Have half a page's tokens copied to this program's shared memory, 64 channels from `first` on; those that are not there as 0."""
    source, t_B = _source(base, row, n, first, upper, N, D)
    gl.inline_asm_elementwise(
        ASK, "=r,=r,r,r,l,l,r,r,r,r,r,r", [_place(start, 2 * upper), source, N * D * 16, (t_B - slot)[:, None], count],
        dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def _read(start, upper: gl.constexpr, ptr):
    """Half the tokens as sixteen of [64, 4] FP32."""
    if ptr.dtype.element_ty == gl.bfloat16:
        x = gl.inline_asm_elementwise(READ_BF16, READ_IN, [_place(start, upper * 2)], dtype=SIXTEEN, is_pure=False, pack=2)
    else:
        x = gl.inline_asm_elementwise(READ_FP16, READ_IN, [_place(start, upper * 2)], dtype=SIXTEEN, is_pure=False, pack=2)
    return x


@gluon.jit
def _clean(base, row, slot, count, n, first, upper, counts_ptr, gain, N: gl.constexpr, D: gl.constexpr):
    """The same from global memory, NaN as 0 and all within FP16; what was not is counted, outliers apart."""
    source, t_B = _source(base, row, n, first, upper, N, D)
    on_BQ = ((t_B >= slot) & (t_B < slot + count)).to(gl.int32)[:, None]
    args = (source, on_BQ, counts_ptr.to(gl.int64)) + gain
    if base.dtype.element_ty == gl.bfloat16:
        x = gl.inline_asm_elementwise(CLEAN_BF16, CLEAN_IN, args, dtype=SIXTEEN, is_pure=False, pack=2)
    else:
        x = gl.inline_asm_elementwise(CLEAN_FP16, CLEAN_IN, args, dtype=SIXTEEN, is_pure=False, pack=2)
    return x


@gluon.jit
def _most(y, lane, BLOCKS: gl.constexpr):
    """Of 16 channels a lane as BLOCKS blocks a row: the largest magnitude of each, one a lane."""
    if BLOCKS == 1:
        most = gl.inline_asm_elementwise(MOST_1, MOST_IN, y + (lane,), dtype=gl.float32, is_pure=False, pack=2)
    else:
        most = gl.inline_asm_elementwise(MOST_2, MOST_IN, y + (lane,), dtype=gl.float32, is_pure=False, pack=2)
    return most


@gluon.jit
def _quiet(start):
    """Nothing of a page has been seen."""
    gl.inline_asm_elementwise(
        "mov.f32 encode_most, 0f00000000; mov.u32 $0, 0; // $1", "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _loud(start, D: gl.constexpr):
    """Whether a magnitude that a warp has seen of a page is not below what `_limit` found."""
    return gl.inline_asm_elementwise(LOUD, "=r,r", [start + BOOK + (6 * D + 16) * 4], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait(start):
    """For all that has been asked for but the last half."""
    gl.inline_asm_elementwise("cp.async.wait_group 1; mov.u32 $0, 0;", "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_before(start):
    """Until nothing has been counted: for the kernel before this one."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _soon(ptr):
    """Have a line come to L2."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _keep(at, word):
    gl.inline_asm_elementwise("st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [at, word], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _learn(start, gain_I, weight_I, mean_I, out_I, ch_I, keys, D: gl.constexpr):
    """Keep a head's part of the book, without gains for its outliers, in this program's shared memory: four rows of D + 4 weights, where
    row i's lie in byte i, means, gains; and for each channel what no number beyond FP16 comes below, its mean off and its gain on.
    """
    mean_I = gl.where(keys, mean_I, 0.0)
    out_I = out_I & keys
    gain_I = gl.where(out_I, 0.0, gain_I)
    at_I = start + BOOK + ch_I * 4
    for i in gl.static_range(4):
        _keep(at_I + i * (D + 4) * 4, weight_I << 8 * i)
    _keep(at_I + (4 * D + 16) * 4, mean_I.to(gl.int32, bitcast=True))
    _keep(at_I + (5 * D + 16) * 4, gain_I.to(gl.int32, bitcast=True))
    room_I = 65504.0 - gl.abs(mean_I)
    # all that an outlier leaves in a code is its sign
    least_I = gl.where(out_I, 3e38, room_I * gl.abs(gain_I) * 0.99999)
    _keep(at_I + (6 * D + 20) * 4, gl.where((room_I > 0) & (least_I > 0), least_I, 0.0).to(gl.int32, bitcast=True))


@gluon.jit
def _limit(start, D: gl.constexpr):
    """Put the least of what `_learn` found for the channels in front of it, for `_loud`."""
    at = start + BOOK + (6 * D + 16) * 4
    if D == 64:
        gl.inline_asm_elementwise(LEAST_64, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(LEAST_128, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _half(start, at):
    q_Q = gl.arange(0, 4, LANE)[None, :]
    return gl.inline_asm_elementwise(
        COLUMNS, "=f,=f,=f,=f,=f,=f,=f,=f,r", [start + BOOK + at * 4 + q_Q * 32], dtype=EIGHT_F, is_pure=False, pack=1)


@gluon.jit
def _columns(start, at):
    """Of 64 channels, whose FP32 numbers are kept from `at` on, sixteen of [1, 4]."""
    return _half(start, at) + _half(start, at + 32)


@gluon.jit
def _part(start, at, D: gl.constexpr):
    lane_B = gl.arange(0, 64, ROW) // 2 % 4
    at_BQ = start + BOOK + at * 4 + (lane_B * ((D + 4) * 4))[:, None] + gl.arange(0, 4, LANE)[None, :] * 32
    return gl.inline_asm_elementwise(WEIGHTS, WEIGHTS_IN, [at_BQ], dtype=EIGHT, is_pure=False, pack=2)


@gluon.jit
def _weights(start, at, D: gl.constexpr):
    """Weights of 64 channels as the product's second operand holds them: a word each, sixteen of [64, 4]. Rows are kept D + 4 apart."""
    return _part(start, at, D) + _part(start, at + 32, D)


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
def _chosen(y, w, most, lane, start, wide, BLOCKS: gl.constexpr):
    """Of 16 channels a lane as BLOCKS blocks a row: 4 / scale of each [64, 4], then the scales, one a lane [32, 4] (`assembly.choose`)."""
    if BLOCKS == 1:
        inverse, scale = gl.inline_asm_elementwise(
            CHOOSE_1, CHOOSE_IN_1, y + (lane, start, wide) + w + (most,), dtype=(gl.float32, gl.int32), is_pure=False, pack=2)
        out = (inverse, _own(scale))
    else:
        inverse0, inverse1, scale = gl.inline_asm_elementwise(
            CHOOSE_2, CHOOSE_IN_2, y + (lane, start, wide) + w + (most,), dtype=(gl.float32, gl.float32, gl.int32), is_pure=False, pack=2)
        out = (inverse0, inverse1, _own(scale))
    return out


@gluon.jit
def _codes(y, inverse_BQ):
    """Two words of four codes."""
    return gl.inline_asm_elementwise(CODES, CODES_IN, y + (inverse_BQ,), dtype=(gl.int32, gl.int32), is_pure=True, pack=2)
