"""Experts behind the device's table: exact under any forecast, every demand and byte counted, new weights seen, captured on a GPU."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import IntegrityError, ShapeError
from moe_prefetch.experts.device import COSTS, DeviceExperts, links_of
from moe_prefetch.experts.homes import HostHome, LocalHome, MemoryStore
from moe_prefetch.experts.ledger import Totals
from moe_prefetch.experts.planner import Budget, Link
from moe_prefetch.kernels.expert_mlp.record import Form
from moe_prefetch.kernels.plan.naive import plan_naive
from moe_prefetch.kernels.probe_topk.naive import pack
from moe_prefetch.kernels.probe_topk.op import probe_topk, scratch_for
from moe_prefetch.probes.router import GateSpec
from moe_prefetch.runtime import REAL
from moe_prefetch.types import PROB_ONE

from .decode_step import ADVERSARIAL, EMPTY, PERFECT, RANDOM, Decode, RandomSource

FORM = Form("bfloat16", 32, 16)


def small(mode: int | None = None, **more) -> Decode:
    torch.manual_seed(0)
    home = more.pop("home", None) or HostHome(REAL)
    return Decode(home, "cpu", **{"layers": 4, "experts": 8, "slots": 3, "form": FORM, "mode": mode, **more})


@pytest.mark.parametrize("mode", [PERFECT, RANDOM, EMPTY, ADVERSARIAL, None], ids=["perfect", "random", "empty", "adversarial", "mixed"])
def test_no_forecast_changes_a_bit(mode: int | None) -> None:
    decode = small(mode)
    d = decode.device_experts
    for n in range(8):
        decode.step()
        d.check()
        assert torch.equal(decode.out, decode.alone())
        said = d.counts()
        assert said == d.counts(wait=False)
        assert said.step == n + 1
        assert said.total.demanded == int(decode.asked)
        size = decode.store.layout.nbytes
        assert sum(said.moved_K) + sum(said.read_K) == said.total.bytes_moved
        assert sum(said.read_K) == said.total.miss * size
        assert all(t.wasted >= 0 for t in said.layers)
    assert int(decode.wrong) == 0
    total = d.counts().total
    if mode == PERFECT:
        assert total.hit_rate > 0.4
        assert total.cancelled == total.wasted == 0
    elif mode == ADVERSARIAL:
        assert total.wasted > 0
    assert total.miss > 0


def test_homes_in_this_memory_move_nothing() -> None:
    decode = small(home=LocalHome("cpu", REAL), link_E=None)
    decode.device_experts = DeviceExperts(decode.store, "cpu", REAL, 1)
    assert links_of(decode.store) == (-1,) * 8
    for _ in range(3):
        decode.step()
    said = decode.device_experts.counts()
    assert said.total == Totals(hit=int(decode.asked))
    assert (int(decode.wrong), said.moved_K, said.read_K) == (0, (0,), (0,))


def test_budgets_and_links_bound_what_moves() -> None:
    budget = Budget(1, waste=PROB_ONE // 2, links=(Link(worth=16), Link(worth=4)))
    decode = small(RANDOM, link_E=(0, 1) * 4, budget=budget)
    d = decode.device_experts
    for _ in range(6):
        before = d.ledger_LC.clone()
        decode.step()
        spent = d.tables.budget_L3[2:, 2]
        assert bool((spent == PROB_ONE // 2).all()), "each step has its own"
        fills = (d.ledger_LC - before)[:, 6:8].sum(1)
        assert bool((fills <= 1).all())
    moved, read = d.counts().moved_K, d.counts().read_K
    assert min(*moved, *read) > 0


def test_new_weights_drop_every_slot() -> None:
    decode = small(RANDOM)
    d, calls = decode.device_experts, []
    for _ in range(3):
        decode.step()
    assert bool((d.tables.where_LE != d.tables.home_LE).any())

    def write() -> None:
        calls.append("write")
        assert torch.equal(d.tables.where_LE, d.tables.home_LE)
        fresh = RandomSource(FORM, 4, 8, version=1)
        for layer in range(4):
            for e in range(8):
                for store in (decode.store, decode.resident):
                    store.layout.pack(fresh.tensors(layer, e), store.buffer(layer, e), stamp=(2, layer, e))

    generations = d.tables.slot_LS >> 32
    d.update(write, lambda: calls.append("rest"))
    assert calls == ["rest", "write", "rest"]
    assert torch.equal(d.tables.slot_LS, generations << 32)
    assert d.epoch == 1
    before = d.counts().total.wasted
    for _ in range(3):
        decode.step()
    assert int(decode.wrong) == 0
    assert d.counts().total.wasted > before, "what was dropped unread was moved in vain"


def test_a_tap_speaks_for_the_two_layers_after_it() -> None:
    gates = [GateSpec(torch.randn(8, 32), torch.ones(32), 1e-6, 2) for _ in range(4)]
    taps = [pack(ahead, [None] * len(ahead), [1.0] * len(ahead), 0, torch.float32) if (ahead := gates[n + 1 : n + 3]) else None
            for n in range(4)]
    store = MemoryStore(RandomSource(FORM, 4, 8), HostHome(REAL), REAL)
    d = DeviceExperts(store, "cpu", REAL, 3, taps=taps, tokens=4)
    hidden = torch.randn(4, 32)
    d.moe_input(0, hidden)
    said = probe_topk(hidden, taps[0], scratch_for(4, taps[0]))[1]
    other = DeviceExperts(store, "cpu", REAL, 3)
    plan_naive(other.tables, torch.tensor([2]), said[1:2], None, COSTS, 0, 0)
    assert int(d.tables.count_L[2]) == int(other.tables.count_L[2]) > 0
    assert torch.equal(d.tables.queue_LS[2], other.tables.queue_LS[2])
    for layer in range(1, 4):
        d.moe_input(layer, hidden)
        d.warm(layer, said[0])
    d.step_end()
    d.check()


def test_a_caller_is_told_what_does_not_fit() -> None:
    store = MemoryStore(RandomSource(FORM, 2, 4), HostHome(REAL), REAL)
    for bad in ({"slots": 0}, {"slots": 5}, {"slots": 2, "programs": 25}, {"slots": 2, "taps": [None]},
                {"slots": 2, "link_E": (0, 1, 2)}, {"slots": 2, "link_E": (0, 0, 2, 0), "budget": Budget(1)},
                {"slots": 2, "link_E": (-2,) * 4}):
        with pytest.raises(ShapeError):
            DeviceExperts(store, "cpu", REAL, **bad)
    d = DeviceExperts(store, "cpu", REAL, 2)
    d.check()
    one = torch.zeros(1, 4, dtype=torch.int32)
    for layer, prob in ((-1, one), (2, one), (0, one[:0]), (0, one.expand(3, -1)), (0, one[:, :3]), (0, one[0])):
        with pytest.raises(ShapeError, match="forecast"):
            d.forecast(layer, prob)
    d.tables.where_LE[1, 2] += 128
    with pytest.raises(IntegrityError, match=r"\[1, 2\]"):
        d.check()


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["host", "local"])
def test_a_captured_step_of_26_layers_is_exact(home: str) -> None:
    """10,000 replays in all; forecasts perfect, random, empty and adversarial by turns; nothing is allocated."""
    decode = Decode(HostHome(REAL) if home == "host" else LocalHome("cuda", REAL), "cuda")
    d = decode.device_experts
    graph = d.capture(decode.step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5000):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    d.check()
    assert int(decode.wrong) == 0
    assert torch.equal(decode.out, decode.alone())
    said = d.counts().total
    assert said.demanded == int(decode.asked)
    assert min(said.hit, said.miss, said.wasted) > 0
