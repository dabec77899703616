"""Compute: a MoE layer from slots is the law, bit for bit, for every routing that can come."""
from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.errors import ArtefactError, DeadlineError, SessionError, ShapeError
from moe_prefetch.experts.compute import LocalCompute, SlotCompute, demand_of
from moe_prefetch.experts.ledger import Ledger
from moe_prefetch.experts.planner import POLICIES
from moe_prefetch.experts.store import LocalStore
from moe_prefetch.kernels.expert_mlp.naive import moe
from moe_prefetch.runtime import REAL
from moe_prefetch.types import Move, Plan, SlotState
from tests.experts.records import Source, mover_of, poison
from tests.models import FaultyRuntime, GateRuntime, settled

act = torch.nn.functional.silu


class Bench:
    """Both homes over one source."""

    def __init__(self, folder, source=None, *, policy="lru", runtime=REAL, **kw):
        self.source = source or Source(2, 5)
        self.demands = []
        self.mover = mover_of(folder, self.source, runtime=runtime, poison=poison, **kw)
        self.ledger = Ledger(self.source.num_layers, self.mover.store.layout.nbytes)
        self.slots = SlotCompute(self.mover, POLICIES[policy], self.ledger, runtime, self.demands.append, lambda layer, step: ())
        self.local_ledger = Ledger(self.source.num_layers, self.mover.store.layout.nbytes)
        self.local = LocalCompute(LocalStore(self.source, REAL), self.local_ledger, self.demands.append)
        self.step = 0

    def both(self, layer, ids_TK, weights_TK, hidden_TD):
        self.step += 1
        with torch.no_grad():
            args = (layer, self.step, "decode", hidden_TD, ids_TK, weights_TK, act)
            got, want = self.slots.run(*args), self.local.run(*args)
        self.mover.table.check_integrity()
        assert not any(s.leases for row in self.mover.table._slots for s in row)
        assert len(self.mover._bounce) == len(self.mover._all_bounce)
        return got, want

    def close(self):
        self.mover.close()
        self.mover.store.close()


@pytest.fixture
def bench(tmp_path):
    made = []

    def build(*args, **kw):
        made.append(Bench(tmp_path / "r", *args, **kw))
        return made[-1]

    yield build
    for b in made:
        b.close()


ROUTINGS = {
    "uniform": lambda g, t, k: torch.randint(0, 5, (t, k), generator=g),
    "one": lambda g, t, k: torch.full((t, k), 3),
    "masked": lambda g, t, k: torch.randint(-1, 6, (t, k), generator=g),
    "all masked": lambda g, t, k: torch.full((t, k), -1),
    "out of range": lambda g, t, k: torch.tensor([-(2**63), -7, 5, 2**62]).repeat(t * k)[: t * k].reshape(t, k),
    "duplicates": lambda g, t, k: torch.randint(0, 5, (t, 1), generator=g).expand(t, k),
    "int32": lambda g, t, k: torch.randint(0, 5, (t, k), generator=g, dtype=torch.int32),
}


@pytest.mark.parametrize("policy", ["lru", "stale"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_the_law(bench, routing, policy):
    b = bench(policy=policy, slots=2)
    g = torch.Generator().manual_seed(3)
    for tokens in (1, 3, 0, 33, 2):
        ids, weights, hidden = ROUTINGS[routing](g, tokens, 2), torch.rand(tokens, 2, generator=g), torch.randn(tokens, 8, generator=g)
        for layer in range(2):
            got, want = b.both(layer, ids, weights, hidden)
            assert torch.equal(got, want)
            law = moe(hidden.double(), ids, weights.double(), b.source.gate_up[layer].double(), b.source.down[layer].double(), act)
            assert torch.allclose(got.double(), law, atol=1e-4)
    if routing in ("all masked", "out of range"):
        assert b.ledger.total.demanded == 0 and not got.any()
    else:
        assert b.ledger.total.demanded == b.local_ledger.total.demanded > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_float32_weights(bench, dtype):
    b = bench(Source(2, 5, dtype=dtype), slots=1)
    hidden = torch.randn(9, 8).to(dtype)
    got, want = b.both(1, torch.randint(0, 5, (9, 2)), torch.rand(9, 2), hidden)
    assert got.dtype == dtype and torch.equal(got, want)


def test_special_values_stay_with_their_token(bench):
    b = bench(slots=2)
    hidden = torch.randn(6, 8)
    clean = b.both(0, torch.arange(12).reshape(6, 2) % 5, torch.ones(6, 2), hidden.clone())[0]
    hidden[1], hidden[4, 3] = float("nan"), float("inf")
    got, want = b.both(0, torch.arange(12).reshape(6, 2) % 5, torch.ones(6, 2), hidden)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert torch.equal(got[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_twenty_repeats_give_one_output(bench):
    b = bench(slots=1)
    ids, weights, hidden = torch.randint(0, 5, (40, 2)), torch.rand(40, 2), torch.randn(40, 8)
    outs = [b.both(0, ids, weights, hidden)[0] for _ in range(20)]
    assert all(torch.equal(o, outs[0]) for o in outs)


@given(ids=st.lists(st.integers(-3, 9), max_size=80))
def test_a_demand_counts_each_valid_id(ids):
    d = demand_of(1, 2, torch.tensor(ids, dtype=torch.int64).reshape(-1, 1), 6)
    valid = [i for i in ids if 0 <= i < 6]
    assert d.experts == tuple(sorted(set(valid))) and d.tokens == tuple(valid.count(e) for e in d.experts)
    assert (d.layer, d.step) == (1, 2)


def test_more_experts_than_slots_and_buffers(bench):
    b = bench(Source(1, 40), slots=1, threads=1)
    ids = torch.arange(40).reshape(20, 2)
    for _ in range(3):
        got, want = b.both(0, ids, torch.rand(20, 2), torch.randn(20, 8))
        assert torch.equal(got, want)


def test_the_caller_gets_a_typed_error_for_gradients_and_other_dtypes(bench):
    b = bench()
    hidden = torch.randn(2, 8, requires_grad=True)
    for compute in (b.slots, b.local):
        with pytest.raises(SessionError, match="inference only"):
            compute.run(0, 0, "decode", hidden, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), act)
        with pytest.raises(ShapeError, match="one dtype"):
            compute.run(0, 0, "decode", hidden.detach().double(), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), act)


def test_hits_late_and_misses(bench):
    runtime = GateRuntime()
    b = bench(slots=3, threads=2, runtime=runtime, policy="stale")
    with b.mover.lock:
        b.mover.wait(b.mover.demand(0, 0, 0))
    b.mover.take_counts(0)
    runtime.shut()


    with b.mover.lock:
        b.mover.prefetch(Plan(0, 0, (Move(0, 1, 1, 1),)))
    assert settled(lambda: runtime.waiting == 1)


    threading.Timer(0.05, runtime.open).start()
    got, want = b.both(0, torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 2), torch.randn(2, 8))
    assert torch.equal(got, want)
    t = b.ledger.total
    assert (t.hit, t.late, t.miss) == (1, 1, 1)
    assert t.bytes_moved == 2 * b.ledger.record_bytes
    assert t.stall_s > 0.02


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_read_that_fails_within_a_layer(bench, nth):
    """Whichever read it is: a typed error, no lease and no buffer kept, and the same layer works at the next try."""
    runtime = FaultyRuntime("pread_into", nth)
    runtime.armed = False
    b = bench(slots=1, threads=2, runtime=runtime)
    runtime.calls.clear()
    runtime.armed = True
    ids, weights, hidden = torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.rand(3, 2), torch.randn(3, 8)
    with pytest.raises(ArtefactError, match="can't be read"), torch.no_grad():
        b.slots.run(0, 0, "decode", hidden, ids, weights, act)
    with b.mover.lock:
        b.mover.drain()
    got, want = b.both(0, ids, weights, hidden)
    assert torch.equal(got, want)


def test_a_hung_drive_costs_one_deadline_and_no_buffer(bench):
    runtime = GateRuntime()
    b = bench(slots=1, threads=2, runtime=runtime, deadline=0.2)
    ids, weights, hidden = torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.rand(3, 2), torch.randn(3, 8)
    runtime.shut()
    for _ in range(3):
        start = REAL.now()
        with pytest.raises(DeadlineError), torch.no_grad():
            b.slots.run(0, 0, "decode", hidden, ids, weights, act)
        assert REAL.now() - start < 1.0
    runtime.open()
    with b.mover.lock:
        b.mover.drain()
    got, want = b.both(0, ids, weights, hidden)
    assert torch.equal(got, want)


def test_a_policy_that_fails_leaves_no_lease(bench, monkeypatch):
    b = bench(slots=2)
    ids, weights, hidden = torch.tensor([[0, 1]]), torch.ones(1, 2), torch.randn(1, 8)
    b.both(0, ids, weights, hidden)

    def broken(*args):
        raise ZeroDivisionError

    b.slots._policy = type(POLICIES["lru"])("broken", POLICIES["lru"].plan, broken, False)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        b.slots.run(0, 5, "decode", hidden, torch.tensor([[0, 3]]), weights, act)
    assert not any(s.leases for row in b.mover.table._slots for s in row)
    b.slots._policy = POLICIES["lru"]
    assert torch.equal(*b.both(0, ids, weights, hidden))


def test_released_bounce_buffers_are_poisoned_only_after_use(bench):
    """The law holds although every returned buffer is filled with NaN at once."""
    b = bench(Source(1, 8), slots=1, threads=1, policy="stale")
    for _ in range(5):
        got, want = b.both(0, torch.randint(0, 8, (6, 2)), torch.rand(6, 2), torch.randn(6, 8))
        assert not got.isnan().any() and torch.equal(got, want)
    assert all(s.state is not SlotState.FILLING for s in b.mover.table.view(0).slots)
