"""The ledger: what it says moved is what the drive was asked for, to the byte."""
from __future__ import annotations

import pytest
import torch

import moe_prefetch
from moe_prefetch.experts.ledger import Ledger
from moe_prefetch.experts.planner import POLICIES
from moe_prefetch.probes.forecast import OracleForecaster
from moe_prefetch.runtime import Runtime
from moe_prefetch.types import Settlement
from tests.models import DISK, logits_of, prompt, small
from tests.parity.test_forecasts import RandomForecaster


class CountingRuntime(Runtime):
    bytes = 0

    def pread_into(self, fd, buffer, offset, where):
        super().pread_into(fd, buffer, offset, where)
        self.bytes += len(buffer)


@pytest.mark.parametrize("kind", ["random", *POLICIES])
def test_bytes_add_up(kind):
    model = small(layers=4, experts=6)
    with moe_prefetch.attach(model) as session:
        demands = session.record_demands()
        logits_of(model, prompt(2))
    runtime = CountingRuntime()
    forecaster = {"random": RandomForecaster(6), "oracle": OracleForecaster(demands, 6)}.get(kind)
    plan = "stale" if kind in ("random", "probe") else kind
    session = moe_prefetch.attach(model, DISK, runtime=runtime, forecaster=forecaster, plan=plan)
    counted = session.record_demands()
    for _ in range(3):
        start = runtime.bytes
        before = session.ledger.total
        logits_of(model, prompt(2))
        session.wait_idle()
        total = session.ledger.total
        assert total.bytes_moved - before.bytes_moved == runtime.bytes - start
    # Each demanded expert was settled exactly once.
    assert total.demanded == sum(len(d.experts) for d in counted)
    assert total.hit + total.late + total.miss == total.demanded
    by_kind = session.ledger.kinds
    for key in ("hit", "late", "miss", "wasted", "cancelled", "bytes_moved", "bytes_wasted"):
        per_layer = sum(getattr(t, key) for t in session.ledger.layers)
        assert sum(getattr(t, key) for t in by_kind.values()) == getattr(total, key) == per_layer, key
    read_by_detach = session.num_layers * session.num_experts * session.ledger.record_bytes
    start = runtime.bytes
    session.detach()
    after = session.ledger.total
    assert runtime.bytes - start == read_by_detach
    assert after.bytes_moved == total.bytes_moved
    # Every record that moved was read by a demand, or is called wasted.
    assert after.wasted >= total.wasted
    moved = after.bytes_moved // session.ledger.record_bytes
    assert after.bytes_wasted == after.wasted * session.ledger.record_bytes <= after.bytes_moved
    assert moved - after.wasted <= after.demanded
    if kind == "lru":
        assert after.wasted == after.cancelled == after.late == 0 and moved == after.miss


def test_what_was_fetched_for_nothing_is_wasted_at_the_end():
    """A fetch ahead for a step that never comes."""
    model = small()

    class Eager(RandomForecaster):
        def forecast(self, layer, step, horizon, hidden_TD):
            return ()

        def next_step(self, layer, step):
            return (65536,) * 4

    session = moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": 4, "threads": 1}}, forecaster=Eager(4), plan="stale")
    logits_of(model, prompt(1, 1), 1)
    session.detach()
    total = session.ledger.total
    assert total.wasted + total.cancelled > 0
    assert total.bytes_moved == (total.miss + total.wasted) * session.ledger.record_bytes


def test_local_moves_nothing():
    model = small()
    with moe_prefetch.attach(model) as session:
        logits_of(model, prompt())
    t = session.ledger.total
    assert t.hit == t.demanded > 0 and t.bytes_moved == t.stall_s == 0 and t.hit_rate == 1.0


def test_a_step_of_no_tokens_and_kinds():
    ledger = Ledger(2, 10)
    assert ledger.total.hit_rate == 1.0
    ledger.settle(Settlement(0, 0, 1, 2, 3, 4, 5, 60, 0.5), "decode")
    ledger.settle(Settlement(1, 0, 1, 0, 0, 0, 0, 0, 0.25), "prefill")
    assert ledger.total.as_dict() == {"hit": 2, "late": 2, "miss": 3, "wasted": 4, "cancelled": 5, "bytes_moved": 60, "bytes_wasted": 40,
                                      "stall_s": 0.75, "demanded": 7, "hit_rate": 2 / 7}
    assert ledger.kinds["decode"].demanded == 6 and ledger.kinds["prefill"].demanded == 1


def test_what_was_read_of_a_running_ledger_stays_as_it_was():
    """A report may be made in one thread while the model generates in another."""
    ledger = Ledger(2, 10)
    ledger.settle(Settlement(0, 0, 1, 0, 0, 0, 0, 0, 0.0), "prefill")
    kinds, (first, _), prefill = iter(ledger.kinds.items()), ledger.layers, ledger.kinds["prefill"]
    ledger.settle(Settlement(0, 1, 1, 2, 0, 0, 0, 20, 0.0), "decode")
    ledger.settle(Settlement(0, 1, 1, 2, 0, 0, 0, 20, 0.0), "prefill")
    assert [(kind, t.demanded) for kind, t in kinds] == [("prefill", 1)] and first.demanded == prefill.demanded == 1
    assert ledger.layers[0].demanded == 7 and ledger.kinds["prefill"].demanded == 4


def test_prefill_and_decode_are_told_apart():
    model = small()
    with moe_prefetch.attach(model) as session, torch.no_grad():
        model(prompt(3, 5))
        assert set(session.ledger.kinds) == {"prefill"}
        model(prompt(3, 1))
        assert set(session.ledger.kinds) == {"prefill", "decode"}
