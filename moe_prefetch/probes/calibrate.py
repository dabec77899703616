"""Temperatures: so that an expert forecast at 0.7 is used seven times in ten. The planner spends on these numbers.

One temperature per (layer, horizon), the minimum of the log-likelihood on held-out tokens: a convex problem in 1/T, solved by Newton
(temperature scaling, arXiv 1706.04599, on the margin to the top-k boundary instead of a class logit).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..errors import ShapeError
from . import metrics
from .probe import HORIZONS, Residual, RoutingProbe, margins, select
from .targets import Taps


def fit_temperature(margin_TE: torch.Tensor, true_TK: torch.Tensor, iterations: int = 40) -> float:
    """Temperature that makes sigmoid(margin / T) most likely for the router's choices. Rows that are not finite are left out.

    margin_TE float [T, E], true_TK int64 [T, K]. Raises ShapeError when no finite row is left.
    """
    chosen = torch.zeros_like(margin_TE, dtype=torch.float64).scatter_(1, true_TK, 1.0)
    keep = margin_TE.isfinite().all(1)
    m, y = margin_TE[keep].double(), chosen[keep]
    if not m.numel():
        raise ShapeError("no finite forecast to calibrate on", where="fit_temperature", do="record held-out tokens first")
    size = float(m.abs().mean())
    if size == 0.0:
        return 1.0
    # In units of the mean margin, so that start and limits fit any router; separable data would run off to T = 0.
    m, s = m / size, 1.0
    for _ in range(iterations):
        p = torch.sigmoid(m * s)
        slope, curve = float((m * (p - y)).mean()), float((m * m * p * (1 - p)).mean())
        step = min(max(slope / max(curve, 1e-12), -s), s / 2)
        s = min(max(s - step, 1e-3), 1e3)
        if abs(step) < 1e-6 * s:
            break
    return size / s


@torch.no_grad()
def calibrate(probe: RoutingProbe, held_out: Taps, *, horizons: Sequence[int] = HORIZONS) -> RoutingProbe:
    """Set every (layer, horizon)'s temperature from held-out taps, in place; also where the stale gate is used. Returns the probe."""
    for h in horizons:
        if h >= probe.layers:
            continue
        if probe.residuals[h] is None:
            probe.residuals[h] = Residual.zero(probe.layers, probe.experts, probe.gates[0].hidden, 1)
        r = probe.residuals[h]
        assert r is not None
        for target in range(h, probe.layers):
            margin, true = margin_and_truth(probe, held_out, target, h)
            r.temperature_L[target] = fit_temperature(margin, true)
    probe.refresh()
    return probe


def margin_and_truth(probe: RoutingProbe, taps: Taps, target: int, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Forecast margins [T, E] of one target, and what its router chose [T, K]."""
    tap, gate, past = target - horizon, probe.gates[target], None
    hidden = (taps.residual_LTD if horizon == 0 else taps.moe_input_LTD)[tap]
    if probe.sees_past(horizon):
        if taps.past_LTD is None:
            raise ShapeError("the taps hold no recent past", where="margin_and_truth", do="take them from Step.taps_with_past")
        past = taps.past_LTD[tap]
    return margins(probe.logits(tap, horizon, hidden, past), gate), select(taps.logits_LTE[target].float(), gate)


def reliability_plot(path: Path, curves: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """PNG of share chosen against forecast probability. `curves`: label -> (prob_TE, true_TK), over any tokens. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for label, (prob, true) in curves.items():
        p, y, count = metrics.reliability(prob, true)
        some = count > 0
        axes.plot(p[some].tolist(), y[some].tolist(), marker="o", markersize=3, linewidth=1.2,
                  label=f"{label} (error {metrics.calibration_error(prob, true):.3f})")
    axes.set(xlabel="forecast P(expert in the top-k)", ylabel="share chosen by the router", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
