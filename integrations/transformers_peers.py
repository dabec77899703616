"""The KV quantisers that people use with transformers today, for comparison: over all of K and V, without their FP16 remainder.

Each is made with a list that receives bits per element, counted as ours are: codes, scales and zero points (16 bits each).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_prefetch.integrations.transformers_quality import Transform

Bits = list[float]
Peer = Callable[[Bits], Transform]


def fp8_cast(bits: Bits) -> Transform:
    """A plain cast to E4M3, as serving engines do without calibration."""

    def transform(_layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits.append(8.0)
        return k.clamp(-448, 448).to(torch.float8_e4m3fn).float(), v.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    return transform


def quanto(axis_key: int, axis_value: int, group: int = 64) -> Peer:
    """transformers' QuantizedCache with optimum-quanto, int4."""

    def peer(bits: Bits) -> Transform:
        from transformers.cache_utils import QuantoQuantizedLayer

        layer = QuantoQuantizedLayer(nbits=4, axis_key=axis_key, axis_value=axis_value, q_group_size=group)

        def one(x: torch.Tensor, axis: int) -> torch.Tensor:
            # On the CPU: the arithmetic is the same, and its CUDA extension would compile for minutes first.
            q = layer._quantize(x.cpu().contiguous(), axis)
            bits.append(4 + 16 * (q._scale.numel() + q._shift.numel()) / x.numel())
            return layer._dequantize(q).to(x.device)

        return lambda _layer, k, v: (one(k, axis_key), one(v, axis_value))

    return peer


def hqq(group: int) -> Peer:
    """transformers' QuantizedCache with HQQ, 4 bits."""

    def peer(bits: Bits) -> Transform:
        from transformers.cache_utils import HQQQuantizedLayer

        layer = HQQQuantizedLayer(nbits=4, axis_key=1, axis_value=1, q_group_size=group)

        def one(x: torch.Tensor) -> torch.Tensor:
            q, meta = layer.quantizer.quantize(
                x.contiguous(), axis=1, device=str(x.device), compute_dtype=x.dtype, nbits=4, group_size=group
            )
            bits.append(4 + 16 * (meta["scale"].numel() + meta["zero"].numel()) / x.numel())
            return layer.quantizer.dequantize(q, {**meta, "compute_dtype": x.dtype}).reshape(x.shape)

        return lambda _layer, k, v: (one(k), one(v))

    return peer


PEERS: dict[str, Peer] = {
    "peer-fp8-cast": fp8_cast,
    "peer-quanto-int4-k0v0": quanto(0, 0),
    "peer-quanto-int4-k1v0": quanto(-1, 0),
    "peer-hqq4-g64": hqq(64),
    "peer-hqq4-g32": hqq(32),
}
