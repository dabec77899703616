"""The routing probe: which experts will layer L choose, seen from an earlier point of the residual stream.

Two taps a layer. The residual that enters decoder layer L gives horizon 0 (for L itself, before its attention). The MoE input of
layer L (the residual after its attention, before its pre-MoE norm) gives horizon 1 (for L+1) and horizon 2 (for L+2). For every
(target, horizon):

    x_TD      = RMSNorm of the tap with the *target* layer's own weight
    logits_TE = x_TD @ gate_ED.T  +  act(x_TD @ down_RD.T + shift_R) @ up_ER.T + out_E
    prob_TE   = sigmoid((score_TE - boundary_T) / temperature)

`act` leaves the first `linear` of the R units as they are (a plain low-rank correction) and applies SiLU to the rest: these stand in for
the MoE block between tap and target. The gate is the target's own, frozen, copied from the model and never stored. `up` and `out` start at
zero, so an untrained probe is the stale gate, bitwise. `boundary` is the middle between the k-th and the next score, so `prob` estimates
P(expert is in the top-k) and has one free number, the temperature (`calibrate.py`). Related work: PROBE (arXiv 2602.00509), pre-attention
routing prediction (arXiv 2511.10676); RMSNorm arXiv 1910.07467; group-limited selection arXiv 2412.19437.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..checkpoint import contained, load_tensors, read_json, save_tensors, sha256_file, sha256_tensors, write_json, write_text
from ..errors import ArtefactError, ProbeMismatchError, ShapeError
from ..types import PROB_ONE

VERSION = 2
HORIZONS = (0, 1, 2)
KINDS = ("softmax_topk", "topk_softmax", "sigmoid_group")
MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class GateSpec:
    """One MoE layer's router and the norm before it, as the probe needs them.

    weight_ED  router weight, float              bias_E  selection bias or None: added to the logits (softmax kinds) or to the
    norm_D     weight of that layer's own               sigmoid scores (`sigmoid_group`, DeepSeek-V3's e_score_correction_bias)
               pre-MoE RMSNorm, any offset folded in
    kind       'softmax_topk' (Qwen, OLMoE, DeepSeek-V2), 'topk_softmax' (Mixtral, GPT-OSS), 'sigmoid_group' (DeepSeek-V3, GLM)
    n_group, topk_group  group-limited selection; a group's score is its best expert (softmax) or the sum of its best two (sigmoid)
    scaling    routed scaling factor: changes weights, never the choice; kept so that a gate is whole
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

    def to(self, device: torch.device | str) -> GateSpec:
        """A float32 copy on `device` (the same storage where nothing changes)."""
        def move(t: torch.Tensor) -> torch.Tensor:
            return t.detach().to(device, torch.float32).contiguous()

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


@dataclass(eq=False, slots=True)
class Residual:
    """The learnt part of all targets of one horizon, float32. Row l belongs to target layer l; `used_L[l]` False means stale gate.

    down_LRD, shift_LR, up_LER, out_LE as in the module's formula; temperature_L > 0.
    """

    down_LRD: torch.Tensor
    shift_LR: torch.Tensor
    up_LER: torch.Tensor
    out_LE: torch.Tensor
    temperature_L: torch.Tensor
    linear: int
    used_L: list[bool]

    @staticmethod
    def zero(layers: int, experts: int, hidden: int, rank: int, linear: int = 0) -> Residual:
        return Residual(torch.zeros(layers, rank, hidden), torch.zeros(layers, rank), torch.zeros(layers, experts, rank),
                        torch.zeros(layers, experts), torch.ones(layers), linear, [False] * layers)


def residual_logits(x_TD: torch.Tensor, down_RD: torch.Tensor, shift_R: torch.Tensor, up_ER: torch.Tensor, out_E: torch.Tensor, *,
                    linear: int, dropout: float = 0.0) -> torch.Tensor:
    """act(x @ down.T + shift) @ up.T + out, for one target ([T, D] and [R, D]) or batched over targets ([L, T, D], [L, R, D])."""
    if x_TD.dim() == 2:
        a_TR = torch.addmm(shift_R, x_TD, down_RD.mT)
    else:
        a_TR = torch.baddbmm(shift_R.unsqueeze(-2), x_TD, down_RD.mT)
    # Concatenation rather than a write in place: the same line serves autograd.
    a_TR = F.silu(a_TR) if linear == 0 else torch.cat([a_TR[..., :linear], F.dropout(F.silu(a_TR[..., linear:]), dropout, dropout > 0)], -1)
    return torch.addmm(out_E, a_TR, up_ER.mT) if x_TD.dim() == 2 else torch.baddbmm(out_E.unsqueeze(-2), a_TR, up_ER.mT)


def gate_hash(gates: Sequence[GateSpec]) -> str:
    """Identity of the routers a probe was made for: of values rounded to bfloat16, so that a model loaded in bfloat16 or float32 agrees."""
    named: dict[str, torch.Tensor] = {}
    for i, g in enumerate(gates):
        named[f"{i}.weight"], named[f"{i}.norm"] = g.weight_ED.bfloat16(), g.norm_D.bfloat16()
        if g.bias_E is not None:
            named[f"{i}.bias"] = g.bias_E.bfloat16()
        named[f"{i}.rule"] = torch.tensor([g.top_k, KINDS.index(g.kind), g.n_group, g.topk_group])
    return sha256_tensors(named)


def _pack(name: str, value_LRD: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """int8 with a float16 scale per row and per column. The stream's channels differ in size by a factor of hundreds, and a row's
    weights by the inverse: with row scales alone the smallest channels would set the step of the largest ones."""
    column = value_LRD.square().mean(-2, keepdim=True).sqrt()
    column = (column / column.amax(-1, keepdim=True).clamp_min(1e-30)).clamp_min(1e-4).half()
    even = value_LRD / column.float()
    row = (even.abs().amax(-1, keepdim=True) / 127).clamp_min(6e-8).half()
    out[name] = (even / row.float()).round().clamp(-127, 127).to(torch.int8)
    out[name + ".row"], out[name + ".column"] = row, column


def _unpack(name: str, tensors: dict[str, torch.Tensor], where: str) -> torch.Tensor:
    value, row, column = (tensors[name + tail] for tail in ("", ".row", ".column"))
    if (value.dtype, row.dtype, column.dtype) != (torch.int8, torch.float16, torch.float16):
        raise ArtefactError(f"{name} has dtypes {value.dtype}, {row.dtype}, {column.dtype}", where=where,
                            expected="int8 with float16 scales", do="fit the probe again")
    return value.float() * row.float() * column.float()


class RoutingProbe:
    """All layers and horizons of one model. Holds float32 tensors on one device; reading it is thread-safe, `to` is not.

    `residuals[h]` is None when the horizon was never fitted; then, and for layers whose `used_L` is False, it is the stale gate.
    """

    def __init__(self, gates: Sequence[GateSpec], residuals: Sequence[Residual | None] = (None, None, None)) -> None:
        if not gates or len(residuals) != len(HORIZONS):
            raise ShapeError("a probe needs at least one gate and three horizons", where="RoutingProbe", do="pass gates(model)")
        if len({(g.experts, g.hidden, g.top_k) for g in gates}) != 1:
            raise ShapeError("MoE layers differ in experts, hidden size or top-k", where="RoutingProbe",
                             expected="one shape for all layers", do="make one probe per group of equal layers")
        self.gates = [g.to(g.weight_ED.device) for g in gates]
        self.residuals = list(residuals)
        self.refresh()

    def refresh(self) -> None:
        """Take over a change made to `residuals` in place."""
        # Views per target, made once: indexing a stacked tensor costs more than the product at one token.
        self._parts: dict[tuple[int, int], tuple[torch.Tensor, ...] | None] = {}
        self._inverse_temperature: dict[tuple[int, int], float] = {}
        self._linear = [r.linear if r is not None else 0 for r in self.residuals]
        for h, r in enumerate(self.residuals):
            for layer in range(len(self.gates)):
                used = r is not None and r.used_L[layer]
                self._parts[layer, h] = (r.down_LRD[layer], r.shift_LR[layer], r.up_LER[layer], r.out_LE[layer]) if r and used else None
                self._inverse_temperature[layer, h] = 1.0 / float(r.temperature_L[layer]) if r is not None else 1.0

    # shape -----------------------------------------------------------------------------------------------------------
    @property
    def layers(self) -> int:
        return len(self.gates)

    @property
    def experts(self) -> int:
        return self.gates[0].experts

    @property
    def top_k(self) -> int:
        return self.gates[0].top_k

    def horizons(self, tap_layer: int) -> tuple[int, ...]:
        """Horizons that have a target from this layer's taps."""
        return tuple(h for h in HORIZONS if tap_layer + h < len(self.gates))

    def to(self, device: torch.device | str) -> RoutingProbe:
        """Move in place; returns self."""
        self.gates = [g.to(device) for g in self.gates]
        for r in self.residuals:
            if r is not None:
                r.down_LRD, r.shift_LR, r.up_LER, r.out_LE = (t.to(device) for t in (r.down_LRD, r.shift_LR, r.up_LER, r.out_LE))
        self.refresh()
        return self

    # use -------------------------------------------------------------------------------------------------------------
    def logits(self, tap_layer: int, horizon: int, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Expected router logits of layer `tap_layer + horizon`, float32 [T, E]. `hidden_TD` is the tap: the residual that enters the
        layer for horizon 0, its MoE input for 1 and 2; any float dtype. Raises ShapeError."""
        target = tap_layer + horizon
        if not (0 <= tap_layer and horizon in HORIZONS and target < len(self.gates)):
            raise ShapeError(f"no target at layer {tap_layer} + horizon {horizon}", where="RoutingProbe",
                             expected=f"a target below {len(self.gates)}", do="ask only for probe.horizons(tap_layer)")
        gate = self.gates[target]
        if hidden_TD.dim() != 2 or hidden_TD.shape[1] != gate.hidden:
            raise ShapeError(f"hidden states have shape {tuple(hidden_TD.shape)}", where=f"layer {tap_layer}",
                             expected=f"[tokens, {gate.hidden}]", do="flatten batch and sequence; pass the residual stream, not its norm")
        x_TD = normalise(hidden_TD, gate)
        logits_TE = F.linear(x_TD, gate.weight_ED)
        parts = self._parts[target, horizon]
        return logits_TE if parts is None else logits_TE + residual_logits(x_TD, *parts, linear=self._linear[horizon])

    def forecast(self, tap_layer: int, horizon: int, hidden_TD: torch.Tensor) -> torch.Tensor:
        """P(expert is in the top-k of layer `tap_layer + horizon`), float32 [T, E]. A row with NaN gives NaN; see `quantise_union`."""
        target = tap_layer + horizon
        logits_TE = self.logits(tap_layer, horizon, hidden_TD)
        return torch.sigmoid(margins(logits_TE, self.gates[target]) * self._inverse_temperature[target, horizon])

    def candidates(self, tap_layer: int, horizon: int, hidden_TD: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Ids int64 [T, C], most probable first; C defaults to top-k, where group limits are kept as the router keeps them."""
        gate = self.gates[tap_layer + horizon]
        logits_TE = self.logits(tap_layer, horizon, hidden_TD)
        return select(logits_TE, gate) if count is None else scores(logits_TE, gate)[0].topk(count, -1).indices

    # store -----------------------------------------------------------------------------------------------------------
    def save_pretrained(self, folder: Path | str, *, card: str = "", extra: dict[str, Any] | None = None) -> None:
        """Write config.json, model.safetensors and README.md. The weights go first and the config, which names their hash, last: a folder
        interrupted half way is refused by `from_pretrained`, never half used. `extra` must be JSON."""
        folder = Path(folder)
        tensors: dict[str, torch.Tensor] = {}
        used: dict[str, list[int]] = {}
        rank = linear = 0
        for h, r in enumerate(self.residuals):
            if r is None:
                continue
            rank, linear = int(r.down_LRD.shape[1]), r.linear
            # The first h layers have no tap so far ahead of them: nothing is kept for them.
            _pack(f"h{h}.down", r.down_LRD[h:], tensors)
            _pack(f"h{h}.up", r.up_LER[h:], tensors)
            tensors[f"h{h}.shift"], tensors[f"h{h}.out"] = r.shift_LR[h:].float(), r.out_LE[h:].float()
            tensors[f"h{h}.temperature"] = r.temperature_L[h:].float()
            used[str(h)] = [i for i, u in enumerate(r.used_L) if u]
        save_tensors(folder / "model.safetensors", tensors, {"format": "moe_prefetch.probe"})
        write_text(folder / "README.md", card or "# Routing probe\n\nNo figures were recorded for this probe.\n")
        write_json(folder / "config.json", {
            "format": "moe_prefetch.probe", "version": VERSION, "layers": self.layers, "experts": self.experts,
            "hidden": self.gates[0].hidden, "top_k": self.top_k, "rank": rank, "linear": linear, "used": used,
            "gate_hash": gate_hash(self.gates), "weights_sha256": sha256_file(folder / "model.safetensors"), "extra": extra or {}})

    @classmethod
    def from_pretrained(cls, folder: Path | str, gates: Sequence[GateSpec]) -> RoutingProbe:
        """Read a probe for the model that `gates` came from. Raises ArtefactError (missing, altered, hostile, other version) and
        ProbeMismatchError (made for other dimensions or other router weights)."""
        config, residuals = read_folder(folder)
        probe = cls(gates)
        have = {"layers": probe.layers, "experts": probe.experts, "hidden": gates[0].hidden, "top_k": probe.top_k}
        wrong = {k: config.get(k) for k, v in have.items() if config.get(k) != v}
        if wrong:
            raise ProbeMismatchError(f"the probe was made for another model: {wrong}", where=str(folder),
                                     expected=str({k: have[k] for k in wrong}), do="fit a probe for this model")
        if config.get("gate_hash") != gate_hash(gates):
            raise ProbeMismatchError("the probe was made for other router weights", where=str(folder),
                                     expected="the gate hash of this model", do="fit it again after every change of the router")
        probe.residuals = residuals
        probe.refresh()
        return probe


def read_folder(folder: Path | str) -> tuple[dict[str, Any], list[Residual | None]]:
    """What `save_pretrained` wrote, checked as far as it can be without the model: (config, residuals by horizon). Raises ArtefactError."""
    folder = Path(folder)
    config = read_json(contained(folder, "config.json"))
    if not isinstance(config, dict) or config.get("format") != "moe_prefetch.probe" or config.get("version") != VERSION:
        raise ArtefactError("not a routing probe of this version", where=str(folder),
                            expected=f"format moe_prefetch.probe, version {VERSION}", do="fit the probe again with this version")
    tensors = load_tensors(contained(folder, "model.safetensors"), sha256=str(config.get("weights_sha256")), cap=MAX_BYTES)
    try:
        return config, [_read_residual(h, tensors, config["used"][str(h)], config, str(folder)) if f"h{h}.down" in tensors else None
                        for h in HORIZONS]
    except (KeyError, TypeError, IndexError, RuntimeError) as e:
        raise ArtefactError(f"the probe's parts do not fit together: {e}", where=str(folder), do="fit the probe again") from e


def _read_residual(h: int, tensors: dict[str, torch.Tensor], used: list[int], config: dict[str, Any], where: str) -> Residual:
    layers, experts, hidden, rank, linear = (config[k] for k in ("layers", "experts", "hidden", "rank", "linear"))
    kept = (_unpack(f"h{h}.down", tensors, where), tensors[f"h{h}.shift"].float(), _unpack(f"h{h}.up", tensors, where),
            tensors[f"h{h}.out"].float(), tensors[f"h{h}.temperature"].float())
    down, shift, up, out = (torch.cat([t.new_zeros(h, *t.shape[1:]), t]) for t in kept[:-1])
    r = Residual(down, shift, up, out, torch.cat([kept[-1].new_ones(h), kept[-1]]), linear, [i in set(used) for i in range(layers)])
    want = {"down_LRD": (layers, rank, hidden), "shift_LR": (layers, rank), "up_LER": (layers, experts, rank), "out_LE": (layers, experts),
            "temperature_L": (layers,)}
    for name, shape in want.items():
        value = getattr(r, name)
        if tuple(value.shape) != shape or not bool(torch.isfinite(value).all()):
            raise ArtefactError(f"horizon {h}, {name}: shape {tuple(value.shape)} or values not finite", where=where, expected=str(shape),
                                do="fit the probe again")
    if not isinstance(linear, int) or not 0 <= linear <= rank:
        raise ArtefactError(f"{linear} linear units of {rank}", where=where, do="fit the probe again")
    if not bool((r.temperature_L > 0).all()):
        raise ArtefactError(f"horizon {h} has a temperature that is not positive", where=where, do="calibrate the probe again")
    return r


def quantise_union(prob_TE: torch.Tensor) -> tuple[int, ...]:
    """P(at least one of the tokens uses e), as integers of 1/PROB_ONE: what a `Forecast` carries. float [T, E] -> E integers.

    Tokens are taken as independent. A NaN says nothing and counts as 0; no tokens gives zeros.
    """
    p_TE = torch.nan_to_num(prob_TE, nan=0.0)
    p_E = p_TE[0] if p_TE.shape[0] == 1 else 1.0 - (1.0 - p_TE).prod(0)
    return tuple((p_E * PROB_ONE).round().to(torch.int32).tolist())
