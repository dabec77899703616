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
    q_ptr, stored_ptr, length_ptr, sink_k_ptr, recent_k_ptr, recent_first_ptr, k_mean_ptr, k_gain_ptr, part_ptr, ml_ptr, before, scale_log2,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    TT: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):
    """EACH of an item's FP16 tokens, TT at a time, beside `fused_latent.attend_latent`: slots from `before` on.

    Small programs that ask for all they need at once, so that they find places beside pages and are soon ready. What they write is in the
    units of pages: times the K gain, and scores without the part of the K mean, which stands third in `ml`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (R + RP - 1) // RP
    DQ: tl.constexpr = D + ROPE
    item = tl.program_id(0)
    head = item // BLOCKS
    c_C = tl.arange(0, 64)
    r_R = tl.arange(0, RP)
    row_R = item % BLOCKS * RP + r_R
    at_CR = q_ptr + head * R * DQ + row_R[None, :] * DQ + c_C[:, None]
    length = tl.load(length_ptr + head // N)
    stored = tl.load(stored_ptr + head // N)
    first = tl.load(recent_first_ptr + head // N)
    qs = ()
    for p in tl.static_range(DQ // 64):
        qs = qs + (tl.load(at_CR + 64 * p, mask=(row_R < R)[None, :], other=0).to(tl.float32),)
    means = ()
    gains = ()
    for p in tl.static_range(D // 64):
        means = means + (tl.load(k_mean_ptr + head % N * D + 64 * p + c_C),)
        gains = gains + (tl.load(k_gain_ptr + head % N * D + 64 * p + c_C),)
    in_sinks = tl.minimum(length, SINKS)
    count = tl.where(length > SINKS, length - stored, length)
    # a row's largest element becomes 256
    amax_CR = tl.full((64, RP), 1.0e-30, tl.float32)
    shift_CR = tl.zeros((64, RP), tl.float32)
    for p in tl.static_range(DQ // 64):
        amax_CR = tl.maximum(amax_CR, tl.abs(qs[p]))
        if 64 * p < D:
            shift_CR += qs[p] * means[p][:, None]
    amax_R = tl.max(amax_CR, axis=0)
    shift_R = tl.sum(shift_CR, axis=0) * scale_log2
    norm_R = 256.0 / amax_R
    m_R = tl.full((RP,), NONE, tl.float32)
    l_TR = tl.zeros((TT, RP), tl.float32)
    accs = ()
    for _ in tl.static_range(D // 64):
        accs = accs + (tl.zeros((RP, 64), tl.float32),)
    for at in tl.range(0, EACH, TT):
        t_T = tl.program_id(1) * EACH + at + tl.arange(0, TT)
        there_T = t_T < count
        k_T = recent_k_ptr + (head * RING + (first + t_T - in_sinks) % RING) * DQ
        if SINKS > 0:
            k_T = tl.where(t_T < in_sinks, sink_k_ptr + (head * SINKS + t_T) * DQ, k_T)
        ks = ()
        for p in tl.static_range(DQ // 64):
            ks = ks + (tl.load(k_T[:, None] + 64 * p + c_C[None, :], mask=there_T[:, None], other=0),)
        s_TR = tl.zeros((TT, RP), tl.float32)
        for p in tl.static_range(DQ // 64):
            s_TR = dot(ks[p], (qs[p] * norm_R[None, :]).to(tl.float16), s_TR)
        s_TR = tl.where(there_T[:, None], s_TR * (amax_R * (scale_log2 / 256.0))[None, :], float("-inf"))
        p_TR, alpha_R, m_R, l_TR = softmax_step(s_TR, m_R, l_TR)
        p_RT = tl.trans(p_TR.to(tl.float16))
        new = ()
        for p in tl.static_range(D // 64):
            new = new + (dot(p_RT, ks[p], accs[p] * alpha_R[:, None]),)
        accs = new
    slot = before + item * tl.num_programs(1) + tl.program_id(1)
    for p in tl.static_range(D // 64):
        tl.store(part_ptr + (slot * RP + r_R)[:, None] * D + 64 * p + c_C[None, :], accs[p] * gains[p][None, :])
    tl.store(ml_ptr + (slot * RP + r_R) * 3, m_R - shift_R)
    tl.store(ml_ptr + (slot * RP + r_R) * 3 + 1, tl.sum(l_TR, axis=0))
    tl.store(ml_ptr + (slot * RP + r_R) * 3 + 2, shift_R)
    if PDL and (item == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1):
        # the end of this launch is to mean the end of that before it
        tl.extra.cuda.gdc_wait()


def pieces_of(tokens: int) -> tuple[int, int]:
    """Programs of `attend_recent` an item, and tokens of each: 32 or a multiple, so that all are in flight at once."""
    pieces = min(8, max(1, -(-tokens // 32)))
    return pieces, -(-tokens // (32 * pieces)) * 32
