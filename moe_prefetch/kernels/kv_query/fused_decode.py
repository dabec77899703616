"""Queries on their way to the tensor cores, for the Gluon kernel: as `fused.prepare`, by every program for its items."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

QO_L = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def read(q_ptr, gain_ptr, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr, QC: gl.constexpr):
    """Rows of q [R, D] as columns (row, scale block) of the low and of the high plane [QC, D / 2], and their channels' K gain."""
    KB: gl.constexpr = D // 2
    Q_L: gl.constexpr = gl.BlockedLayout([1, KB * QC // 128], [QC // 4, 128 // QC], [4, 1], [1, 0])
    n_Q = gl.arange(0, QC, gl.SliceLayout(1, Q_L))
    j_K = gl.arange(0, KB, gl.SliceLayout(0, Q_L))
    ch_K = j_K // 32 * 64 + j_K % 32
    # head dim 64 has one block: 8 rows lie as `by_row` wants them, beside 4 rows are zeros
    row_Q = n_Q // 2 + n_Q % 2 * 4 if D == 64 and RP == 8 else n_Q // 2
    on_QK = (row_Q < R)[:, None] & ((ch_K >= 0)[None, :] if D == 64 and RP == 8 else (j_K // 32)[None, :] == (n_Q % 2)[:, None])
    q_at = q_ptr + row_Q[:, None] * D + ch_K[None, :]
    lo_QK = gl.load(q_at, mask=on_QK, other=0)
    hi_QK = gl.load(q_at + 32, mask=on_QK, other=0)
    return lo_QK, hi_QK, gl.load(gain_ptr + ch_K), gl.load(gain_ptr + 32 + ch_K)


@gluon.jit
def queries(lo_QK, hi_QK, lo_gain_K, hi_gain_K, scale_log2, q0_s, q1_s, q2_s, q3_s):
    """What `read` gave, divided by the gain, to operands: of the low plane hi and lo term, then of the high one.

    Returns what a score of codes is to be multiplied with.
    """
    lo_QK = lo_QK.to(gl.float32) * (1.0 / lo_gain_K)[None, :]
    hi_QK = hi_QK.to(gl.float32) * (1.0 / hi_gain_K)[None, :]
    # one norm for all rows: what counts in a score is its absolute error
    amax = gl.maximum(gl.max(gl.max(gl.maximum(gl.abs(lo_QK), gl.abs(hi_QK)), axis=1), axis=0), 1.0e-30)
    lo_QK = lo_QK * (256.0 / amax)
    hi_QK = hi_QK * (256.0 / amax)
    lo_8 = lo_QK.to(gl.float8e4nv)
    hi_8 = hi_QK.to(gl.float8e4nv)
    q0_s.store(lo_8)
    q1_s.store((lo_QK - lo_8.to(gl.float32)).to(gl.float8e4nv))
    q2_s.store(hi_8)
    q3_s.store((hi_QK - hi_8.to(gl.float32)).to(gl.float8e4nv))
    # a score is code 2^-14 * scale 2^-120 * factor * q * norm; the 2^120 enters after the factor
    return amax * (scale_log2 / 256.0 * 16384.0)


@gluon.jit
def read_channels(channels_ptr, OUT: gl.constexpr):
    """Outlier channels of a head, up to 8, twice; -1 where there is none."""
    k_O = gl.arange(0, 16, gl.SliceLayout(0, QO_L))
    return gl.load(channels_ptr + k_O % 8, mask=k_O % 8 < OUT, other=-1)


@gluon.jit
def outlier_queries(q_ptr, ch_O, scale_log2, qo_s, R: gl.constexpr, RP: gl.constexpr, D: gl.constexpr):
    """Outlier channels of q to the operand [8, 16]: FP16 hi of up to 8, then lo; columns as in `by_row`."""
    x_X = gl.arange(0, 8, gl.SliceLayout(1, QO_L))
    k_O = gl.arange(0, 16, gl.SliceLayout(0, QO_L))
    row_X = x_X // 2 if RP == 4 else x_X // 2 + x_X % 2 * 4
    on_X = (row_X < R) & (x_X % 2 == 0) if RP == 4 else row_X < R
    on_XO = on_X[:, None] & (ch_O >= 0)[None, :]
    q_XO = gl.load(q_ptr + row_X[:, None] * D + ch_O[None, :], mask=on_XO, other=0).to(gl.float32) * scale_log2
    hi_XO = q_XO.to(gl.float16)
    qo_s.store(gl.where((k_O < 8)[None, :], hi_XO, (q_XO - hi_XO.to(gl.float32)).to(gl.float16)))
