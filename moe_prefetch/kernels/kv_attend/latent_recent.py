"""Attention over the FP16 tokens (sinks and window) of MLA's items, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv_fp4.fused import ASM, NONE, bend, dot, exp2, seen


@triton.jit
def softmax_step(s_TR, m_R, l_TR):
    """One step of the running softmax over axis 0: (p, alpha, maximum, sums)."""
    new_R = tl.maximum(m_R, tl.max(s_TR, axis=0))
    alpha_R = exp2(m_R - new_R)
    p_TR = exp2(s_TR - new_R[None, :])
    return p_TR, alpha_R, new_R, l_TR * alpha_R[None, :] + p_TR


@triton.jit
def latent_recent(
    q_at, row_R, on_R, norm_R, back_R, qpos_R, head, stored, length, first, sink_k_ptr, recent_k_ptr, part_at, ml_at,
    T: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Partial attention over an item's FP16 tokens, written to a slot of its own."""
    DQ: tl.constexpr = D + ROPE
    i_T = tl.arange(0, 64)
    c_C = tl.arange(0, 64)
    in_sinks = tl.minimum(length, SINKS)
    count = tl.where(length > SINKS, length - stored, length)
    m_R = tl.full((RP,), NONE, tl.float32)
    l_TR = tl.zeros((64, RP), tl.float32)
    accs = ()
    for _ in tl.static_range(D // 64):
        accs = accs + (tl.zeros((RP, 64), tl.float32),)
    for at in tl.range(0, count if ASM else count.handle.data.item(), 64, num_stages=1):
        t_T = at + i_T
        there_T = t_T < count
        k_T = recent_k_ptr + (head * RING + (first + t_T - in_sinks) % RING) * DQ
        if SINKS > 0:
            k_T = tl.where(t_T < in_sinks, sink_k_ptr + (head * SINKS + t_T) * DQ, k_T)
        s_TR = tl.zeros((64, RP), tl.float32)
        for p in tl.static_range((DQ + 63) // 64):
            on_C = 64 * p + c_C < DQ
            at_CR = q_at + row_R[None, :] * DQ + 64 * p + c_C[:, None]
            q_CR = tl.load(at_CR, mask=on_C[:, None] & on_R[None, :], other=0).to(tl.float32) * norm_R[None, :]
            k_TC = tl.load(k_T[:, None] + 64 * p + c_C[None, :], mask=there_T[:, None] & on_C[None, :], other=0)
            s_TR = dot(k_TC, q_CR.to(tl.float16), s_TR)
        s_TR = s_TR * back_R[None, :]
        if SOFTCAP > 0:
            s_TR = bend(s_TR, SOFTCAP)
        s_TR = seen(s_TR, tl.where(t_T < in_sinks, t_T, t_T + stored), there_T, qpos_R, T, SLIDING)
        p_TR, alpha_R, m_R, l_TR = softmax_step(s_TR, m_R, l_TR)
        p_RT = tl.trans(p_TR.to(tl.float16))
        new = ()
        for p in tl.static_range(D // 64):
            v_TC = tl.load(k_T[:, None] + 64 * p + c_C[None, :], mask=there_T[:, None], other=0)
            new = new + (dot(p_RT, v_TC, accs[p] * alpha_R[:, None]),)
        accs = new
    for p in tl.static_range(D // 64):
        tl.store(part_at + tl.arange(0, RP)[:, None] * D + 64 * p + c_C[None, :], accs[p])
    tl.store(ml_at + tl.arange(0, RP) * 2, m_R)
    tl.store(ml_at + tl.arange(0, RP) * 2 + 1, tl.sum(l_TR, axis=0))


@triton.jit
def attend_recent(
    q_ptr, q_len_ptr, stored_ptr, length_ptr, sink_k_ptr, recent_k_ptr, recent_first_ptr, part_ptr, ml_ptr, B, programs, scale_log2,
    BP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    SINKS: tl.constexpr, RING: tl.constexpr, PDL: tl.constexpr,
):
    """The FP16 tokens of one item beside `fused_latent.attend_latent`, which has `programs` over the pages: the slot after its last."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (R + RP - 1) // RP
    DQ: tl.constexpr = D + ROPE
    item = tl.program_id(0)
    head = item // BLOCKS
    b = head // N
    b_B = tl.arange(0, BP)
    pages_B = tl.where(b_B < B, tl.maximum((tl.load(stored_ptr + b_B, mask=b_B < B, other=0) + 127) // 128, 1), 0)
    through = tl.sum(tl.where(b_B < b, pages_B, 0), axis=0) * (N * BLOCKS)
    through += tl.sum(tl.where(b_B == b, pages_B, 0), axis=0) * (item % (N * BLOCKS) + 1)
    share = tl.cdiv(tl.sum(pages_B, axis=0) * (N * BLOCKS), programs)
    slot = (through - 1) // share + 2 * item + 1
    length = tl.load(length_ptr + b)
    q_len = tl.load(q_len_ptr + b)
    row_R = item % BLOCKS * RP + tl.arange(0, RP)
    on_R = row_R < R
    q_at = q_ptr + head * R * DQ
    amax_R = tl.full((RP,), 1.0e-30, tl.float32)
    for p in tl.static_range((DQ + 63) // 64):
        c_C = 64 * p + tl.arange(0, 64)
        q_CR = tl.load(q_at + row_R[None, :] * DQ + c_C[:, None], mask=(c_C < DQ)[:, None] & on_R[None, :], other=0).to(tl.float32)
        amax_R = tl.maximum(amax_R, tl.max(tl.abs(q_CR), axis=0))
    qpos_R = tl.where(on_R & (row_R % T < q_len), length - q_len + row_R % T, -1)
    latent_recent(
        q_at, row_R, on_R, 256.0 / amax_R, amax_R * (scale_log2 / 256.0), qpos_R, head, tl.load(stored_ptr + b), length,
        tl.load(recent_first_ptr + b), sink_k_ptr, recent_k_ptr, part_ptr + slot * RP * D, ml_ptr + slot * RP * 2,
        T, D, ROPE, RP, SINKS, RING, 0, 0.0)
    if PDL and item == tl.num_programs(0) - 1:
        # the end of this launch is to mean the end of that before it
        tl.extra.cuda.gdc_wait()
