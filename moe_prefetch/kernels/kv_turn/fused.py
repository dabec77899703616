"""`turn_naive` in one launch, for the few rows of a decode step: a program has 32 columns of one head's matrix and some of its rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, ROWS = 32, 4


@triton.jit(do_not_specialize=["T", "rows"])
def turn_rows(x_ptr, m_ptr, y_ptr, rows, T, sb, sh, st, mi, mj,
              G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr):
    """x [B, N G, T, D] by strides, the last one 1; m [N, D, D] by strides mi, mj; y FP32 [B, N G, T, D], contiguous; rows = B G T."""
    n = tl.program_id(0)
    j_C = tl.program_id(1) * C + tl.arange(0, C)
    i_D = tl.arange(0, DP)
    at_DC = n * D * D + i_D[:, None] * mi + j_C[None, :] * mj
    m_DC = tl.load(m_ptr + at_DC, mask=(i_D < D)[:, None] & (j_C < D)[None, :], other=0)
    m_DC = m_DC.to(tl.float64 if WIDE else tl.float32)
    for k in tl.static_range(R):
        row = tl.program_id(2) * R + k
        b = (row // (G * T)).to(tl.int64)
        h = n * G + row // T % G
        t = row % T
        x_D = tl.load(x_ptr + b * sb + h * sh + t * st + i_D, mask=(i_D < D) & (row < rows), other=0)
        y_C = tl.sum(x_D.to(tl.float64 if WIDE else tl.float32)[:, None] * m_DC, axis=0).to(tl.float32)
        at = ((b * tl.num_programs(0) * G + h) * T + t) * D
        tl.store(y_ptr + at + j_C, y_C, mask=(j_C < D) & (row < rows))


def turn(x_BHTd: torch.Tensor, m_Ndd: torch.Tensor, wide: bool) -> torch.Tensor:
    """As `naive.turn_naive`."""
    B, H, T, D = x_BHTd.shape
    N = len(m_Ndd)
    out = torch.empty(B, H, T, D, dtype=torch.float32, device=x_BHTd.device)
    if not out.numel():
        return out
    x = x_BHTd if x_BHTd.stride(3) == 1 else x_BHTd.contiguous()
    rows = B * H // N * T
    turn_rows[(N, triton.cdiv(D, COLUMNS), triton.cdiv(rows, ROWS))](
        x, m_Ndd, out, rows, T, *x.stride()[:3], *m_Ndd.stride()[1:], G=H // N, D=D, DP=triton.next_power_of_2(D), C=COLUMNS, R=ROWS,
        WIDE=wide, num_warps=4)
    return out
