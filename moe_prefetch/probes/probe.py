"""The routing probe: which experts will layer L choose, seen from an earlier point of the residual stream.

Two taps a layer. The residual that enters decoder layer L gives horizon 0 (for L itself, before its attention). The MoE input of
layer L (the residual after its attention, before its pre-MoE norm; with the shared expert's output added where the model computes one
before the routed experts) gives horizon 1 (for L+1) and horizon 2 (for L+2). For every (target, horizon):

    x_TD      = RMSNorm of the tap with the *target* layer's own weight
    logits_TE = x_TD @ gate_ED.T  +  act([x_TD, past_TD] @ down_RW.T + shift_R) @ up_ER.T + out_E
    prob_TE   = sigmoid((score_TE - boundary_T) / temperature)

`act` leaves the first `linear` of the R units as they are (a plain low-rank correction) and applies SiLU to the rest: these stand in for
the MoE block between tap and target. `past` is optional, for horizon 0: the mean of the sequence's earlier taps that halves with every
token (`collect.recent_past`), which stands in for the attention between tap and target. W = D without it and 2 D with it. The gate is
the target's own, frozen, copied from the model and never stored. `up` and `out` start at zero, so an untrained probe is the stale gate,
bitwise. `boundary` is the middle between the k-th and the next score, so `prob` estimates
P(expert is in the top-k) and has one free number, the temperature (`calibrate.py`). Related work: PROBE (arXiv 2602.00509), pre-attention
routing prediction (arXiv 2511.10676); RMSNorm arXiv 1910.07467; group-limited selection arXiv 2412.19437.
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..checkpoint import check_own, contained, json_bytes, load_tensors, read_json, tensors_bytes, write_together
from ..errors import ArtefactError, ProbeMismatchError, ShapeError, UnsupportedModelError
from ..kernels.probe_topk.naive import TapWeights, pack
from ..runtime import REAL, Runtime
from ..types import PROB_ONE
from .router import GateSpec, gate_hash, margins, normalise, scores, select

VERSION = 3
HORIZONS = (0, 1, 2)
MAX_BYTES = 1 << 30
FORMAT = "moe_prefetch.probe"


@dataclass(eq=False, slots=True)
class Residual:
    """The learnt part of all targets of one horizon, float32. Row l belongs to target layer l; `used_L[l]` False means stale gate.

    down_LRW, shift_LR, up_LER, out_LE as in the module's formula; temperature_L > 0.
    """

    down_LRW: torch.Tensor
    shift_LR: torch.Tensor
    up_LER: torch.Tensor
    out_LE: torch.Tensor
    temperature_L: torch.Tensor
    linear: int
    used_L: list[bool]

    def to(self, device: torch.device | str) -> Residual:
        """On `device`; the temperatures stay on the CPU."""
        moved = [t.to(device) for t in (self.down_LRW, self.shift_LR, self.up_LER, self.out_LE)]
        return Residual(*moved, self.temperature_L, self.linear, self.used_L)

    @staticmethod
    def zero(layers: int, experts: int, hidden: int, rank: int, linear: int = 0) -> Residual:
        return Residual(torch.zeros(layers, rank, hidden), torch.zeros(layers, rank), torch.zeros(layers, experts, rank),
                        torch.zeros(layers, experts), torch.ones(layers), linear, [False] * layers)


def residual_logits(x_TW: torch.Tensor, down_RW: torch.Tensor, shift_R: torch.Tensor, up_ER: torch.Tensor, out_E: torch.Tensor, *,
                    linear: int, dropout: float = 0.0) -> torch.Tensor:
    """act(x @ down.T + shift) @ up.T + out, for one target ([T, W] and [R, W]) or batched over targets ([L, T, W], [L, R, W])."""
    if x_TW.dim() == 2:
        a_TR = torch.addmm(shift_R, x_TW, down_RW.mT)
    else:
        a_TR = torch.baddbmm(shift_R.unsqueeze(-2), x_TW, down_RW.mT)
    # Concatenation rather than a write in place: the same line serves autograd.
    a_TR = F.silu(a_TR) if linear == 0 else torch.cat([a_TR[..., :linear], F.dropout(F.silu(a_TR[..., linear:]), dropout, dropout > 0)], -1)
    return torch.addmm(out_E, a_TR, up_ER.mT) if x_TW.dim() == 2 else torch.baddbmm(out_E.unsqueeze(-2), a_TR, up_ER.mT)


def _pack(name: str, value_LRW: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """int8 with a float16 scale per row and per column. The stream's channels differ in size by a factor of hundreds, and a row's
    weights by the inverse: with row scales alone the smallest channels would set the step of the largest ones."""
    column = value_LRW.square().mean(-2, keepdim=True).sqrt()
    column = (column / column.amax(-1, keepdim=True).clamp_min(1e-30)).clamp_min(1e-4).half()
    even = value_LRW / column.float()
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
                self._parts[layer, h] = (r.down_LRW[layer], r.shift_LR[layer], r.up_LER[layer], r.out_LE[layer]) if r and used else None
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
        self.residuals = [r and r.to(device) for r in self.residuals]
        self.refresh()
        return self

    def tap(self, layer: int, dtype: torch.dtype) -> TapWeights | None:
        """What the kernel `probe_topk` reads for the MoE input of `layer`: horizons 1 and 2, as far as there are layers; else None.

        Raises UnsupportedModelError: the horizons have other units.
        """
        ahead = [h for h in (1, 2) if layer + h < len(self.gates)]
        if not ahead:
            return None
        parts = [self._parts[layer + h, h] for h in ahead]
        if len({(p[0].shape[0], self._linear[h]) for h, p in zip(ahead, parts, strict=True) if p is not None}) > 1:
            raise UnsupportedModelError("horizons 1 and 2 have other numbers of units", where=f"probe, layer {layer}", expected="one rank",
                                        do="fit both horizons together")
        linear = max(n for h, n in enumerate(self._linear) if h in ahead)
        return pack([self.gates[layer + h] for h in ahead], parts, [self._inverse_temperature[layer + h, h] for h in ahead], linear, dtype)

    # use -------------------------------------------------------------------------------------------------------------
    def sees_past(self, horizon: int) -> bool:
        """Whether this horizon was fitted with the recent past as a second input."""
        r = self.residuals[horizon]
        return r is not None and r.down_LRW.shape[-1] != self.gates[0].hidden

    def logits(self, tap_layer: int, horizon: int, hidden_TD: torch.Tensor, past_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Expected router logits of layer `tap_layer + horizon`, float32 [T, E]. `hidden_TD` is the tap: the residual that enters the
        layer for horizon 0, its MoE input for 1 and 2; any float dtype. `past_TD` as `collect.recent_past` gives it, read where
        `sees_past`; None is a past of zeros, as at a sequence's start. Raises ShapeError."""
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
        if parts is None:
            return logits_TE
        down_RW, *rest = parts
        if down_RW.shape[1] == gate.hidden:
            x_TW = x_TD
        elif past_TD is None:
            x_TW, down_RW = x_TD, down_RW[:, : gate.hidden]
        elif past_TD.shape == hidden_TD.shape:
            x_TW = torch.cat([x_TD, past_TD.float() * gate.norm_D], 1)
        else:
            raise ShapeError(f"the past has shape {tuple(past_TD.shape)}", where=f"layer {tap_layer}", expected=str(tuple(hidden_TD.shape)),
                             do="give one row a token")
        return logits_TE + residual_logits(x_TW, down_RW, *rest, linear=self._linear[horizon])

    def forecast(self, tap_layer: int, horizon: int, hidden_TD: torch.Tensor, past_TD: torch.Tensor | None = None) -> torch.Tensor:
        """P(expert is in the top-k of layer `tap_layer + horizon`), float32 [T, E]. A row with NaN gives NaN; see `quantise_union`."""
        target = tap_layer + horizon
        logits_TE = self.logits(tap_layer, horizon, hidden_TD, past_TD)
        return torch.sigmoid(margins(logits_TE, self.gates[target]) * self._inverse_temperature[target, horizon])

    def candidates(self, tap_layer: int, horizon: int, hidden_TD: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Ids int64 [T, C], most probable first; C defaults to top-k, where group limits are kept as the router keeps them."""
        gate = self.gates[tap_layer + horizon]
        logits_TE = self.logits(tap_layer, horizon, hidden_TD)
        return select(logits_TE, gate) if count is None else scores(logits_TE, gate)[0].topk(count, -1).indices

    def _norms(self) -> torch.Tensor:
        return torch.stack([g.norm_D for g in self.gates]).cpu()

    def _on_trunk(self) -> bool:
        """Whether horizons 1 and 2 have the same units, tap by tap, so that they need be kept once."""
        one, two = self.residuals[1:]
        if one is None or two is None or one.linear != two.linear or one.down_LRW.shape != two.down_LRW.shape:
            return False
        want = trunk_down(one.down_LRW.cpu(), self._norms())
        return torch.equal(one.shift_LR[1:-1], two.shift_LR[2:]) and torch.allclose(two.down_LRW[2:].cpu(), want[2:], rtol=1e-4, atol=1e-30)

    # store -----------------------------------------------------------------------------------------------------------
    def save_pretrained(self, folder: Path | str, *, card: str = "", extra: dict[str, Any] | None = None,
                        runtime: Runtime = REAL) -> None:
        """Write config.json, model.safetensors and README.md together (`checkpoint.write_together`): the config, which names the weights'
        hash, last, so that no mixture is ever used. `extra` must be JSON. Raises ArtefactError: `check_folder`."""
        folder = check_folder(folder)
        tensors: dict[str, torch.Tensor] = {}
        used: dict[str, list[int]] = {}
        shapes: dict[str, dict[str, int]] = {}
        for h, r in enumerate(self.residuals):
            if r is None:
                continue
            rank, width = r.down_LRW.shape[1:]
            shapes[str(h)] = {"rank": rank, "linear": r.linear, "inputs": width // self.gates[0].hidden}
            # The first h layers have no tap so far ahead of them: nothing is kept for them.
            if h == 2 and self._on_trunk():
                shapes["2"]["trunk"] = 1
            else:
                _pack(f"h{h}.down", r.down_LRW[h:], tensors)
                tensors[f"h{h}.shift"] = r.shift_LR[h:].float()
            _pack(f"h{h}.up", r.up_LER[h:], tensors)
            tensors[f"h{h}.out"], tensors[f"h{h}.temperature"] = r.out_LE[h:].float(), r.temperature_L[h:].float()
            used[str(h)] = [i for i, u in enumerate(r.used_L) if u]
        data = tensors_bytes(tensors, {"format": FORMAT})
        config = {
            "format": FORMAT, "version": VERSION, "layers": self.layers, "experts": self.experts,
            "hidden": self.gates[0].hidden, "top_k": self.top_k, "horizons": shapes, "used": used,
            "gate_hash": gate_hash(self.gates), "weights_sha256": hashlib.sha256(data).hexdigest(), "extra": extra or {}}
        text = card or "# Routing probe\n\nNo figures were recorded for this probe.\n"
        files = {"model.safetensors": data, "README.md": text.encode("utf-8"), "config.json": json_bytes(config)}
        write_together({folder / name: content for name, content in files.items()}, runtime)

    @classmethod
    def from_pretrained(cls, folder: Path | str, gates: Sequence[GateSpec]) -> RoutingProbe:
        """Read a probe for the model that `gates` came from. Raises ArtefactError (missing, altered, hostile, other version) and
        ProbeMismatchError (made for other dimensions or other router weights)."""
        config, residuals = read_folder(folder)
        probe = cls(gates)
        one, two = residuals[1:]
        have = {"layers": probe.layers, "experts": probe.experts, "hidden": gates[0].hidden, "top_k": probe.top_k}
        wrong = {k: config.get(k) for k, v in have.items() if config.get(k) != v}
        if wrong:
            raise ProbeMismatchError(f"the probe was made for another model: {wrong}", where=str(folder),
                                     expected=str({k: have[k] for k in wrong}), do="fit a probe for this model")
        if config.get("gate_hash") != gate_hash(gates):
            raise ProbeMismatchError("the probe was made for other router weights", where=str(folder),
                                     expected="the gate hash of this model", do="fit it again after every change of the router")
        if one is not None and two is not None and "trunk" in config["horizons"]["2"]:
            two.down_LRW = trunk_down(one.down_LRW, probe._norms())
        probe.residuals = [r and r.to(gates[0].weight_ED.device) for r in residuals]
        probe.refresh()
        return probe


def trunk_down(down_LRD: torch.Tensor, norm_LD: torch.Tensor) -> torch.Tensor:
    """Horizon 2's `down` from horizon 1's when both have the same units: the tap is the same, its norm weight another. Row l is for target
    l; a channel that the weight removes is not read."""
    norm_LD = norm_LD.unsqueeze(1)
    ratio = torch.where(norm_LD[2:] == 0, 0.0, norm_LD[1:-1] / torch.where(norm_LD[2:] == 0, 1.0, norm_LD[2:]))
    return torch.cat([torch.zeros_like(down_LRD[:2]), down_LRD[1:-1] * ratio])


def check_folder(folder: Path | str) -> Path:
    """The folder, if a probe can be written there and replaces nothing but a probe. Raises ArtefactError."""
    folder = Path(folder)
    # A fit looked before it began: files beside its state, and no config yet, are its own, cut off between two renames.
    if (folder / "config.json").exists() or not (folder / "fit-state" / "state.json").exists():
        check_own(folder, ("model.safetensors", "README.md", "config.json"), {"format": FORMAT})
    return folder


def read_folder(folder: Path | str) -> tuple[dict[str, Any], list[Residual | None]]:
    """What `save_pretrained` wrote, checked as far as it can be without the model: (config, residuals by horizon); `down` of a horizon that
    stands on a trunk is still the trunk's. Raises ArtefactError."""
    folder = Path(folder)
    config = read_json(contained(folder, "config.json"))
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("version") != VERSION:
        raise ArtefactError("not a routing probe of this version", where=str(folder),
                            expected=f"format {FORMAT}, version {VERSION}", do="fit the probe again with this version")
    tensors = load_tensors(contained(folder, "model.safetensors"), sha256=str(config.get("weights_sha256")), cap=MAX_BYTES)
    try:
        return config, [_read_residual(h, tensors, set(config["used"][str(h)]), config, str(folder)) if str(h) in config["used"] else None
                        for h in HORIZONS]
    except (KeyError, TypeError, IndexError, RuntimeError) as e:
        raise ArtefactError(f"the probe's parts do not fit together: {e}", where=str(folder), do="fit the probe again") from e


def _read_residual(h: int, tensors: dict[str, torch.Tensor], used: set[int], config: dict[str, Any], where: str) -> Residual:
    layers, experts, hidden = (config[k] for k in ("layers", "experts", "hidden"))
    rank, linear, inputs = (config["horizons"][str(h)][k] for k in ("rank", "linear", "inputs"))
    if inputs not in (1, 2):
        raise ArtefactError(f"{inputs} inputs", where=where, expected="1 (the tap) or 2 (and the recent past)", do="fit the probe again")
    trunk, taps = (1, slice(0, layers - h)) if h == 2 and "trunk" in config["horizons"]["2"] else (h, slice(None))
    kept = (_unpack(f"h{trunk}.down", tensors, where)[taps], tensors[f"h{trunk}.shift"].float()[taps],
            _unpack(f"h{h}.up", tensors, where), tensors[f"h{h}.out"].float(), tensors[f"h{h}.temperature"].float())
    down, shift, up, out = (torch.cat([t.new_zeros(h, *t.shape[1:]), t]) for t in kept[:-1])
    # As many as there are: how many the config says is compared below.
    used_L = [i in used for i in range(len(up))]
    r = Residual(down, shift, up, out, torch.cat([kept[-1].new_ones(h), kept[-1]]), linear, used_L)
    want = {"down_LRW": (layers, rank, inputs * hidden), "shift_LR": (layers, rank), "up_LER": (layers, experts, rank),
            "out_LE": (layers, experts), "temperature_L": (layers,)}
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
