"""The law of the expert FFN: down(act(gate(x)) * up(x)), and of a MoE layer: a weighted sum in ascending expert order.

Twice: in the model's dtype, as the CPU serves it, and from records in FP32, as the kernels are judged.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from .record import GROUP, Form, plain_bytes, plain_codes, plain_scales

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


class How(NamedTuple):
    """How a model computes its own experts: the implementation, by transformers' names, and the dtype of the hidden states that they get,
    where that may be another than the weights'."""

    name: str = "eager"
    given: torch.dtype | None = None

    @property
    def casts(self) -> bool:
        """Whether it brings hidden states to the weights' dtype by itself, and autocast does not know its products: `grouped_mm` and
        what is like it."""
        return self.name not in ("eager", "batched_mm")


EAGER = How()


class Shares:
    """What the experts of a layer give, summed as the model's own experts do, so that an attached model has the model's bits.

    `eager`: each expert's share is added to an output of the hidden states' dtype. Others: the K shares of a token, of the dtype that
    expert outputs and routing weights have together, are kept and summed at the end.
    """

    def __init__(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, act: Activation, how: How) -> None:
        self._given, self._act, self._how = (hidden_TD, ids_TK, weights_TK), act, how
        self._out = torch.zeros_like(hidden_TD) if how.name == "eager" else None

    def add(self, expert: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        hidden_TD, ids_TK, weights_TK = self._given
        if self._how.name == "eager":
            accumulate(self._out, hidden_TD, *tokens_of(expert, ids_TK, weights_TK), gate_up_FD, down_DF, self._act)
            return
        token_n, k_n = (ids_TK == expert).nonzero(as_tuple=True)
        x_nD = hidden_TD[token_n]
        if not self._how.casts:
            y_nD = expert_mlp(x_nD, gate_up_FD, down_DF, self._act)
        else:
            with torch.autocast(x_nD.device.type, enabled=False):
                y_nD = expert_mlp(x_nD.to(gate_up_FD.dtype), gate_up_FD, down_DF, self._act)
        share_nD = y_nD * weights_TK[token_n, k_n, None]
        if self._out is None:
            self._out = share_nD.new_zeros(*ids_TK.shape, share_nD.shape[1])
        self._out[token_n, k_n] = share_nD

    def total(self) -> torch.Tensor:
        """[T, D]."""
        if self._out is None:
            return torch.zeros_like(self._given[0])
        return self._out if self._how.name == "eager" else self._out.sum(1).to(self._given[0].dtype)


def moe(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor,
        act: Activation) -> torch.Tensor:
    """A whole MoE layer: ids_TK [T, K] int64 (ids below 0 or from E on are masked), weights_TK [T, K]. Returns [T, D]."""
    out_TD = torch.zeros_like(hidden_TD)
    for e in range(gate_up_EFD.shape[0]):
        token_n, weight_n = tokens_of(e, ids_TK, weights_TK)
        if len(token_n):
            accumulate(out_TD, hidden_TD, token_n, weight_n, gate_up_EFD[e], down_EDF[e], act)
    return out_TD


# from records ---------------------------------------------------------------------------------------------------------------
# E2M1, by code: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def weights_of(record: torch.Tensor, form: Form, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The numbers that a record stands for: gate_up [2 F, D], down [D, F], and with biases gate_up_bias [2 F], down_bias [D]."""
    v = form.layout().views(record)
    out = {name: v[name].to(dtype) for name in ("gate_up_bias", "down_bias") if name in v}
    for name in ("gate_up", "down"):
        w = v[name]
        if form.weights == "mxfp4":
            groups = (form.hidden if name == "gate_up" else form.width) // GROUP
            byte, scale = plain_codes(w, groups), plain_scales(v[f"{name}_scale"], groups)
            code = torch.stack([byte & 15, byte >> 4], -1).flatten(-2)
            value = torch.tensor(E2M1, dtype=torch.float64, device=w.device)[code.long()] * _e8m0(scale)[..., None]
            out[name] = value.flatten(1).to(dtype)
        elif form.weights == "fp8":
            w = plain_bytes(w, form.hidden if name == "gate_up" else form.width).view(torch.float8_e4m3fn)
            scale = v[f"{name}_scale"]
            scale = _e8m0(scale.view(torch.uint8)) if scale.dtype == torch.float8_e8m0fnu else scale.double()
            halves = (scale.chunk(2), w.chunk(2)) if name == "gate_up" else ((scale,), (w,))
            spread = [s.repeat_interleave(form.block, 0)[: len(m)].repeat_interleave(form.block, 1)[:, : m.shape[1]]
                      for s, m in zip(*halves, strict=True)]
            out[name] = (w.to(torch.float32).double() * torch.cat(spread)).to(dtype)
        else:
            out[name] = w.to(dtype)
    return out


def _e8m0(byte: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in float64; 255 is NaN."""
    return torch.where(byte == 255, float("nan"), torch.exp2(byte.double() - 127))


def gated(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """[2 F] -> [F]. Without a limit SwiGLU, silu(gate) * up (arXiv 2002.05202). With one what gpt-oss has: gate at most `limit`, up within
    +-limit, then gate * sigmoid(alpha * gate) * (up + 1)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit == 0:
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def moe_records(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, records: Sequence[torch.Tensor], form: Form,
                limit: float = 0.0, alpha: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The law of the kernels: a MoE layer from records (uint8, one an expert), computed in `dtype` and returned in it, [T, D].

    An expert that a token names twice counts once, with the sum of both weights; ids below 0 or from E on are masked. A token's experts are
    added in ascending order, starting from zero. Each token is computed alone, so its result can't depend on its neighbours.
    """
    out_TD = torch.zeros(hidden_TD.shape, dtype=dtype, device=hidden_TD.device)
    for e in range(len(records)):
        token_n, weight_n = tokens_of(e, ids_TK, weights_TK.to(dtype))
        if not len(token_n):
            continue
        w = weights_of(records[e], form, dtype)
        for t, weight in zip(token_n.tolist(), weight_n, strict=True):
            # A copy, since a row of a matrix may be aligned in another way than its neighbour, and sums follow alignment.
            h = gated(torch.mv(w["gate_up"], hidden_TD[t].to(dtype, copy=True)) + w.get("gate_up_bias", 0), limit, alpha)
            out_TD[t] += weight * (torch.mv(w["down"], h) + w.get("down_bias", 0))
    return out_TD
