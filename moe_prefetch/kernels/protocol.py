"""The prefetch protocol on the device: its words, and every actor as the atomic steps it takes. No torch, no Triton: this is the law.

`kernels/plan` and `kernels/move` follow these sequences; the litmus model (`tests/protocol`) runs them in every order. An actor is a
generator: it yields one step on memory at a time and is sent what the step returned. Steps are the only thing that others can see.

Words (of one GPU; L layer, E expert, S slot, M move):

    where_LE   int64  the address where this GPU reads a record now: its home, or a slot of this GPU that holds it
    slot_LS    int64  generation (31 bits from 32 on), USED (bit 18), state (bits 16 and 17), expert + 1 (bits 0 to 15)
    queue_LM   int64  one move of the layer's one plan of a step: generation, slot (16 to 31), expert (0 to 15)
    count_L    int32  how many moves the plan has
    taken_LM, done_LM  int32  pieces of a move that copiers have taken, and that are copied and fenced
    claim_LE   int32  who brings a missing expert's bytes: step (from bit 3 on), claim state. Another step's claim is none
    epoch      int32  version of the weights; a lease is good for one

A lease is no word. Layer L's slots are leased from `settle` to the end of its expert kernel, and the only plan that may give them away
is L's next: it is enqueued after that kernel and waits for it, and L's next `settle` waits for it. That order is the lease. A slot's
generation grows with each fill, and only the holder of the current one can publish it. Generations last for 2^31 fills of a slot: eight
months at 100 steps a second.
"""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..types import SlotState

EXPERT_BITS, STATE_AT, USED_AT, GENERATION_AT, SLOT_AT, STEP_AT = 16, 16, 18, 32, 16, 3
EXPERT_MASK = (1 << EXPERT_BITS) - 1
USED = 1 << USED_AT  # the slot has been read since it was filled
# Claims of a missing expert, in the step they are tagged with. From QUEUED one compare-and-swap leads to each of the others.
NONE, QUEUED, MOVING, DONE, READING, CANCELLED = range(6)
CLAIM_MASK = (1 << STEP_AT) - 1


def slot_word(generation: int, state: int, expert: int) -> int:
    """`expert` -1: none."""
    return generation << GENERATION_AT | state << STATE_AT | (expert + 1)


def expert_of(word: int) -> int:
    return (word & EXPERT_MASK) - 1


def state_of(word: int) -> SlotState:
    return SlotState(word >> STATE_AT & 3)


def generation_of(word: int) -> int:
    return word >> GENERATION_AT


def move_word(generation: int, slot: int, expert: int) -> int:
    return generation << GENERATION_AT | slot << SLOT_AT | expert


def move_of(word: int) -> tuple[int, int, int]:
    """(expert, slot, generation)."""
    return word & EXPERT_MASK, word >> SLOT_AT & EXPERT_MASK, word >> GENERATION_AT


def claim_word(step: int, state: int) -> int:
    return step << STEP_AT | state


# Steps ---------------------------------------------------------------------------------------------------------------
Place = tuple[Any, ...]


class Load(NamedTuple):
    """A plain load of a word. Kernels before this one in stream order, or that it waited for, are seen."""

    at: Place


class Acquire(NamedTuple):
    """A load with acquire order: what the writer fenced or released before is seen after it. `lease`: a record is read next."""

    at: Place
    lease: bool = False


class Store(NamedTuple):
    """A plain store of a word: others see it some time before this program's next fence or end."""

    at: Place
    value: Any


class Release(NamedTuple):
    """A store with release order: it comes after all that this program wrote before."""

    at: Place
    value: Any


class Cas(NamedTuple):
    """Compare-and-swap, acquire and release; returns what was there."""

    at: Place
    expected: Any
    value: Any


class Add(NamedTuple):
    """Atomic add; returns what was there. Orders nothing by itself: what it hands over is fenced before."""

    at: Place
    value: int


class Wait(NamedTuple):
    """Acquire loads until the word passes. Whoever makes it pass is on the chip, or was before: see `settle`."""

    at: Place
    passes: Callable[[Any], bool]


class Copy(NamedTuple):
    """One piece of a record from address to address, loads and stores past L1. Nobody sees it for certain before a fence."""

    source: Place
    target: Place
    piece: int


class Read(NamedTuple):
    """One piece of a record, by an expert kernel, past L1 (`.cg`)."""

    address: Place
    piece: int


class Fence(NamedTuple):
    """All that this program wrote is seen before anything it writes from now on; system scope where a peer or the host is involved."""


class Pick(NamedTuple):
    """The planner's law: from the words of the layer's slots to moves (expert, slot)."""

    words: tuple[int, ...]


class Write(NamedTuple):
    """New weights for one piece of a home."""

    address: Place
    piece: int


Actor = Generator[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Device:
    """Names of one GPU's words. `owner_E[e]`: the GPU that is expert e's home."""

    rank: int
    slots: int
    owner_E: tuple[int, ...]
    pieces: int = 2

    def where(self, layer: int, expert: int) -> Place:
        return "where", self.rank, layer, expert

    def slot(self, layer: int, slot: int) -> Place:
        return "slot", self.rank, layer, slot

    def claim(self, layer: int, expert: int) -> Place:
        return "claim", self.rank, layer, expert

    def queue(self, layer: int, move: int) -> Place:
        return "queue", self.rank, layer, move

    def taken(self, layer: int, move: int) -> Place:
        return "taken", self.rank, layer, move

    def done(self, layer: int, move: int) -> Place:
        return "done", self.rank, layer, move

    def count(self, layer: int) -> Place:
        return "count", self.rank, layer

    @property
    def epoch(self) -> Place:
        return "epoch", self.rank

    def home(self, layer: int, expert: int) -> Place:
        """Address of a record at home."""
        return "home", self.owner_E[expert], layer, expert

    def buffer(self, layer: int, slot: int) -> Place:
        """Address of a slot's memory."""
        return "buffer", self.rank, layer, slot


# Actors --------------------------------------------------------------------------------------------------------------
def plan(d: Device, layer: int, step: int) -> Actor:
    """Plan and re-home: one program on a stream for plans, once for (layer, step); that stream waits for the layer's last readers.

    When it has ended no entry leads to a slot that will be overwritten. FILLING slots are their movers'.
    """
    words = []
    for s in range(d.slots):
        words.append((yield Load(d.slot(layer, s))))
    moves = yield Pick(tuple(words))
    for m, (expert, s) in enumerate(moves):
        old = expert_of(words[s])
        if old >= 0:
            yield Store(d.where(layer, old), d.home(layer, old))
        generation = generation_of(words[s]) + 1
        yield Store(d.slot(layer, s), slot_word(generation, SlotState.FILLING, expert))
        yield Store(d.claim(layer, expert), claim_word(step, QUEUED))
        yield Store(d.queue(layer, m), move_word(generation, s, expert))
        yield Store(d.taken(layer, m), 0)
        yield Store(d.done(layer, m), 0)
    yield Store(d.count(layer), len(moves))


def move(d: Device, layer: int, step: int) -> Actor:
    """One of the mover's programs, on the side stream, after the plan. Any one of them can finish every move alone.

    The first to claim a move starts it; the others help by taking pieces; the one that ends the last piece publishes.
    """
    count = yield Load(d.count(layer))
    for m in range(count):
        expert, slot, generation = move_of((yield Load(d.queue(layer, m))))
        queued, moving = claim_word(step, QUEUED), claim_word(step, MOVING)
        if (yield Cas(d.claim(layer, expert), queued, moving)) not in (queued, moving):
            continue
        while (piece := (yield Add(d.taken(layer, m), 1))) < d.pieces:
            yield Copy(d.home(layer, expert), d.buffer(layer, slot), piece)
            yield Fence()
            if (yield Add(d.done(layer, m), 1)) == d.pieces - 1:
                yield from publish(d, layer, step, expert, slot, generation)


def publish(d: Device, layer: int, step: int, expert: int, slot: int, generation: int) -> Actor:
    """If the slot is still this move's, the entry leads to it; then it becomes READY; only then does `settle` go on.

    In this order, since a FILLING slot can't be planned: no plan sees the slot before its entry is there to be re-homed.
    """
    filling = slot_word(generation, SlotState.FILLING, expert)
    if (yield Load(d.slot(layer, slot))) == filling:
        yield Release(d.where(layer, expert), d.buffer(layer, slot))
        yield Cas(d.slot(layer, slot), filling, slot_word(generation, SlotState.READY, expert))
    yield Cas(d.claim(layer, expert), claim_word(step, MOVING), claim_word(step, DONE))


def withdraw(d: Device, layer: int, step: int, word: int, state: int) -> Generator[Any, Any, bool]:
    """Take back a move that no mover has started, for `state` (READING or CANCELLED); returns whether it could. The slot is FREE again."""
    expert, slot, generation = move_of(word)
    mine = (yield Cas(d.claim(layer, expert), claim_word(step, QUEUED), claim_word(step, state))) == claim_word(step, QUEUED)
    if mine:
        yield Cas(d.slot(layer, slot), slot_word(generation, SlotState.FILLING, expert), slot_word(generation, SlotState.FREE, -1))
    return mine


def cancel(d: Device, layer: int, step: int, worthless: Iterable[int]) -> Actor:
    """A nearer forecast: moves that no longer pay are taken back, if they have not started. As `plan`, before the layer's `settle`."""
    count = yield Load(d.count(layer))
    for m in range(count):
        word = yield Load(d.queue(layer, m))
        if move_of(word)[0] in worthless:
            yield from withdraw(d, layer, step, word, CANCELLED)


def settle(d: Device, layer: int, step: int, demanded: Iterable[int]) -> Actor:
    """The layer starts: one program on the compute stream, after the layer's plan and between its router and its expert kernel.

    Each missing expert gets one claimant. What no mover has started is read in place, or not at all. What one has started is waited for:
    a program that claims a move is on the chip and finishes it alone, whoever else is. After it the layer's entries of demanded
    experts stand still until its next plan.
    """
    count = yield Load(d.count(layer))
    for m in range(count):
        word = yield Load(d.queue(layer, m))
        expert = move_of(word)[0]
        mine = yield from withdraw(d, layer, step, word, READING if expert in demanded else CANCELLED)
        if not mine and expert in demanded:
            yield Wait(d.claim(layer, expert), lambda claim: claim != claim_word(step, MOVING))


def read(d: Device, layer: int, expert: int) -> Actor:
    """One program of the expert kernel, after `settle`: the entry once, with acquire order, then the record, past L1."""
    address = yield Acquire(d.where(layer, expert), lease=True)
    for piece in range(d.pieces):
        yield Read(address, piece)


def update(d: Device, layers: int, arrived: Place, ranks: int, round_: int) -> Actor:
    """New weights, on every rank, after the side stream has joined: quiesce, re-home, drop, bump the epoch, write, quiesce.

    No rank reads a home while another writes it. `round_` counts updates from 0.
    """
    yield Add(arrived, 1)
    yield Wait(arrived, lambda n: n >= ranks * (2 * round_ + 1))
    for layer in range(layers):
        for s in range(d.slots):
            word = yield Load(d.slot(layer, s))
            if expert_of(word) >= 0:
                yield Store(d.where(layer, expert_of(word)), d.home(layer, expert_of(word)))
            yield Store(d.slot(layer, s), slot_word(generation_of(word), SlotState.FREE, -1))
    epoch = yield Load(d.epoch)
    yield Store(d.epoch, epoch + 1)
    for layer in range(layers):
        for expert, owner in enumerate(d.owner_E):
            if owner == d.rank:
                for piece in range(d.pieces):
                    yield Write(d.home(layer, expert), piece)
    yield Fence()
    yield Add(arrived, 1)
    yield Wait(arrived, lambda n: n >= ranks * (2 * round_ + 2))
