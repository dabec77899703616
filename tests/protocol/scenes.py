"""Scenes for the litmus model: decode steps on one GPU, a fill that was begun before, a mover that outlived a drop, ranks, new weights."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

from moe_prefetch.kernels import protocol
from moe_prefetch.kernels.protocol import Actor, Cas, Copy, Device, Fence, Load, Store, expert_of, slot_word, state_of
from moe_prefetch.types import SlotState

from .litmus import Scenario

HOST = 9  # a home that is no rank of the scene
Moves = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Protocol:
    """The actors, and the edges between streams; a planted violation replaces one of them."""

    plan: Callable[..., Actor] = protocol.plan
    move: Callable[..., Actor] = protocol.move
    publish: Callable[..., Actor] = protocol.publish
    cancel: Callable[..., Actor] = protocol.cancel
    settle: Callable[..., Actor] = protocol.settle
    read: Callable[..., Actor] = protocol.read
    update: Callable[..., Actor] = protocol.update
    join: bool = True
    wait: bool = True
    plans_filling: bool = False


def legal(experts: int, most: int, filling: bool = False) -> Callable[[tuple[int, ...]], list[Moves]]:
    """Every plan that the rules allow, up to names: up to `most` experts that have no slot, into slots that are not FILLING."""

    def options(words: tuple[int, ...]) -> list[Moves]:
        open_ = [s for s, w in enumerate(words) if filling or state_of(w) is not SlotState.FILLING]
        missing = [e for e in range(experts) if e not in {expert_of(w) for w in words}]
        found = {tuple(words[s] for s in where): where for n in range(min(most, len(open_), len(missing)) + 1)
                 for where in reversed(list(permutations(open_, n)))}
        return [tuple(zip(who, where)) for where in found.values() for who in combinations(missing, len(where))]

    return options


def first(*moves: tuple[int, int]) -> Callable[[tuple[int, ...]], list[Moves]]:
    """One plan: of these moves those that the rules allow."""

    def options(words: tuple[int, ...]) -> list[Moves]:
        there = {expert_of(w) for w in words}
        return [tuple((e, s) for e, s in moves if e not in there and state_of(words[s]) is not SlotState.FILLING)]

    return options


@dataclass
class Stream:
    """Builds the graph of one rank: what its streams have launched last: compute, movers (`side`), and plans beside compute.

    `pending`: plans that compute has not waited for yet, with the (step, layer) whose `settle` must.
    """

    scene: Scenario
    d: Device
    p: Protocol
    copiers: int = 2
    readers: int = 2
    compute: frozenset[int] = frozenset()
    side: frozenset[int] = frozenset()
    plans: frozenset[int] = frozenset()
    pending: tuple[tuple[tuple[int, int], frozenset[int]], ...] = ()
    epoch: int = 0

    def _launch(self, name: str, actor: Callable[..., Actor], layer: int, step: int, *more: Any, **node: Any) -> int:
        d = self.d
        after = node.pop("after", self.compute)
        return self.scene.add(f"{name} {step} {layer}", lambda: actor(d, layer, step, *more), after, rank=d.rank, step=step,
                              epoch=self.epoch, **node)

    def _beside(self, name: str, actor: Callable[..., Actor], layer: int, step: int, *more: Any, **node: Any) -> None:
        self.plans = frozenset([self._launch(name, actor, layer, step, *more, after=self.compute | self.plans, **node)])
        self.pending += (((step, layer), self.plans),)

    def plan(self, layer: int, step: int, picks: Callable[[tuple[int, ...]], list[Moves]]) -> None:
        self._beside("plan", self.p.plan, layer, step, picks=picks)
        before = self.plans | self.side
        d, move = self.d, self.p.move
        numbered = move is not protocol.move
        self.side = frozenset(
            self.scene.add(f"move {step} {layer} #{n}", lambda n=n: move(d, layer, step, *[n] * numbered), before, rank=d.rank, step=step,
                           epoch=self.epoch) for n in range(self.copiers))
        if move is protocol.move and self.copiers > 1:
            self.scene.twins.append(tuple(sorted(self.side)))

    def cancel(self, layer: int, step: int, worthless: Iterable[int]) -> None:
        self._beside("cancel", self.p.cancel, layer, step, tuple(worthless))

    def planned(self, step: int, layer: int) -> None:
        """What is launched on compute from now on sees the plans that this layer depends on."""
        self.compute = self.compute.union(*(nodes for at, nodes in self.pending if self.p.wait and at <= (step, layer)))
        self.pending = tuple(x for x in self.pending if x[0] > (step, layer))

    def layer(self, layer: int, step: int, demanded: Iterable[int]) -> None:
        self.planned(step, layer)
        self.compute = frozenset([self._launch("settle", self.p.settle, layer, step, tuple(demanded))])
        d, read = self.d, self.p.read
        # With nothing to read the stream goes on from `settle`.
        self.compute = frozenset(
            self.scene.add(f"read {step} {layer} {e} #{n}", lambda e=e: read(d, layer, e), self.compute, rank=d.rank, step=step,
                           epoch=self.epoch, sm=n) for e in demanded for n in range(self.readers)) or self.compute

    def join(self, step: int) -> None:
        if self.p.join:
            self.planned(step + 1, self.scene.layers)
            self.compute |= self.side

    def update(self, ranks: int) -> None:
        d, layers, round_, update = self.d, self.scene.layers, self.epoch, self.p.update
        self.compute = frozenset([self.scene.add(f"update {d.rank}", lambda: update(d, layers, ("arrived",), ranks, round_), self.compute,
                                                 rank=d.rank, epoch=self.epoch)])
        self.epoch += 1


def decode(p: Protocol, demands: list[list[tuple[int, ...]]], *, slots: int = 3, experts: int = 4, most: int = 1, copiers: int = 2,
           readers: int = 2, seats: int | None = None, doubt: tuple[int, ...] = (0,),
           plans: dict[tuple[int, int], Moves] | None = None) -> Scenario:
    """Steps of two layers: layer 1 is planned when the step begins, layer 0's next step after layer 0's experts; both may be cancelled.

    demands[step][layer]. `doubt`: experts that the nearer forecast gives up. plans[layer, step]: what is asked for (None: all plans).
    """
    d = Device(0, slots, (HOST,) * experts)
    scene = Scenario([d], 2, seats=seats)
    s = Stream(scene, d, p, copiers, readers)

    def picks(layer: int, step: int) -> Callable[[tuple[int, ...]], list[Moves]]:
        return legal(experts, most) if plans is None else first(*plans.get((layer, step), ()))

    for step, (first_, second) in enumerate(demands):
        s.plan(1, step, picks(1, step))
        s.cancel(1, step, doubt)
        s.layer(0, step, first_)
        s.plan(0, step + 1, picks(0, step + 1))
        s.layer(1, step, second)
        s.cancel(0, step + 1, doubt)
        s.join(step)
    return scene


def two_steps(p: Protocol, seed: int) -> Scenario:
    """Two layers, three slots, two horizons, two copiers, two readers, two steps; what is planned, doubted and demanded is drawn."""
    draw = random.Random(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(sorted(draw.sample(range(4), draw.randint(0, most))))

    def moves() -> Moves:
        return tuple(zip(draw.sample(range(4), 2), draw.sample(range(3), 2)))

    plans = {(layer, step): moves()[:1] for layer in range(2) for step in range(3)}
    copiers = draw.randint(1, 2)
    if copiers == 1:
        plans[draw.randint(0, 1), 1] = moves()
    return decode(p, [[some(2), some(2)] for _ in range(2)], copiers=copiers, doubt=some(2), plans=plans)


def random_decode(p: Protocol, seed: int, steps: int) -> Scenario:
    """Many steps of a larger layer: 2 to 4 layers planned two ahead, 3 slots, 5 experts, 1 to 3 copiers and readers."""
    draw = random.Random(seed)
    layers, experts = draw.randint(2, 4), 5
    d = Device(0, 3, (HOST,) * experts, pieces=draw.randint(1, 3))
    scene = Scenario([d], layers)
    s = Stream(scene, d, p, draw.randint(1, 3), draw.randint(1, 2))
    picks = legal(experts, draw.randint(1, 2))

    def some(most: int) -> tuple[int, ...]:
        return tuple(sorted(draw.sample(range(experts), draw.randint(0, most))))

    for step in range(steps):
        for layer in range(layers):
            if layer + 2 < layers:
                s.plan(layer + 2, step, picks)
            if layer + 1 < layers and (layer >= 1 or step):
                s.cancel(layer + 1, step, some(1))
            s.layer(layer, step, some(2))
            if layer < 2:
                s.plan(layer, step + 1, picks)
        for layer in range(min(2, layers)):
            s.cancel(layer, step + 1, range(experts) if draw.random() < 0.5 else some(1))
        s.join(step)
    return scene


def filling(p: Protocol) -> Scenario:
    """A slot is being filled by a copy planned before the step began (the copy engine's): a plan meets it FILLING."""
    d = Device(0, 2, (HOST,) * 3, pieces=1)
    scene = Scenario([d], 1)

    def begin() -> Actor:
        yield Store(d.slot(0, 0), slot_word(1, SlotState.FILLING, 0))

    def fill() -> Actor:
        for piece in range(d.pieces):
            yield Copy(d.home(0, 0), d.buffer(0, 0), piece)
        yield Fence()
        yield from protocol.publish(d, 0, 0, 0, 0, 1)

    first = scene.add("begin 0 0", begin, [])
    last = scene.add("fill 0 0", fill, [first])
    s = Stream(scene, d, p, copiers=1, readers=1, compute=frozenset([first]))
    for step in range(2):
        s.plan(0, step, legal(2, 1, p.plans_filling))
        s.layer(0, step, (0, 1))
        s.join(step)
    s.compute |= {last}
    return scene


def outlived(p: Protocol) -> Scenario:
    """A mover is held up before its publication; slots are dropped and given away meanwhile (`SlotTable.clear` does so)."""
    d = Device(0, 1, (HOST,) * 2)
    scene = Scenario([d], 1)
    s = Stream(scene, d, p, copiers=1, readers=1)
    s.plan(0, 0, first((0, 0)))

    def copied() -> Actor:
        yield Cas(d.claim(0, 0), protocol.claim_word(0, protocol.QUEUED), protocol.claim_word(0, protocol.MOVING))
        for piece in range(d.pieces):
            yield Copy(d.home(0, 0), d.buffer(0, 0), piece)

    def drop() -> Actor:
        word = yield Load(d.slot(0, 0))
        yield Store(d.where(0, 0), d.home(0, 0))
        yield Store(d.slot(0, 0), slot_word(protocol.generation_of(word), SlotState.FREE, -1))

    scene.nodes.pop()
    mover = scene.add("move 0 0 #0", copied, s.plans, step=0)
    s.side = frozenset()
    s.compute = frozenset([scene.add("drop 0 0", drop, [mover])])
    s.plan(0, 1, first((1, 0)))
    scene.add("publish 0 0", lambda: p.publish(d, 0, 0, 0, 0, 1), s.plans, step=0)
    s.layer(0, 1, (0, 1))
    return scene


def ranks(p: Protocol) -> Scenario:
    """Two ranks, one layer, two steps; each reads the other's homes in place or pulls from them."""
    devices = [Device(r, 1, (0, 1, 1), pieces=1) for r in range(2)]
    scene = Scenario(devices, 1)
    for s in [Stream(scene, d, p, copiers=1, readers=1) for d in devices]:
        for step in range(2):
            s.plan(0, step, first((step + 1, 0)) if s.d.rank == 0 else first(*[(0, 0)][: 1 - step]))
            s.layer(0, step, (1,) if s.d.rank else (2, 0))
            s.join(step)
    return scene


def weights(p: Protocol) -> Scenario:
    """Two ranks get new weights between two steps. Rank 0 pulls the other's expert before it is asked for, rank 1 reads in place."""
    devices = [Device(r, 1, (0, 1), pieces=1) for r in range(2)]
    scene = Scenario(devices, 1)
    for s in [Stream(scene, d, p, copiers=1, readers=1) for d in devices]:
        for step in range(2):
            if s.d.rank == 0:
                s.plan(0, step, first(*[(1, 0)][: 1 - step]))
            s.layer(0, step, ((0,), (1,))[step] if s.d.rank == 0 else (0,))
            s.join(step)
            if step == 0:
                s.update(2)
    return scene
