"""The law of a token's first stop: FP16, in a sequence's window."""

from __future__ import annotations

import torch

from ..kv_encode.naive import FP16_MAX


def take_naive(
    buffer_k: torch.Tensor, buffer_v: torch.Tensor, counts: torch.Tensor, k_BNTd: torch.Tensor, v_BNTd: torch.Tensor, at: int
) -> None:
    """Write T tokens to slots `at` to `at + T - 1` of FP16 buffers [B, N, R, d]: NaN as 0, what is beyond FP16 as +-65504.

    K and V may be of any float type and any strides. counts, int64 [2], grows by the elements (saturated, NaN).
    """
    T = k_BNTd.shape[2]
    for buffer, x in ((buffer_k, k_BNTd), (buffer_v, v_BNTd)):
        if x.numel():
            x = x if x.dtype == torch.float16 else x.float()
            counts += torch.stack([x.abs() > FP16_MAX, x.isnan()]).flatten(1).sum(1)
            buffer[:, :, at : at + T] = x.nan_to_num(0.0, FP16_MAX, -FP16_MAX).clamp(-FP16_MAX, FP16_MAX)
