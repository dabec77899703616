"""The law of turning: each head's rows times that head's matrix."""

from __future__ import annotations

import torch


def turn_naive(x_BHTd: torch.Tensor, m_Ndd: torch.Tensor, wide: bool) -> torch.Tensor:
    """Rows x times m, FP32 [B, H, T, d]: y_j = sum_i x_i m_ij, with m of head h // (H // N). Sums in FP64 where `wide`, in FP32 else.

    x of any float type and any strides, m FP16 or FP32.
    """
    B, H, T, d = x_BHTd.shape
    dtype = torch.float64 if wide else torch.float32
    # One product per head of m: a broadcast one would copy the matrices for each sequence. Autocast would make BF16 of FP32.
    with torch.autocast(x_BHTd.device.type, enabled=False):
        rows = x_BHTd.to(dtype).transpose(0, 1).reshape(len(m_Ndd), -1, d)
        return (rows @ m_Ndd.to(dtype)).float().view(H, B, T, d).transpose(0, 1)
