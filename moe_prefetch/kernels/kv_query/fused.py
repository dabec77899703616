"""Queries on their way to the tensor cores: once per item, so that the many programs that attend for it only load them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kv_fp4.fused import ASM, coded, swapped, terms, to_e4m3


@triton.jit
def prepare(
    q_ptr, channels_ptr, k_mean_ptr, k_gain_ptr, q8_ptr, qo_ptr, qf_ptr, scale_log2,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, KC: tl.constexpr, HL: tl.constexpr,
    XC: tl.constexpr, SWAPS: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):
    """One item. q [B, N, R, D] becomes, for scores in log2 units:

    q8 [item, plane, block, row, term, D / 2] divided by the K gain, scaled to +-256, block diagonal over the scale blocks of a plane, in
       two E4M3 terms: as columns of their own (HL == 2), or as more of K (HL == 1)
    qo more than 3 outliers: FP16 [item, term, XC, 16], columns of the outlier MMA; else FP32 [item, OUT, RP]
    qf FP32 [item, 1 + RP]: what a score of codes is to be multiplied with; q . K mean of each row if SOFTCAP
    """
    KB: tl.constexpr = D // 2
    QC: tl.constexpr = KC * RP * HL
    OP: tl.constexpr = 4 if OUT <= 4 else 8 if OUT <= 8 else 16
    if PDL:
        # the programs that attend may start: they wait before they read what is written here
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0)
    n = item % N
    q_at = q_ptr + item * R * D
    r_R = tl.arange(0, RP)
    j_K = tl.arange(0, KB)
    place_K = j_K // 32 * 64 + j_K % 32
    lo_K = swapped(place_K, n, channels_ptr, OUT, SWAPS)
    hi_K = swapped(place_K + 32, n, channels_ptr, OUT, SWAPS)
    on_R = (r_R < R)[None, :]
    lo_KR = tl.load(q_at + lo_K[:, None] + r_R[None, :] * D, mask=on_R, other=0).to(tl.float32)
    hi_KR = tl.load(q_at + hi_K[:, None] + r_R[None, :] * D, mask=on_R, other=0).to(tl.float32)
    gain_at = k_gain_ptr + n * D
    mean_at = k_mean_ptr + n * D
    if SOFTCAP > 0:
        mean_R = tl.sum(lo_KR * tl.load(mean_at + lo_K)[:, None] + hi_KR * tl.load(mean_at + hi_K)[:, None], axis=0) * scale_log2
        tl.store(qf_ptr + item * (1 + RP) + 1 + r_R, mean_R)
    lo_KR = lo_KR * (1.0 / tl.load(gain_at + lo_K))[:, None]
    hi_KR = hi_KR * (1.0 / tl.load(gain_at + hi_K))[:, None]
    if SWAPS > 0:
        # what scales mean as codes
        lo_KR = tl.where(coded(place_K, SWAPS)[:, None], lo_KR, 0.0)
        hi_KR = tl.where(coded(place_K + 32, SWAPS)[:, None], hi_KR, 0.0)
    # one norm for all rows: what counts in a score is its absolute error
    amax = tl.max(tl.max(tl.maximum(tl.abs(lo_KR), tl.abs(hi_KR)), axis=1), axis=0)
    amax = tl.maximum(amax, 1.0e-30)
    # a score is code 2^-14 * scale 2^-120 * factor * q * norm; the 2^120 enters after the factor
    tl.store(qf_ptr + item * (1 + RP), amax * (scale_log2 / 256.0 * 16384.0))
    norm = 256.0 / amax
    for plane in tl.static_range(2):
        t0_KR, t1_KR = terms((lo_KR if plane == 0 else hi_KR) * norm)
        for term in tl.static_range(2):
            x_KR = to_e4m3(t0_KR if term == 0 else t1_KR)
            for c in tl.static_range(KC):
                mine_KR = tl.where((j_K // 32 == c)[:, None], x_KR.to(tl.float32), 0.0)
                base = q8_ptr + (item * 2 + plane) * (2 // HL) * QC * KB + term * KB
                col_R = base + (c * RP + r_R) * (2 * KB)
                tl.store(col_R[None, :] + j_K[:, None], to_e4m3(mine_KR).to(q8_ptr.dtype.element_ty))
    if OUT > 3:
        k_O = tl.arange(0, 16)
        x_X = tl.arange(0, XC)
        o_O = k_O % OP if OP >= 8 else k_O % 8 // 2
        on_O = o_O < OUT if OP >= 8 else (o_O < OUT) & (k_O < 8)
        ch_O = tl.load(channels_ptr + n * OUT + o_O, mask=on_O, other=-1)
        # 16 columns are the least of an MMA whose rows lie as those of the scores do; a thread keeps its rows of q
        row_X = x_X % 8 // 2 if RP == 4 else x_X
        on_X = (row_X < R) & (x_X < 8) & (x_X % 2 == 0) if RP == 4 else row_X < R
        on_OX = on_X[None, :] & (ch_O >= 0)[:, None]
        qo_OX = tl.load(q_at + row_X[None, :] * D + ch_O[:, None], mask=on_OX, other=0).to(tl.float32) * scale_log2
        qo_0 = qo_OX.to(tl.float16)
        qo_1 = (qo_OX - qo_0.to(tl.float32)).to(tl.float16)
        if OP < 16:
            # rows are K's channels twice, for hi and lo (16 channels: two MMAs)
            qo_0 = tl.where((k_O // 8 if OP == 8 else k_O % 2)[:, None] == 0, qo_0, qo_1)
        at_OX = qo_ptr + item * 2 * XC * 16 + x_X[None, :] * 16 + k_O[:, None]
        tl.store(at_OX, qo_0)
        tl.store(at_OX + XC * 16, qo_1)
    else:
        for o in tl.static_range(OUT):
            ch = tl.load(channels_ptr + n * OUT + o)
            q_R = tl.load(q_at + r_R * D + ch, mask=(r_R < R) & (ch >= 0), other=0).to(tl.float32) * scale_log2
            tl.store(qo_ptr + (item * OUT + o) * RP + r_R, q_R)


def buffers(items: int, RP: int, QC: int, HL: int, D: int, OUT: int, XC: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q8, qo, qf; E4M3 numbers lie in FP32 where Triton's interpreter, which casts them wrongly, reads them."""
    q8 = torch.empty(items, 2, 2 // HL, QC, D // 2, dtype=torch.float8_e4m3fn if ASM.value else torch.float32, device=device)
    qo = torch.empty((items, 2, XC, 16) if OUT > 3 else (items, max(OUT, 1), RP), dtype=torch.float16 if OUT > 3 else torch.float32,
                     device=device)
    return q8, qo, torch.empty(items, 1 + RP, dtype=torch.float32, device=device)
