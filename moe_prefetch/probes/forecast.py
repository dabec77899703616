"""Sources of forecasts for the planner: a routing probe (fitted or stale gate), and an oracle that has seen the future."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import torch

from ..errors import ShapeError
from ..types import PROB_ONE, Demand
from .probe import RoutingProbe, quantise_union


class Forecaster(Protocol):
    """Probabilities are those of `types.Forecast.prob_E`; an empty tuple says "nothing known"."""

    def forecast(self, layer: int, step: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        """For target `layer`, from the tap `horizon` layers before it."""

    def next_step(self, layer: int, step: int) -> tuple[int, ...]:
        """For the first layers of a step that has not begun."""

    def keep(self, layer: int, step: int) -> tuple[int, ...]:
        """What each expert is worth in a slot after `step`; empty: the recent load decides."""


def checked(value_E: tuple[int, ...], experts: int, source: object) -> tuple[int, ...]:
    """`value_E`, from any source. Raises ShapeError unless it is empty or `experts` integers from 0 to PROB_ONE."""
    if not isinstance(value_E, Sequence):
        raise ShapeError(f"a forecast is a {type(value_E).__name__}", where=type(source).__name__,
                         expected=f"a tuple of {experts} integers, or nothing", do="mend the forecaster that was given to attach")
    if value_E and (len(value_E) != experts or not isinstance(sum(value_E), int) or min(value_E) < 0 or max(value_E) > PROB_ONE):
        raise ShapeError(f"a forecast holds {len(value_E)} values such as {value_E[0]!r}", where=type(source).__name__,
                         expected=f"{experts} integers from 0 to {PROB_ONE}, or nothing", do="mend the forecaster that was given to attach")
    return value_E


class ProbeForecaster:
    """A routing probe as the planner's source."""

    def __init__(self, probe: RoutingProbe) -> None:
        self._probe = probe

    def forecast(self, layer: int, step: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        with torch.autocast(hidden_TD.device.type, enabled=False):
            return quantise_union(self._probe.forecast(layer - horizon, horizon, hidden_TD))

    def next_step(self, layer: int, step: int) -> tuple[int, ...]:
        return ()

    def keep(self, layer: int, step: int) -> tuple[int, ...]:
        return ()


class OracleForecaster:
    """Knows every demand of a run that will be repeated exactly; the bound that no predictor can beat.

    An expert is worth PROB_ONE / (steps until its next use), so the slot that is needed last goes first (Belady).
    """

    def __init__(self, demands: Sequence[Demand], num_experts: int) -> None:
        self._experts = num_experts
        self._used = {(d.layer, d.step): d.experts for d in demands}
        self._steps: dict[tuple[int, int], list[int]] = {}
        for d in sorted(demands, key=lambda d: d.step):
            for e in d.experts:
                self._steps.setdefault((d.layer, e), []).append(d.step)

    def forecast(self, layer: int, step: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        return self.next_step(layer, step)

    def next_step(self, layer: int, step: int) -> tuple[int, ...]:
        used = self._used.get((layer, step), ())
        return tuple(PROB_ONE if e in used else 0 for e in range(self._experts))

    def keep(self, layer: int, step: int) -> tuple[int, ...]:
        out = []
        for e in range(self._experts):
            steps = self._steps.get((layer, e), [])
            i = bisect_right(steps, step)
            out.append(PROB_ONE // (steps[i] - step) if i < len(steps) else 0)
        return tuple(out)
