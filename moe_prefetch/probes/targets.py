"""The targets of one horizon: their moments, the start that these give, and the loss. `trainer.py` says how they are used."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..errors import ShapeError
from .probe import HORIZONS, GateSpec, margins, residual_logits, scores


@dataclass(frozen=True, slots=True)
class FitConfig:
    """Raises ShapeError that names every setting that no fit can have.

    rank: units of a target, one number or two (horizon 0; horizons 1 and 2, which share theirs), of which `linear` pass without the
    non-linearity (at most `experts` are of use). `past` gives horizon 0 the recent past as a second input (better, and twice its size
    and a longer start). lr is the peak after `warmup` steps, then a cosine to zero at `steps`. `tau` is the width of the boundary, in
    standard deviations of the router's logits. `ema` is the decay of the averaged weights that are judged and kept. `dropout` acts on the
    non-linear units. `horizons` without 0 suits traces that lack the residual tap. `whiten` False replaces the ridge start and the full
    preconditioner, which take about 30 D^2 bytes a target while moments are gathered (with `past` four times as much), by a diagonal
    one."""

    rank: int | tuple[int, int] = 64
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
    past: bool = False

    def rank_of(self, horizon: int) -> int:
        return self.rank if isinstance(self.rank, int) else self.rank[horizon > 0]

    def __post_init__(self) -> None:
        def whole(value: object, least: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        def real(value: object, least: float, below: float = math.inf) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < below

        units = self.rank if isinstance(self.rank, tuple | list) else (self.rank,)
        sound = {"rank": len(units) in (1, 2) and all(whole(n, 1) for n in units), "steps": whole(self.steps, 1),
                 "batch": whole(self.batch, 1), "lr": real(self.lr, 0) and self.lr > 0, "weight_decay": real(self.weight_decay, 0),
                 "rank_weight": real(self.rank_weight, 0), "tau": real(self.tau, 0) and self.tau > 0, "ridge": real(self.ridge, 0),
                 "dropout": real(self.dropout, 0, 1), "warmup": whole(self.warmup, 0), "ema": real(self.ema, 0, 1),
                 "seed": whole(self.seed, 0), "whiten": isinstance(self.whiten, bool), "past": isinstance(self.past, bool),
                 "horizons": isinstance(self.horizons, tuple | list) and len(self.horizons) > 0
                 and list(self.horizons) == [h for h in HORIZONS if h in self.horizons]}
        sound["linear"] = whole(self.linear, 0) and (not sound["rank"] or self.linear <= min(units))
        if wrong := [f"{name} is {getattr(self, name)!r}" for name, good in sound.items() if not good]:
            raise ShapeError("; ".join(wrong), where="FitConfig",
                             expected="finite numbers: 0 <= linear <= rank; rank, steps, batch, lr, tau above 0; dropout and ema below 1; "
                             f"horizons of {HORIZONS} in order; nothing below 0", do="correct the fit settings")


@dataclass(slots=True, eq=False)
class Taps:
    """Some tokens as the probe's training sees them, layer-major, any float dtype, one device.

    residual_LTD  stream entering each MoE layer's decoder layer       moe_input_LTD  stream after its attention (see `seam.Taps`)
    logits_LTE    what the router said (before any selection bias)     past_LTD  recent past of the residual (`collect.recent_past`)
    """

    residual_LTD: torch.Tensor
    moe_input_LTD: torch.Tensor
    logits_LTE: torch.Tensor
    past_LTD: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.logits_LTE.shape[1])

    @staticmethod
    def join(parts: Sequence[Taps]) -> Taps:
        """Consecutive tokens of several."""
        names = ["residual_LTD", "moe_input_LTD", "logits_LTE"] + ["past_LTD"] * all(t.past_LTD is not None for t in parts)
        return Taps(*(torch.cat([getattr(t, k) for t in parts], 1) for k in names))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Taps:
        past = None if self.past_LTD is None else change(self.past_LTD)
        return Taps(change(self.residual_LTD), change(self.moe_input_LTD), change(self.logits_LTE), past)

    def take(self, index_T: torch.Tensor) -> Taps:
        return self.map(lambda t: t.index_select(1, index_T.to(t.device)))

    def slice(self, start: int, stop: int) -> Taps:
        return self.map(lambda t: t[:, start:stop])


def unit_rms(x_LTD: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_LTD.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def all_sum(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum in place over the ranks of a group (default: all); nothing to do without one. One collective for all of them."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


class Targets:
    """Moments, preconditioner and weights of all n targets of one horizon. Inputs come as unit-RMS, shared by all targets of a tap; each
    target's norm weight is folded into its gate and its `down`.

    With a `trunk` (horizon 1 for horizon 2: both look from the same taps) the hidden units are the trunk's, row by row of taps, and only
    `up` and `out` are this horizon's own: twice the units for the same bytes and the same reads.
    """

    def __init__(self, gates: Sequence[GateSpec], horizon: int, config: FitConfig, device: torch.device,
                 trunk: Targets | None = None) -> None:
        self.horizon, self.config, self.device, self.trunk = horizon, config, device, trunk
        self.follow(gates)
        (n, e, self.hidden), d, rank = self.gate_nED.shape, self.norm_nW.shape[1], config.rank_of(horizon)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.moments = {"count": zeros(1, dtype=torch.float64), "cross_nWE": zeros(n, d, e, dtype=torch.float64),
                        "sum_nE": zeros(n, e, dtype=torch.float64), "square_n": zeros(n, dtype=torch.float64),
                        "total_n": zeros(n, dtype=torch.float64)}
        self.std_n, self.kl0_n, self.fresh = zeros(n), zeros(n), True
        self.params = {"up_nER": zeros(n, e, rank), "out_nE": zeros(n, e)}
        if trunk is None:
            self.moments["sum_nW"] = zeros(n, d, dtype=torch.float64)
            # Second moments: all of them, or those of each channel with itself.
            self.moments["cov"] = zeros(n, d, d if config.whiten else 1, dtype=torch.float64)
            self.mean_nW = zeros(n, d)
            self.white = zeros(n, d, d) if config.whiten else zeros(n, 1, d)
            self.params |= {"white_nRW": zeros(n, rank, d), "shift_nR": zeros(n, rank)}

    def follow(self, gates: Sequence[GateSpec]) -> None:
        """Take the routers and norms of all layers as they are now."""
        self.specs = list(gates[self.horizon :])
        norm_nD = torch.stack([g.norm_D for g in self.specs]).to(self.device)
        self.gate_nED = torch.stack([g.weight_ED for g in self.specs]).to(self.device) * norm_nD.unsqueeze(1)
        # The recent past goes through the same norm weight.
        self.norm_nW = torch.cat([norm_nD, norm_nD], 1) if self.config.past and self.horizon == 0 else norm_nD

    @property
    def constants(self) -> tuple[str, ...]:
        """What `start` fixes, by name."""
        return ("std_n", "kl0_n") if self.trunk else ("std_n", "kl0_n", "mean_nW", "white")

    def stale(self, u_nTW: torch.Tensor) -> torch.Tensor:
        return torch.bmm(u_nTW[..., : self.hidden], self.gate_nED.mT)

    def accumulate(self, u_nTW: torch.Tensor, y_nTE: torch.Tensor, sound: torch.Tensor) -> None:
        """`sound` 0 says that the batch is to be left out; its values are zeros then."""
        m, r_nTE = self.moments, y_nTE - self.stale(u_nTW)
        m["count"] += u_nTW.shape[1] * sound
        m["cross_nWE"] += torch.bmm(u_nTW.mT, r_nTE)
        m["sum_nE"] += r_nTE.sum(1)
        m["square_n"] += y_nTE.double().square().sum((1, 2))
        m["total_n"] += y_nTE.double().sum((1, 2))
        if self.trunk is None:
            m["sum_nW"] += u_nTW.sum(1)
            m["cov"] += torch.bmm(u_nTW.mT, u_nTW) if self.config.whiten else u_nTW.square().sum(1).unsqueeze(2)

    def start(self) -> torch.Tensor | None:
        """Whitening and units from the moments of all ranks. Returns the ridge solution [n, W, E] in whitened coordinates (the trunk's
        where there is one), or None without `whiten`. The trunk's own start comes first."""
        all_sum(list(self.moments.values()))
        m, src, n, e = self.moments, self.trunk or self, len(self.specs), self.gate_nED.shape[1]
        c, norm = m["count"], src.norm_nW[:n].double()
        self.std_n = ((m["square_n"] / (c * e)) - (m["total_n"] / (c * e)).square()).clamp_min(1e-12).sqrt().float()
        mean_e = m["sum_nE"] / c
        if self.trunk is None:
            mean = m["sum_nW"] / c * norm
            self.mean_nW = mean.float()
            self.white = whitened(m["cov"] / c, norm, mean)
        # What is left over once the inputs' mean is subtracted, as `unit_down` does.
        self.params["out_nE"].copy_(mean_e)
        cross = m["cross_nWE"] / c * norm.unsqueeze(2) - src.mean_nW[:n].double().unsqueeze(2) * mean_e.unsqueeze(1)
        self.moments = {}
        return torch.bmm(src.white[:n].double(), cross) / (1 + self.config.ridge) if self.config.whiten else None

    def unit_down(self, params: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(down, shift) for unit-RMS inputs; `params` holds the trunk's too."""
        src, n = self.trunk or self, len(self.specs)
        rows, white = params["white_nRW"], src.white[:n]
        down = torch.bmm(rows, white) if self.config.whiten else rows * white
        return (down * src.norm_nW[:n].unsqueeze(1),
                params["shift_nR"] - torch.bmm(down, src.mean_nW[:n].unsqueeze(2)).squeeze(2))

    def logits(self, u_nTW: torch.Tensor, params: dict[str, torch.Tensor], dropout: float = 0.0) -> torch.Tensor:
        return self.stale(u_nTW) + residual_logits(u_nTW, *self.unit_down(params), params["up_nER"], params["out_nE"],
                                                   linear=self.config.linear, dropout=dropout)

    def loss(self, z_nTE: torch.Tensor, y_nTE: torch.Tensor) -> torch.Tensor:
        """Mean over tokens, sum over targets."""
        kl_n = kl(z_nTE, y_nTE)
        if self.fresh:
            self.kl0_n, self.fresh = kl_n.detach().clamp_min(1e-9), False
        loss = (kl_n / self.kl0_n).sum()
        if self.config.rank_weight:
            loss = loss + self.config.rank_weight * boundary(z_nTE, y_nTE, self.config.tau * self.std_n, self.specs)
        return loss


def start_units(groups: Sequence[Targets], solutions: Sequence[torch.Tensor | None], generator: torch.Generator) -> None:
    """First values of the units that `groups` share (a horizon, or a trunk and what stands on it): the strongest `linear` directions of
    their ridge solutions together, then random ones without an effect."""
    trunk = groups[0]
    rows, k = trunk.params["white_nRW"], 0
    n, rank, d = rows.shape
    if solutions[0] is not None:
        wide = torch.cat([F.pad(w, (0, 0, 0, 0, 0, n - len(w))) for w in solutions if w is not None], 2)
        left, strength, right = torch.linalg.svd(wide.cpu(), full_matrices=False)
        k = min(trunk.config.linear, strength.shape[-1])
        root = strength[:, :k].clamp_min(1e-12).sqrt()
        rows[:, :k] = (left[:, :, :k] * root.unsqueeze(1)).mT.float().to(rows.device)
        up = (right[:, :k] * root.unsqueeze(2)).mT.float().to(rows.device)
        for g, part in zip(groups, up.chunk(len(groups), 1)):
            g.params["up_nER"][:, :, :k] = part[: len(g.specs)]
    # Outputs of unit size.
    rows[:, k:] = (torch.randn(n, rank - k, d, generator=generator) / math.sqrt(d)).to(rows.device)


def whitened(second_nWV: torch.Tensor, norm_nW: torch.Tensor, mean_nW: torch.Tensor) -> torch.Tensor:
    """What makes inputs uncorrelated and of unit variance, float32: [n, W, W] from mean products before the norm weight [n, W, W], or
    [n, 1, W] from the mean squares alone [n, 1 column]. `mean_nW` is behind the norm weight."""
    if second_nWV.shape[2] > 1:
        return whitening(second_nWV * (norm_nW.unsqueeze(2) * norm_nW.unsqueeze(1)) - mean_nW.unsqueeze(2) * mean_nW.unsqueeze(1))
    var_nW = (second_nWV.squeeze(2) * norm_nW.square() - mean_nW.square()).clamp_min(0)
    return (var_nW + 5e-4 * var_nW.median(-1, keepdim=True).values.clamp_min(1e-12)).rsqrt().float().unsqueeze(1)


def whitening(cov_nWW: torch.Tensor) -> torch.Tensor:
    """W = L^-1 of the Cholesky factor, so that W x has unit covariance. The floor keeps directions without variance from being blown up;
    it rises where rounding made a covariance indefinite."""
    n, d, _ = cov_nWW.shape
    floor_n = 5e-4 * cov_nWW.diagonal(dim1=1, dim2=2).median(-1).values.clamp_min(1e-12)
    eye = torch.eye(d, dtype=cov_nWW.dtype, device=cov_nWW.device).expand(n, d, d)
    while True:
        factor, failed_n = torch.linalg.cholesky_ex(cov_nWW + floor_n.view(-1, 1, 1) * eye)
        if not failed_n.any():
            return torch.linalg.solve_triangular(factor, eye, upper=False).float()
        if not torch.isfinite(cov_nWW).all():
            raise ShapeError("the taps hold values that are not finite", where="Trainer.start", do="leave broken passes out of the fit")
        floor_n = torch.where(failed_n > 0, floor_n * 10, floor_n)


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


def boundary(z_nTE: torch.Tensor, y_nTE: torch.Tensor, width_n: torch.Tensor, specs: Sequence[GateSpec]) -> torch.Tensor:
    """Binary cross-entropy of z's margins, in units of `width_n`, with y's choices: mean over tokens, sum over targets."""
    m_z, m_y = batched_margins(z_nTE, specs), batched_margins(y_nTE, specs)
    return F.binary_cross_entropy_with_logits(m_z / width_n.view(-1, 1, 1), (m_y > 0).float(), reduction="none").sum(-1).mean(-1).sum()


def batched_hits(z_nTE: torch.Tensor, y_nTE: torch.Tensor, specs: Sequence[GateSpec]) -> torch.Tensor:
    """How many of the router's choices are among the forecast's, per target, float64 [n] (of tokens x top_k)."""
    first = specs[0]

    def choice(z: torch.Tensor) -> torch.Tensor:
        hard = scores(z, first)[1] if first.bias_E is None else torch.stack([scores(a, s)[1] for a, s in zip(z, specs)])
        return torch.zeros_like(hard, dtype=torch.bool).scatter_(-1, hard.topk(first.top_k, -1).indices, True)

    return (choice(z_nTE) & choice(y_nTE)).sum((1, 2)).double()
