"""Cases of dispatch; `test_dispatch.py` runs them in processes of their own. Each compares a rank's share with the single-process law."""
from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # an operator's first call imports it: once before the fork, instead of once a rank

from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.symmetric import symmetric_memory
from moe_prefetch.experts.dispatch import MODES, Dispatch, DispatchSpec
from moe_prefetch.experts.placement import Placement
from moe_prefetch.kernels.expert_mlp.naive import moe_records
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.kernels.expert_mlp.record import Form
from moe_prefetch.metrics import Metrics
from moe_prefetch.runtime import Runtime
from tests.distributed.group_cases import Hosts, refusal
from tests.kernels.expert_cases import records, table

# (experts, hidden, width, top-k, capacity): odd sizes, experts that ranks do not divide, messages that overflow.
SHAPES = [(8, 16, 8, 2, 4), (5, 33, 7, 3, 2), (16, 8, 16, 4, 64), (3, 24, 12, 1, 1), (7, 130, 5, 2, 3)]
PATTERNS = ("random", "balanced", "zipf", "all-to-one", "none")


class Model:
    """One MoE layer, known whole to every rank; its records lie spread over the ranks' shared memory."""

    def __init__(self, group: Group, shape: tuple[int, ...], dtype: str = "float32", placement: Placement | None = None,
                 runtime: Runtime | None = None, seed: int = 0) -> None:
        self.experts, hidden, width, self.top_k, self.capacity = shape
        self.form = Form(dtype, hidden, width)
        self.dtype = getattr(torch, dtype)
        self.records = records(self.form, self.experts, seed=seed, device="cpu")
        self.group = group
        self.placement = placement or Placement.even(self.experts, group.size)
        self.runtime = runtime or group._runtime
        size = self.form.layout().nbytes
        held = [self.placement.held_by(r) for r in range(group.size)]
        block = symmetric_memory(group, "cpu", self.runtime).allocate(max(map(len, held)) * size)
        self.mine = [block.mine[i * size : (i + 1) * size] for i in range(len(held[group.rank]))]
        for record, e in zip(self.mine, held[group.rank], strict=True):
            record.copy_(self.records[e])
        # Where each expert is read in mode stay: at its first server's, which on simulated hosts may be out of reach.
        place = {p: i for i, p in enumerate(range(group.size) if len(block.views) == group.size else [])}
        self.everyone = []
        for e in range(self.experts if place else 0):
            owner = self.placement.serve_RE[0][e]
            at = held[owner].index(e) * size
            self.everyone.append(block.views[place[owner]][at : at + size])
        group.gather(b"filled")

    def local(self, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.mine:
            return torch.zeros_like(rows)
        return expert_mlp(rows, ids, weights, table(self.mine), self.form, records=self.mine)

    def everywhere(self, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return expert_mlp(rows, ids, weights, table(self.everyone), self.form, records=self.everyone)

    def open(self, mode: str, **more: Any) -> Dispatch:
        options = {k: more.pop(k) for k in ("deadline", "metrics", "attach_deadline") if k in more}
        spec = DispatchSpec(self.form.hidden, self.top_k, self.dtype, **{"capacity": self.capacity, **more})
        return Dispatch(self.group, spec, self.placement, mode, local=self.local, everywhere=self.everywhere if self.everyone else None,
                        runtime=self.runtime, **{"deadline": 60.0, **options})

    def single(self, batch: Batch) -> torch.Tensor:
        """The law on all tokens at once, in one process."""
        return moe_records(torch.cat(batch.hidden), torch.cat(batch.ids), torch.cat(batch.weights), self.records, self.form).to(self.dtype)


class Batch:
    """Tokens of every rank, drawn alike on every rank."""

    def __init__(self, model: Model, tokens: list[int], pattern: str, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        E, K = model.experts, model.top_k
        self.tokens = tokens
        self.hidden, self.ids, self.weights = [], [], []
        for t in tokens:
            self.hidden.append(torch.randn(t, model.form.hidden, generator=g).to(model.dtype))
            if pattern == "balanced":
                ids = (torch.arange(t * K) + seed).reshape(t, K) % E
            elif pattern == "zipf":
                ids = torch.multinomial(1 / torch.arange(1, E + 1).float(), max(1, t * K), True, generator=g)[: t * K].reshape(t, K)
            elif pattern == "all-to-one":
                ids = torch.full((t, K), seed % E)
            elif pattern == "none":
                ids = torch.full((t, K), -1)
            else:
                # Masked ids of both kinds and experts that a token names twice are among them.
                ids = torch.randint(-1, E + 1, (t, K), generator=g)
            self.ids.append(ids)
            self.weights.append(torch.randn(t, K, generator=g))

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.hidden[rank], self.ids[rank], self.weights[rank]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.view(torch.int32), want.view(torch.int32))


def share(whole: torch.Tensor, batch: Batch, rank: int) -> torch.Tensor:
    start = sum(batch.tokens[:rank])
    return whole[start : start + batch.tokens[rank]]


class Tally:
    """Counts what was compared and keeps what differed."""

    def __init__(self) -> None:
        self.compared, self.rows, self.wrong, self.start = 0, 0, [], time.perf_counter()

    def check(self, what: str, got: torch.Tensor, want: torch.Tensor, exact: bool) -> None:
        self.compared += 1
        self.rows += len(want)
        if not (same_bits(got, want) if exact else torch.allclose(got, want, rtol=2e-5, atol=2e-5)):
            self.wrong.append(f"{what}: {(got - want).abs().max() if got.shape == want.shape else got.shape}")

    def result(self) -> dict[str, Any]:
        return {"compared": self.compared, "rows": self.rows, "wrong": self.wrong[:5], "seconds": time.perf_counter() - self.start}


def subsets(world: int) -> Iterator[list[int]]:
    """Tokens of each rank, zero on every subset of ranks."""
    for empty in itertools.product((False, True), repeat=world):
        yield [0 if e else 3 + r for r, e in enumerate(empty)]


def patterns(rank: int, world: int) -> Any:
    """Every mode, both sums, every pattern, zero tokens on each subset of ranks."""
    tally = Tally()
    model = Model(Group.of(), SHAPES[0])
    for mode in MODES:
        for deterministic in (False, True):
            dispatch = model.open(mode, deterministic=deterministic)
            for n, (pattern, tokens) in enumerate(itertools.product(PATTERNS, subsets(world))):
                batch = Batch(model, tokens, pattern, n)
                got = dispatch(n, *batch.of(rank))
                tally.check(f"{mode} {deterministic} {pattern} {tokens}", got, share(model.single(batch), batch, rank), deterministic)
    return tally.result()


def random_cases(rank: int, world: int, count: str, seed: str) -> Any:
    """Random shapes, batches and patterns; each in every mode, deterministic in one case of two."""
    tally, rng = Tally(), random.Random(int(seed))
    # Two shapes have replicas, one of them on every rank.
    replicas = {0: {1: [world - 1], 5: [0]}, 2: {3: [r for r in range(world) if r != Placement.even(16, world).serve_RE[0][3]]}}
    replicas[0] = {e: ranks for e, ranks in replicas[0].items() if Placement.even(8, world).serve_RE[0][e] not in ranks}
    models = [Model(Group.of(), shape, seed=i, placement=Placement.even(shape[0], world).with_replicas(replicas.get(i, {})))
              for i, shape in enumerate(SHAPES)]
    opened = {(i, mode, d): models[i].open(mode, deterministic=d) for i in range(len(models)) for mode in MODES for d in (False, True)}
    for n in range(int(count)):
        i = rng.randrange(len(models))
        tokens = [rng.choice((0, 1, 1, 2, 3, 5, 9)) for _ in range(world)]
        batch = Batch(models[i], tokens, rng.choice(PATTERNS[:1] * 4 + PATTERNS), n)
        deterministic = rng.random() < 0.5
        want = share(models[i].single(batch), batch, rank)
        for mode in MODES:
            got = opened[i, mode, deterministic](n % 7, *batch.of(rank))
            tally.check(f"case {n} shape {i} {mode} {deterministic} {tokens}", got, want, deterministic)
    return tally.result()


def overflow(rank: int, world: int) -> Any:
    """Messages of one to four rows and up to 23 tokens: every token arrives, in as many exchanges as it takes, on all ranks alike."""
    tally, exchanges = Tally(), []
    for capacity in (1, 4):
        model = Model(Group.of(), (*SHAPES[0][:4], capacity))
        for mode in ("gather", "host"):
            metrics = Metrics()
            dispatch = model.open(mode, deterministic=True, metrics=metrics)
            for n, tokens in enumerate(([23] + [0] * (world - 1), [0] * (world - 1) + [9], [5] * world, [0] * world)):
                batch = Batch(model, tokens, "all-to-one", n)
                before = metrics.value("dispatch_exchanges")
                got = dispatch(n, *batch.of(rank))
                tally.check(f"{capacity} {mode} {tokens}", got, share(model.single(batch), batch, rank), True)
                exchanges.append([metrics.value("dispatch_exchanges") - before, max(1, -(-max(tokens) // capacity))])
    return {**tally.result(), "exchanges": exchanges}


def spanning(rank: int, world: int, *names: str) -> Any:
    """Simulated hosts: one-sided within each, the collective between them; a collective alone in mode host."""
    tally = Tally()
    model = Model(Group.of(runtime=Hosts(*names)), SHAPES[1])
    for mode, deterministic in itertools.product(("gather", "host"), (False, True)):
        dispatch = model.open(mode, deterministic=deterministic)
        kinds = type(dispatch._transports[mode]).__name__
        some = list(subsets(world))
        for n, (pattern, tokens) in enumerate(itertools.product(PATTERNS, [some[0], some[-1], some[5]])):
            batch = Batch(model, tokens, pattern, n)
            tally.check(f"{mode} {pattern} {tokens}", dispatch(n, *batch.of(rank)), share(model.single(batch), batch, rank), deterministic)
    return {**tally.result(), "last": kinds}


def switching(rank: int, world: int) -> Any:
    """Modes and replicas change between layers; what one rank alone wants is refused everywhere, and the old mode goes on."""
    model, tally, refused = Model(Group.of(), SHAPES[0]), Tally(), []
    dispatch = model.open("gather", deterministic=True)

    def layer(n: int) -> None:
        batch = Batch(model, [4] * world, "random", n)
        tally.check(f"{n} {dispatch.mode}", dispatch(n, *batch.of(rank)), share(model.single(batch), batch, rank), True)

    # Every rank holds every expert, so any placement can be served; ids within a rank's own experts change with it.
    dispatch._local = lambda layer, x, i, w: model.everywhere(
        layer, x, torch.where(i >= 0, torch.tensor(dispatch.placement.held_by(rank))[i.clamp(0)], -1), w)
    two = {0: [world - 1], 3: [0 if world > 2 else 1]}
    for n, (mode, replicas) in enumerate([("host", {}), ("stay", {}), ("gather", two), ("gather", {})]):
        owner = Placement.even(8, world).serve_RE[0]
        extra = {e: [r for r in ranks if r != owner[e]] for e, ranks in replicas.items()}
        dispatch.switch(mode, Placement.even(8, world).with_replicas(extra))
        layer(n)
    for act in (lambda: dispatch.switch("host" if rank else "stay"), lambda: dispatch.switch("nowhere"),
                lambda: dispatch.switch("gather", Placement.even(8, world + 1))):
        refused.append(refusal(act))
        layer(10 + len(refused))
    return {**tally.result(), "refused": refused, "mode": dispatch.mode}


def differing(rank: int, world: int) -> Any:
    """Two configurations: refused at attach on every rank, with the key and the ranks."""
    model = Model(Group.of(), SHAPES[0])
    odd = rank == world - 1
    return [refusal(lambda: model.open("gather", capacity=8 if odd else 4)), refusal(lambda: model.open("gather", deterministic=odd)),
            refusal(lambda: model.open("host" if odd else "gather")), refusal(lambda: model.open("gather", deadline=5.0 if odd else 6.0))]


def overlap(rank: int, world: int) -> Any:
    """Other work between `begin` and `finish`; two dispatches at once, finished the other way round; what is not allowed meanwhile."""
    model, tally = Model(Group.of(), SHAPES[0]), Tally()
    one, two = model.open("gather", deterministic=True), model.open("host", deterministic=True)
    for n in range(5):
        a, b = Batch(model, [n] * world, "random", n), Batch(model, [3] * world, "zipf", n)
        first, second = one.begin(n, *a.of(rank)), two.begin(n, *b.of(rank))
        early = refusal(lambda: one.begin(n, *a.of(rank)))  # noqa: B023
        tally.check("second", second.finish(), share(model.single(b), b, rank), True)
        tally.check("first", first.finish(), share(model.single(a), a, rank), True)
    return {**tally.result(), "early": early["kind"]}


def bad_calls(rank: int, world: int) -> Any:
    """Refused before anything is sent: the layer is called again, rightly, and all is well."""
    model, tally = Model(Group.of(), SHAPES[0]), Tally()
    dispatch = model.open("gather", deterministic=True)
    batch = Batch(model, [4] * world, "random", 0)
    hidden, ids, weights = batch.of(rank)
    kinds = [refusal(lambda: dispatch(0, *args))["kind"] for args in (  # noqa: B023
        (hidden[:, :-1], ids, weights), (hidden, ids[:-1], weights), (hidden, ids.float(), weights), (hidden.double(), ids, weights),
        (hidden, ids, weights[:, :1]))]
    tally.check("after", dispatch(0, *batch.of(rank)), share(model.single(batch), batch, rank), True)
    return {**tally.result(), "kinds": kinds}


def strays(rank: int, world: int) -> Any:
    """One rank is a layer ahead, in a group where another's experts fail: every rank hears of it at once, not at its deadline."""
    model = Model(Group.of(), SHAPES[0])
    batch = Batch(model, [2] * world, "random", 0)
    ahead = model.open("gather")
    layers = refusal(lambda: ahead(1 if rank == 1 else 0, *batch.of(rank)))
    broken = model.open("gather")
    if rank == 1:
        def fails(*args: Any) -> torch.Tensor:
            raise MemoryError("no memory for this layer")
        broken._local = fails
    failed = refusal(lambda: broken(0, *batch.of(rank)))
    again = refusal(lambda: broken(1, *batch.of(rank)))
    left = model.open("gather")
    if rank == 1:
        left.close()
        gone = {"kind": "PeerError", "ranks": [1], "seconds": 0}
    else:
        gone = refusal(lambda: left(0, *batch.of(rank)))
    return [layers, failed, again, gone]


def uneven(rank: int, world: int) -> Any:
    """Rank 1 runs one layer fewer: the others name it by their deadline."""
    model = Model(Group.of(), SHAPES[0])
    dispatch = model.open("gather", deadline=0.5)
    batch = Batch(model, [2] * world, "random", 0)
    for n in range(3 if rank != 1 else 2):
        last = refusal(lambda: dispatch(n, *batch.of(rank)))  # noqa: B023
    if rank == 1:
        time.sleep(2.0)
    return last


def waits(rank: int, world: int) -> Any:
    """Rank 1 comes late, or comes in time and sends slowly: told apart by the others."""
    model = Model(Group.of(), SHAPES[0])
    dispatch = model.open("gather")
    transport = dispatch._transports["gather"]
    batch, found = Batch(model, [2] * world, "random", 0), {"late": [], "slow": []}
    send = transport.send
    for n in range(12):
        kind = "late" if n % 2 else "slow"
        transport.send = lambda half, kind=kind: (rank == 1 and kind == "slow" and half == 0 and time.sleep(0.1), send(half))
        model.group.gather(b"together")
        if rank == 1 and kind == "late":
            time.sleep(0.1)
        dispatch(n, *batch.of(rank))
        found[kind].append([transport.waits.late, transport.waits.late_rank, transport.waits.transfer])
    return found


def fp8_payload(rank: int, world: int, pattern: str) -> Any:
    """Rows in E4M3: the error against the law, and that all modes but stay agree to the bit."""
    model = Model(Group.of(), (16, 512, 128, 4, 64), "bfloat16")
    batch = Batch(model, [64] * world, pattern, 3)
    exact = share(model.single(batch), batch, rank).float()
    plain, fp8 = model.open("gather")(0, *batch.of(rank)).float(), model.open("gather", fp8=True)(0, *batch.of(rank))
    other = model.open("host", fp8=True)(0, *batch.of(rank))
    norm = exact.norm()
    return {"plain": float((plain - exact).norm() / norm), "fp8": float((fp8.float() - exact).norm() / norm),
            "same": torch.equal(fp8.view(torch.int16), other.view(torch.int16)),
            "bytes": [model.open("gather", fp8=f)._message.out_bytes for f in (False, True)]}
