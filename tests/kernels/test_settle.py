"""Who brings a missing expert: kernels against law on random states, what is counted, the laws' words against planner and slots."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.experts.planner import WASTE, cancellable
from moe_prefetch.experts.slots import SlotTable
from moe_prefetch.kernels.plan.naive import Tables, plan_naive
from moe_prefetch.kernels.protocol import (
    CANCELLED,
    DONE,
    QUEUED,
    READING,
    USED,
    claim_word,
    expert_of,
    generation_of,
    move_of,
    slot_word,
    state_of,
)
from moe_prefetch.kernels.settle import fused
from moe_prefetch.kernels.settle.naive import COUNTS, settle_naive, withdraw_naive
from moe_prefetch.kernels.settle.op import _settle, _withdraw, settle, withdraw
from moe_prefetch.types import Demand, Forecast, Move, SlotState

from .plan_cases import COSTS, copy, same, states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(8, 4, 1), (63, 13, 3), (64, 40, 2), (300, 64, 7)]


def planned(experts: int, slots: int, links: int, layers: int = 4) -> tuple[Tables, torch.Tensor]:
    """Layers with a plan, of whose moves some are done and some taken back; what another step left; ids for each layer."""
    t, prob, _ = states(layers, experts, slots, links, experts)
    t.budget_L3[:] = torch.tensor([slots, 0, -1], dtype=torch.int32)
    plan_naive(t, torch.arange(layers), prob, None, COSTS, 0, 0)
    g = torch.Generator().manual_seed(slots)
    step = int(t.step)
    for layer in range(layers):
        for m in range(int(t.count_L[layer])):
            expert, slot, generation = move_of(int(t.queue_LS[layer, m]))
            fate = int(torch.randint(0, 4, (), generator=g))
            if fate == 1:
                t.claim_LE[layer, expert] = claim_word(step, DONE)
                t.slot_LS[layer, slot] = slot_word(generation, SlotState.READY, expert)
            elif fate == 2:
                t.claim_LE[layer, expert] = claim_word(step, CANCELLED)
                t.slot_LS[layer, slot] = slot_word(generation, SlotState.FREE, -1)
            elif fate == 3 and layer == 1:
                t.claim_LE[layer, expert] = claim_word(step - 1, DONE)
    ids = torch.randint(-1, experts + 1, (layers, 5, 3), generator=g)
    return replace(t, **{f: getattr(t, f).to(DEVICE) for f in t.__dataclass_fields__}), ids.to(DEVICE)


def ledger_of(t: Tables) -> torch.Tensor:
    return torch.full((len(t.count_L), len(COUNTS) + 2 * len(t.link_K3)), 1000, device=DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
def test_settle_is_the_law(shape: tuple[int, int, int]) -> None:
    t, ids = planned(*shape)
    want, ledger, counts = copy(t), ledger_of(t), ledger_of(t)
    for layer, some in enumerate((ids[0, :0], ids[1, 0], ids[2], torch.arange(600, device=DEVICE) % 301 - 1)):
        settle_naive(want, layer, some.reshape(-1), counts)
        fused.launch_settle(t, layer, some.reshape(-1).contiguous(), ledger)
    assert same(t, want) == []
    assert torch.equal(ledger, counts)
    assert bool((counts[2:, 3:] > 1000).any()), "some were cancelled, used, moved or read"


@pytest.mark.parametrize("shape", SHAPES)
def test_withdraw_is_the_law_and_the_planners(shape: tuple[int, int, int]) -> None:
    t, _ = planned(*shape)
    want, before = copy(t), copy(t)
    prob = (torch.rand(4, shape[0], generator=torch.Generator().manual_seed(1)) * 60000).int().to(DEVICE)
    prob[3, 0] = -1
    for layer in range(4):
        withdraw_naive(want, layer, prob[layer], COSTS.waste, 0)
        fused.launch_withdraw(t, layer, prob[layer], COSTS.waste, 0)
        fused.launch_withdraw(t, layer, prob[layer] * 0, COSTS.waste, 1)
        queue = [int(w) for w in before.queue_LS[layer, : int(before.count_L[layer])]]
        moves = tuple(Move(layer, *move_of(w)) for w in queue if int(before.claim_LE[layer, move_of(w)[0]]) == claim_word(41, QUEUED))
        forecast = Forecast(layer, 41, 1, () if prob[layer, 0] < 0 else tuple(prob[layer].tolist()))
        gone = {m.expert for m in cancellable(moves, forecast)}
        changed = (want.claim_LE[layer] != before.claim_LE[layer]).nonzero().flatten().tolist()
        assert set(changed) == gone
        for m in moves:
            word = int(want.slot_LS[layer, m.slot])
            assert (state_of(word), generation_of(word)) == (SlotState.FREE if m.expert in gone else SlotState.FILLING, m.generation)
    assert same(t, want) == []
    assert COSTS.waste == WASTE


@pytest.mark.parametrize("run", [settle_naive, fused.launch_settle], ids=["law", "fused"])
def test_what_is_counted(run) -> None:
    """Six demanded experts: in a slot, brought ahead in time, not started, known to this memory, and two at home; twice."""
    t = states(1, 8, 4, 2, 0)[0]
    for name, value in (("count_L", 2), ("claim_LE", 0), ("load_LE", 0)):
        getattr(t, name).fill_(value)
    t.link_LE[0] = torch.tensor([0, 1, 0, -1, 1, 0, 0, 1], dtype=torch.int32)
    t.slot_LS[0] = torch.tensor([slot_word(3, SlotState.READY, 0) | USED, slot_word(1, SlotState.READY, 1),
                                 slot_word(7, SlotState.FILLING, 2), slot_word(1, SlotState.READY, 7)])
    t.queue_LS[0, :2] = torch.tensor([1 << 32 | 1 << 16 | 1, 7 << 32 | 2 << 16 | 2])
    t.claim_LE[0, 1], t.claim_LE[0, 2] = claim_word(41, DONE), claim_word(41, QUEUED)
    t = replace(t, **{f: getattr(t, f).to(DEVICE) for f in t.__dataclass_fields__})
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 5, 9, -1], device=DEVICE)
    ledger = torch.zeros(1, len(COUNTS) + 4, dtype=torch.int64, device=DEVICE)
    run(t, 0, ids, ledger)
    # hit, late, miss, cancelled, used, unread; moved over two links, read in place over them.
    assert ledger[0].tolist() == [3, 0, 3, 1, 1, 1, 0, 1, 2, 1]
    assert int(t.claim_LE[0, 2]) == claim_word(41, READING)
    assert [expert_of(int(w)) for w in t.slot_LS[0]] == [0, 1, -1, 7]
    assert [bool(int(w) & USED) for w in t.slot_LS[0]] == [True, True, False, False]
    t.step.add_(1)
    run(t, 0, ids, ledger)
    assert ledger[0].tolist() == [6, 0, 6, 1, 1, 1, 0, 1, 4, 2], "the plan of another step is not counted again"
    table = SlotTable(1, 1, 8)
    for step in range(2):
        table.observe(Demand(0, step, (0, 1, 2, 3, 4, 5), (1,) * 6))
    assert t.load_LE[0].tolist() == list(table.view(0).load_E)


def test_ops_are_honest_about_what_they_change() -> None:
    t, ids = planned(16, 8, 2)
    ledger, prob = ledger_of(t), torch.full((16,), 9, dtype=torch.int32, device=DEVICE)
    words = (t.where_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE)
    torch.library.opcheck(_settle, (*words, t.load_LE, t.link_LE, t.link_K3, t.step, ids[0].reshape(-1), ledger, 1))
    torch.library.opcheck(_withdraw, (*words, t.step, prob, 2, WASTE, 0))
    t, ids = planned(16, 8, 2)
    want, counts = copy(t), ledger_of(t)
    withdraw_naive(want, 2, prob, WASTE, 0)
    settle_naive(want, 2, ids[2].reshape(-1), counts)
    ledger = ledger_of(t)
    withdraw(t, 2, prob, WASTE)
    settle(t, 2, ids[2], ledger)
    assert same(t, want) == []
    assert torch.equal(ledger, counts)
    for bad in ({"layer": 4}, {"ids_TK": ids[2].int()}, {"ids_TK": ids[2].T}, {"ledger_LC": ledger[:, :3]}, {"ledger_LC": ledger.int()}):
        with pytest.raises(ShapeError):
            settle(t, **{"layer": 2, "ids_TK": ids[2], "ledger_LC": ledger, **bad})
    for bad in ({"layer": -1}, {"prob_E": prob.long()}, {"prob_E": prob[:8]}):
        with pytest.raises(ShapeError):
            withdraw(t, **{"layer": 2, "prob_E": prob, "waste": WASTE, **bad})
