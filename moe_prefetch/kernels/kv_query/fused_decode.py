"""Queries on their way to the tensor cores, for the Gluon kernel: as `fused.prepare`, by every program for its items."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEEP = gl.constexpr("evict_last")  # of what every call reads again, while pages pass through L2
QO_L = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _channel_at(place_K, channels_ptr, M: gl.constexpr):
    """Whose codes lie in some places of a row: M channels have them where an outlier's would be, as scales lie in their own."""
    ch_K = place_K
    for o in gl.static_range(M):
        out = gl.load(channels_ptr + o, eviction_policy=KEEP)
        ch_K = gl.where(place_K == out, 32 - M // 2 + o // (M // 2) * 32 + o % (M // 2), ch_K)
    return ch_K


@gluon.jit
def read(q_ptr, gain_ptr, channels_ptr, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr, M: gl.constexpr):
    """Rows of q [R, D] by the places of codes in the low and in the high plane [RP, D / 2], and the K gain there.

    Of 8 rows they lie as `by_row` wants them.
    """
    KB: gl.constexpr = D // 2
    # a lane has one place of each plane, and half of the rows, or a quarter
    X_L: gl.constexpr = gl.DistributedLinearLayout(
        ([[1, 0]] if RP * D >= 512 else []) + ([[2, 0]] if RP * D == 1024 else []), [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[0, 32] if D == 128 else [RP // 4, 0], [RP // 2, 0]], [], [RP, KB])
    n_Q = gl.arange(0, RP, gl.SliceLayout(1, X_L))
    j_K = gl.arange(0, KB, gl.SliceLayout(0, X_L))
    row_Q = n_Q // 2 + n_Q % 2 * 4 if RP == 8 else n_Q
    place_K = j_K // 32 * 64 + j_K % 32
    lo_K = _channel_at(place_K, channels_ptr, M)
    hi_K = _channel_at(place_K + 32, channels_ptr, M)
    on_Q1 = (row_Q < R)[:, None]
    lo_QK = gl.load(q_ptr + row_Q[:, None] * D + lo_K[None, :], mask=on_Q1, other=0, eviction_policy=KEEP)
    hi_QK = gl.load(q_ptr + row_Q[:, None] * D + hi_K[None, :], mask=on_Q1, other=0, eviction_policy=KEEP)
    return lo_QK, hi_QK, gl.load(gain_ptr + lo_K, eviction_policy=KEEP), gl.load(gain_ptr + hi_K, eviction_policy=KEEP)


@gluon.jit
def _operand(x_QK, q_s, PARTS: gl.constexpr):
    """FP8 rows to columns of an MMA: those of 4 rows are (row, scale block), with zeros for places of the other block."""
    RP: gl.constexpr = x_QK.shape[0]
    KB: gl.constexpr = x_QK.shape[1]
    if RP == 4:
        b_QK = x_QK.to(gl.uint8, bitcast=True)
        first_1K = (gl.arange(0, KB, gl.SliceLayout(0, x_QK.type.layout)) < 32)[None, :]
        both_QKB = gl.join(gl.where(first_1K, b_QK, 0), gl.where(first_1K, 0, b_QK))
        x_QK = gl.reshape(gl.permute(both_QKB, [0, 2, 1]), [8, KB]).to(gl.float8e4nv, bitcast=True)
    # parts one behind the other
    x_QK = gl.reshape(gl.permute(gl.reshape(x_QK, [8, PARTS, KB // PARTS]), [1, 0, 2]), [8 * PARTS, KB // PARTS])
    q_s._reinterpret(gl.float8e4nv, [8 * PARTS, KB // PARTS], gl.NVMMASharedLayout(KB // PARTS, 8, 2)).store(x_QK)


@gluon.jit
def queries(lo_QK, hi_QK, lo_gain_K, hi_gain_K, scale_log2, q0_s, q1_s, q2_s, q3_s, PARTS: gl.constexpr, M: gl.constexpr):
    """What `read` gave, divided by the gain, to operands [PARTS, 8, places]: of the low plane hi and lo term, then of the high one.

    Returns what a score of codes is to be multiplied with.
    """
    lo_QK = lo_QK.to(gl.float32) * (1.0 / lo_gain_K)[None, :]
    hi_QK = hi_QK.to(gl.float32) * (1.0 / hi_gain_K)[None, :]
    if M > 0:
        # what scales mean as codes
        j_K = gl.arange(0, lo_QK.shape[1], gl.SliceLayout(0, lo_QK.type.layout))
        codes_1K = ((j_K < 32 - M // 2) | (j_K >= 32))[None, :]
        lo_QK = gl.where(codes_1K, lo_QK, 0.0)
        hi_QK = gl.where(codes_1K, hi_QK, 0.0)
    # one norm for all rows: what counts in a score is its absolute error
    amax = gl.maximum(gl.max(gl.max(gl.maximum(gl.abs(lo_QK), gl.abs(hi_QK)), axis=1), axis=0), 1.0e-30)
    lo_QK = lo_QK * (256.0 / amax)
    hi_QK = hi_QK * (256.0 / amax)
    lo_8 = lo_QK.to(gl.float8e4nv)
    hi_8 = hi_QK.to(gl.float8e4nv)
    _operand(lo_8, q0_s, PARTS)
    _operand((lo_QK - lo_8.to(gl.float32)).to(gl.float8e4nv), q1_s, PARTS)
    _operand(hi_8, q2_s, PARTS)
    _operand((hi_QK - hi_8.to(gl.float32)).to(gl.float8e4nv), q3_s, PARTS)
    # a score is code 2^-14 * scale 2^-120 * factor * q * norm; the 2^120 enters after the factor
    return amax * (scale_log2 / 256.0 * 16384.0)


@gluon.jit
def read_channels(channels_ptr, OUT: gl.constexpr):
    """Outlier channels of a head, up to 8, twice; -1 where there is none."""
    k_O = gl.arange(0, 16, gl.SliceLayout(0, QO_L))
    return gl.load(channels_ptr + k_O % 8, mask=k_O % 8 < OUT, other=-1, eviction_policy=KEEP)


@gluon.jit
def outlier_queries(q_ptr, ch_O, scale_log2, qo_s, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr):
    """Outlier channels of q to the operand [8, 16]: FP16 hi of up to 8, then lo; columns as in `by_row`."""
    x_X = gl.arange(0, 8, gl.SliceLayout(1, QO_L))
    k_O = gl.arange(0, 16, gl.SliceLayout(0, QO_L))
    row_X = x_X // 2 if RP == 4 else x_X // 2 + x_X % 2 * 4
    on_X = (row_X < R) & (x_X % 2 == 0) if RP == 4 else row_X < R
    on_XO = on_X[:, None] & (ch_O >= 0)[None, :]
    q_XO = gl.load(q_ptr + row_X[:, None] * D + ch_O[None, :], mask=on_XO, other=0, eviction_policy=KEEP).to(gl.float32) * scale_log2
    hi_XO = q_XO.to(gl.float16)
    qo_s.store(gl.where((k_O < 8)[None, :], hi_XO, (q_XO - hi_XO.to(gl.float32)).to(gl.float16)))
