"""The Triton kernels of mode gather under the interpreter, over the same shared memory; `test_kernels.py` runs these in processes."""
from __future__ import annotations

import random
import time
from typing import Any

import torch

from moe_prefetch.distributed.groups import Group
from moe_prefetch.experts.dispatch import Dispatch, DispatchSpec
from moe_prefetch.experts.gather import Gather
from moe_prefetch.experts.placement import Placement
from moe_prefetch.kernels.dispatch import planes
from moe_prefetch.kernels.dispatch.planes import NUMBER, Planes
from tests.distributed.dispatch_cases import PATTERNS, SHAPES, Batch, Model, Tally, share
from tests.distributed.group_cases import refusal


def speak(protocol: str) -> None:
    """Which kernels exchange messages of these sizes: `fused_words`, or `fused` as for large ones."""
    planes.WORDS_UP_TO = {"words": 1 << 19, "planes": 0}[protocol]


def device_gather(rank: int, world: int, count: str, protocol: str = "words") -> Any:
    """The Triton kernels under the interpreter, over the same shared memory."""
    speak(protocol)
    tally, rng = Tally(), random.Random(7)
    cases = [((8, 16, 8, 2, 4), "float32", 1), ((5, 40, 7, 3, 2), "float32", 3), ((6, 24, 8, 2, 3), "float16", 2)]
    for i, (shape, dtype, rounds) in enumerate(cases):
        extra = {0: [world - 1]} if world > 1 and i == 0 else {}
        model = Model(Group.of(), shape, dtype, Placement.even(shape[0], world).with_replicas(extra))
        for deterministic in (False, True):
            spec = DispatchSpec(model.form.hidden, model.top_k, model.dtype, shape[4], deterministic)
            gather = Gather(model.group, spec, model.placement, model.local, tokens=rounds * shape[4], device="cpu", deadline=60.0)
            for n in range(int(count)):
                tokens = [rng.choice((0, 1, rounds * shape[4], rng.randrange(rounds * shape[4] + 1))) for _ in range(world)]
                batch = Batch(model, tokens, rng.choice(PATTERNS), n)
                hidden, ids, weights = batch.of(rank)
                got = gather(n, hidden, ids.contiguous(), weights)
                gather.check()
                want = share(model.single(batch), batch, rank)
                if dtype == "float32":
                    tally.check(f"{shape} {deterministic} {n} {tokens}", got, want, deterministic)
                else:
                    tally.compared += 1
                    tally.rows += len(want)
                    if not torch.allclose(got.float(), want.float(), rtol=4e-3, atol=4e-3):
                        tally.wrong.append(f"{shape} {n} {(got - want).abs().max()}")
    return tally.result()


class Launches(Dispatch):
    """As on a GPU, in Triton's interpreter."""

    def _launches(self) -> bool:
        return True


def device_dispatch(rank: int, world: int, protocol: str = "words") -> Any:
    """`Dispatch` over the kernels: rows sent before other work, modes and replicas that change, more tokens than were promised."""
    speak(protocol)
    model, tally = Model(Group.of(), SHAPES[0]), Tally()
    spec = DispatchSpec(16, 2, torch.float32, 4, deterministic=True, tokens=6)
    dispatch = Launches(model.group, spec, model.placement, "gather", local=model.local, everywhere=model.everywhere, deadline=60.0)
    dispatch._gather._local = lambda layer, x, i, w: model.everywhere(
        layer, x, torch.where(i >= 0, torch.tensor(dispatch.placement.held_by(rank))[i.clamp(0)], -1), w)
    owner = model.placement.serve_RE[0]
    replicas = model.placement.with_replicas({e: [r] for e, r in ((0, world - 1), (3, 0)) if owner[e] != r})
    refused = []
    even = model.placement
    for n, (mode, placement) in enumerate([("gather", even), ("gather", replicas), ("stay", replicas), ("host", even), ("gather", even)]):
        dispatch.switch(mode, placement)
        batch = Batch(model, [6 - r for r in range(world)], "random", n)
        flight = dispatch.begin(n, *batch.of(rank))
        refused.append(refusal(lambda: dispatch.begin(n, *batch.of(rank)))["kind"] if mode != "stay" else "SessionError")  # noqa: B023
        tally.check(f"{n} {mode}", flight.finish(), share(model.single(batch), batch, rank), True)
        tally.check(f"{n} {mode} again", dispatch(n + 1, *batch.of(rank)), share(model.single(batch), batch, rank), True)
        dispatch.check()
    refused.append(refusal(lambda: dispatch(0, *Batch(model, [9] * world, "random", 0).of(rank)))["kind"])
    tally.check("after", dispatch(0, *batch.of(rank)), share(model.single(batch), batch, rank), True)
    dispatch.close()
    return {**tally.result(), "refused": refused}


def device_deadlines(rank: int, world: int, protocol: str) -> Any:
    """A rank that does not come is waited for once, whatever it owes: CPU seconds (looks cost them) of a call in which it owes a slot, and
    in which 8."""
    speak(protocol)
    model, took = Model(Group.of(), (8, 16, 8, 2, 8)), []
    for slots in (1, 8):
        gather = Gather(model.group, DispatchSpec(16, 2, torch.float32, slots), model.placement, model.local, tokens=slots, device="cpu",
                        deadline=0.5)
        batch = Batch(model, [slots] * world, "random", 0)
        gather(0, *batch.of(rank))
        gather.check()
        model.group.gather(b"here")
        start = time.process_time()
        if rank:
            gather(1, *batch.of(rank))
        took.append(time.process_time() - start)
        model.group.gather(b"there")
    return took


def device_deadline(rank: int, world: int, protocol: str = "words") -> Any:
    """The last rank does not come to the third call: the others give up, results are NaN, and `check` names it, though the host asks
    late: who is not there when nobody waits any more is not to blame. Rank 1 comes late to that."""
    speak(protocol)
    model = Model(Group.of(), (8, 16, 8, 2, 4))
    spec = DispatchSpec(16, 2, torch.float32, 4)
    gather = Gather(model.group, spec, model.placement, model.local, tokens=4, device="cpu", deadline=0.5)
    batch = Batch(model, [3] * world, "balanced", 0)
    for n in range(2):
        gather(n, *batch.of(rank))
        gather.check()
    if rank == world - 1:
        time.sleep(12)
        return None
    out = gather(2, *batch.of(rank))
    for n in range(3, 5):
        time.sleep(rank)
        gather(n, *batch.of(rank))
    return {"late": int(gather._failed[0]), **refusal(gather.check), "nan": bool(out.isnan().all())}


def device_turns(rank: int, world: int, rule: str) -> Any:
    """Rank 0 sends, sleeps, and takes; rank 1, without tokens, waits for no result and sends its next words meanwhile. `broken`: to where
    rank 0 has yet to look."""
    if rule == "broken":
        Planes.turn_bytes = property(lambda self: 0)  # type: ignore[assignment, method-assign]
    model, tally = Model(Group.of(), SHAPES[0]), Tally()
    gather = Gather(model.group, DispatchSpec(16, 2, torch.float32, 4), model.placement, model.local, tokens=4, device="cpu", deadline=1.0)
    for n in range(4):
        batch = Batch(model, [3] + [0] * (world - 1), "random", n)
        # One turn by layers: words have turns of their own.
        finish = gather.begin(0, *batch.of(rank))
        if rank == 0:
            time.sleep(0.3)
        out = finish()
        if (said := refusal(gather.check))["kind"] != "none":
            return {"rule": rule, **said}
        tally.check(f"{n}", out, share(model.single(batch), batch, rank), False)
    return {"rule": rule, **tally.result()}


def device_numbers(rank: int, world: int) -> Any:
    """Numbers go round at 2^32, and no word is older than four times the slots, whatever the routing."""
    model, tally = Model(Group.of(), SHAPES[0]), Tally()
    gather = Gather(model.group, DispatchSpec(16, 2, torch.float32, 4), model.placement, model.local, tokens=4, device="cpu", deadline=60.0)
    lie, ages = gather.planes, []
    for start in (0, 2**32 - 3):
        model.group.gather(b"idle")
        gather._state[NUMBER] = start
        model.group.gather(b"set")
        for n in range(4 + 2 * bool(start)):
            batch = Batch(model, [4] * world, "random", n)
            tally.check(f"{start} {n}", gather(n, *batch.of(rank)), share(model.single(batch), batch, rank), False)
        for n in range(4 * lie.slots if start else 0):
            gather(n, *Batch(model, [0] * world, "none", n).of(rank))
        model.group.gather(b"done")
        last, at = int(gather._state[NUMBER]), lie.word_offsets[0]
        words = gather.block.mine[at : at + 2 * lie.turn_bytes].view(torch.int64)
        size = 8 * world * lie.slots
        for turn in range(2):
            for offset, width in zip(lie.word_offsets, (2 * lie.keys, lie.words, lie.words), strict=True):
                first = (offset - at + turn * lie.turn_bytes) // 8
                found = words[first : first + size // 8 * width] >> 32
                if start:
                    ages.append(int(((last - found) % 2**32).max()))
    gather.check()
    return {**tally.result(), "ages": max(ages), "slots": lie.slots}
