"""Random states for `plan`: many layers at once, with ties, free and filling slots, several links, bounds, nothing known."""
from __future__ import annotations

from dataclasses import fields, replace

import torch

from moe_prefetch.experts.planner import HYSTERESIS, KEEP, WASTE, Budget, Link, plan_value
from moe_prefetch.kernels.plan.naive import Costs, Tables
from moe_prefetch.kernels.protocol import QUEUED, claim_word, expert_of, generation_of, move_of, slot_word, state_of
from moe_prefetch.types import PROB_ONE, Forecast, Residency, SlotState, SlotView

COSTS = Costs(WASTE, KEEP, HYSTERESIS)


def states(layers: int, experts: int, slots: int, links: int, seed: int, device: str = "cpu") -> tuple[Tables, torch.Tensor, torch.Tensor]:
    """(tables, prob [L, E], keep [L, E]); a third of the forecasts know nothing, a quarter of the numbers tie."""
    g = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    def shares() -> torch.Tensor:
        exact, coarse = ints(0, PROB_ONE + 1, layers, experts), ints(0, 9, layers, experts) * (PROB_ONE // 8)
        return torch.where(ints(0, 4, layers, experts) == 0, coarse, torch.where(ints(0, 3, layers, 1) == 0, exact // 16, exact)).int()

    expert = torch.rand(layers, experts, generator=g).argsort(1)[:, :slots]
    state = ints(0, 3, layers, slots)
    word = ints(0, 1000, layers, slots) << 32 | state << 16 | ints(0, 2, layers, slots) << 18 | torch.where(state == 0, 0, expert + 1)
    word[0, 0] = word[0, 0] & 0xFFFFFFFF | (2**31 - 2) << 32
    prob = shares()
    prob[ints(0, 3, layers) == 0, 0] = -1
    link = ints(-1 if links > 1 else 0, links, layers, experts).int()
    if links == 1 and layers > 2:
        link[1] = -1
    link_K3 = torch.stack([ints(0, 50, links), ints(0, 200, links), ints(1, 17, links) if links > 1 else torch.tensor([16])], 1).int()
    budget = torch.stack([ints(0, slots + 2, layers), ints(0, 2, layers) * ints(0, 600, layers),
                          torch.where(ints(0, 2, layers) == 0, -1, ints(0, 3 * PROB_ONE, layers))], 1).int()
    home = (torch.arange(layers * experts).view(layers, experts) + 1) * 128
    zeros = torch.zeros(layers, slots, dtype=torch.int32)
    t = Tables(home + (1 << 40), home, word, torch.full((layers, slots), -1), torch.full((layers,), -1, dtype=torch.int32),
               torch.full((layers, experts), 7, dtype=torch.int32), zeros + 5, zeros + 6, shares(), link, link_K3, budget,
               torch.tensor([41], dtype=torch.int32))
    return replace(t, **{f.name: getattr(t, f.name).to(device) for f in fields(t)}), prob.to(device), shares().to(device)


def copy(t: Tables) -> Tables:
    return replace(t, **{f.name: getattr(t, f.name).clone() for f in fields(t)})


def same(a: Tables, b: Tables) -> list[str]:
    """Names of tables that differ; of queues only what counts."""
    used = torch.arange(a.slot_LS.shape[1], device=a.slot_LS.device)[None] < a.count_L[:, None]
    a, b = (replace(x, queue_LS=torch.where(used, x.queue_LS, 0)) for x in (a, b))
    return [f.name for f in fields(a) if not torch.equal(getattr(a, f.name), getattr(b, f.name))]


def check_law(before: Tables, after: Tables, layer: int, prob: torch.Tensor, keep: torch.Tensor | None, first: int, ahead: int) -> int:
    """One layer against the pure planner; how many moves it has."""
    slots = [int(w) for w in before.slot_LS[layer]]
    views = tuple(SlotView(expert_of(w), state_of(w), generation_of(w), -1) for w in slots)
    most, window, waste = before.budget_L3[layer].tolist()
    links = tuple(Link(*x) for x in before.link_K3.tolist())
    budget = Budget(most, window, waste, links, tuple(before.link_LE[layer].tolist()), first)
    forecast = Forecast(layer, 0, 2, () if prob[layer, 0] < 0 else tuple(prob[layer].tolist()))
    moves = plan_value(Residency(layer, views, tuple(before.load_LE[layer].tolist())), forecast, budget,
                       () if keep is None else tuple(keep[layer].tolist())).moves
    count = int(after.count_L[layer])
    assert [move_of(int(w)) for w in after.queue_LS[layer, :count]] == [(m.expert, m.slot, m.generation) for m in moves]
    where, claim = before.where_LE[layer].clone(), before.claim_LE[layer].clone()
    for m in moves:
        if views[m.slot].expert >= 0:
            where[views[m.slot].expert] = before.home_LE[layer, views[m.slot].expert]
        slots[m.slot] = slot_word(m.generation, SlotState.FILLING, m.expert)
        claim[m.expert] = claim_word(41 + ahead, QUEUED)
    assert torch.equal(after.where_LE[layer], where)
    assert torch.equal(after.claim_LE[layer], claim)
    assert after.slot_LS[layer].tolist() == slots
    assert not after.taken_LS[layer].any()
    assert not after.done_LS[layer].any()
    spent = sum(PROB_ONE - (forecast.prob_E or tuple(before.load_LE[layer].tolist()))[m.expert] for m in moves)
    assert after.budget_L3[layer].tolist() == [most, window, waste if waste < 0 else waste - spent]
    return len(moves)
