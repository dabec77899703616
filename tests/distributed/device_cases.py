"""Cases of `Gather` on a device. Ranks are processes, with a GPU each or all on one, or streams of one process on one GPU.

`benchmarks/dispatch_gpu.py` runs them. The law is `Dispatch` in mode stay over all records, as one process computes it.
"""
from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from moe_prefetch.bench.expert_mlp import random_block
from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.symmetric import LINE, SharedBlock, SymmetricMemory
from moe_prefetch.experts.dispatch import Dispatch, DispatchSpec, Mode
from moe_prefetch.experts.gather import Gather
from moe_prefetch.experts.placement import Placement
from moe_prefetch.kernels.dispatch.planes import FAILED
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.kernels.expert_mlp.record import Form
from tests.distributed.dispatch_cases import PATTERNS, Batch

BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}


class Shape(NamedTuple):
    form: Form
    experts: int
    top_k: int
    capacity: int
    rounds: int = 1


# A decode step's messages; sizes that nothing divides, in two rounds; full messages that programs sort first.
SHAPES = {"decode": Shape(Form("bfloat16", 2048, 256), 16, 8, 8), "odd": Shape(Form("bfloat16", 72, 40), 5, 3, 3, 2),
          "full": Shape(Form("float16", 256, 128), 16, 4, 64)}

STEP = SHAPES["decode"]._replace(capacity=4)  # of a captured step: messages of as many rows as there are tokens


# ranks that are streams ------------------------------------------------------------------------------------------------------
class Meeting:
    """What threads that open one rank each tell each other."""

    def __init__(self, size: int) -> None:
        self.size, self.words, self.barrier = size, [b""] * size, threading.Barrier(size)
        self.blocks: list[torch.Tensor | None] = [None] * size


class StreamGroup(Group):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__("ep", range(meeting.size), rank)
        self.meeting = meeting

    def gather(self, word: bytes, deadline: float = 60.0) -> list[bytes]:
        m = self.meeting
        m.words[self.rank] = word
        m.barrier.wait(deadline)
        words = list(m.words)
        m.barrier.wait(deadline)
        return words


class StreamMemory:
    """Blocks of one process: every rank writes to every other's through the same addresses."""

    def __init__(self, group: StreamGroup, device: torch.device) -> None:
        self.group, self.places, self.rank, self.device = group, group.ranks, group.rank, device

    def allocate(self, nbytes: int, deadline: float = 60.0) -> SharedBlock:
        blocks = self.group.meeting.blocks
        blocks[self.rank] = torch.zeros(-(-nbytes // LINE) * LINE, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize()
        self.group.gather(b"allocated")
        views = tuple(b for b in blocks if b is not None)
        return SharedBlock(self.rank, views, tuple(v.data_ptr() for v in views))


# a world ---------------------------------------------------------------------------------------------------------------------
class World:
    """The ranks that this process plays, with a layer whose records it has whole. A rank serves its own experts alone."""

    def __init__(self, shape: Shape, device: torch.device, groups: list[Group], memory: Callable[[Group], SymmetricMemory | None],
                 replicas: dict[int, list[int]] | None = None, deadline: float = 30.0) -> None:
        if device.type == "cpu":
            shape = shape._replace(form=replace(shape.form, weights="float32"))
        self.shape, self.device, self.groups, self.memory, self.deadline = shape, device, groups, memory, deadline
        self.size, self.dtype = groups[0].size, getattr(torch, shape.form.weights)
        torch.manual_seed(1)
        self.records = list(random_block(shape.form, shape.experts, device))
        self.placement = Placement.even(shape.experts, self.size).with_replicas(replicas or {})
        self.streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in groups]
        self.experts, self.top_k, self.form = shape.experts, shape.top_k, shape.form
        self._where = {r: self._table(self.placement.held_by(r)) for r in range(self.size)}
        self._all = self._table(range(shape.experts))

    def _table(self, held: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        records = [self.records[e] for e in held]
        return torch.tensor([r.data_ptr() for r in records], dtype=torch.int64, device=self.device), records

    def _layer(self, where: tuple[torch.Tensor, list[torch.Tensor]]) -> Callable[..., torch.Tensor]:
        table, records = where

        def experts(layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if not records:
                return torch.zeros_like(rows)
            return expert_mlp(rows, ids, weights, table, self.shape.form, records=records if self.device.type == "cpu" else ())

        return experts

    def spec(self, deterministic: bool) -> DispatchSpec:
        return DispatchSpec(self.shape.form.hidden, self.shape.top_k, self.dtype, self.shape.capacity, deterministic)

    def law(self) -> Dispatch:
        return Dispatch(Group("ep", (0,), 0), self.spec(True), Placement.even(self.experts, 1), "stay", device=self.device,
                        everywhere=self._layer(self._all))

    def dispatch(self, mode: Mode, deterministic: bool) -> Dispatch:
        """As a model opens it; collective, where a process plays one rank."""
        spec = replace(self.spec(deterministic), tokens=self.shape.capacity * self.shape.rounds)
        return Dispatch(self.groups[0], spec, self.placement, mode, device=self.device, deadline=self.deadline,
                        local=self._layer(self._where[self.groups[0].rank]), everywhere=self._layer(self._all))

    def open(self, deterministic: bool) -> list[Gather]:
        def one(group: Group) -> Gather:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return Gather(group, self.spec(deterministic), self.placement, self._layer(self._where[group.rank]),
                          tokens=self.shape.capacity * self.shape.rounds, device=self.device, deadline=self.deadline,
                          memory=self.memory(group))

        with ThreadPoolExecutor(len(self.groups)) as pool:
            gathers = list(pool.map(one, self.groups))
        if len(gathers) > 1:
            self._warm(gathers)
        return gathers

    def _warm(self, gathers: list[Gather]) -> None:
        """Every kernel is loaded before one waits for another of this process."""
        with self.unwaiting(gathers):
            for tokens in (self.shape.capacity * self.shape.rounds, 1):
                batch = Batch(self, [tokens] * self.size, "random", 0)  # type: ignore[arg-type]
                for i, gather in enumerate(gathers):
                    with self.on(i):
                        gather(0, *self.inputs(batch, 0))
                    torch.cuda.synchronize()

    @contextmanager
    def unwaiting(self, gathers: list[Gather]) -> Iterator[None]:
        """With a mark of failure nothing waits, and results are NaN."""
        for mark in (1, 0):
            torch.cuda.synchronize()
            for gather in gathers:
                gather._state[FAILED] = mark
            torch.cuda.synchronize()
            if mark:
                yield

    def inputs(self, batch: Batch, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, ids, weights = (t.to(self.device).contiguous() for t in batch.of(rank))
        return hidden, ids, weights

    def on(self, i: int) -> Any:
        return torch.cuda.stream(self.streams[i]) if self.device.type == "cuda" else nullcontext()

    def run(self, gathers: list[Gather], layer: int, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        outs = []
        for i, gather in enumerate(gathers):
            with self.on(i):
                outs.append(gather(layer, *inputs[i]))
        self.settle(gathers)
        return outs

    def settle(self, gathers: list[Gather]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for gather in gathers:
            gather.check()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def correct(world: World, count: int, seed: int = 3) -> dict[str, Any]:
    """Random batches of every pattern, zero tokens among them: bitwise in deterministic mode, within rounding and repeatable without."""
    rng, wrong, rows, compared, worst = random.Random(seed), [], 0, 0, 0.0
    law, alone = world.law(), len(world.groups) == 1
    most = world.shape.capacity * world.shape.rounds
    for deterministic in (True, False):
        gathers = world.open(deterministic)
        others = [world.dispatch(mode, deterministic) for mode in ("stay", "gather") if alone and (deterministic or mode == "gather")]
        for n in range(count):
            tokens = [rng.choice((0, 1, most, rng.randrange(most + 1))) for _ in range(world.size)]
            pattern = PATTERNS[n % len(PATTERNS)]
            batch = Batch(world, tokens, pattern, n)  # type: ignore[arg-type]
            inputs = [world.inputs(batch, g.rank) for g in world.groups]
            outs, again = (world.run(gathers, n + i, inputs) for i in range(2))
            for out, more, given in zip(outs, again, inputs, strict=True):
                want = law(0, *given)
                compared, rows = compared + 1, rows + len(want)
                if not same_bits(out, more):
                    wrong.append(f"{pattern} {tokens} {deterministic}: not repeatable")
                for other in others:
                    flight = other.begin(n, *given)
                    busy = given[0] * 2
                    more = flight.finish()
                    other.check()
                    if not same_bits(more, out) and (deterministic or world.device.type == "cuda"):
                        wrong.append(f"{pattern} {tokens}: Dispatch in mode {other.mode} has other bits, {len(busy)} tokens")
                if deterministic and not same_bits(out, want):
                    wrong.append(f"{pattern} {tokens}: {int((out != want).sum())} of {out.numel()} numbers differ")
                if not deterministic and want.numel():
                    err = float((out.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9))
                    worst = max(worst, err)
                    if not err <= BOUND[world.dtype]:
                        wrong.append(f"{pattern} {tokens}: off by {err:.1e}")
    return {"compared": compared, "rows": rows, "wrong": wrong[:5], "worst": worst}


def _step(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Layers one after another, each with its own routing, over a residual that is kept small; the first behind a copy, which in a graph is
    no kernel."""
    x = hidden.clone()
    for n in range(len(ids)):
        x = (x + layer(n, x, ids[n], weights[n])) * 0.75
    return x


def replays(world: World, layers: int, count: int, seconds: float, deterministic: bool, sets: int = 8, tokens: int = 4) -> dict[str, Any]:
    """A captured step of many layers, replayed with changing tokens and routing; every result is compared on the device.

    Deterministic: with the bits of the single-process law. Otherwise with the bits of each set's first replay, which must be within
    rounding of the law.
    """
    law, gathers, cuda = world.law(), world.open(deterministic), world.device.type == "cuda"
    T = tokens
    patterns = ("random", "zipf", "all-to-one", "balanced", "none")
    data = []  # [set][rank of this process]: hidden, ids [L, T, K], weights
    for s in range(sets):
        # Rank s % size has no tokens to speak of in every third set: all its ids are masked.
        batches = [Batch(world, [T] * world.size, patterns[(s + n) % len(patterns)], s * 100 + n)  # type: ignore[arg-type]
                   for n in range(layers)]
        mine = []
        for g in world.groups:
            parts = [world.inputs(b, g.rank) for b in batches]
            ids = torch.stack([p[1] for p in parts])
            if s % 3 == 2 and g.rank == s % world.size:
                ids.fill_(-1)
            mine.append((parts[0][0], ids, torch.stack([p[2] for p in parts]) * 0.25))
        data.append(mine)
    want = [[_step(*given, lambda n, *x: law(n, *x)) for given in mine] for mine in data]
    static = [[t.clone() for t in given] for given in data[0]]
    out = [torch.zeros_like(given[0]) for given in static]

    def step(i: int) -> None:
        out[i].copy_(_step(*static[i], gathers[i]))

    run: list[Callable[[], Any]] = []
    world.run(gathers, 0, [(g[0], g[1][0].contiguous(), g[2][0].contiguous()) for g in data[0]])
    for i in range(len(gathers)):
        if cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=world.streams[i], capture_error_mode="thread_local"):
                step(i)
            run.append(graph.replay)
        else:
            run.append(lambda i=i: step(i))
    world.settle(gathers)
    if len(world.groups) == 1:
        world.groups[0].gather(b"captured")
    first = [[w.clone() for w in row] for row in want]
    bad = [torch.zeros((), dtype=torch.int64, device=world.device) for _ in gathers]

    def once(s: int, keep: bool) -> None:
        for i, go in enumerate(run):
            with world.on(i):
                for a, b in zip(static[i], data[s][i], strict=True):
                    a.copy_(b)
                go()
        # Not before every rank has been started: a kernel's first launch may wait for all that run.
        for i in range(len(run)):
            with world.on(i):
                if keep:
                    first[s][i].copy_(out[i])
                else:
                    bad[i] += (out[i] != first[s][i]).any()
                    bad[i] += out[i].isnan().any()

    if cuda:
        with world.unwaiting(gathers):
            once(0, False)
        for b in bad:
            b.zero_()
        if len(world.groups) == 1:
            world.groups[0].gather(b"warm")
    worst, done, start = 0.0, 0, time.perf_counter()
    while done < count:
        s = (done * 5 + done // sets) % sets
        once(s, not deterministic and done < sets)
        done += 1
        if done <= 2 * sets or done % 50 == 0:
            world.settle(gathers)
            if not deterministic and done <= sets:
                worst = max([worst, *(float((o.float() - w.float()).norm() / w.float().norm().clamp_min(1e-9))
                                      for o, w in zip(out, want[s], strict=True))])
            # All ranks stop at one count: rank 0's clock says when.
            if done % 50 == 0 and _enough(world, time.perf_counter() - start > seconds):
                break
    world.settle(gathers)
    took = time.perf_counter() - start
    if not worst <= 2 * BOUND[world.dtype]:
        bad[0] += 1
    late, moved = gathers[0].waited() if cuda else (0.0, 0.0)
    return {"replays": done, "layers": layers, "mismatches": int(sum(int(b) for b in bad)), "worst": worst,
            "us_a_layer": took / done / layers * 1e6,
            "late_us_a_layer": late / done / layers * 1e6, "moved_us_a_layer": moved / done / layers * 1e6}


def _enough(world: World, mine: bool) -> bool:
    return mine if len(world.groups) > 1 else world.groups[0].gather(b"1" if mine else b"0")[0] == b"1"
