"""Cases of `experts.steps`; `test_steps.py` runs them in processes of their own."""
from __future__ import annotations

import random
import time
from typing import Any

import torch

from moe_prefetch.distributed.groups import Group
from moe_prefetch.experts.placement import Placement
from moe_prefetch.experts.steps import Replan, Steps
from moe_prefetch.runtime import REAL
from tests.distributed.dispatch_cases import SHAPES, Batch, Model, Tally, share
from tests.distributed.group_cases import Hosts, refusal

MODES: dict[int, Any] = {4: "gather", 16: "host", 64: "stay"}


def decisions(rank: int, world: int, *names: str) -> Any:
    """Sixty steps with other tokens on every rank and loads that move: what this rank was told, and what it had said."""
    group = Group.of(runtime=Hosts(*names) if names else REAL)
    steps = Steps(group, MODES, Placement.even(8, world), replan=Replan(2, every=5), deadline=60.0)
    rng, told = random.Random(rank), []
    for n in range(60):
        tokens, load_E = rng.choice((0, 1, 4, 5, 16, 17, 64)), torch.tensor([(n // 10 + rank * 3 + e * 7) % 5 for e in range(8)])
        step = steps.next(tokens, load_E)
        told.append([step.size, step.mode, step.placement.serve_RE, step.fresh, tokens, load_E.tolist()])
    return {"told": told, "shared": steps._channel is not None}


def graphs(rank: int, world: int) -> Any:
    """A step is captured once for each size and mode, and replicas change under it: every result is the single process's, to the bit."""
    model, tally = Model(Group.of(), SHAPES[0]), Tally()
    modes: dict[int, Any] = {2: "gather", 4: "stay", 9: "host"}
    steps = Steps(model.group, modes, model.placement, replan=Replan(2, every=3, gain=1.0), deadline=60.0)
    dispatches = {size: model.open(mode, deterministic=True, capacity=size) for size, mode in modes.items()}
    for dispatch in dispatches.values():
        # Every rank reads every expert, so any placement can be served; ids within a rank's own experts change with it.
        dispatch._local = lambda layer, x, i, w, d=dispatch: model.everywhere(
            layer, x, torch.where(i >= 0, torch.tensor(d.placement.held_by(rank))[i.clamp(0)], -1), w)
    captured: dict[tuple[int, str], Any] = {}
    load_E, rng, fresh = torch.zeros(8, dtype=torch.int64), random.Random(5), 0
    for n in range(24):
        tokens = [rng.choice((0, 1, 2, 3, 4, 9)) for _ in range(world)]
        step = steps.next(tokens[rank], load_E)
        if step.fresh:
            fresh += 1
            for dispatch in dispatches.values():
                dispatch.switch(dispatch.mode, step.placement)
        run = captured.setdefault((step.size, step.mode), dispatches[step.size])
        batch = Batch(model, tokens, "zipf", n // 6)
        load_E = batch.of(rank)[1].flatten().clamp(0).bincount(minlength=8)
        tally.check(f"{n} {step.mode} {step.size}", run(n, *batch.of(rank)), share(model.single(batch), batch, rank), True)
    return {**tally.result(), "captured": sorted(map(list, captured)), "fresh": fresh}


def refused(rank: int, world: int) -> Any:
    group, even = Group.of(), Placement.even(8, world)
    wrong: list[Any] = [{}, {0: "gather"}, {4: "fast"}]
    said = [refusal(lambda m=m: Steps(group, m, even)) for m in wrong]
    said.append(refusal(lambda: Steps(group, {4 + rank: "gather"}, even)))
    said.append(refusal(lambda: Steps(group, MODES, even, replan=Replan(rank))))
    steps = Steps(group, MODES, even, deadline=60.0)
    # Refused before anybody is told, so that all can go on.
    said += [refusal(lambda: steps.next(65)), refusal(lambda: steps.next(1, torch.zeros(7, dtype=torch.int64))),
             refusal(lambda: steps.next(1, torch.zeros(8)))]
    return {"kinds": [s["kind"] for s in said], "sizes": str(said[3]["said"]), "size": steps.next(rank).size}


def late(rank: int, world: int) -> Any:
    """Rank 1 does not come to the third step."""
    steps = Steps(Group.of(), MODES, Placement.even(8, world), deadline=0.5)
    for _ in range(2):
        steps.next(1)
    if rank == 1:
        time.sleep(4)
        return None
    return refusal(lambda: steps.next(1))


def leaves(rank: int, world: int) -> Any:
    steps = Steps(Group.of(), MODES, Placement.even(8, world), deadline=60.0)
    steps.next(1)
    if rank == 1:
        steps.close()
        return None
    return refusal(lambda: steps.next(1))
