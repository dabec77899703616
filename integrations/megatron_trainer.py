"""Fits the probes of one pipeline stage while its routers move: the arithmetic of `probes.trainer`, for a model in training.

What differs from a fit on a trace: gates and norms are read anew at every step; the loss is in units of the stale gate's divergence, which
is followed as the router sharpens; sums go over the ranks of the stage alone; and every local layer has a row at every horizon, used or
not, so that a checkpoint has one shape per layer. Nothing here touches the model's autograd graph, its gradients or the random streams.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_prefetch.errors import ArtefactError, ShapeError
from moe_prefetch.probes.probe import GateSpec, residual_logits
from moe_prefetch.probes.targets import FitConfig, all_sum, batched_hits, boundary, kl, unit_rms, whitened
from moe_prefetch.probes.trainer import count_steps, make_adamw, schedule

LOWEST_RATE = 0.1  # share of the peak: a router that goes on moving must be followed after the schedule's end
FOLLOW = 0.9  # decay of the units that the loss is measured in
PARAMS = ("white_nRD", "shift_nR", "up_nER", "out_nE")
CONSTANTS = ("white", "mean_nD", "var_n", "stale_n")


@dataclass(slots=True, eq=False)
class StageTaps:
    """Some tokens of a pass, any float dtype, layer-major. `moe_input` begins with the layers that the stage before sent."""

    residual_LTD: torch.Tensor
    moe_input_LTD: torch.Tensor
    logits_LTE: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.logits_LTE.shape[1])

    def take(self, index_T: torch.Tensor) -> StageTaps:
        return StageTaps(*(t.index_select(1, index_T) for t in (self.residual_LTD, self.moe_input_LTD, self.logits_LTE)))

    def finite(self) -> StageTaps:
        """The tokens all of whose values are finite."""
        sound_T = torch.stack([t.isfinite().all(-1).all(0) for t in (self.residual_LTD, self.moe_input_LTD, self.logits_LTE)]).all(0)
        return self.take(sound_T.nonzero().flatten())

    @staticmethod
    def join(parts: Sequence[StageTaps]) -> StageTaps:
        return StageTaps(*(torch.cat([getattr(t, k) for t in parts], 1) for k in StageTaps.__slots__))


class _Rows:
    """One horizon: moments, preconditioner and weights of all n local layers; the first `lead` of them have no tap."""

    def __init__(self, n: int, experts: int, hidden: int, horizon: int, lead: int, config: FitConfig, device: torch.device) -> None:
        self.horizon, self.lead, self.config = horizon, lead, config

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        r, m = config.rank, max(0, n - lead)
        self.moments = {k: zeros(*shape, dtype=torch.float64) for k, shape in {
            "count": (1,), "sum_nD": (m, hidden), "sum_nE": (m, experts), "cov": (m, hidden, hidden if config.whiten else 1),
            "cross_nDE": (m, hidden, experts)}.items()}
        self.white = zeros(n, hidden, hidden) if config.whiten else zeros(n, 1, hidden)
        self.mean_nD, self.var_n, self.stale_n = zeros(n, hidden), zeros(n), zeros(n)
        shapes = ((n, r, hidden), (n, r), (n, experts, r), (n, experts))
        self.params = {k: zeros(*shape) for k, shape in zip(PARAMS, shapes)}

    def inputs(self, taps: StageTaps, edge: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tap, router's logits) per target with a tap. `edge` layers of the stage before stand first in the taps' `moe_input`."""
        if self.horizon == 0:
            return taps.residual_LTD, taps.logits_LTE
        first = edge - self.horizon + self.lead
        return taps.moe_input_LTD[first : first + taps.logits_LTE.shape[0] - self.lead], taps.logits_LTE[self.lead :]

    def accumulate(self, u_nTD: torch.Tensor, y_nTE: torch.Tensor, gate_nED: torch.Tensor, sound: torch.Tensor) -> None:
        m, r_nTE = self.moments, y_nTE - torch.bmm(u_nTD, gate_nED.mT)
        m["count"] += u_nTD.shape[1] * sound
        m["sum_nD"] += u_nTD.sum(1)
        m["cov"] += torch.bmm(u_nTD.mT, u_nTD) if self.config.whiten else u_nTD.square().sum(1).unsqueeze(2)
        m["cross_nDE"] += torch.bmm(u_nTD.mT, r_nTE)
        m["sum_nE"] += r_nTE.sum(1)

    def start(self, norm_nD: torch.Tensor, generator: torch.Generator, group: Any) -> None:
        """The ridge solution and the whitening, from the moments of all ranks of the stage (formulas: `probes.trainer`)."""
        m, lead = self.moments, self.lead
        n, d, _ = m["cross_nDE"].shape
        if n == 0:
            return
        all_sum(list(m.values()), group)
        c, norm = m["count"].clamp_min(1.0), norm_nD.double()
        mean_e = m["sum_nE"] / c
        mean, rows, k = m["sum_nD"] / c * norm, self.params["white_nRD"][lead:], 0
        self.mean_nD[lead:] = mean.float()
        self.white[lead:] = whitened(m["cov"] / c, norm, mean)
        if self.config.whiten:
            cross = m["cross_nDE"] / c * norm.unsqueeze(2) - mean.unsqueeze(2) * mean_e.unsqueeze(1)
            solution = torch.bmm(self.white[lead:].double(), cross) / (1 + self.config.ridge)
            left, strength, right = torch.linalg.svd(solution.cpu(), full_matrices=False)
            k = min(self.config.linear, strength.shape[-1])
            root = strength[:, :k].clamp_min(1e-12).sqrt()
            rows[:, :k] = (left[:, :, :k] * root.unsqueeze(1)).mT.float().to(rows.device)
            self.params["up_nER"][lead:, :, :k] = (right[:, :k] * root.unsqueeze(2)).mT.float().to(rows.device)
        rows[:, k:] = (torch.randn(n, self.config.rank - k, d, generator=generator) / math.sqrt(d)).to(rows.device)
        self.params["out_nE"][lead:] = mean_e.float()

    def folded(self, params: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(down, shift, up, out) of every target with a tap, for inputs with the target's norm weight applied."""
        white_nRD, shift, up, out = (params[k][self.lead :] for k in PARAMS)
        white = self.white[self.lead :]
        down = torch.bmm(white_nRD, white) if self.config.whiten else white_nRD * white
        return down, shift - torch.bmm(down, self.mean_nD[self.lead :].unsqueeze(2)).squeeze(2), up, out

    def logits(self, u_nTD: torch.Tensor, params: dict[str, torch.Tensor], gate_nED: torch.Tensor, norm_nD: torch.Tensor) -> torch.Tensor:
        down, *rest = self.folded(params)
        return torch.bmm(u_nTD, gate_nED.mT) + residual_logits(u_nTD, down * norm_nD.unsqueeze(1), *rest, linear=self.config.linear)

    def loss(self, z_nTE: torch.Tensor, y_nTE: torch.Tensor, specs: Sequence[GateSpec]) -> torch.Tensor:
        """Mean over tokens, sum over targets: KL in units of the stale gate's, and the binary term at the top-k boundary. Without a
        gradient as long as no rank has seen the units (the start's own tokens were all padding, say)."""
        stale, var = (torch.where(t > 0, t, float("inf"))[self.lead :] for t in (self.stale_n, self.var_n))
        loss = (kl(z_nTE, y_nTE) / stale).sum()
        if self.config.rank_weight:
            loss = loss + self.config.rank_weight * boundary(z_nTE, y_nTE, self.config.tau * var.sqrt(), specs)
        return loss

    def units(self, u_nTD: torch.Tensor, y_nTE: torch.Tensor, gate_nED: torch.Tensor) -> torch.Tensor:
        """[2, n]: variance of the router's logits and divergence of the stale gate on these tokens, zero where there is no tap."""
        out = torch.zeros(2, len(self.var_n), device=y_nTE.device)
        out[0, self.lead :] = y_nTE.var((1, 2), correction=0)
        out[1, self.lead :] = kl(torch.bmm(u_nTD, gate_nED.mT), y_nTE)
        return out


def check_config(config: FitConfig) -> None:
    """Raises ShapeError for what is not for a fit beside training."""
    if config.dropout or not isinstance(config.rank, int) or config.past:
        raise ShapeError(f"dropout {config.dropout}, rank {config.rank}, or an input from the past", where="FitConfig",
                         expected="no dropout (it draws from the model's random stream), one rank, and no past (a step takes rows here "
                         "and there of a sequence)", do="leave them out of the FitConfig")


class StageTrainer:
    """Life: `accumulate` some passes, `start`, then `step`. All ranks of `group` must make the same calls; each feeds its own tokens.

    layers     MoE layers of this chunk of the model          edge  layers of the chunk before whose MoE input comes with the taps (0 to 2)
    config     see `check_config`
    """

    def __init__(self, layers: int, experts: int, hidden: int, eps: float, config: FitConfig, device: torch.device, group: Any,
                 edge: int) -> None:
        check_config(config)
        self.layers, self.eps, self.config, self.device, self.group, self.edge = layers, eps, config, device, group, edge
        leads = {h: max(0, h - edge) for h in config.horizons}
        self.horizons = [_Rows(layers, experts, hidden, h, leads[h], config, device) for h in config.horizons]
        self.done, self.started = 0, False
        self.unsound = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def targets(self) -> int:
        """Pairs of a layer and a horizon that are fitted here."""
        return sum(max(0, self.layers - h.lead) for h in self.horizons)

    def _inputs(self, taps: StageTaps, gates: Sequence[GateSpec]) -> Any:
        norm_nD = torch.stack([g.norm_D.detach().float() for g in gates])
        gate_nED = torch.stack([g.weight_ED.detach().float() for g in gates]) * norm_nD.unsqueeze(1)
        for h in self.horizons:
            if h.lead < self.layers:
                u, y = h.inputs(taps, self.edge)
                yield h, unit_rms(u, self.eps), y.float(), gate_nED[h.lead :], norm_nD[h.lead :], gates[h.lead :]

    def _sound(self, taps: StageTaps) -> tuple[StageTaps, torch.Tensor]:
        """The taps and 1, or zeros and 0 where a value is not finite: such a pass counts as one without tokens (`probes.trainer`)."""
        parts = [taps.residual_LTD, taps.moe_input_LTD, taps.logits_LTE]
        sound = torch.stack([t.isfinite().all() for t in parts]).all()
        self.unsound += ~sound
        return StageTaps(*(torch.where(sound, t, 0.0) for t in parts)), sound.float()

    @torch.no_grad()
    def accumulate(self, taps: StageTaps, gates: Sequence[GateSpec]) -> torch.Tensor:
        """Add a pass to the moments; returns the rows that it added, [1] on the device."""
        taps, sound = self._sound(taps)
        for h, u, y, gate, _, _ in self._inputs(taps, gates):
            h.accumulate(u, y, gate, sound)
        return sound.double().reshape(1) * taps.tokens

    @torch.no_grad()
    def start(self, taps: StageTaps, gates: Sequence[GateSpec]) -> None:
        """From the moments so far; `taps` (the last of them will do) say how large the start's own divergence is."""
        generator = torch.Generator().manual_seed(self.config.seed)
        norm_nD = torch.stack([g.norm_D.detach().float() for g in gates])
        for h in self.horizons:
            h.start(norm_nD[h.lead :], generator, self.group)
            h.moments = {}
        units, seen = self._units(*self._sound(taps), gates)
        all_sum([units, seen], self.group)
        self._follow(units, seen, 0.0)
        self._begin()

    def _units(self, taps: StageTaps, sound: torch.Tensor, gates: Sequence[GateSpec]) -> tuple[torch.Tensor, torch.Tensor]:
        """[horizons, 2, n] of this rank, and [1]: whether it has tokens."""
        units = torch.zeros(len(self.horizons), 2, self.layers, device=self.device)
        if taps.tokens:
            for h, u, y, gate, _, _ in self._inputs(taps, gates):
                units[self.horizons.index(h)] = h.units(u, y, gate) * sound
        return units, torch.full((1,), float(taps.tokens > 0), device=self.device) * sound

    def _follow(self, units: torch.Tensor, seen: torch.Tensor, decay: float) -> None:
        """Take over what all ranks saw (their sum, and how many saw tokens)."""
        mean = units / seen.clamp_min(1.0)
        for h, (var, stale) in zip(self.horizons, mean):
            # What was never seen is taken over whole.
            weight = torch.where(h.stale_n > 0, 1 - decay, 1.0) * seen.clamp(max=1.0)
            h.var_n.lerp_(var.clamp_min(1e-12), weight)
            h.stale_n.lerp_(stale.clamp_min(1e-9), weight)

    def _begin(self) -> None:
        for h in self.horizons:
            for p in h.params.values():
                p.requires_grad_(True)
        self.optimiser = make_adamw(self._params(), self.config.lr, self.config.weight_decay)
        self.average = [{k: v.detach().clone() for k, v in h.params.items()} for h in self.horizons]
        self.started = True

    def _params(self) -> list[torch.Tensor]:
        return [p for h in self.horizons for p in h.params.values()]

    @torch.enable_grad()
    def step(self, taps: StageTaps, gates: Sequence[GateSpec]) -> torch.Tensor:
        """One update; returns this rank's loss per target as a 0-d tensor (reading it synchronises). No tokens give no gradient."""
        rate = self.config.lr * max(schedule(self.done, self.config), LOWEST_RATE if self.done >= self.config.warmup else 0.0)
        for slot in self.optimiser.param_groups:
            slot["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        taps, sound = self._sound(taps)
        for h, u, y, gate, norm, specs in self._inputs(taps, gates):
            if taps.tokens:
                loss = h.loss(h.logits(u, h.params, gate, norm), y, specs) * sound
                loss.backward()
                total += loss.detach()
        params = self._params()
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [p.grad for p in params]
        with torch.no_grad():
            units, seen = self._units(taps, sound, gates)
            all_sum([*grads, units, seen], self.group)
            self._follow(units, seen, FOLLOW)
        if self.group is not None:
            torch._foreach_div_(grads, dist.get_world_size(self.group))
        self.optimiser.step()
        self.done += 1
        decay = min(self.config.ema, self.done / (self.done + 10))
        torch._foreach_lerp_([a[k] for a in self.average for k in PARAMS], [p.detach() for p in params], 1 - decay)
        return total / max(1, self.targets)

    @torch.no_grad()
    def hits(self, taps: StageTaps, gates: Sequence[GateSpec]) -> list[torch.Tensor]:
        """Per horizon, how many of the router's choices the averaged weights forecast, float64 [targets], on this rank's tokens."""
        return [batched_hits(h.logits(u, a, gate, norm), y, specs)
                for a, (h, u, y, gate, norm, specs) in zip(self._averages(), self._inputs(taps, gates))]

    def _averages(self) -> list[dict[str, torch.Tensor]]:
        return [a for a, h in zip(self.average, self.horizons) if h.lead < self.layers]

    @torch.no_grad()
    def learnt(self, horizon: int) -> list[tuple[torch.Tensor, ...] | None]:
        """(down_RD, shift_R, up_ER, out_E) of the averaged weights per local layer, for inputs with the target's norm weight applied; None
        where there is no tap."""
        i = self.config.horizons.index(horizon)
        h = self.horizons[i]
        parts = h.folded(self.average[i])
        return [None if t < h.lead else tuple(p[t - h.lead] for p in parts) for t in range(self.layers)]

    # checkpoints -----------------------------------------------------------------------------------------------------
    def layer_state(self, layer: int) -> dict[str, torch.Tensor]:
        """Everything that belongs to one local layer, horizons stacked first: weights, averages, optimiser moments, constants; and
        `done` int64 [1], -1 before the start. Shapes do not depend on what has been done."""
        out = {"done": torch.tensor([self.done if self.started else -1])}
        for k in CONSTANTS:
            out[k] = torch.stack([getattr(h, k)[layer] for h in self.horizons])
        for k in PARAMS:
            out[k] = torch.stack([h.params[k].detach()[layer] for h in self.horizons])
            average = self.average if self.started else [h.params for h in self.horizons]
            out["average." + k] = torch.stack([a[k].detach()[layer] for a in average])
            for name in ("exp_avg", "exp_avg_sq"):
                slots = [self.optimiser.state.get(h.params[k], {}) if self.started else {} for h in self.horizons]
                out[f"{name}.{k}"] = torch.stack([s[name][layer] if name in s else torch.zeros_like(h.params[k][layer])
                                                  for s, h in zip(slots, self.horizons)])
        return {k: v.detach().clone() for k, v in out.items()}

    def check_layer_state(self, layer: int, state: dict[str, torch.Tensor], where: str) -> int:
        """Steps that a saved layer has made, -1 before the start. Takes nothing over. Raises, each with the key: ShapeError when it
        belongs to other settings, ArtefactError when it is damaged."""
        have = self.layer_state(layer)

        def damaged(key: str, what: str, expected: str) -> ArtefactError:
            return ArtefactError(f"the probe's state is damaged: {key} {what}", where=where + key, expected=expected,
                                 do="load another checkpoint, or start the probes anew: ProbeFit(..., anew=True)")

        for k in sorted(have.keys() ^ state.keys()):
            raise damaged(k, "is not there" if k in have else "belongs to no probe", "the keys that were saved")
        strange = [k for k, v in state.items() if not isinstance(v, torch.Tensor) or v.dtype != have[k].dtype]
        if strange:
            raise damaged(strange[0], "is no tensor of its type", str(have[strange[0]].dtype))
        wrong = [k for k, v in have.items() if state[k].shape != v.shape]
        if wrong:
            raise ShapeError(f"the saved probe does not fit: {', '.join(wrong)}", where=where,
                             expected=str({k: tuple(have[k].shape) for k in wrong}), do="use the FitConfig that it was saved with")
        done = int(state["done"][0])
        if done < -1:
            raise damaged("done", f"is {done}", "a count of steps, or -1 before the start")
        for k, v in state.items():
            if not bool(v.isfinite().all()):
                raise damaged(k, "holds values that are not finite", "finite numbers")
            if k.partition(".")[0] in ("var_n", "stale_n", "exp_avg_sq") and bool((v < 0).any()):
                raise damaged(k, "holds negative values", "none")
            # Before the start nothing is there, and before the first step the optimiser has no moments.
            empty = k != "done" if done == -1 else done == 0 and k.startswith("exp_avg")
            if empty and bool(v.any()):
                raise damaged(k, f"holds values, and done says {done}", "zeros, or another count of steps")
        return done

    @torch.no_grad()
    def load_layer_state(self, layer: int, state: dict[str, torch.Tensor]) -> None:
        """The reverse of `layer_state`, for one layer after the other. Raises as `check_layer_state`, before anything is taken over."""
        done = self.check_layer_state(layer, state, f"layer {layer}: ")
        if done < 0:
            return
        if not self.started:
            self._begin()
        self.done = done
        count_steps(self.optimiser, done)
        for i, h in enumerate(self.horizons):
            for k in CONSTANTS:
                getattr(h, k)[layer] = state[k][i].to(self.device)
            for k in PARAMS:
                p = h.params[k]
                p[layer] = state[k][i].to(self.device)
                self.average[i][k][layer] = state["average." + k][i].to(self.device)
                slot = self.optimiser.state[p]
                if not slot:
                    slot |= {"step": torch.tensor(float(done), device=p.device), "exp_avg": torch.zeros_like(p),
                             "exp_avg_sq": torch.zeros_like(p)}
                for name in ("exp_avg", "exp_avg_sq"):
                    slot[name][layer] = state[f"{name}.{k}"][i].to(self.device)
