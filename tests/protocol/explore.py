"""Every order of a scenario's steps, or one at random."""
from __future__ import annotations

import random
from typing import Any

from moe_prefetch.kernels.protocol import Actor, Place

from .litmus import Chip, RuleError, Scenario


class Explorer:
    """Every order of a scenario's steps, each state once.

    A step that uses no word which a node beside it may yet use differently is taken at once: all orders of such steps are alike. What
    nodes may use is what they have been seen to use; exploring is repeated until that no longer grows. With `seats` every order is taken.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._next: dict[tuple[int, tuple[Any, ...]], Any] = {}
        self._same: dict[Any, tuple[Any, ...]] = {}
        self._rivals = rivals(scenario)
        self._uses: list[dict[Place, set[str]]] = [{} for _ in scenario.nodes]
        self._grown = True

    def step_of(self, i: int, history: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The step that a node takes next (None at its end), and the first results seen that lead to where it stands."""
        key = (i, history)
        if key not in self._next:
            actor = self.scenario.nodes[i].make()
            try:
                op = next(actor)
                for result in history:
                    op = actor.send(result)
            except StopIteration:
                op = None
            self._next[key] = op, self._same.setdefault((i, standing(actor)), history)
        return self._next[key]

    def run(self) -> int:
        """How many states there are. Raises RuleError."""
        states = 0
        while self._grown:
            self._grown = False
            states = self._explore()
        return states

    def _explore(self) -> int:
        nodes, chip = self.scenario.nodes, Chip(self.scenario)
        keys = list(chip.words)
        todo = [(tuple(chip.words.values()), tuple(chip.pending), tuple(chip.leases), ((),) * len(nodes))]
        seen = set(todo)
        while todo:
            words, pending, leases, histories = todo.pop()
            active = [i for i, h in enumerate(histories) if h is not None and all(histories[j] is None for j in nodes[i].after)]
            if self.scenario.seats is not None:
                seated = [i for i in active if histories[i]]
                active = active if len(seated) < self.scenario.seats else seated
            after: list[Any] = []
            for i in active:
                mine: list[Any] = []
                op, _ = self.step_of(i, histories[i])
                chip.words, chip.pending, chip.leases, chip.used = dict(zip(keys, words)), list(pending), list(leases), set()
                for way in range(1 if op is None else chip.choices(i, op)):
                    chip.words, chip.pending, chip.leases = dict(zip(keys, words)), list(pending), list(leases)
                    history: Any = None
                    if op is None:
                        chip.end(i)
                    else:
                        _, history = self.step_of(i, (*histories[i], chip.take(i, op, way)))
                    mine.append(self._state(chip, histories, i, history))
                live = [self._uses[j] for j in self._rivals[i] if histories[j] is not None]
                self._note(i, chip.used)
                if mine and self.scenario.seats is None and not any(conflict(use, chip.used) for use in live):
                    after = mine
                    break
                after += mine
                for n, (at, _) in enumerate(pending[i]):
                    if self.scenario.seats is not None or any(at in use for use in live):
                        chip.words, chip.pending, chip.leases, chip.used = dict(zip(keys, words)), list(pending), list(leases), set()
                        chip.flush(i, n)
                        self._note(i, chip.used)
                        after.append(self._state(chip, histories, i, histories[i]))
            if not after and any(h is not None for h in histories):
                raise RuleError(f"somebody can go on: {', '.join(nodes[i].name for i in active) or 'nobody'} waits for ever")
            for state in map(self._canonical, after):
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        return len(seen)

    @staticmethod
    def _state(chip: Chip, histories: tuple[Any, ...], i: int, history: Any) -> Any:
        return tuple(chip.words.values()), tuple(chip.pending), tuple(chip.leases), (*histories[:i], history, *histories[i + 1 :])

    def _canonical(self, state: Any) -> Any:
        """Copiers of one kernel are alike: their order in the state is no difference."""
        words, pending, leases, histories = state
        for twins in self.scenario.twins:
            own = [(histories[i], pending[i], leases[i]) for i in twins]
            if len(set(own)) > 1 and (order := sorted(own, key=repr)) != own:
                lists = list(histories), list(pending), list(leases)
                for i, values in zip(twins, order):
                    for target, value in zip(lists, values):
                        target[i] = value
                histories, pending, leases = map(tuple, lists)
        return words, pending, leases, histories

    def _note(self, i: int, used: set[tuple[Place, str]]) -> None:
        uses = self._uses[i]
        for at, how in used:
            if how not in uses.setdefault(at, set()):
                uses[at].add(how)
                self._grown = True


def standing(actor: Any) -> Any:
    """Where a generator stands: the places and variables of its frames, and of those it drives. Equal ones go on alike."""
    frame = getattr(actor, "gi_frame", None)
    if frame is None:
        return None
    values = tuple((k, standing(v) if hasattr(v, "gi_frame") else repr(v)) for k, v in sorted(frame.f_locals.items())
                   if isinstance(v, (int, str, tuple, list, type(None))) or hasattr(v, "gi_frame"))
    return frame.f_lasti, values, standing(actor.gi_yieldfrom)


def conflict(uses: dict[Place, set[str]], used: set[tuple[Place, str]]) -> bool:
    """Whether the order of two nodes' steps may matter: one word, and one of them writes it, or they mark it differently."""
    return any(at in uses and (how == "w" or uses[at] != {how}) for at, how in used)


def rivals(scenario: Scenario) -> list[list[int]]:
    """For each node the others that may run beside it."""
    nodes = scenario.nodes
    before: list[set[int]] = []
    for n in nodes:
        before.append(set().union(n.after, *(before[j] for j in n.after)))
    return [[j for j in range(len(nodes)) if j != i and j not in before[i] and i not in before[j]] for i in range(len(nodes))]


class Walk:
    """One order of a scenario's steps, drawn at random; a node may be held back for long (`patience`), as a delay injected there would."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.random = scenario, random.Random(seed)

    def run(self) -> int:
        """How many steps it took. Raises RuleError."""
        nodes, draw = self.scenario.nodes, self.random
        chip = Chip(self.scenario)
        unmet = [len(n.after) for n in nodes]
        followers: list[list[int]] = [[] for _ in nodes]
        for i, n in enumerate(nodes):
            for j in n.after:
                followers[j].append(i)
        live: dict[int, tuple[Actor, Any]] = {}

        def start(i: int) -> None:
            actor = nodes[i].make()
            live[i] = actor, next(actor, None)

        for i, n in enumerate(unmet):
            if n == 0:
                start(i)
        left, steps, weight = len(nodes), 0, [draw.choice((0.02, 1.0, 1.0, 5.0)) for _ in nodes]
        while left:
            order = sorted(live, key=lambda i: draw.random() ** (1 / weight[i]), reverse=True)
            for i in order:
                actor, op = live[i]
                if chip.pending[i] and draw.random() < 0.3:
                    chip.flush(i, draw.randrange(len(chip.pending[i])))
                    break
                if op is None:
                    chip.end(i)
                    del live[i]
                    left -= 1
                    for j in followers[i]:
                        unmet[j] -= 1
                        if unmet[j] == 0:
                            start(j)
                    break
                ways = chip.choices(i, op)
                if ways:
                    result = chip.take(i, op, draw.randrange(ways) if ways > 1 else 0)
                    try:
                        live[i] = actor, actor.send(result)
                    except StopIteration:
                        live[i] = actor, None
                    break
            else:
                raise RuleError(f"somebody can go on: {', '.join(nodes[i].name for i in live)} waits for ever")
            steps += 1
        return steps
