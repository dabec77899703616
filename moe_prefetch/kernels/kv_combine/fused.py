"""The last step of attention over pages: partial results become outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv_fp4.fused import ASM, NONE, exp2


@triton.jit
def combine(
    q_ptr, q_len_ptr, length_ptr, k_mean_ptr, v_gain_ptr, logit_ptr, part_ptr, ml_ptr, span_ptr, out_ptr, lse_ptr,
    recent_slot, t_at, scale_log2,
    N: tl.constexpr, R: tl.constexpr, T: tl.constexpr, OUT_T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SOFTCAP: tl.constexpr, LOGIT: tl.constexpr,
    SB: tl.constexpr, PIECES: tl.constexpr, PP: tl.constexpr, PDL: tl.constexpr,
):
    """DP channels of one query row: partial results of pages and of FP16 tokens, the learned logit. out FP32 [B, N, G, OUT_T, D]."""
    item = tl.program_id(0) // R
    r = tl.program_id(0) % R
    n = item % N
    d_D = tl.arange(0, DP) + tl.program_id(1) * DP
    s_S = tl.arange(0, SB)
    shift = 0.0
    if SOFTCAP == 0:
        # q . K mean belongs to every stored score
        all_D = tl.arange(0, D)
        q_D = tl.load(q_ptr + (item * R + r) * D + all_D).to(tl.float32)
        shift = tl.sum(q_D * tl.load(k_mean_ptr + n * D + all_D), axis=0) * scale_log2
    gain_D = 1.0 / tl.load(v_gain_ptr + n * D + d_D)
    b = item // N
    q_at = t_at + r % T
    q_len = tl.load(q_len_ptr + b)
    there = (q_at < q_len) & (q_at < OUT_T) & (tl.load(length_ptr + b) - q_len + q_at >= 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    s0 = tl.load(span_ptr + item * 2)
    s1 = tl.load(span_ptr + item * 2 + 1)
    p_P = tl.arange(0, PP)
    row_P = (recent_slot + item * PIECES + p_P) * R + r
    m_P = tl.load(ml_ptr + row_P * 2, mask=p_P < PIECES, other=NONE)
    l_P = tl.load(ml_ptr + row_P * 2 + 1, mask=p_P < PIECES, other=0)
    recent_PD = tl.load(part_ptr + row_P[:, None] * D + d_D[None, :], mask=(p_P < PIECES)[:, None], other=0)
    m = NONE
    total = 0.0
    acc_D = tl.zeros((DP,), tl.float32)
    for s in tl.range(s0 if ASM else s0.handle.data.item(), s1 if ASM else s1.handle.data.item(), SB):
        row_S = (s + s_S) * R + r
        on_S = s + s_S < s1
        m_S = tl.load(ml_ptr + row_S * 2, mask=on_S, other=NONE)
        l_S = tl.load(ml_ptr + row_S * 2 + 1, mask=on_S, other=0)
        part_SD = tl.load(part_ptr + row_S[:, None] * D + d_D[None, :], mask=on_S[:, None], other=0)
        new = tl.maximum(m, tl.max(m_S, axis=0))
        alpha = exp2(m - new)
        w_S = exp2(m_S - new)
        m = new
        total = total * alpha + tl.sum(w_S * l_S, axis=0)
        acc_D = acc_D * alpha + tl.sum(part_SD * w_S[:, None], axis=0)
    new = tl.maximum(m + shift, tl.max(m_P, axis=0))
    alpha = exp2(m + shift - new)
    beta_P = exp2(m_P - new)
    m = new
    total = total * alpha + tl.sum(l_P * beta_P, axis=0)
    acc_D = acc_D * gain_D * alpha + tl.sum(recent_PD * beta_P[:, None], axis=0)
    seen = there & (total > 0)
    if LOGIT:
        logit = tl.load(logit_ptr + n * (R // T) + r // T).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(m, logit)
        alpha = exp2(m - new)
        m = new
        total = total * alpha + exp2(logit - new)
        acc_D = acc_D * alpha
        seen = there
    safe = tl.where(seen, total, 1.0)
    out_row = (item * (R // T) + r // T) * OUT_T + q_at
    tl.store(out_ptr + out_row * D + d_D, tl.where(seen, acc_D / safe, 0.0))
    tl.store(lse_ptr + out_row, tl.where(seen, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf")))
