"""Violations of the protocol, each one change to an actor or to the order of streams. The library has no switch for any of them."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from moe_prefetch.kernels import protocol
from moe_prefetch.kernels.protocol import (
    CANCELLED,
    DONE,
    MOVING,
    QUEUED,
    Acquire,
    Actor,
    Add,
    Cas,
    Copy,
    Device,
    Fence,
    Load,
    Read,
    Release,
    Store,
    Wait,
    claim_word,
    move_of,
    slot_word,
)
from moe_prefetch.types import SlotState

from .litmus import Scenario, StaleLoad, StaleRead
from .scenes import Protocol, decode, filling, outlived, ranks, weights

GOOD = Protocol()


def through(actor: Callable[..., Actor], change: Callable[[Any], Any]) -> Callable[..., Actor]:
    """The actor with every step changed, or left out where the change gives None."""

    def changed(*args: Any) -> Actor:
        inner = actor(*args)
        result = None
        try:
            while True:
                op = change(inner.send(result))
                result = (yield op) if op is not None else None
        except StopIteration as end:
            return end.value

    return changed


def copier(*, fences: bool = True, heeds_claim: bool = True, all_pieces: bool = True, own_piece: bool = False,
           publish: Callable[..., Actor] = protocol.publish) -> Callable[..., Actor]:
    """`protocol.move` with its parts to be left out; `n` is the program's number."""

    def move(d: Device, layer: int, step: int, n: int) -> Actor:
        count = yield Load(d.count(layer))
        for m in range(count):
            expert, slot, generation = move_of((yield Load(d.queue(layer, m))))
            queued, moving = claim_word(step, QUEUED), claim_word(step, MOVING)
            if (yield Cas(d.claim(layer, expert), queued, moving)) not in (queued, moving) and heeds_claim:
                continue
            for own in range(d.pieces + 1):
                piece = (n if own == 0 else d.pieces) if own_piece else (yield Add(d.taken(layer, m), 1))
                if piece >= d.pieces:
                    break
                yield Copy(d.home(layer, expert), d.buffer(layer, slot), piece)
                if fences:
                    yield Fence()
                last = (yield Add(d.done(layer, m), 1)) == d.pieces - 1
                if own_piece and n == 0:
                    yield Wait(d.done(layer, m), lambda done: done == d.pieces)
                if (n == 0 if own_piece else last) or not all_pieces:
                    yield from publish(d, layer, step, expert, slot, generation)

    return move


def publish_anyhow(d: Device, layer: int, step: int, expert: int, slot: int, generation: int) -> Actor:
    """Whatever the slot's word says now."""
    yield Release(d.where(layer, expert), d.buffer(layer, slot))
    yield Store(d.slot(layer, slot), slot_word(generation, SlotState.READY, expert))
    yield Cas(d.claim(layer, expert), claim_word(step, MOVING), claim_word(step, DONE))


def publish_everywhere(d: Device, layer: int, step: int, expert: int, slot: int, generation: int) -> Actor:
    yield Release(("where", 1 - d.rank, layer, expert), d.buffer(layer, slot))
    yield from protocol.publish(d, layer, step, expert, slot, generation)


def plan_without_rehome(d: Device, layer: int, step: int) -> Actor:
    return through(protocol.plan, lambda op: None if isinstance(op, Store) and op.at[0] == "where" else op)(d, layer, step)


def move_with_rehome(d: Device, layer: int, step: int, n: int) -> Actor:
    """The mover re-homes what its slots held: beside the layer's expert kernel."""
    count = yield Load(d.count(layer))
    for m in range(count):
        _, slot, _ = move_of((yield Load(d.queue(layer, m))))
        for expert in range(len(d.owner_E)):
            if (yield Load(d.where(layer, expert))) == d.buffer(layer, slot):
                yield Release(d.where(layer, expert), d.home(layer, expert))
    yield from copier()(d, layer, step, n)


def settle_without_claims(d: Device, layer: int, step: int, demanded: Iterable[int]) -> Actor:
    yield Load(d.count(layer))


def settle_without_waits(d: Device, layer: int, step: int, demanded: Iterable[int]) -> Actor:
    return through(protocol.settle, lambda op: None if isinstance(op, Wait) else op)(d, layer, step, demanded)


def settle_that_waits(d: Device, layer: int, step: int, demanded: Iterable[int]) -> Actor:
    """Waits for every move, whether its mover is on the chip or not."""
    count = yield Load(d.count(layer))
    for m in range(count):
        expert, _, _ = move_of((yield Load(d.queue(layer, m))))
        yield Wait(d.claim(layer, expert), lambda claim: claim in (claim_word(step, DONE), claim_word(step, CANCELLED)))


def cancel_started(d: Device, layer: int, step: int, worthless: Iterable[int]) -> Actor:
    count = yield Load(d.count(layer))
    for m in range(count):
        expert, slot, generation = move_of((yield Load(d.queue(layer, m))))
        if expert in worthless:
            yield Store(d.claim(layer, expert), claim_word(step, CANCELLED))
            yield Store(d.slot(layer, slot), slot_word(generation, SlotState.FREE, -1))


def update_alone(d: Device, layers: int, arrived: protocol.Place, ranks: int, round_: int) -> Actor:
    """Only this rank has come to rest."""
    return through(protocol.update, lambda op: None if isinstance(op, Wait) else op)(d, layers, arrived, ranks, round_)


def update_keeping_slots(d: Device, layers: int, arrived: protocol.Place, ranks: int, round_: int) -> Actor:
    return through(protocol.update, lambda op: None if isinstance(op, Store) and op.at[0] in ("where", "slot") else op)(
        d, layers, arrived, ranks, round_)


def read_as(kind: type, stale: type) -> Callable[..., Actor]:
    return through(protocol.read, lambda op: stale(*op) if isinstance(op, kind) else op)


# One slot that is given away in the second step, and read in both.
SWAP = {"demands": [[(0,), (1,)], [(0,), (2,)]], "slots": 1, "experts": 3, "doubt": (), "copiers": 2, "readers": 1,
        "plans": {(1, 0): ((1, 0),), (1, 1): ((2, 0),)}}
MISS = {**SWAP, "demands": [[(), (1,)]], "plans": {(1, 0): ((1, 0),)}}
# The slot is given away while its expert is demanded again: to be read at home.
AGAIN = {**SWAP, "demands": [[(), (1,)], [(0,), (1,)]]}
DOUBT = {**MISS, "doubt": (1,), "copiers": 1}
# A chip that holds one program at a time.
FEW = {**MISS, "copiers": 1, "seats": 1}


def swap(**more: Any) -> Callable[[Protocol], Scenario]:
    return lambda p: decode(p, **{**SWAP, **more})


# name: (the scene, the protocol with the violation, what must be found)
FAULTS: dict[str, tuple[Callable[[Protocol], Scenario], Protocol, str]] = {
    "publish_before_fence": (swap(**MISS), replace(GOOD, move=copier(fences=False)), "right bytes|leased slot"),
    "publish_by_the_first_to_finish": (swap(**MISS), replace(GOOD, move=copier(all_pieces=False)), "right bytes"),
    "no_wait_for_a_started_move": (swap(**MISS), replace(GOOD, settle=settle_without_waits), "one claimant"),
    "rehome_after_compute_starts": (swap(**AGAIN), replace(GOOD, plan=plan_without_rehome, move=move_with_rehome),
                                    "right bytes|leased slot|one claimant"),
    "no_rehome": (swap(**AGAIN), replace(GOOD, plan=plan_without_rehome), "right bytes|leased slot"),
    "filling_slot_replanned": (filling, replace(GOOD, plans_filling=True), "right bytes|leased slot|stale mover"),
    "two_claimants": (swap(**MISS), replace(GOOD, settle=settle_without_claims), "one claimant"),
    "missing_join": (swap(), replace(GOOD, join=False), "right bytes|leased slot|stale mover|cancelled mover|somebody can go on"),
    "settled_before_its_plan": (swap(), replace(GOOD, wait=False), "right bytes|leased slot|one claimant|somebody can go on"),
    "stale_generation": (outlived, replace(GOOD, publish=publish_anyhow), "stale mover|right bytes"),
    "weights_through_l1": (swap(copiers=1), replace(GOOD, read=read_as(Read, StaleRead)), "right bytes"),
    "entry_through_l1": (swap(**{**AGAIN, "copiers": 1}), replace(GOOD, read=read_as(Acquire, StaleLoad)), "right bytes|leased slot"),
    "remote_entry_to_a_slot": (ranks, replace(GOOD, move=copier(publish=publish_everywhere)), "right bytes|leased slot"),
    "update_without_quiesce": (weights, replace(GOOD, update=update_alone), "right bytes"),
    "update_that_keeps_slots": (weights, replace(GOOD, update=update_keeping_slots), "right bytes"),
    "update_without_join": (weights, replace(GOOD, join=False), "right bytes|leased slot|stale mover|cancelled mover"),
    "cancelled_move_that_publishes": (swap(**DOUBT), replace(GOOD, move=copier(heeds_claim=False, publish=publish_anyhow)),
                                      "cancelled mover|stale mover|one claimant"),
    "cancel_of_a_started_move": (swap(**DOUBT), replace(GOOD, cancel=cancel_started), "one claimant|right bytes|cancelled mover"),
    "wait_for_a_move_not_started": (swap(**FEW), replace(GOOD, settle=settle_that_waits), "somebody can go on"),
    "copiers_that_wait_for_each_other": (swap(**{**MISS, "seats": 2}), replace(GOOD, move=copier(own_piece=True)), "somebody can go on"),
}
