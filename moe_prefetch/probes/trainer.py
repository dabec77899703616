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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..errors import ShapeError
from .probe import HORIZONS, GateSpec, Residual, RoutingProbe, margins, residual_logits, scores


@dataclass(frozen=True, slots=True)
class FitConfig:
    """rank: units of a probe, of which `linear` pass without the non-linearity (at most `experts` are of use). lr is the peak after
    `warmup` steps, then a cosine to zero at `steps`. `tau` is the width of the boundary, in standard deviations of the router's logits.
    `ema` is the decay of the averaged weights that are judged and kept. `dropout` acts on the non-linear units. `horizons` without 0 suits
    traces that lack the residual tap. `whiten` False replaces the ridge start and the full preconditioner, which take about
    30 D^2 bytes a target while moments are gathered, by a diagonal one."""

    rank: int = 64
    linear: int = 32
    steps: int = 2000
    batch: int = 4096
    lr: float = 1e-3
    weight_decay: float = 0.01
    rank_weight: float = 0.3
    tau: float = 0.1
    ridge: float = 1e-2
    dropout: float = 0.0
    warmup: int = 50
    ema: float = 0.995
    seed: int = 0
    horizons: tuple[int, ...] = HORIZONS
    whiten: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.linear <= self.rank or self.rank < 1 or self.steps < 1 or self.batch < 1 or not 0 <= self.dropout < 1:
            raise ShapeError(f"rank {self.rank} with {self.linear} linear units, {self.steps} steps of {self.batch}", where="FitConfig",
                             expected="0 <= linear <= rank, and positive sizes", do="correct the fit settings")


@dataclass(slots=True, eq=False)
class Taps:
    """Some tokens as the probe's training sees them, layer-major, any float dtype, one device.

    residual_LTD  stream entering each MoE layer's decoder layer       moe_input_LTD  stream after its attention
    logits_LTE    what the router said (before any selection bias)
    """

    residual_LTD: torch.Tensor
    moe_input_LTD: torch.Tensor
    logits_LTE: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.logits_LTE.shape[1])

    @staticmethod
    def join(parts: Sequence[Taps]) -> Taps:
        """Consecutive tokens of several."""
        return Taps(*(torch.cat([getattr(t, k) for t in parts], 1) for k in ("residual_LTD", "moe_input_LTD", "logits_LTE")))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Taps:
        return Taps(change(self.residual_LTD), change(self.moe_input_LTD), change(self.logits_LTE))

    def take(self, index_T: torch.Tensor) -> Taps:
        return self.map(lambda t: t.index_select(1, index_T.to(t.device)))

    def slice(self, start: int, stop: int) -> Taps:
        return self.map(lambda t: t[:, start:stop])


def unit_rms(x_LTD: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_LTD.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def all_sum(tensors: Sequence[torch.Tensor]) -> None:
    """Sum in place over the data-parallel ranks; nothing to do without a process group. One collective for all of them."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


class _Horizon:
    """Moments, preconditioner and weights of all targets at one horizon; n = number of targets. Inputs come as unit-RMS, shared by all
    targets of a tap; each target's norm weight is folded into its gate and its `down`."""

    def __init__(self, gates: Sequence[GateSpec], horizon: int, config: FitConfig, device: torch.device) -> None:
        self.horizon, self.config, self.specs = horizon, config, list(gates[horizon:])
        self.norm_nD = torch.stack([g.norm_D for g in self.specs]).to(device)
        self.gate_nED = torch.stack([g.weight_ED for g in self.specs]).to(device) * self.norm_nD.unsqueeze(1)
        n, e, d = self.gate_nED.shape

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.count = zeros(1, dtype=torch.float64)
        self.sum_nD, self.cross_nDE = zeros(n, d, dtype=torch.float64), zeros(n, d, e, dtype=torch.float64)
        # Second moments: all of them, or those of each channel with itself.
        self.cov = zeros(n, d, d if config.whiten else 1, dtype=torch.float64)
        self.sum_nE = zeros(n, e, dtype=torch.float64)
        self.square_n, self.total_n = zeros(n, dtype=torch.float64), zeros(n, dtype=torch.float64)
        self.mean_nD, self.std_n, self.kl0_n = zeros(n, d), zeros(n), zeros(n)
        self.white = zeros(n, d, d) if config.whiten else zeros(n, 1, d)
        self.fresh = True
        self.params = {"white_nRD": zeros(n, config.rank, d), "shift_nR": zeros(n, config.rank), "up_nER": zeros(n, e, config.rank),
                       "out_nE": zeros(n, e)}

    def accumulate(self, u_nTD: torch.Tensor, y_nTE: torch.Tensor) -> None:
        r_nTE = y_nTE - torch.bmm(u_nTD, self.gate_nED.mT)
        self.count += u_nTD.shape[1]
        self.sum_nD += u_nTD.sum(1)
        self.cov += torch.bmm(u_nTD.mT, u_nTD) if self.config.whiten else u_nTD.square().sum(1).unsqueeze(2)
        self.cross_nDE += torch.bmm(u_nTD.mT, r_nTE)
        self.sum_nE += r_nTE.sum(1)
        self.square_n += y_nTE.double().square().sum((1, 2))
        self.total_n += y_nTE.double().sum((1, 2))

    def start(self, generator: torch.Generator) -> None:
        """Ridge solution, whitening and the parameters' first values, from the moments of all ranks."""
        all_sum([self.count, self.sum_nD, self.cov, self.cross_nDE, self.sum_nE, self.square_n, self.total_n])
        c, (n, e, d) = self.count, self.gate_nED.shape
        norm, mean_e, rows = self.norm_nD.double(), self.sum_nE / c, self.params["white_nRD"]
        mean = self.sum_nD / c * norm
        self.std_n = ((self.square_n / (c * e)) - (self.total_n / (c * e)).square()).clamp_min(1e-12).sqrt().float()
        self.mean_nD, k = mean.float(), 0
        if self.config.whiten:
            cov = self.cov / c * (norm.unsqueeze(2) * norm.unsqueeze(1)) - mean.unsqueeze(2) * mean.unsqueeze(1)
            cross = self.cross_nDE / c * norm.unsqueeze(2) - mean.unsqueeze(2) * mean_e.unsqueeze(1)
            # W = L^-1 of the Cholesky factor: W x has unit covariance. The floor keeps directions without variance from being blown up.
            floor = 5e-4 * cov.diagonal(dim1=1, dim2=2).median(-1).values.clamp_min(1e-12)
            eye = torch.eye(d, dtype=torch.float64, device=cov.device).expand(n, d, d)
            white = torch.linalg.solve_triangular(torch.linalg.cholesky(cov + floor.view(-1, 1, 1) * eye), eye, upper=False)
            self.white = white.float()
            # The ridge solution in whitened coordinates, cut to its strongest `linear` directions.
            solution = torch.bmm(white, cross) / (1 + self.config.ridge)
            left, strength, right = torch.linalg.svd(solution.cpu(), full_matrices=False)
            k = min(self.config.linear, strength.shape[-1])
            root = strength[:, :k].clamp_min(1e-12).sqrt()
            rows[:, :k] = (left[:, :, :k] * root.unsqueeze(1)).mT.float().to(rows.device)
            self.params["up_nER"][:, :, :k] = (right[:, :k] * root.unsqueeze(2)).mT.float().to(rows.device)
        else:
            var = (self.cov.squeeze(2) / c * norm.square() - mean.square()).clamp_min(0)
            self.white = (var + 5e-4 * var.median(-1, keepdim=True).values.clamp_min(1e-12)).rsqrt().float().unsqueeze(1)
        # Random directions with outputs of unit size for the units that start without an effect.
        rows[:, k:] = (torch.randn(n, self.config.rank - k, d, generator=generator) / math.sqrt(d)).to(rows.device)
        # `folded` subtracts the input's mean, so the mean residual is what is left for `out`.
        self.params["out_nE"].copy_(mean_e)
        for p in self.params.values():
            p.requires_grad_(True)

    def folded(self, params: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(down, shift, up, out) for inputs with the target's norm weight applied."""
        down = torch.bmm(params["white_nRD"], self.white) if self.config.whiten else params["white_nRD"] * self.white
        return down, params["shift_nR"] - torch.bmm(down, self.mean_nD.unsqueeze(2)).squeeze(2), params["up_nER"], params["out_nE"]

    def logits(self, u_nTD: torch.Tensor, params: dict[str, torch.Tensor], dropout: float = 0.0) -> torch.Tensor:
        down, *rest = self.folded(params)
        return torch.bmm(u_nTD, self.gate_nED.mT) + residual_logits(u_nTD, down * self.norm_nD.unsqueeze(1), *rest,
                                                                    linear=self.config.linear, dropout=dropout)

    def loss(self, z_nTE: torch.Tensor, y_nTE: torch.Tensor) -> torch.Tensor:
        """Mean over tokens, sum over targets."""
        kl_n = kl(z_nTE, y_nTE)
        if self.fresh:
            self.kl0_n, self.fresh = kl_n.detach().clamp_min(1e-9), False
        loss = (kl_n / self.kl0_n).sum()
        if self.config.rank_weight:
            width = (self.config.tau * self.std_n).view(-1, 1, 1)
            m_z, m_y = batched_margins(z_nTE, self.specs), batched_margins(y_nTE, self.specs)
            loss = loss + self.config.rank_weight * F.binary_cross_entropy_with_logits(
                m_z / width, (m_y > 0).float(), reduction="none").sum(-1).mean(-1).sum()
        return loss


def kl(z_nTE: torch.Tensor, y_nTE: torch.Tensor) -> torch.Tensor:
    """KL(softmax(y) || softmax(z)), mean over tokens, per target [n]."""
    p = y_nTE.log_softmax(-1)
    return (p.exp() * (p - z_nTE.log_softmax(-1))).sum(-1).mean(-1)


def batched_margins(z_nTE: torch.Tensor, specs: Sequence[GateSpec]) -> torch.Tensor:
    """`margins` for all targets at once; only the selection bias differs between them."""
    first = specs[0]
    if first.bias_E is None:
        return margins(z_nTE, first)
    return torch.stack([margins(z, spec) for z, spec in zip(z_nTE, specs)])


class Trainer:
    """Fits all horizons of one probe. Life: `accumulate` some batches, `start`, then `step` in a loop, `probe` at any time.

    Under torch.distributed every rank feeds its own tokens; moments and gradients are summed, so all ranks hold the same weights.
    `state` and `load_state` are complete: a fit that was interrupted continues as if it had not been.
    """

    def __init__(self, gates: Sequence[GateSpec], config: FitConfig, device: torch.device | str = "cpu") -> None:
        self.device, self.config = torch.device(device), config
        self.gates = [g.to(self.device) for g in gates]
        if len({(g.experts, g.hidden, g.top_k, g.kind, g.n_group, g.topk_group, g.norm_eps, g.bias_E is None) for g in self.gates}) != 1:
            raise ShapeError("MoE layers differ in shape or router kind", where="Trainer", do="fit groups of equal layers on their own")
        self.horizons = [_Horizon(self.gates, h, config, self.device) for h in config.horizons if h < len(gates)]
        self.done, self.started = 0, False

    def _inputs(self, taps: Taps) -> list[tuple[_Horizon, torch.Tensor, torch.Tensor]]:
        eps = self.gates[0].norm_eps
        taps = taps.map(lambda t: t.to(self.device))
        after = unit_rms(taps.moe_input_LTD, eps)
        y = taps.logits_LTE.float()
        return [(h, unit_rms(taps.residual_LTD, eps) if h.horizon == 0 else after[: after.shape[0] - h.horizon], y[h.horizon :])
                for h in self.horizons]

    @torch.no_grad()
    def accumulate(self, taps: Taps) -> None:
        """Add a batch to the moments (before `start`)."""
        for h, u, y in self._inputs(taps):
            h.accumulate(u, y)

    def start(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        for h in self.horizons:
            h.start(generator)
        self._make_optimiser()
        self.started = True

    def _make_optimiser(self) -> None:
        params = [p for h in self.horizons for p in h.params.values()]
        self.optimiser = make_adamw(params, self.config.lr, self.config.weight_decay)
        self.average = [{k: v.detach().clone() for k, v in h.params.items()} for h in self.horizons]

    def step(self, taps: Taps) -> torch.Tensor:
        """One update from one batch; returns the loss per target as a 0-d tensor (reading it synchronises)."""
        rate = self.config.lr * schedule(self.done, self.config)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        targets = 0
        for h, u, y in self._inputs(taps):
            loss = h.loss(h.logits(u, h.params, self.config.dropout), y)
            loss.backward()  # one horizon at a time: its activations are freed before the next
            total += loss.detach()
            targets += len(h.specs)
        params = [p for h in self.horizons for p in h.params.values()]
        grads = [p.grad for p in params if p.grad is not None]
        all_sum(grads)
        if dist.is_available() and dist.is_initialized():
            torch._foreach_div_(grads, dist.get_world_size())
        self.optimiser.step()
        self.done += 1
        decay = min(self.config.ema, self.done / (self.done + 10))
        average = [a[k] for a, h in zip(self.average, self.horizons) for k in h.params]
        torch._foreach_lerp_(average, [p.detach() for p in params], 1 - decay)
        return total / targets

    @torch.no_grad()
    def evaluate(self, held_out: Taps, chunk: int = 4096) -> list[list[float]]:
        """Recall of the router's top-k by the averaged weights: a list per horizon of one figure per target. Summed over all ranks."""
        n_k = self.gates[0].top_k
        found = [torch.zeros(len(h.specs) + 1, dtype=torch.float64, device=self.device) for h in self.horizons]
        for start in range(0, held_out.tokens, chunk):
            part = held_out.slice(start, min(start + chunk, held_out.tokens))
            for total, average, (h, u, y) in zip(found, self.average, self._inputs(part)):
                total[:-1] += batched_hits(h.logits(u, average), y, h.specs)
                total[-1] += part.tokens * n_k
        all_sum(found)
        return [(total[:-1] / total[-1]).tolist() for total in found]

    @torch.no_grad()
    def probe(self) -> RoutingProbe:
        """The averaged weights as a probe on this device; temperatures are 1 (see `calibrate.py`)."""
        residuals: list[Residual | None] = [None] * len(HORIZONS)
        for h, average in zip(self.horizons, self.average):
            down, shift, up, out = h.folded(average)
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
        """Tensors by name, and the step count as a tensor: ready for safetensors."""
        out: dict[str, torch.Tensor] = {"done": torch.tensor([self.done])}
        for h, average in zip(self.horizons, self.average):
            head = f"h{h.horizon}."
            out |= {head + k: v.detach() for k, v in h.params.items()} | {head + "average." + k: v for k, v in average.items()}
            out |= {head + k: getattr(h, k) for k in ("mean_nD", "white", "std_n", "kl0_n")}
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
                h.params[k] = value.to(self.device).clone().requires_grad_(True)
            for k in ("mean_nD", "white", "std_n", "kl0_n"):
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


def find_fused_adam() -> Any:
    """apex's FusedAdam, or None when apex is absent, a namesake, or was built without its kernels."""
    try:
        optimizers, _ = importlib.import_module("apex.optimizers"), importlib.import_module("amp_C")
    except ImportError:
        return None
    return getattr(optimizers, "FusedAdam", None)


def batched_hits(z_nTE: torch.Tensor, y_nTE: torch.Tensor, specs: Sequence[GateSpec]) -> torch.Tensor:
    """How many of the router's choices are among the forecast's, per target, float64 [n] (of tokens x top_k)."""
    first = specs[0]

    def choice(z: torch.Tensor) -> torch.Tensor:
        hard = scores(z, first)[1] if first.bias_E is None else torch.stack([scores(a, s)[1] for a, s in zip(z, specs)])
        return torch.zeros_like(hard, dtype=torch.bool).scatter_(-1, hard.topk(first.top_k, -1).indices, True)

    return (choice(z_nTE) & choice(y_nTE)).sum((1, 2)).double()
