"""Violations of the protocol in the kernels that run, each with the delay that opens its window: the delay alone must be harmless.

A scene is given the delays, and the delays with the violation. Most violations are one change to a kernel's text; those of the order of
streams and of updates are one change to `DeviceExperts`.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_prefetch.experts.device import COSTS, DeviceExperts
from moe_prefetch.kernels.plan.op import plan
from moe_prefetch.kernels.settle.op import settle
from moe_prefetch.types import PROB_ONE, SlotState

from .device_scene import CLAIMANTS, ENTRY, FILLING, MOVE, WORD, Scene, kernels
from .planted import SMALL, Change, module

STALL = 5  # a sixth count: waits of 20 ms

# Places in the kernels' texts.
COPY = "                copy_piece(source, target, begin, tl.minimum(begin + PIECE, NBYTES), TILE)\n                fence()\n"
COUNTED = '                done = tl.atomic_add(done_ptr + layer * S + m, 1, sem="acq_rel", scope="gpu")\n'
LAST = "                if done == PIECES - 1:\n"
STILL = "                    if tl.load(slot_ptr + layer * S + slot, volatile=True) == filling:\n"
PUBLISH = '                        tl.atomic_xchg(where_ptr + entry, target, sem="release", scope="sys")\n'
MOVER_STARTS = "    count = tl.load(count_ptr + layer)\n    queued"
REHOME = "    tl.store(where_ptr + layer * E + expert, home, mask=(come >= 0) & in_slot)\n"
TAKEN_BACK = "    seen = take_back(slot_ptr + layer * S, claim, word, expert, slot, tag, on, tl.where(wanted, C_READING, C_CANCELLED))\n"
CANCEL = "    take_back(slot_ptr + layer * S, claim_ptr + layer * E + expert, word, expert, slot, tag, chosen, C_CANCELLED)\n"
MINE = "        if (seen == queued) | (seen == moving):\n"


def put(kernel: str, text: str, *, before: str = "", after: str = "") -> Change:
    return kernel, text, before + text + after


NO_REHOME: Change = ("plan", REHOME, REHOME.replace("come >= 0", "come > E"))


@dataclass(frozen=True)
class Fault:
    """`finding`: the count that must not stay 0. `delays` are in both runs, `fault` in one. `run` gives what a scene found."""

    finding: int
    delays: tuple[Change, ...] = ()
    fault: tuple[Change, ...] = ()
    scene: dict[str, Any] = field(default_factory=dict)
    run: Callable[[Fault, bool], list[int]] = lambda self, broken: self.replays(broken)

    def replays(self, broken: bool, steps: int = 100) -> list[int]:
        return Scene(**self.scene).run(steps)

    def found(self, broken: bool) -> list[int]:
        with kernels(BOUNDED + self.delays + self.fault * broken):
            return self.run(self, broken)


# Streams and updates ---------------------------------------------------------------------------------------------------
class LateJoin(DeviceExperts):
    """Steps do not wait for their movers."""

    late = True

    def join(self) -> None:
        if not self.late:
            super().join()


def two_steps_one_join(fault: Fault, broken: bool) -> list[int]:
    scene = Scene(kind=LateJoin if broken else DeviceExperts)
    d = scene.device_experts

    def steps() -> None:
        d.late = True
        scene.step()
        scene.step()
        d.late = False
        d.join()

    return scene.run(30, steps)


class SettlesEarly(DeviceExperts):
    """A layer does not wait for what is planned of it."""

    def _planned(self, layer: int) -> None:
        if layer >= self.layers:
            super()._planned(layer)


def settled_early(fault: Fault, broken: bool) -> list[int]:
    return Scene(hold_ns=40_000, kind=SettlesEarly if broken else DeviceExperts, **fault.scene).run(400)


def one(d: DeviceExperts, expert: int) -> torch.Tensor:
    prob = torch.zeros(1, d.tables.where_LE.shape[1], dtype=torch.int32, device="cuda")
    prob[0, expert] = PROB_ONE
    return prob


def ids(*experts: int) -> torch.Tensor:
    return torch.tensor(experts, device="cuda")


def plan_beside(d: DeviceExperts, layer: int, expert: int) -> None:
    """Another plan of a layer and its mover, which nothing holds up, on this stream: the layer's mover of before may still be at work."""
    plan(d.tables, d._row_L[layer : layer + 1], one(d, expert), COSTS)
    module("move", (SMALL,)).launch_move(d.tables, layer, d.buffers[layer], d.store.layout.nbytes, 0, 1)


def drop(d: DeviceExperts) -> None:
    """What `update` does to the tables."""
    d.tables.where_LE.copy_(d.tables.home_LE)
    d.tables.slot_LS.bitwise_right_shift_(32).bitwise_left_shift_(32)


def outlived(fault: Fault, broken: bool) -> list[int]:
    """A mover is held up before it publishes; its slot is dropped and given to another expert meanwhile."""
    scene = Scene(layers=3, slots=1)
    d = scene.device_experts
    for _ in range(5):
        d._plan(2, one(d, 3), 0)
        torch.cuda._sleep(2_000_000)
        drop(d)
        plan_beside(d, 2, 5)
        d.join()
        scene.read_layer(d, 2, ids(3, 5))
        d.step_end()
        drop(d)
    torch.cuda.synchronize()
    return scene.found.tolist()


def filled_from_outside(fault: Fault, broken: bool) -> list[int]:
    """A slot is FILLING by a copy that was planned before the steps began; its bytes land after the next plan."""
    scene = Scene(layers=3)
    d, t = scene.device_experts, scene.device_experts.tables
    for _ in range(10):
        drop(d)
        t.slot_LS[2, 0] = t.slot_LS[2, 0] + (1 << 32 | int(SlotState.FILLING) << 16 | 8)
        for expert in (1, 4, 6):
            d._plan(2, one(d, expert), 0)
            d.step_end()
        d.buffers[2, 0].copy_(scene.store.buffer(2, 7))
        scene.read_layer(d, 2, ids(1, 4, 6))
    torch.cuda.synchronize()
    return scene.found.tolist()


def remote_entries(fault: Fault, broken: bool) -> list[int]:
    """Two ranks read the same homes; one's entries lead to the other's slots."""
    scene = Scene(layers=3)
    d, other = scene.device_experts, DeviceExperts(scene.store, "cuda", scene.device_experts._runtime, 1, link_E=(0,) * 8)
    for n in range(12):
        d._plan(2, one(d, n % 8), 0)
        d.step_end()
        if broken:
            other.tables.where_LE.copy_(d.tables.where_LE)
        for expert in range(3):
            d._plan(2, one(d, (n + 3 + expert) % 8), 0)
            d.step_end()
        scene.read_layer(other, 2, torch.arange(8, device="cuda"))
    torch.cuda.synchronize()
    return scene.found.tolist()


def rewrite(scene: Scene) -> None:
    """The next version of every home."""
    scene.source.version += 1
    for layer in range(scene.layers):
        for expert in range(scene.num_experts):
            number = scene.source.version << 16 | (layer * scene.num_experts + expert)
            scene.store.buffer(layer, expert).view(torch.int32)[: 3 * 1024].fill_(number)
    scene.version.add_(1)


class NoRest(DeviceExperts):
    """Weights change whoever reads and moves."""

    def rest(self) -> None:
        pass

    def join(self) -> None:
        pass


class KeepsSlots(DeviceExperts):
    def update(self, write: Callable[[], None], quiesce: Callable[[], None] = lambda: None) -> None:
        self.rest()
        write()
        self.rest()


def update_under_a_reader(fault: Fault, broken: bool) -> list[int]:
    """Another rank is at work while this one writes homes that both read."""
    scene = Scene(layers=2, hold_ns=3_000_000, kind=NoRest if broken else DeviceExperts)
    d, other = scene.device_experts, DeviceExperts(scene.store, "cuda", scene.device_experts._runtime, 1, link_E=(0,) * 8)
    stream = torch.cuda.Stream()
    scene.read_layer(other, 0, ids(0, 1))
    for _ in range(4):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            scene.read_layer(other, 0, ids(0, 1))
        torch.cuda._sleep(200_000)
        d.update(lambda: rewrite(scene), (lambda: None) if broken else torch.cuda.synchronize)
    torch.cuda.synchronize()
    return scene.found.tolist()


def update_that_keeps_slots(fault: Fault, broken: bool) -> list[int]:
    scene = Scene(layers=3, kind=KeepsSlots if broken else DeviceExperts)
    d = scene.device_experts
    for _ in range(4):
        d._plan(2, one(d, 3), 0)
        d.step_end()
        d.update(lambda: rewrite(scene))
        scene.read_layer(d, 2, ids(3))
    torch.cuda.synchronize()
    return scene.found.tolist()


def update_under_a_mover(fault: Fault, broken: bool) -> list[int]:
    """A mover is held up between two pieces while the weights change and its slot is given to another expert."""
    scene = Scene(layers=3, slots=1, programs=1, kind=NoRest if broken else DeviceExperts)
    d = scene.device_experts
    for _ in range(4):
        torch.cuda.synchronize()
        d._plan(2, one(d, 3), 0)
        torch.cuda._sleep(2_000_000)
        d.update(lambda: rewrite(scene))
        plan_beside(d, 2, 5)
        DeviceExperts.join(d)
        scene.read_layer(d, 2, ids(3, 5))
        d.step_end()
        drop(d)
    torch.cuda.synchronize()
    return scene.found.tolist()


def stalled(fault: Fault, broken: bool) -> list[int]:
    """The side stream is busy with something else for long: whoever waits for a move that has not started waits for that (STALL)."""
    scene = Scene(layers=3)
    d = scene.device_experts
    ended = []
    for expert in (3, 4):
        with torch.cuda.stream(d._side):
            torch.cuda._sleep(150_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        d._plan(2, one(d, expert), 0)
        settle(d.tables, 2, ids(expert), d.ledger_LC)
        scene.read_layer(d, 2, ids(expert))
        end.record()
        d.step_end()
        torch.cuda.synchronize()
        ended.append(int(begin.elapsed_time(end)))
    return [*scene.found.tolist(), ended[-1] // 20]


TARGET = "            target = buffers_ptr.to(tl.int64) + slot.to(tl.int64) * STRIDE\n"
LATE = "    late = (wanted & (seen == moving)).to(tl.int32)\n"
WAITS = "        waits = tl.where(now == moving, waits, 0)\n"
# Nobody waits for ever, whatever is broken.
BOUNDED: tuple[Change, ...] = (
    put("settle", "    waits = late\n", after="    spins = layer * 0\n"),
    ("settle", "    while tl.max(waits, 0) > 0:\n", "    while (tl.max(waits, 0) > 0) & (spins < 200000):\n        spins += 1\n"))
HELD = put("move", TARGET, after="            hold(100000)\n")
HELD_AT_START = put("move", MOVER_STARTS, before="    hold(100000)\n")
HELD_BEFORE_PUBLISHING = put("move", LAST, after="                    hold(150000)\n")
EARLY = """            if seen == queued:
                early = (word >> C_GENERATION << C_GENERATION) | FILLING | (expert + 1).to(tl.int64)
                tl.atomic_xchg(where_ptr + entry, target, sem="release", scope="sys")
                tl.atomic_cas(slot_ptr + layer * S + slot, early, early - FILLING + READY, sem="acq_rel", scope="gpu")
                tl.atomic_cas(claim, moving, moving - C_MOVING + C_DONE, sem="acq_rel", scope="gpu")
"""
MOVER_REHOMES = """                    n = layer * 0
                    while n < E:
                        if tl.load(where_ptr + layer * E + n, volatile=True) == target:
                            tl.atomic_xchg(where_ptr + layer * E + n, tl.load(home_ptr + layer * E + n), sem="release", scope="sys")
                        n += 1
"""
BY_FORCE = """    tl.atomic_xchg(claim_ptr + layer * E + expert, expert * 0 + tag | C_CANCELLED, mask=chosen)
    tl.atomic_xchg(slot_ptr + layer * S + slot, word >> C_GENERATION << C_GENERATION, mask=chosen)
"""
SOON = COUNTED + "                if done == PIECES - 2:\n                    hold(100000)\n" + COPY

PERFECT, RANDOM = {"mode": 0}, {"mode": 1}
FAULTS: dict[str, Fault] = {
    "entry_published_before_the_copy": Fault(WORD, (HELD,), (put("move", "            hold(100000)\n", before=EARLY),), PERFECT),
    "piece_counted_before_it_is_copied": Fault(WORD, (), (("move", COPY + COUNTED, SOON),), PERFECT),
    "publish_by_the_first_to_finish": Fault(
        WORD, (put("move", COPY, before="                if piece > 0:\n                    hold(100000)\n"),),
        (("move", LAST, LAST.replace("PIECES - 1", "0")),), PERFECT),
    "no_wait_for_a_started_move": Fault(CLAIMANTS, (HELD,), (("settle", "    waits = late\n", "    waits = late * 0\n"),)),
    "no_rehome": Fault(WORD, (), (NO_REHOME,)),
    "rehome_after_compute_starts": Fault(WORD, (HELD_BEFORE_PUBLISHING,), (NO_REHOME, put("move", STILL, before=MOVER_REHOMES))),
    "filling_slot_replanned": Fault(WORD, (), (("plan", "on_s & (state != FILLING)", "on_s & (state >= 0)"),), run=filled_from_outside),
    "two_claimants": Fault(
        CLAIMANTS, (HELD_AT_START,), (("settle", TAKEN_BACK, TAKEN_BACK.replace("tag, on,", "tag, on & (expert < 0),")),)),
    "missing_join": Fault(FILLING, (put("move", TARGET, after="            hold(300000)\n"),), run=two_steps_one_join),
    "settled_before_its_plan": Fault(CLAIMANTS, (put("plan", REHOME, before="    maybe(200000)\n"),), (), {"mode": 0}, settled_early),
    "stale_generation": Fault(WORD, (put("move", LAST, after="                    hold(20000000)\n"),),
                              (("move", STILL, STILL.replace("== filling", "!= -1")),), run=outlived),
    "cancelled_move_that_publishes": Fault(
        ENTRY, (HELD_AT_START,), (("move", MINE, "        if seen != -1:\n"), ("move", STILL, STILL.replace("== filling", "!= -1")))),
    "cancel_of_a_started_move": Fault(MOVE, (HELD,), (("settle", CANCEL, BY_FORCE),), RANDOM),
    "remote_entry_to_a_slot": Fault(WORD, run=remote_entries),
    "update_without_quiesce": Fault(WORD, run=update_under_a_reader),
    "update_that_keeps_slots": Fault(WORD, run=update_that_keeps_slots),
    "update_without_join": Fault(WORD, (put("move", COPY, before="                hold(6000000)\n"),), run=update_under_a_mover),
    "wait_for_a_move_not_started": Fault(
        STALL, (), (("settle", TAKEN_BACK, TAKEN_BACK.replace("tag, on,", "tag, on & (wanted == 0),")),
                    ("settle", LATE, LATE.replace("(seen == moving)", "((seen == moving) | (seen == (tag | C_QUEUED)))")),
                    ("settle", WAITS, WAITS.replace("now == moving", "(now == moving) | (now == (tag | C_QUEUED))"))), run=stalled),
}
# Now and then, at every place where another may come between: what the clean protocol must bear.
DELAYS: tuple[Change, ...] = (
    put("move", MOVER_STARTS, before="    maybe(4000)\n"), put("move", TARGET, after="            maybe(6000)\n"),
    put("move", COPY, before="                maybe(4000)\n"), put("move", COUNTED, before="                maybe(3000)\n"),
    put("move", STILL, before="                    maybe(4000)\n"), put("move", PUBLISH, after="                        maybe(4000)\n"),
    put("plan", REHOME, before="    maybe(2000)\n", after="    maybe(2000)\n"),
    put("settle", TAKEN_BACK, before="    maybe(3000)\n", after="    maybe(3000)\n"), put("settle", CANCEL, before="    maybe(3000)\n"))
