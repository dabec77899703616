"""Partial attention over the FP16 tokens of a sequence: sinks and window."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv_fp4.fused import NONE, bend, dot, exp2


@triton.jit
def fetch(
    t_T, item, stored, length, first, c_C, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, D: tl.constexpr, SINKS: tl.constexpr,
    RING: tl.constexpr,
):
    """K and, of channels `c_C`, V of an item's FP16 tokens `t_T`."""
    d_D = tl.arange(0, D)
    in_sinks = tl.minimum(length, SINKS)
    there_T = t_T < tl.where(length > SINKS, length - stored, length)
    row_T = item * RING + (first + t_T - in_sinks) % RING
    k_T = recent_k_ptr + row_T * D
    v_T = recent_v_ptr + row_T * D
    if SINKS > 0:
        row_T = item * SINKS + t_T
        k_T = tl.where(t_T < in_sinks, sink_k_ptr + row_T * D, k_T)
        v_T = tl.where(t_T < in_sinks, sink_v_ptr + row_T * D, v_T)
    k_TD = tl.load(k_T[:, None] + d_D[None, :], mask=there_T[:, None], other=0)
    v_TC = tl.load(v_T[:, None] + c_C[None, :], mask=there_T[:, None], other=0)
    return k_TD, v_TC


@triton.jit
def see(
    q_RD, norm, qpos_R, m_R, l_R, acc_RC, t_T, k_TD, v_TC, stored, length,
    NR: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Attention over what was fetched of an item's FP16 tokens `t_T`, on top of what was seen before: maximum, sum, V's channels."""
    # Rows of q are M here: sixteen of them make an ordinary MMA. With tokens as M, ptxas of CUDA 12.8 reads a uniform register that
    # nobody wrote for the descriptor of p (tests/kernels/machine_code.py looks for that).
    in_sinks = tl.minimum(length, SINKS)
    there_T = t_T < tl.where(length > SINKS, length - stored, length)
    s_RT = dot(q_RD, tl.trans(k_TD), tl.zeros((NR, TOKENS), tl.float32)) * norm
    if SOFTCAP > 0:
        s_RT = bend(s_RT, SOFTCAP)
    kpos_T = tl.where(t_T < in_sinks, t_T, t_T + stored)
    seen_RT = there_T[None, :] & (kpos_T[None, :] <= qpos_R[:, None])
    if SLIDING > 0:
        seen_RT = seen_RT & (kpos_T[None, :] > qpos_R[:, None] - SLIDING)
    s_RT = tl.where(seen_RT, s_RT, float("-inf"))
    new_R = tl.maximum(m_R, tl.max(s_RT, axis=1))
    alpha_R = exp2(m_R - new_R)
    p_RT = exp2(s_RT - new_R[:, None])
    return new_R, l_R * alpha_R + tl.sum(p_RT, axis=1), dot(p_RT.to(tl.float16), v_TC, acc_RC * alpha_R[:, None])


@triton.jit(do_not_specialize=["first_slot"])
def attend_recent(
    q_ptr, q_len_ptr, stored_ptr, length_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, recent_first_ptr, part_ptr, ml_ptr,
    span_ptr, first_slot, t_at, scale_log2,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    PIECES: tl.constexpr, REST: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):
    """Partial attention over a piece of 64 of an item's FP16 tokens, the last one REST longer, written to slot `first_slot + program`."""
    NR: tl.constexpr = 16 if RP < 16 else RP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES
    slot = first_slot + tl.program_id(0)
    b = item // N
    r_R = tl.arange(0, NR)
    d_D = tl.arange(0, D)
    stored = tl.load(stored_ptr + b)
    length = tl.load(length_ptr + b)
    q_len = tl.load(q_len_ptr + b)
    first = tl.load(recent_first_ptr + b)
    qpos_R = tl.where((r_R < R) & (t_at + r_R % T < q_len), length - q_len + t_at + r_R % T, -1)
    q_RD = tl.load(q_ptr + (item * R + r_R)[:, None] * D + d_D[None, :], mask=(r_R < R)[:, None], other=0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.max(tl.abs(q_RD), axis=1), axis=0), 1.0e-30)
    q_RD = (q_RD * (256.0 / amax)).to(tl.float16)
    norm = amax * scale_log2 / 256.0
    m_R = tl.full((NR,), NONE, tl.float32)
    l_R = tl.zeros((NR,), tl.float32)
    acc_RD = tl.zeros((NR, D), tl.float32)
    # all asked for before any is worked on
    t_T = piece * 64 + tl.arange(0, 64)
    k_TD, v_TC = fetch(t_T, item, stored, length, first, d_D, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, D, SINKS, RING)
    if REST > 0:
        # of pieces before the last these are beyond all tokens
        e_T = tl.where(piece == PIECES - 1, PIECES * 64, SINKS + RING) + tl.arange(0, REST)
        k_ED, v_EC = fetch(e_T, item, stored, length, first, d_D, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, D, SINKS, RING)
    m_R, l_R, acc_RD = see(q_RD, norm, qpos_R, m_R, l_R, acc_RD, t_T, k_TD, v_TC, stored, length, NR, 64, SINKS, SLIDING, SOFTCAP)
    if REST > 0:
        m_R, l_R, acc_RD = see(q_RD, norm, qpos_R, m_R, l_R, acc_RD, e_T, k_ED, v_EC, stored, length, NR, REST, SINKS, SLIDING, SOFTCAP)
    row_R = slot * R + r_R
    tl.store(part_ptr + row_R[:, None] * D + d_D[None, :], acc_RD, mask=(r_R < R)[:, None])
    tl.store(ml_ptr + row_R * 2, m_R, mask=r_R < R)
    tl.store(ml_ptr + row_R * 2 + 1, l_R, mask=r_R < R)
    pages = (stored + 127) // 128
    if SLIDING > 0:
        pages -= tl.minimum(tl.maximum(length - q_len - SLIDING + 1 - SINKS, 0) // 128, pages)
    if (pages == 0) & (piece == 0):
        tl.store(span_ptr + item * 2, 0)
        tl.store(span_ptr + item * 2 + 1, 0)
    if PDL and tl.program_id(0) == tl.num_programs(0) - 1:
        # the end of this launch is to mean the end of those before it; one program is enough, the others leave their places
        tl.extra.cuda.gdc_wait()
