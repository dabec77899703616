"""Partial attention over the FP16 tokens of a sequence: sinks and window."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv_fp4.fused import ASM, NONE, bend, dot, exp2


@triton.jit
def attend_recent(
    item, piece, q_ptr, q_len_ptr, stored_ptr, length_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, recent_first_ptr,
    part_ptr, ml_ptr, span_ptr,
    slot, t_at, scale_log2,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SINKS: tl.constexpr, RING: tl.constexpr,
    SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Partial attention over a piece of 128 of an item's FP16 tokens, written to `slot`."""
    NR: tl.constexpr = 16 if RP < 16 else RP
    b = item // N
    r_R = tl.arange(0, NR)
    d_D = tl.arange(0, D)
    v_V = tl.arange(0, DV)
    i_T = tl.arange(0, 64)
    stored = tl.load(stored_ptr + b)
    length = tl.load(length_ptr + b)
    q_len = tl.load(q_len_ptr + b)
    first = tl.load(recent_first_ptr + b)
    qpos_R = tl.where((r_R < R) & (t_at + r_R % T < q_len), length - q_len + t_at + r_R % T, -1)
    # Rows of q are M here: sixteen of them make an ordinary MMA. With tokens as M, ptxas of CUDA 12.8 reads a uniform register that
    # nobody wrote for the descriptor of p (tests/kernels/machine_code.py looks for that).
    q_RD = tl.load(q_ptr + (item * R + r_R)[:, None] * D + d_D[None, :], mask=(r_R < R)[:, None], other=0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.max(tl.abs(q_RD), axis=1), axis=0), 1.0e-30)
    q_RD = (q_RD * (256.0 / amax)).to(tl.float16)
    m_R = tl.full((NR,), NONE, tl.float32)
    l_R = tl.zeros((NR,), tl.float32)
    acc_RV = tl.zeros((NR, DV), tl.float32)
    in_sinks = tl.minimum(length, SINKS)
    count = tl.where(length > SINKS, length - stored, length)
    end = tl.minimum(count, piece * 128 + 128)
    for at in tl.range(piece * 128 if ASM else piece.handle.data.item() * 128, end if ASM else end.handle.data.item(), 64, num_stages=1):
        t_T = at + i_T
        there_T = t_T < count
        row_T = item * RING + (first + t_T - in_sinks) % RING
        k_T = recent_k_ptr + row_T * D
        v_T = recent_v_ptr + row_T * DV
        if SINKS > 0:
            row_T = item * SINKS + t_T
            k_T = tl.where(t_T < in_sinks, sink_k_ptr + row_T * D, k_T)
            v_T = tl.where(t_T < in_sinks, sink_v_ptr + row_T * DV, v_T)
        k_TD = tl.load(k_T[:, None] + d_D[None, :], mask=there_T[:, None], other=0)
        v_TV = tl.load(v_T[:, None] + v_V[None, :], mask=there_T[:, None], other=0)
        s_RT = dot(q_RD, tl.trans(k_TD), tl.zeros((NR, 64), tl.float32)) * (amax * scale_log2 / 256.0)
        if SOFTCAP > 0:
            s_RT = bend(s_RT, SOFTCAP)
        kpos_T = tl.where(t_T < in_sinks, t_T, t_T + stored)
        seen_RT = there_T[None, :] & (kpos_T[None, :] <= qpos_R[:, None])
        if SLIDING > 0:
            seen_RT = seen_RT & (kpos_T[None, :] > qpos_R[:, None] - SLIDING)
        s_RT = tl.where(seen_RT, s_RT, float("-inf"))
        new_R = tl.maximum(m_R, tl.max(s_RT, axis=1))
        alpha_R = exp2(m_R - new_R)
        m_R = new_R
        p_RT = exp2(s_RT - m_R[:, None])
        l_R = l_R * alpha_R + tl.sum(p_RT, axis=1)
        acc_RV = dot(p_RT.to(tl.float16), v_TV, acc_RV * alpha_R[:, None])
    row_R = slot * R + r_R
    tl.store(part_ptr + row_R[:, None] * DV + v_V[None, :], acc_RV, mask=(r_R < R)[:, None])
    tl.store(ml_ptr + row_R * 2, m_R, mask=r_R < R)
    tl.store(ml_ptr + row_R * 2 + 1, l_R, mask=r_R < R)
    pages = (stored + 127) // 128
    if SLIDING > 0:
        pages -= tl.minimum(tl.maximum(length - q_len - SLIDING + 1 - SINKS, 0) // 128, pages)
    if (pages == 0) & (piece == 0):
        tl.store(span_ptr + item * 2, 0)
        tl.store(span_ptr + item * 2 + 1, 0)
