"""Queries on their way to the tensor cores, for the Gluon kernel: as `fused.prepare`, by every program for its items."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEEP = gl.constexpr("evict_last")  # of what every call reads again, while pages pass through L2
QO_L = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def read(q_ptr, gain_ptr, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr):
    """Rows of q [R, D] as columns of the low and of the high plane [8, D / 2], and their channels' K gain.

    Of 4 rows columns are (row, scale block), of 8 rows they lie as `by_row` wants them and have both blocks.
    """
    KB: gl.constexpr = D // 2
    # a lane has the same channels of both blocks
    Q_L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 32]] if D == 128 else [[0, 1]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[2, 0], [4, 0]], [], [8, KB])
    n_Q = gl.arange(0, 8, gl.SliceLayout(1, Q_L))
    j_K = gl.arange(0, KB, gl.SliceLayout(0, Q_L))
    ch_K = j_K // 32 * 64 + j_K % 32
    row_Q = n_Q // 2 + n_Q % 2 * 4 if RP == 8 else n_Q // 2
    on_QK = (row_Q < R)[:, None] & ((ch_K >= 0)[None, :] if RP == 8 else (j_K // 32)[None, :] == (n_Q % 2)[:, None])
    q_at = q_ptr + row_Q[:, None] * D + ch_K[None, :]
    lo_QK = gl.load(q_at, mask=on_QK, other=0, eviction_policy=KEEP)
    hi_QK = gl.load(q_at + 32, mask=on_QK, other=0, eviction_policy=KEEP)
    lo_gain_K = gl.load(gain_ptr + ch_K, eviction_policy=KEEP)
    hi_gain_K = gl.load(gain_ptr + 32 + ch_K, eviction_policy=KEEP)
    return lo_QK, hi_QK, lo_gain_K, hi_gain_K


@gluon.jit
def read_swaps(q_ptr, gain_ptr, channels_ptr, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr):
    """Of channels whose codes lie at an outlier's place, scales being at their own: q [8, M], K gain, and that place."""
    M: gl.constexpr = D // 16
    M_L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] if D == 128 else [[0, 1], [0, 2]], [[0, 0], [0, 0], [0, 0], [0, 0], [1, 0]], [[2, 0], [4, 0]], [], [8, M])
    n_Q = gl.arange(0, 8, gl.SliceLayout(1, M_L))
    row_Q = n_Q // 2 + n_Q % 2 * 4 if RP == 8 else n_Q // 2
    o_M = gl.arange(0, M, gl.SliceLayout(0, M_L))
    ch_M = 32 - M // 2 + o_M // (M // 2) * 32 + o_M % (M // 2)
    q_QM = gl.load(q_ptr + row_Q[:, None] * D + ch_M[None, :], mask=(row_Q < R)[:, None], other=0, eviction_policy=KEEP)
    return q_QM, gl.load(gain_ptr + ch_M, eviction_policy=KEEP), gl.load(channels_ptr + o_M, eviction_policy=KEEP)


@gluon.jit
def coded(lo_QK, hi_QK, lo_gain_K, hi_gain_K):
    """What `read` gave, divided by the gain."""
    return lo_QK.to(gl.float32) * (1.0 / lo_gain_K)[None, :], hi_QK.to(gl.float32) * (1.0 / hi_gain_K)[None, :]


@gluon.jit
def _put(lo_QK, hi_QK, q_QM, place_QM, RP: gl.constexpr, D: gl.constexpr):
    """Each of M channels at its place, if that is a row's own."""
    M: gl.constexpr = q_QM.shape[1]
    if M > 1:
        q0, q1 = gl.split(gl.reshape(q_QM, [8, M // 2, 2]))
        p0, p1 = gl.split(gl.reshape(place_QM, [8, M // 2, 2]))
        lo_QK, hi_QK = _put(lo_QK, hi_QK, q0, p0, RP, D)
        lo_QK, hi_QK = _put(lo_QK, hi_QK, q1, p1, RP, D)
    else:
        X_L: gl.constexpr = lo_QK.type.layout
        q_Q1 = gl.convert_layout(gl.reshape(q_QM, [8]), gl.SliceLayout(1, X_L))[:, None]
        place_Q1 = gl.convert_layout(gl.reshape(place_QM, [8]), gl.SliceLayout(1, X_L))[:, None]
        j_K = gl.arange(0, D // 2, gl.SliceLayout(0, X_L))
        ch_1K = (j_K // 32 * 64 + j_K % 32)[None, :]
        lo_QK = gl.where(ch_1K == place_Q1, q_Q1, lo_QK)
        hi_QK = gl.where(ch_1K + 32 == place_Q1, q_Q1, hi_QK)
    return lo_QK, hi_QK


@gluon.jit
def swapped(lo_QK, hi_QK, q_QM, gain_M, place_M, RP: gl.constexpr, D: gl.constexpr):
    """What `coded` gave, by the places of codes: what `read_swaps` gave at those of outliers, nothing where scales lie."""
    X_L: gl.constexpr = lo_QK.type.layout
    q_QM = q_QM.to(gl.float32) * (1.0 / gain_M)[None, :]
    n_Q = gl.arange(0, 8, gl.SliceLayout(1, q_QM.type.layout))
    # a row of 4 has columns for two scale blocks, each with zeros for the other's places
    there_QM = (place_M[None, :] // 64 == (n_Q % 2)[:, None]) if RP == 4 and D == 128 else (n_Q >= 0)[:, None]
    lo_QK, hi_QK = _put(lo_QK, hi_QK, q_QM, gl.where(there_QM, place_M[None, :], -1), RP, D)
    j_K = gl.arange(0, D // 2, gl.SliceLayout(0, X_L))
    scales_1K = ((j_K < 32) & (j_K >= 32 - D // 32))[None, :]
    return gl.where(scales_1K, 0.0, lo_QK), gl.where(scales_1K, 0.0, hi_QK)


@gluon.jit
def _operand(x_QK, q_s, PARTS: gl.constexpr):
    if PARTS == 2:
        a, b = gl.split(gl.permute(gl.reshape(x_QK, [8, 2, 32]), [0, 2, 1]))
        q_s.index(0).store(a)
        q_s.index(1).store(b)
    else:
        q_s.index(0).store(x_QK)


@gluon.jit
def queries(lo_QK, hi_QK, scale_log2, q0_s, q1_s, q2_s, q3_s, PARTS: gl.constexpr):
    """What `coded` gave to operands [PARTS, 8, channels]: of the low plane hi and lo term, then of the high one.

    Returns what a score of codes is to be multiplied with.
    """
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
