"""The law of `probe_topk`: everything one tap has to say, in readable PyTorch.

One tap (the stream at one point of a layer) serves H targets: one for the residual tap, up to two for the MoE input. For each target:
RMSNorm, gate product, low-rank residual, top-k of the router's score, and P(at least one token uses e) as integers of 1/PROB_ONE.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...types import PROB_ONE


@dataclass(frozen=True, slots=True, eq=False)
class TapWeights:
    """The packed weights of a tap's H targets, made once.

    weight_HND  gate rows (E), then `down` rows (R), each times the target's norm weight; N = E + R; bf16, fp16 or fp32
    past_HRD    the same for `down` of the recent past, or None where no target reads it
    shift_HR, up_HER, out_HE  as in `RoutingProbe`, float32; a selection bias of a softmax router is part of `out`
    bias_HE     selection bias of a sigmoid router, float32 (zeros otherwise)
    sharp_H     1 / temperature, float32
    """

    weight_HND: torch.Tensor
    past_HRD: torch.Tensor | None
    shift_HR: torch.Tensor
    up_HER: torch.Tensor
    out_HE: torch.Tensor
    bias_HE: torch.Tensor
    sharp_H: torch.Tensor
    top_k: int
    linear: int
    norm_eps: float
    sigmoid: bool = False
    n_group: int = 1
    topk_group: int = 1


def scores(logits: torch.Tensor, bias: torch.Tensor, sigmoid: bool, n_group: int, topk_group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(soft, hard) scores as `probes.probe.scores` has them, for any leading shape."""
    s = torch.sigmoid(logits) + bias if sigmoid else logits
    if topk_group == n_group:
        return s, s
    grouped = s.unflatten(-1, (n_group, -1))
    rank = grouped.topk(min(2 if sigmoid else 1, grouped.shape[-1]), -1).values.sum(-1)
    top = rank.topk(topk_group, -1)
    gap = (top.values[..., -1:] - rank).clamp_min(0.0)
    out = torch.ones_like(rank, dtype=torch.bool).scatter(-1, top.indices, False)
    return (grouped - gap.unsqueeze(-1)).flatten(-2), grouped.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(-2)


def tap_logits(hidden_TD: torch.Tensor, past_TD: torch.Tensor | None, weight_HND: torch.Tensor, past_HRD: torch.Tensor | None,
               shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor, linear: int, norm_eps: float) -> torch.Tensor:
    """Expected router logits of every target, float32 [H, T, E]. The past (`probes.collect.recent_past`) is not normalised again."""
    experts = out_HE.shape[1]
    x_TD = hidden_TD.float()
    x_TD = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + norm_eps)
    y_HTN = torch.matmul(x_TD, weight_HND.float().mT)
    a_HTR = y_HTN[..., experts:] + shift_HR.unsqueeze(1)
    if past_TD is not None and past_HRD is not None:
        a_HTR = a_HTR + torch.matmul(past_TD.float(), past_HRD.float().mT)
    a_HTR = torch.cat([a_HTR[..., :linear], F.silu(a_HTR[..., linear:])], -1)
    return y_HTN[..., :experts] + torch.matmul(a_HTR, up_HER.mT) + out_HE.unsqueeze(1)


def probe_topk_naive(hidden_TD: torch.Tensor, past_TD: torch.Tensor | None, weight_HND: torch.Tensor, past_HRD: torch.Tensor | None,
                     shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor, bias_HE: torch.Tensor, sharp_H: torch.Tensor,
                     top_k: int, linear: int, norm_eps: float, sigmoid: bool, n_group: int,
                     topk_group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids int32 [H, T, K], best first, and prob int32 [H, E], the union over the tokens in units of 1/PROB_ONE.

    A row whose logits are not all finite says nothing: its ids are 0 .. K-1 and it adds nothing to `prob`.
    """
    z = tap_logits(hidden_TD, past_TD, weight_HND, past_HRD, shift_HR, up_HER, out_HE, linear, norm_eps)
    good = z.isfinite().all(-1, keepdim=True)
    experts = z.shape[-1]
    soft, hard = scores(torch.where(good, z, torch.zeros((), device=z.device)), bias_HE.unsqueeze(1), sigmoid, n_group, topk_group)
    count = min(top_k + 1, experts)
    best = hard.topk(count, -1)
    lowest = torch.arange(top_k, device=z.device, dtype=torch.int32)
    ids = torch.where(good, best.indices[..., :top_k].int(), lowest)
    if count == top_k:
        prob = torch.ones_like(soft)
    else:
        edge = best.values[..., -2:]
        edge = torch.where(edge == float("-inf"), edge[..., :1], edge)
        prob = torch.sigmoid((soft - edge.mean(-1, keepdim=True)) * sharp_H.view(-1, 1, 1))
    union = 1.0 - (1.0 - torch.where(good, prob, torch.zeros((), device=z.device))).prod(1)
    return ids, (union * PROB_ONE).round().to(torch.int32)


def pack(gates: Sequence[Any], parts: Sequence[tuple[torch.Tensor, ...] | None], sharp: Sequence[float], linear: int,
         dtype: torch.dtype) -> TapWeights:
    """The targets of one tap. `gates`: their `GateSpec`s; `parts`: (down_RW, shift_R, up_ER, out_E) or None for a stale gate."""
    first = gates[0]
    hidden = first.hidden
    rank = max([p[0].shape[0] for p in parts if p is not None], default=1)
    past = any(p is not None and p[0].shape[1] > hidden for p in parts)
    weight, past_weight, shift, up, out, bias = [], [], [], [], [], []
    sigmoid = first.kind == "sigmoid_group"
    for g, p in zip(gates, parts):
        zero = torch.zeros(rank, hidden, device=g.weight_ED.device)
        stale = (zero, zero[:, 0], zero.new_zeros(g.experts, rank), zero.new_zeros(g.experts))
        down_RW, shift_R, up_ER, out_E = stale if p is None else p
        choice = g.bias_E if g.bias_E is not None else torch.zeros_like(out_E)
        weight.append(torch.cat([g.weight_ED, down_RW[:, :hidden]]) * g.norm_D)
        past_weight.append(down_RW[:, hidden:] * g.norm_D if down_RW.shape[1] > hidden else zero)
        shift.append(shift_R)
        up.append(up_ER)
        out.append(out_E if sigmoid else out_E + choice)
        bias.append(choice if sigmoid else torch.zeros_like(out_E))
    stacked = [torch.stack(t).float().contiguous() for t in (shift, up, out, bias)]
    sharp_H = torch.tensor(sharp, device=first.weight_ED.device, dtype=torch.float32)
    past_HRD = torch.stack(past_weight).to(dtype).contiguous() if past else None
    return TapWeights(torch.stack(weight).to(dtype).contiguous(), past_HRD, *stacked, sharp_H, first.top_k, linear, first.norm_eps, sigmoid,
                      first.n_group, first.topk_group)
