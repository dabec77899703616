"""The arithmetic of fitting a probe: all layers of a horizon are one batched product, so a step costs a handful of kernels.

First a pass over data for moments: their ridge solution is the start, and their covariance the preconditioner. Then AdamW on

    loss = KL(router || probe) / KL_0  +  rank_weight * BCE of sigmoid(margin / (tau * std(router logits)))

KL_0 is the ridge start's own divergence, so that flat and peaked routers weigh alike. The second term pushes at the top-k boundary, the
only place where a forecast can be wrong; alone it would forget the order elsewhere. `down` is trained in the whitened coordinates of its
input and folded back, `down = white_down @ W`, which turns weight decay into ridge shrinkage and makes the step size independent of the
stream's few huge channels. Distillation: arXiv 1503.02531; AdamW arXiv 1711.05101.
"""
from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ShapeError, UnsupportedModelError
from .batches import ranks
from .probe import HORIZONS, GateSpec, Residual, RoutingProbe
from .targets import FitConfig, Taps, Targets, all_sum, batched_hits, start_units, unit_rms


def check_gates(gates: Sequence[GateSpec]) -> None:
    """Raises ShapeError for layers that no one probe fits, UnsupportedModelError where there is nothing to forecast."""
    if len({_shape(g) for g in gates}) != 1:
        raise ShapeError("MoE layers differ in shape or router kind, or there are none", where="Trainer",
                         do="fit groups of equal layers on their own")
    if gates[0].top_k >= gates[0].experts:
        raise UnsupportedModelError(f"every token goes to all {gates[0].experts} experts: there is nothing to forecast", where="Trainer",
                                    expected="routers that choose", do="use the plan lru")


class Trainer:
    """Fits all horizons of one probe. Life: `accumulate` some batches, `start`, then `step` in a loop, `probe` at any time.

    Under torch.distributed every rank feeds its own tokens; moments and gradients are summed, so all ranks hold the same weights.
    `state` and `load_state` are complete: a fit that was interrupted continues as if it had not been.
    """

    def __init__(self, gates: Sequence[GateSpec], config: FitConfig, device: torch.device | str = "cpu") -> None:
        self.device, self.config = torch.device(device), config
        self.gates = [g.to(self.device) for g in gates]
        check_gates(self.gates)
        if min(config.horizons) >= len(gates):
            raise ShapeError(f"horizons {config.horizons} reach beyond {len(gates)} layers", where="Trainer", do="fit horizon 0")
        self.horizons: list[Targets] = []
        for h in config.horizons:
            if h < len(gates):
                trunk = self.horizons[-1] if h == 2 and self.horizons and self.horizons[-1].horizon == 1 else None
                self.horizons.append(Targets(self.gates, h, config, self.device, trunk))
        self.done, self.tokens, self.started = 0, 0, False
        # Batches that were left out because a value was not finite.
        self.unsound = torch.zeros((), dtype=torch.int64, device=self.device)

    def read(self, taps: Taps) -> list[torch.Tensor]:
        """What targets look at. Traces without the residual tap hold NaN there, and no target that reads it."""
        return [taps.moe_input_LTD, taps.logits_LTE] + [taps.residual_LTD] * any(h.horizon == 0 for h in self.horizons)

    def check(self, taps: Taps) -> None:
        """Raises ShapeError for taps of another model."""
        g, n = self.gates[0], len(self.gates)
        found, stream = [tuple(t.shape) for t in self.read(taps)], (n, taps.tokens, g.hidden)
        if found != (want := [stream, (n, taps.tokens, g.experts), stream][: len(found)]):
            raise ShapeError(f"taps (MoE input, logits, residual) of shape {found}", where="Trainer",
                             expected=f"{want}, as this model's layers", do="record them from this model")

    def _sound(self, taps: Taps) -> tuple[Taps, torch.Tensor]:
        """The taps on this device, and 1; or zeros and 0 where a value is not finite: such a batch teaches nothing, and one NaN that got
        into a weight would stay for good. Decided on the device, without waiting for it."""
        taps = taps.map(lambda t: t.to(self.device))
        sound = torch.stack([t.isfinite().all() for t in self.read(taps)]).all()
        self.unsound += ~sound
        return taps.map(lambda t: torch.where(sound, t, 0.0)), sound.float()

    def _inputs(self, taps: Taps) -> list[tuple[Targets, torch.Tensor, torch.Tensor]]:
        eps = self.gates[0].norm_eps
        self.check(taps)
        taps = taps.map(lambda t: t.to(self.device))
        after = unit_rms(taps.moe_input_LTD, eps)
        before = unit_rms(taps.residual_LTD, eps)
        if self.config.past:
            if taps.past_LTD is None:
                raise ShapeError("the taps hold no recent past", where="Trainer", do="take them from Step.taps_with_past")
            before = torch.cat([before, taps.past_LTD.float()], -1)
        y = taps.logits_LTE.float()
        return [(h, before if h.horizon == 0 else after[: after.shape[0] - h.horizon], y[h.horizon :]) for h in self.horizons]

    @torch.no_grad()
    def follow(self, gates: Sequence[GateSpec]) -> None:
        """From now on the probe's frozen half are these routers, copied: those of a model in training as they have become, so that what is
        learnt is what they lack. Raises ShapeError when they are no such routers as those before."""
        if [_shape(g) for g in gates] != [_shape(g) for g in self.gates]:
            raise ShapeError("these are routers of another model", where="Trainer.follow", expected="as many, of the same shape and kind",
                             do="make a Trainer for them")
        self.gates = [g.to(self.device, copy=True) for g in gates]
        for h in self.horizons:
            h.follow(self.gates)

    @torch.no_grad()
    def accumulate(self, taps: Taps) -> torch.Tensor:
        """Add a batch to the moments (before `start`); returns the tokens that it added, float64 [1] on the device."""
        taps, sound = self._sound(taps)
        for h, u, y in self._inputs(taps):
            h.accumulate(u, y, sound)
        return sound.double().reshape(1) * taps.tokens

    def start(self) -> None:
        """The first weights, from the moments of all ranks."""
        generator = torch.Generator().manual_seed(self.config.seed)
        solutions = [h.start() for h in self.horizons]
        for i, h in enumerate(self.horizons):
            if h.trunk is None:
                j = i + 1 + (i + 1 < len(self.horizons) and self.horizons[i + 1].trunk is h)
                start_units(self.horizons[i:j], solutions[i:j], generator)
        self._make_optimiser()
        self.started = True

    def whole(self, values: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """A horizon's values with those of its trunk."""
        out: list[dict[str, torch.Tensor]] = []
        for h, own in zip(self.horizons, values):
            out.append({**{k: v[: len(h.specs)] for k, v in out[-1].items() if k not in own}, **own} if h.trunk else own)
        return out

    def _make_optimiser(self) -> None:
        params = [p for h in self.horizons for p in h.params.values()]
        for p in params:
            p.requires_grad_(True)
        self.optimiser = make_adamw(params, self.config.lr, self.config.weight_decay)
        self.average = [{k: v.detach().clone() for k, v in h.params.items()} for h in self.horizons]

    def step(self, taps: Taps, of_all: int | None = None) -> torch.Tensor:
        """One update from one batch; returns the loss per target as a 0-d tensor (reading it synchronises). `of_all`: tokens of all ranks,
        where they have different numbers."""
        rate = self.config.lr * schedule(self.done, self.config)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        targets = 0
        taps, sound = self._sound(taps)
        for params, (h, u, y) in zip(self.whole([h.params for h in self.horizons]), self._inputs(taps)):
            loss = h.loss(h.logits(u, params, self.config.dropout), y) * sound
            loss.backward()  # one horizon at a time: its activations are freed before the next
            total += loss.detach()
            targets += len(h.specs)
        weights = [p for h in self.horizons for p in h.params.values()]
        grads = [p.grad for p in weights if p.grad is not None]
        all_sum(grads)
        if ranks()[1] > 1:
            torch._foreach_div_(grads, ranks()[1])
        self.optimiser.step()
        # Of all ranks, now: the next ones may be more, or fewer.
        self.done, self.tokens = self.done + 1, self.tokens + (taps.tokens * ranks()[1] if of_all is None else of_all)
        decay = min(self.config.ema, self.done / (self.done + 10))
        average = [a[k] for a, h in zip(self.average, self.horizons) for k in h.params]
        torch._foreach_lerp_(average, [p.detach() for p in weights], 1 - decay)
        return total / targets

    @torch.no_grad()
    def evaluate(self, held_out: Taps, chunk: int = 4096) -> list[list[float]]:
        """Recall of the router's top-k by the averaged weights: a list per horizon of one figure per target. Summed over all ranks."""
        n_k = self.gates[0].top_k
        found = [torch.zeros(len(h.specs) + 1, dtype=torch.float64, device=self.device) for h in self.horizons]
        for start in range(0, held_out.tokens, chunk):
            part = held_out.slice(start, min(start + chunk, held_out.tokens))
            for total, average, (h, u, y) in zip(found, self.whole(self.average), self._inputs(part)):
                total[:-1] += batched_hits(h.logits(u, average), y, h.specs)
                total[-1] += part.tokens * n_k
        all_sum(found)
        return [(total[:-1] / total[-1]).tolist() for total in found]

    @torch.no_grad()
    def probe(self) -> RoutingProbe:
        """The averaged weights as a probe on this device; temperatures are 1 (see `calibrate.py`)."""
        residuals: list[Residual | None] = [None] * len(HORIZONS)
        for h, average in zip(self.horizons, self.whole(self.average)):
            down, shift = h.unit_down(average)
            # For inputs with the target's norm weight applied; a channel that the weight removes is not read.
            norm = h.norm_nW.unsqueeze(1)
            down = torch.where(norm == 0, 0.0, down / torch.where(norm == 0, 1.0, norm))
            up, out = average["up_nER"], average["out_nE"]
            lead = h.horizon  # layers that no tap reaches keep the stale gate

            def rows(t: torch.Tensor, lead: int = lead) -> torch.Tensor:
                return torch.cat([torch.zeros(lead, *t.shape[1:], device=t.device), t]).contiguous()

            residuals[h.horizon] = Residual(rows(down), rows(shift), rows(up), rows(out),
                                            torch.ones(len(self.gates)), self.config.linear, [False] * lead + [True] * len(h.specs))
        return RoutingProbe(self.gates, residuals)

    def averages(self) -> dict[str, torch.Tensor]:
        """A copy of the averaged weights."""
        return {f"h{h.horizon}.{k}": v.clone() for h, a in zip(self.horizons, self.average) for k, v in a.items()}

    def set_averages(self, values: dict[str, torch.Tensor]) -> None:
        for h, a in zip(self.horizons, self.average):
            for k, v in a.items():
                v.copy_(values[f"h{h.horizon}.{k}"])

    # resume ----------------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Tensors by name, and the counts of steps and tokens as tensors: ready for safetensors."""
        out: dict[str, torch.Tensor] = {"done": torch.tensor([self.done]), "tokens": torch.tensor([self.tokens])}
        for h, average in zip(self.horizons, self.average):
            head = f"h{h.horizon}."
            out |= {head + k: v.detach() for k, v in h.params.items()} | {head + "average." + k: v for k, v in average.items()}
            out |= {head + k: getattr(h, k) for k in h.constants}
            for k, p in h.params.items():
                for name, value in self.optimiser.state.get(p, {}).items():
                    out[f"{head}optimiser.{k}.{name}"] = torch.as_tensor(value).clone()
        return out

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from `state()`. Raises ShapeError when it belongs to other settings."""
        for h in self.horizons:
            head = f"h{h.horizon}."
            for k, p in h.params.items():
                value = state.get(head + k)
                if value is None or value.shape != p.shape:
                    raise ShapeError(f"the saved state has no fitting {head}{k}", where="Trainer", expected=str(tuple(p.shape)),
                                     do="use the settings it was saved with, or start a new output folder")
                h.params[k] = value.to(self.device).clone()
            for k in h.constants:
                setattr(h, k, state[head + k].to(self.device))
            h.fresh = not bool(h.kl0_n.any())
        self._make_optimiser()
        for h, average in zip(self.horizons, self.average):
            head = f"h{h.horizon}."
            for k, p in h.params.items():
                average[k].copy_(state[head + "average." + k])
                saved = {name.rsplit(".", 1)[1]: v for name, v in state.items() if name.startswith(f"{head}optimiser.{k}.")}
                if saved:
                    self.optimiser.state[p] = {n: v.to(self.device) for n, v in saved.items()}
        self.done, self.started = int(state["done"][0]), True
        self.tokens = int(state["tokens"][0]) if "tokens" in state else self.done * self.config.batch
        count_steps(self.optimiser, self.done)


def _shape(g: GateSpec) -> tuple[object, ...]:
    return g.experts, g.hidden, g.top_k, g.kind, g.n_group, g.topk_group, g.norm_eps, g.bias_E is None


def schedule(done: int, config: FitConfig) -> float:
    """Linear warm-up, then a cosine to zero."""
    up = min(1.0, (done + 1) / max(1, config.warmup))
    return up * 0.5 * (1 + math.cos(math.pi * min(1.0, done / config.steps)))


def make_adamw(params: list[torch.Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """NVIDIA apex FusedAdam where it is really there (its name on PyPI is another package), else torch's fused AdamW."""
    apex = find_fused_adam() if params[0].is_cuda else None
    if apex is not None:
        return apex(params, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay, adam_w_mode=True)
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)


def count_steps(optimiser: torch.optim.Optimizer, done: int) -> None:
    """Tell an optimiser that goes on how many steps it has made: torch's counts them per parameter, in its state, apex's in its groups."""
    if not isinstance(optimiser, torch.optim.AdamW):
        for group in optimiser.param_groups:
            group["step"] = done


def find_fused_adam() -> Any:
    """apex's FusedAdam, or None when apex is absent, a namesake, or was built without its kernels."""
    try:
        optimizers, _ = importlib.import_module("apex.optimizers"), importlib.import_module("amp_C")
    except ImportError:
        return None
    return getattr(optimizers, "FusedAdam", None)


