"""Keys in axes of their own: A k is kept and A^-T q asks for it, so that every score stays what it was.

A head's keys fill few directions of what its queries read, and after RoPE hardly any of them is a channel. In canonical axes (the balanced
coordinates of B. C. Moore, 1981, with E[q q^T] and Cov[k] as the two Gramians, both weighed by what an error there does to the output)
queries and keys are uncorrelated and, axis by axis, equally loud. The loudest axes become a layout's FP16 outlier channels. All others are
mixed by a Hartley matrix (as QuaRot and SpinQuant mix by Hadamard matrices): channels that share a scale are then equally loud, and their
error is least.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..kernels.kv_turn.op import kv_turn


class Axes(NamedTuple):
    """Canonical axes of one layer, the loudest first: `into` FP64 [N, d, d], rows are axes; `power` FP64 [N, d] is E[q^2] and Var[k] along
    each; `mean` FP64 [N, d] is E[k], in channels."""

    into: torch.Tensor
    power: torch.Tensor
    mean: torch.Tensor


class Basis(NamedTuple):
    """Of one layer: `into` FP16 [N, d, d] is A, `back` FP32 [N, d, d] its inverse. What FP16 makes of A is the A that both mean."""

    into: torch.Tensor
    back: torch.Tensor

    def keys(self, k_BNTd: torch.Tensor) -> torch.Tensor:
        """Keys as they are kept, FP32. In FP64 until then: what FP16 makes of them must not depend on how many come at once."""
        return kv_turn(k_BNTd, self.into.mT, wide=True)

    def queries(self, q_BHTd: torch.Tensor) -> torch.Tensor:
        """Queries that ask for kept keys, FP32 [B, H, T, d]."""
        return kv_turn(q_BHTd, self.back, wide=False)

    def restore(self, k_BNTd: torch.Tensor) -> torch.Tensor:
        """Kept keys, FP32, as they came."""
        return kv_turn(k_BNTd, self.back.mT, wide=False)


def felt(q_HTd: torch.Tensor, k_NTd: torch.Tensor, v_NTd: torch.Tensor, skip: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How much an error of a score is felt: FP64 [N, g, T] per query and [N, T] per key. Queries may be those of the last tokens only.

    An error e of the score of key t moves the output by p_t (v_t - out) e, so that its weight is |p_t (v_t - out)|^2, under causal softmax
    attention with scale d^-1/2. The first `skip` keys and a query's own are read exactly and weigh nothing. A tenth of the mean is added:
    other texts attend elsewhere.
    """
    heads, T = k_NTd.shape[:2]
    q, k, v = q_HTd.float().unflatten(0, (heads, -1)), k_NTd.float()[:, None], v_NTd.float()[:, None]
    by_query, by_key = q.new_zeros(q.shape[:3], dtype=torch.float64), q.new_zeros(heads, T, dtype=torch.float64)
    at = torch.arange(T, device=q.device)
    block = max(1, (1 << 26) // (len(q_HTd) * T))
    for start in range(0, q.shape[2], block):
        own = at[T - q.shape[2] + start :][:block, None]
        p = (q[:, :, start : start + block] @ k.mT * q.shape[-1] ** -0.5).masked_fill(at > own, -torch.inf).softmax(-1)
        out = p @ v
        far = v.square().sum(-1)[:, :, None] - 2 * out @ v.mT + out.square().sum(-1, keepdim=True)
        weight = (p.square() * far.clamp(min=0)).masked_fill((at == own) | (at < skip), 0.0)
        by_query[:, :, start : start + block] = weight.sum(-1).double()
        by_key += weight.sum((1, 2)).double()
    return by_query + 0.1 * by_query.mean((1, 2), keepdim=True) + 1e-30, by_key + 0.1 * by_key.mean(1, keepdim=True) + 1e-30


def canonical_axes(qq_Ndd: torch.Tensor, kk_Ndd: torch.Tensor, mean_Nd: torch.Tensor, tokens: int) -> Axes:
    """From E[q q^T], E[k k^T] and E[k], FP64, of so many tokens. Few of them say little about directions: each channel gets d / tokens of
    the mean power on top, 3 % at least."""
    share = max(0.03, mean_Nd.shape[-1] / tokens)
    qq, kk = _loaded(qq_Ndd, share), _loaded(kk_Ndd - mean_Nd[:, :, None] * mean_Nd[:, None], share)
    power, u = torch.linalg.eigh(qq)
    root = (u * power.sqrt()[:, None]) @ u.mT
    power, u = torch.linalg.eigh(root @ kk @ root)
    power, u = power.flip(-1).sqrt(), u.flip(-1)
    return Axes((u.mT @ root) * power.rsqrt()[..., None], power, mean_Nd)


def _loaded(m_Ndd: torch.Tensor, share: float) -> torch.Tensor:
    mean = m_Ndd.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-9)
    return m_Ndd + share * mean[:, None, None] * torch.eye(m_Ndd.shape[-1], dtype=m_Ndd.dtype)


def spread(axes: Axes, outliers: int) -> tuple[Basis, torch.Tensor]:
    """The basis whose first `outliers` channels are the loudest axes and whose others share the rest evenly; and E[q^2] and Var[k] of its
    channels, FP64 [N, d]."""
    d = axes.power.shape[-1]
    mix = torch.eye(d, dtype=torch.float64)
    n = d - outliers
    turn = 2 * math.pi / n * torch.outer(torch.arange(n), torch.arange(n)).remainder(n).double()
    mix[outliers:, outliers:] = (turn.cos() + turn.sin()) / math.sqrt(n)
    into = (mix @ axes.into.double()).half()
    return Basis(into, torch.linalg.inv(into.double()).float()), axes.power.double() @ mix.square().T
