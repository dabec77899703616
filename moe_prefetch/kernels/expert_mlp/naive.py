"""The law of the expert FFN: down(act(gate(x)) * up(x)), and of a MoE layer: a weighted sum in ascending expert order."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

Activation = Callable[[torch.Tensor], torch.Tensor]


def expert_mlp(hidden_TD: torch.Tensor, gate_up_FD: torch.Tensor, down_DF: torch.Tensor, act: Activation) -> torch.Tensor:
    """One expert over some tokens.

    hidden_TD [T, D]; gate_up_FD [2 F, D], gate rows first; down_DF [D, F]; one dtype. Returns [T, D] in that dtype.
    """
    gate_TF, up_TF = linear(hidden_TD, gate_up_FD).chunk(2, dim=-1)
    return linear(act(gate_TF) * up_TF, down_DF)


def tokens_of(expert: int, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens routed to `expert` [n] int64, ascending, and their weights [n]; an expert named twice by a token gets both weights."""
    chosen_TK = ids_TK == expert
    token_n = chosen_TK.any(dim=-1).nonzero().squeeze(-1)
    weight_n = torch.where(chosen_TK, weights_TK, 0).sum(dim=-1)[token_n]
    return token_n, weight_n


def accumulate(out_TD: torch.Tensor, hidden_TD: torch.Tensor, token_n: torch.Tensor, weight_n: torch.Tensor,
               gate_up_FD: torch.Tensor, down_DF: torch.Tensor, act: Activation) -> None:
    """out_TD[token_n] += weight_n * expert(hidden_TD[token_n]), in place; tokens are distinct, so the order within a call is free."""
    y_nD = expert_mlp(hidden_TD[token_n], gate_up_FD, down_DF, act) * weight_n[:, None]
    out_TD.index_add_(0, token_n, y_nD.to(out_TD.dtype))


def moe(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor,
        act: Activation) -> torch.Tensor:
    """A whole MoE layer: ids_TK [T, K] int64 (ids below 0 or from E on are masked), weights_TK [T, K]. Returns [T, D]."""
    out_TD = torch.zeros_like(hidden_TD)
    for e in range(gate_up_EFD.shape[0]):
        token_n, weight_n = tokens_of(e, ids_TK, weights_TK)
        if len(token_n):
            accumulate(out_TD, hidden_TD, token_n, weight_n, gate_up_EFD[e], down_EDF[e], act)
    return out_TD
