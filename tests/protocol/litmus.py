"""A model of weak memory in which the actors of `kernels/protocol.py` run in every order, or in random ones.

What is weak: a plain store, and a copied piece of a record, is seen by others some time before the program's next fence, release or end,
in any order; a load through L1 may return whatever that multiprocessor has once seen there. Atomics, releases and acquires are ordered.

What is checked at every step, whatever the order (`RuleError` names it): a read returns the bytes of its expert, of its epoch; nobody
writes a slot that is leased; the bytes of a missing expert cross the link once; only the mover that holds a claim publishes, and only
the slot that it was given; somebody can always go on.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_prefetch.kernels.protocol import (
    MOVING,
    Acquire,
    Actor,
    Add,
    Cas,
    Copy,
    Device,
    Fence,
    Load,
    Pick,
    Place,
    Read,
    Release,
    Store,
    Wait,
    Write,
    claim_word,
    expert_of,
    generation_of,
    state_of,
)
from moe_prefetch.types import SlotState


class RuleError(AssertionError):
    """An invariant does not hold; the message starts with its name."""


class StaleRead(NamedTuple):
    """A read through L1: `Read` as nobody may do it."""

    address: Place
    piece: int


class StaleLoad(NamedTuple):
    """An entry through L1: `Acquire` as nobody may do it."""

    at: Place
    lease: bool = True


@dataclass(eq=False)
class Node:
    """One program of one kernel: runs when every node in `after` has ended. `name`: what, step, layer, expert."""

    name: str
    make: Callable[[], Actor]
    after: frozenset[int]
    rank: int = 0
    step: int | None = None
    epoch: int = 0
    sm: int = 0
    picks: Callable[[tuple[int, ...]], list[tuple[tuple[int, int], ...]]] | None = None


def record(layer: int, expert: int, epoch: int, piece: int) -> tuple[int, int, int, int]:
    """What a piece of a record holds."""
    return layer, expert, epoch, piece


@dataclass
class Scenario:
    """Devices, the memory they start with, and a graph of nodes. `seats`: how many programs the chip holds at once (None: enough).

    `twins`: nodes that run the same actor.
    """

    devices: list[Device]
    layers: int
    nodes: list[Node] = field(default_factory=list)
    seats: int | None = None
    twins: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, name: str, make: Callable[[], Actor], after: Iterable[int], **more: Any) -> int:
        self.nodes.append(Node(name, make, frozenset(after), **more))
        return len(self.nodes) - 1

    def memory(self) -> dict[Place, Any]:
        words: dict[Place, Any] = {("arrived",): 0}
        for d in self.devices:
            words[d.epoch] = 0
            for layer in range(self.layers):
                words[d.count(layer)] = 0
                for s in range(d.slots):
                    words.update({d.slot(layer, s): 0, d.queue(layer, s): 0, d.taken(layer, s): 0, d.done(layer, s): 0})
                    words[("lease", *d.buffer(layer, s))] = 0
                    words.update({(*d.buffer(layer, s), p): "poison" for p in range(d.pieces)})
                for e, owner in enumerate(d.owner_E):
                    words.update({d.where(layer, e): d.home(layer, e), d.claim(layer, e): 0, ("carried", d.rank, layer, e): None})
                    if owner == d.rank or owner not in {x.rank for x in self.devices}:
                        words.update({(*d.home(layer, e), p): record(layer, e, 0, p) for p in range(d.pieces)})
                for sm in {n.sm for n in self.nodes}:
                    words[("l1", d.rank, layer, sm)] = ()
        return words


class Chip:
    """The memory, and what each step does to it. `state[i]`: a node's buffered stores and its leases."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.device = {d.rank: d for d in scenario.devices}
        self.words: dict[Place, Any] = scenario.memory()
        self.used: set[tuple[Place, str]] = set()  # words that steps have used since this was emptied, and how
        self.pending: list[tuple[tuple[Place, Any], ...]] = [()] * len(scenario.nodes)
        self.leases: list[tuple[Place, ...]] = [()] * len(scenario.nodes)

    def choices(self, i: int, op: Any) -> int:
        """In how many ways a step can end; 0: it can't be taken now."""
        kind = type(op)
        if kind is Wait:
            return int(op.passes(self._see(i, op.at)))
        if kind is Pick:
            return len(self.scenario.nodes[i].picks(op.words))
        if kind is StaleRead:
            return 1 + sum(k == (*op.address, op.piece) for k, _ in self._read(self._l1(i, op.address)))
        if kind is StaleLoad:
            return 1 + sum(k == op.at for k, _ in self._read(self._l1(i, op.at)))
        return 1

    def take(self, i: int, op: Any, choice: int = 0) -> Any:
        """Do a step of node i; what it returns."""
        kind = type(op)
        if kind is Load:
            return self._see(i, op.at)
        if kind is Cas:
            self._write_out(i, op.at)
            seen = self._read(op.at)
            if seen == op.expected:
                self._word(i, op.at, op.value)
            return seen
        if kind is Add:
            self._write_out(i, op.at)
            seen = self._read(op.at)
            self._word(i, op.at, seen + op.value)
            return seen
        if kind is Wait:
            self._see(i, op.at)
        elif kind is Store:
            self._defer(i, op.at, op.value)
        elif kind is Release:
            self.flush(i)
            self._word(i, op.at, op.value)
        elif kind is Fence:
            self.flush(i)
        elif kind is Acquire or kind is StaleLoad:
            seen = self._see(i, op.at) if kind is Acquire else self._through_l1(i, op.at, op.at, choice)
            if op.lease and seen[0] == "buffer":
                self._lease(seen, 1)
                self.leases[i] += (seen,)
            return seen
        elif kind is Pick:
            return self.scenario.nodes[i].picks(op.words)[choice]
        elif kind is Copy:
            self._carry(i, op.source, "mover")
            self._unleased(op.target)
            self._defer(i, (*op.target, op.piece), self._read((*op.source, op.piece)))
        elif kind is Read or kind is StaleRead:
            at = (*op.address, op.piece)
            self._right(i, op.address, op.piece, self._read(at) if kind is Read else self._through_l1(i, at, op.address, choice))
        elif kind is Write:
            _, _, layer, expert = op.address
            self._defer(i, (*op.address, op.piece), record(layer, expert, self.scenario.nodes[i].epoch + 1, op.piece))
        return None

    def end(self, i: int) -> None:
        """A kernel's end: what it wrote is seen, what it leased is free."""
        self.flush(i)
        for at in self.leases[i]:
            self._lease(at, -1)
        self.leases[i] = ()

    def flush(self, i: int, which: int | None = None) -> None:
        """Let others see one deferred store, or all."""
        pending = self.pending[i]
        if not pending:
            return
        go, self.pending[i] = (pending, ()) if which is None else (pending[which : which + 1], pending[:which] + pending[which + 1 :])
        for at, value in go:
            self._word(i, at, value)

    # inside ---------------------------------------------------------------------------------------------------------
    def _read(self, at: Place) -> Any:
        self.used.add((at, "r"))
        return self.words[at]

    def _see(self, i: int, at: Place) -> Any:
        for place, value in reversed(self.pending[i]):
            if place == at:
                return value
        return self._read(at)

    def _defer(self, i: int, at: Place, value: Any) -> None:
        self._write_out(i, at)
        self.pending[i] += ((at, value),)

    def _write_out(self, i: int, at: Place) -> None:
        """Stores to one place keep their order."""
        for n, (place, _) in enumerate(self.pending[i]):
            if place == at:
                self.flush(i, n)
                return

    def _word(self, i: int, at: Place, value: Any) -> None:
        if at[0] == "slot" and state_of(value) is SlotState.READY:
            self._may_publish(i, at, value)
        elif at[0] == "buffer":
            self._unleased(at[:4])
        self.used.add((at, "w"))
        self.words[at] = value

    def _may_publish(self, i: int, at: Place, value: int) -> None:
        old, node = self._read(at), self.scenario.nodes[i]
        if (state_of(old), generation_of(old), expert_of(old)) != (SlotState.FILLING, generation_of(value), expert_of(value)):
            raise RuleError(f"stale mover: {node.name} published {at} over another's word")
        if node.step is not None:
            claim = self._read(("claim", at[1], at[2], expert_of(value)))
            if claim != claim_word(node.step, MOVING):
                raise RuleError(f"cancelled mover: {node.name} published {at} without its claim")

    def _lease(self, buffer: Place, n: int) -> None:
        self.used.add((("lease", *buffer), "lease"))
        self.words["lease", *buffer] += n

    def _unleased(self, buffer: Place) -> None:
        if self._read(("lease", *buffer)):
            raise RuleError(f"leased slot: {buffer} was written while it was read")

    def _carry(self, i: int, home: Place, who: str) -> None:
        """The bytes of a missing expert cross the link of a rank once a step."""
        node = self.scenario.nodes[i]
        if node.step is None:
            return
        at = "carried", node.rank, home[2], home[3]
        self.used.add((at, who))
        seen = self.words[at]
        if seen is not None and seen[0] == node.step and seen[1] != who:
            raise RuleError(f"one claimant: {home} was brought by a mover and read in place in step {node.step}")
        self.words[at] = (node.step, who)

    def _right(self, i: int, address: Place, piece: int, value: Any) -> None:
        node = self.scenario.nodes[i]
        layer, expert = int(node.name.split()[2]), int(node.name.split()[3])
        if value != record(layer, expert, node.epoch, piece):
            raise RuleError(f"right bytes: {node.name} read {value} at {address}, piece {piece}")
        if address[0] == "home":
            self._carry(i, address, "reader")

    def _l1(self, i: int, at: Place) -> Place:
        return "l1", self.scenario.nodes[i].rank, at[2], self.scenario.nodes[i].sm

    def _through_l1(self, i: int, at: Place, place: Place, choice: int) -> Any:
        cache = self._l1(i, place)
        seen = self.words[cache]
        value = self._read(at) if choice == 0 else [v for k, v in seen if k == at][choice - 1]
        if all((k, v) != (at, value) for k, v in seen):
            self._word(i, cache, tuple(sorted([*seen, (at, value)], key=repr)))
        return value
