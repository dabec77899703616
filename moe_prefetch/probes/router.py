"""A router as the probes see it: its weights, how it ranks and chooses, and what it is recognised by."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..checkpoint import sha256_tensors
from ..errors import ShapeError

KINDS = ("softmax_topk", "topk_softmax", "sigmoid_group")


@dataclass(frozen=True, slots=True, eq=False)
class GateSpec:
    """One MoE layer's router and the norm before it, as the probe needs them.

    weight_ED  router weight, float              bias_E  selection bias or None: added to the logits (softmax kinds) or to the
    norm_D     weight of that layer's own               sigmoid scores (`sigmoid_group`, DeepSeek-V3's e_score_correction_bias)
               pre-MoE RMSNorm, any offset folded in
    kind       'softmax_topk' (Qwen, OLMoE, DeepSeek-V2), 'topk_softmax' (Mixtral, GPT-OSS), 'sigmoid_group' (DeepSeek-V3, GLM)
    n_group, topk_group  group-limited selection; a group's score is its best expert (softmax) or the sum of its best two (sigmoid)
    scaling    routed scaling factor: changes weights, never the choice; kept so that a gate is whole
    shared     the taps of horizons 1 and 2 hold the layer's shared expert's output too
    """

    weight_ED: torch.Tensor
    norm_D: torch.Tensor
    norm_eps: float
    top_k: int
    kind: str = "softmax_topk"
    bias_E: torch.Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    scaling: float = 1.0
    shared: bool = False

    def __post_init__(self) -> None:
        experts, hidden = self.weight_ED.shape
        faults = []
        if self.kind not in KINDS:
            faults.append(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        if tuple(self.norm_D.shape) != (hidden,):
            faults.append(f"norm_D has shape {tuple(self.norm_D.shape)}, the gate has hidden size {hidden}")
        if self.bias_E is not None and tuple(self.bias_E.shape) != (experts,):
            faults.append(f"bias_E has shape {tuple(self.bias_E.shape)} for {experts} experts")
        if not 1 <= self.top_k <= experts:
            faults.append(f"top_k {self.top_k} of {experts} experts")
        if self.n_group < 1 or experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            faults.append(f"{self.topk_group} of {self.n_group} groups over {experts} experts")
        elif self.top_k > self.topk_group * (experts // self.n_group):
            faults.append(f"top_k {self.top_k} does not fit into {self.topk_group} groups of {experts // self.n_group}")
        if faults:
            raise ShapeError("this is no router: " + "; ".join(faults), where="GateSpec", do="check the integration that read the model")

    @property
    def experts(self) -> int:
        return int(self.weight_ED.shape[0])

    @property
    def hidden(self) -> int:
        return int(self.weight_ED.shape[1])

    def to(self, device: torch.device | str, *, copy: bool = False) -> GateSpec:
        """In float32 on `device`; the same storage where nothing changes, unless `copy`."""
        def move(t: torch.Tensor) -> torch.Tensor:
            return t.detach().to(device, torch.float32, copy=copy).contiguous()

        bias_E = None if self.bias_E is None else move(self.bias_E)
        return replace(self, weight_ED=move(self.weight_ED), norm_D=move(self.norm_D), bias_E=bias_E)


def normalise(hidden_TD: torch.Tensor, gate: GateSpec) -> torch.Tensor:
    """RMSNorm with the target's weight, float32, in the order of operations that transformers uses (bit-equal in float32)."""
    x = hidden_TD.float()
    return gate.norm_D * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + gate.norm_eps))


def scores(logits_TE: torch.Tensor, gate: GateSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """What the router ranks by. Returns (soft_TE, hard_TE): `hard` is -inf outside the chosen groups, and the top-k of `hard` is the
    router's choice; `soft` lowers the experts of a group that was not chosen by that group's distance to the last chosen one, so that
    a near miss keeps a probability. Without groups both are the same tensor. Works on any leading shape.
    """
    s = torch.sigmoid(logits_TE) if gate.kind == "sigmoid_group" else logits_TE
    if gate.bias_E is not None:
        s = s + gate.bias_E
    if gate.topk_group == gate.n_group:
        return s, s
    grouped = s.unflatten(-1, (gate.n_group, -1))
    best = min(2 if gate.kind == "sigmoid_group" else 1, grouped.shape[-1])
    rank_TG = grouped.topk(best, -1).values.sum(-1)
    top = rank_TG.topk(gate.topk_group, -1)
    gap_TG = (top.values[..., -1:] - rank_TG).clamp_min(0.0)
    out_TG = torch.ones_like(rank_TG, dtype=torch.bool).scatter(-1, top.indices, False)
    hard = grouped.masked_fill(out_TG.unsqueeze(-1), float("-inf")).flatten(-2)
    return (grouped - gap_TG.unsqueeze(-1)).flatten(-2), hard


def select(logits_TE: torch.Tensor, gate: GateSpec) -> torch.Tensor:
    """The router's choice, int64 [T, K], best first: the law for every router kind."""
    return scores(logits_TE, gate)[1].topk(gate.top_k, -1).indices


def margins(logits_TE: torch.Tensor, gate: GateSpec) -> torch.Tensor:
    """Signed distance of each expert's score from the top-k boundary, float32 [T, E]: positive means predicted chosen."""
    soft, hard = scores(logits_TE, gate)
    if gate.top_k == gate.experts:
        return torch.full_like(soft, float("inf"))
    edge = hard.topk(gate.top_k + 1, -1).values[..., -2:]
    if hard is not soft:
        # With exactly k experts in the chosen groups there is no next score among them: the boundary is the k-th itself.
        edge = torch.where(edge == float("-inf"), edge[..., :1], edge)
    return soft - edge.mean(-1, keepdim=True)


def gate_hash(gates: Sequence[GateSpec]) -> str:
    """Identity of the routers a probe was made for: of values rounded to bfloat16, so that a model loaded in bfloat16 or float32 agrees."""
    named: dict[str, torch.Tensor] = {}
    for i, g in enumerate(gates):
        named[f"{i}.weight"], named[f"{i}.norm"] = g.weight_ED.bfloat16(), g.norm_D.bfloat16()
        if g.bias_E is not None:
            named[f"{i}.bias"] = g.bias_E.bfloat16()
        # Softmax before or after the top-k chooses the same experts.
        kind = KINDS.index(g.kind.replace("topk_softmax", "softmax_topk"))
        named[f"{i}.rule"] = torch.tensor([g.top_k, kind, g.n_group, g.topk_group, g.shared])
    return sha256_tensors(named)
