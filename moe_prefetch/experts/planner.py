"""What to fetch, where to put it, what to keep: pure decisions in integers, the same on every rank and every device.

A value is an expected saving in units of (one miss) / PROB_ONE. Bringing expert e into the slot of expert v is worth

    use(e) - (PROB_ONE - use(e)) * WASTE / 16  +  keep(e)  -  use(v)  -  keep(v)  -  HYSTERESIS

use(x)   P(x is used at the target step), from the forecast; the recent load where there is none
keep(x)  what x in a slot is worth for the steps after: its recent load times KEEP / 16, or what the source of the forecasts knows

The terms: a useful move saves one miss; a useless one costs the link WASTE/16 of a miss; throwing out v costs its own use, now
and later. Moves are taken best first while they gain; the budget bounds what each link can bring before the target layer starts, and the
bytes that may be moved in vain. An expert that is not worth a slot is read in place. `kernels/plan` is the same law on a GPU, bit for bit.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..types import PROB_ONE, Forecast, Move, Plan, Residency, SlotState

WASTE = 10       # sixteenths of a miss that a useless move costs: what it takes from the link and from the moves behind it
KEEP = 12        # sixteenths: what the recent load says about the steps after this one
HYSTERESIS = PROB_ONE // 16  # gain below which a slot is left alone


@dataclass(frozen=True, slots=True)
class Link:
    """One way to homes. Times are ticks of any one length."""

    time: int = 0    # what a record takes on it alone; 0: not known, no bound
    queued: int = 0  # work that it has already
    worth: int = 16  # what a miss over it costs, in sixteenths of one over the dearest link


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one plan. Left out, they bound nothing."""

    moves: int                           # most moves
    window: int = 0                      # the layer clock: ticks until the target layer starts; 0: not known
    waste: int = -1                      # records that may be moved in vain, as expected now, in units of 1/PROB_ONE; -1: any number
    links: tuple[Link, ...] = (Link(),)
    link_E: tuple[int, ...] = ()         # which link an expert's home is behind; -1: its home is this memory; empty: all behind link 0
    first: int = 0                       # the link that goes first: another on each rank, so that no home serves two while one is idle


def _scores(residency: Residency, use_E: tuple[int, ...], keep_E: tuple[int, ...]) -> tuple[list[int], list[int]]:
    use = use_E or residency.load_E
    return list(use), [u + k for u, k in zip(use, keep_E or tuple(v * KEEP // 16 for v in residency.load_E), strict=True)]


def plan_value(residency: Residency, forecast: Forecast, budget: Budget, keep_E: tuple[int, ...] = ()) -> Plan:
    """The value plan: what every forecast (stale gate, probe, oracle) is spent by. Ties go to the lower expert and slot."""
    use, score = _scores(residency, forecast.prob_E, keep_E)
    link = budget.link_E or (0,) * len(use)
    worth = [budget.links[k].worth if k >= 0 else 0 for k in link]
    resident = {s.expert for s in residency.slots if s.expert >= 0}
    gain = {e: (score[e] - (PROB_ONE - use[e]) * WASTE // 16) * worth[e] >> 4
            for e in range(len(use)) if e not in resident and link[e] >= 0}
    # A fetch ahead must pay by its own use; one that would only be kept for later can wait for its demand.
    candidates = sorted((e for e in gain if use[e] * 16 > (PROB_ONE - use[e]) * WASTE), key=lambda e: (-gain[e], e))
    # A FILLING slot can't be planned: its mover owns it.
    victims = sorted((score[s.expert] * worth[s.expert] >> 4 if s.state is SlotState.READY else 0, i)
                     for i, s in enumerate(residency.slots) if s.state is not SlotState.FILLING)
    room = [max(0, budget.window - k.queued) // k.time if budget.window and k.time else len(use) for k in budget.links]
    waste = 0
    moves: list[tuple[int, int, Move]] = []
    for expert in candidates:
        k, number = link[expert], len(moves)
        if room[k] <= 0:
            continue
        waste += PROB_ONE - use[expert]
        if number >= min(budget.moves, len(victims)) or gain[expert] - victims[number][0] <= HYSTERESIS or 0 <= budget.waste < waste:
            break
        room[k] -= 1
        slot = victims[number][1]
        turn = sum(link[m.expert] == k for _, _, m in moves)
        move = Move(residency.layer, expert, slot, residency.slots[slot].generation + 1)
        moves.append((turn, (k - budget.first) % len(budget.links), move))
    # Links take turns, from `first` on; each brings its dearest first.
    return Plan(residency.layer, forecast.step, tuple(m for _, _, m in sorted(moves, key=lambda m: m[:2])))


def plan_nothing(residency: Residency, forecast: Forecast, budget: Budget, keep_E: tuple[int, ...] = ()) -> Plan:
    """On demand only."""
    return Plan(residency.layer, forecast.step, ())


def plan_recent(residency: Residency, forecast: Forecast, budget: Budget, keep_E: tuple[int, ...] = ()) -> Plan:
    """Recent-load average: forecasts are not looked at; experts loaded lately are brought in where they beat what is there."""
    return plan_value(residency, Forecast(forecast.layer, forecast.step, forecast.horizon, ()), budget)


def cancellable(moves: tuple[Move, ...], forecast: Forecast) -> tuple[Move, ...]:
    """Moves, not yet started, that a nearer forecast has made worthless: their use no longer pays for the bytes."""
    if not forecast.prob_E:
        return ()
    return tuple(m for m in moves if forecast.prob_E[m.expert] * 16 <= (PROB_ONE - forecast.prob_E[m.expert]) * WASTE)


def admit_lru(residency: Residency, expert: int, busy: frozenset[int], keep_E: tuple[int, ...] = ()) -> int | None:
    """Slot for an expert read on demand: a free one, else the least recently used that is neither FILLING nor in `busy`."""
    free = [(s.last_use if s.state is SlotState.READY else -2, i) for i, s in enumerate(residency.slots)
            if s.state is not SlotState.FILLING and i not in busy]
    return min(free)[1] if free else None


def admit_value(residency: Residency, expert: int, busy: frozenset[int], keep_E: tuple[int, ...] = ()) -> int | None:
    """The same by value: None (bypass: computed from a bounce buffer, no slot changes) when every candidate is worth more.

    The bytes come anyway, so no waste term; only the steps after this one count.
    """
    keep = keep_E or residency.load_E
    free = [(keep[s.expert] if s.state is SlotState.READY else -1, i) for i, s in enumerate(residency.slots)
            if s.state is not SlotState.FILLING and i not in busy]
    if not free:
        return None
    cost, slot = min(free)
    return slot if cost < keep[expert] or cost == -1 else None


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to run the expert wing: who plans ahead, who admits on demand, and whether forecasts are asked for."""

    name: str
    plan: Callable[[Residency, Forecast, Budget, tuple[int, ...]], Plan]
    admit: Callable[[Residency, int, frozenset[int], tuple[int, ...]], int | None]
    forecasts: bool


POLICIES = {
    "lru": Policy("lru", plan_nothing, admit_lru, False),
    "recent": Policy("recent", plan_recent, admit_value, False),
    "stale": Policy("stale", plan_value, admit_value, True),
    "probe": Policy("probe", plan_value, admit_value, True),
    "oracle": Policy("oracle", plan_value, admit_value, True),
}
