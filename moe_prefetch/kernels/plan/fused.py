"""`plan` in one Triton launch: a layer is one warp's, so that its maxima need no barriers.

A round takes the best candidate and the cheapest slot, and there are as many rounds as moves (and one for each link that has no room
left). Which experts have slots is a histogram of the slots' words; what a slot's expert is worth is loaded by its number.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import PROB_ONE, SlotState
from ..protocol import EXPERT_MASK, GENERATION_AT, QUEUED, SLOT_AT, STATE_AT, STEP_AT
from .naive import Costs, Tables

READY, FILLING = tl.constexpr(int(SlotState.READY)), tl.constexpr(int(SlotState.FILLING))
FILLING_BITS = tl.constexpr(int(SlotState.FILLING) << STATE_AT)
C_EXPERT, C_GENERATION, C_SLOT, C_STATE, C_STEP = (tl.constexpr(x) for x in (EXPERT_MASK, GENERATION_AT, SLOT_AT, STATE_AT, STEP_AT))
C_QUEUED, ONE = tl.constexpr(QUEUED), tl.constexpr(PROB_ONE)
LEAST, MOST = tl.constexpr(-2147483648), tl.constexpr(2147483647)


@triton.jit
def worths(use, load, link, keep, links_ptr, KEEP: tl.constexpr, HAS_KEEP: tl.constexpr):
    """(score, worth of a miss in sixteenths) of experts."""
    worth = tl.where(link >= 0, tl.load(links_ptr + tl.maximum(link, 0) * 3 + 2), 0)
    if HAS_KEEP:
        score = use + keep
    else:
        score = use + (load * KEEP >> 4)
    return score, worth


@triton.jit(do_not_specialize=["ahead", "first"])
def plan_rows(where_ptr, home_ptr, slot_ptr, queue_ptr, count_ptr, claim_ptr, taken_ptr, done_ptr, load_ptr, link_ptr, links_ptr,
              budget_ptr, step_ptr, rows_ptr, prob_ptr, keep_ptr, ahead, first, E: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
              EP: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr, E_BITS: tl.constexpr, S_BITS: tl.constexpr, HAS_KEEP: tl.constexpr,
              WASTE: tl.constexpr, KEEP: tl.constexpr, HYSTERESIS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * E
    layer = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    e, s, k = tl.arange(0, EP), tl.arange(0, SP), tl.arange(0, KP)
    on_e, on_s, on_k = e < E, s < S, k < K
    prob = tl.load(prob_ptr + row + e, mask=on_e, other=0)
    unknown = tl.load(prob_ptr + row) < 0
    load = tl.load(load_ptr + layer * E + e, mask=on_e, other=0)
    link = tl.load(link_ptr + layer * E + e, mask=on_e, other=-1)
    keep = tl.load(keep_ptr + row + e, mask=on_e, other=0)
    word = tl.load(slot_ptr + layer * S + s, mask=on_s, other=0)
    most, window, credit = tl.load(budget_ptr + layer * 3), tl.load(budget_ptr + layer * 3 + 1), tl.load(budget_ptr + layer * 3 + 2)
    time, queued = tl.load(links_ptr + k * 3, mask=on_k, other=0), tl.load(links_ptr + k * 3 + 1, mask=on_k, other=0)
    step = tl.load(step_ptr)
    state, generation = (word >> C_STATE).to(tl.int32) & 3, (word >> C_GENERATION).to(tl.int32)
    expert = tl.where(on_s, (word & C_EXPERT).to(tl.int32) - 1, -1)
    in_slot = expert >= 0
    its_load = tl.load(load_ptr + layer * E + expert, mask=in_slot, other=0)
    its_prob = tl.load(prob_ptr + row + expert, mask=in_slot, other=0)
    its_link = tl.load(link_ptr + layer * E + expert, mask=in_slot, other=-1)
    its_keep = tl.load(keep_ptr + row + expert, mask=in_slot, other=0)
    home = tl.load(home_ptr + layer * E + expert, mask=in_slot, other=0)

    resident = tl.histogram(tl.where(in_slot, expert, 0), EP, mask=in_slot)
    use = tl.where(unknown, load, prob)
    lost = use * -1 + ONE
    score, worth = worths(use, load, link, keep, links_ptr, KEEP, HAS_KEEP)
    gain = (score - (lost * WASTE >> 4)) * worth >> 4
    pays = on_e & (link >= 0) & (resident == 0) & (use * 16 > lost * WASTE)
    # Greater keys first, the lower expert among equals; smaller ones first, the lower slot among equals.
    key = tl.where(pays, (gain << E_BITS) + (EP - 1 - e), LEAST)
    score, worth = worths(tl.where(unknown, its_load, its_prob), its_load, its_link, its_keep, links_ptr, KEEP, HAS_KEEP)
    cost = tl.where(state == READY, score * worth >> 4, 0)
    dear = tl.where(on_s & (state != FILLING), (cost << S_BITS) + s, MOST)
    room = tl.where((window > 0) & (time > 0), tl.maximum(window - queued, 0) // tl.maximum(time, 1), E)

    slot, turn, fill = tl.full((EP,), -1, tl.int32), tl.zeros((EP,), tl.int32), tl.zeros((EP,), tl.int32)
    come = tl.full((SP,), -1, tl.int32)
    used = tl.zeros((KP,), tl.int32)
    count, spent, going = most * 0, most * 0, most * 0 + 1
    while going > 0:
        best, least = tl.max(key, 0), tl.min(dear, 0)
        who, where = EP - 1 - (best & (EP - 1)), least & (SP - 1)
        mine = (e == who) & (best != LEAST)
        its = tl.max(tl.where(mine, link, 0), 0)
        number = tl.max(tl.where(k == its, used, 0), 0)
        full = tl.max(tl.where(k == its, room, 0), 0) <= number
        more = spent + tl.max(tl.where(mine, lost, 0), 0)
        pays_off = (best >> E_BITS) - (least >> S_BITS) > HYSTERESIS
        good = (best != LEAST) & (least != MOST) & (count < most) & pays_off & ((credit < 0) | (more <= credit)) & (full == 0)
        # A link without room drops out of the contest; anything else that stops one move stops all after it.
        going = ((best != LEAST) & (good | full)).to(tl.int32)
        now = good.to(tl.int32)
        slot = tl.where(mine & good, where, slot)
        turn = tl.where(mine & good, number, turn)
        fill = tl.where(mine & good, tl.max(tl.where(s == where, generation, 0), 0) + 1, fill)
        come = tl.where((s == where) & good, who, come)
        key = tl.where(mine | ((link == its) & full), LEAST, key)
        dear = tl.where((s == where) & good, MOST, dear)
        used += tl.where(k == its, now, 0)
        spent = tl.where(good, more, spent)
        count += now
    chosen = slot >= 0
    # Links take turns, from `first` on.
    place = tl.where(chosen, turn * K + (tl.maximum(link, 0) - first + K) % K, MOST)
    at, i = tl.zeros((EP,), tl.int32), most * 0
    while i < count:
        next_ = tl.min(place, 0)
        at = tl.where(place == next_, i, at)
        place = tl.where(place == next_, MOST, place)
        i += 1

    # Who was in a slot reads from home again; nobody else looks at these words before this kernel has ended.
    tl.store(where_ptr + layer * E + expert, home, mask=(come >= 0) & in_slot)
    new = (generation + 1).to(tl.int64) << C_GENERATION | FILLING_BITS | (come + 1).to(tl.int64)
    tl.store(slot_ptr + layer * S + s, new, mask=come >= 0)
    tl.store(claim_ptr + layer * E + e, step + ahead << C_STEP | C_QUEUED, mask=chosen)
    move = fill.to(tl.int64) << C_GENERATION | slot.to(tl.int64) << C_SLOT | e.to(tl.int64)
    tl.store(queue_ptr + layer * S + at, move, mask=chosen)
    tl.store(taken_ptr + layer * S + s, 0, mask=on_s)
    tl.store(done_ptr + layer * S + s, 0, mask=on_s)
    tl.store(count_ptr + layer, count)
    tl.store(budget_ptr + layer * 3 + 2, tl.where(credit < 0, credit, credit - spent))


def constants(experts: int, slots: int, links: int, keep: bool, costs: Costs) -> dict[str, int | bool]:
    e, s = max(32, triton.next_power_of_2(experts)), max(8, triton.next_power_of_2(slots))
    return {"E": experts, "S": slots, "K": links, "EP": e, "SP": s, "KP": triton.next_power_of_2(links), "E_BITS": e.bit_length() - 1,
            "S_BITS": s.bit_length() - 1, "HAS_KEEP": keep, "WASTE": costs.waste, "KEEP": costs.keep, "HYSTERESIS": costs.hysteresis}


def launch(t: Tables, rows_N: torch.Tensor, prob_NE: torch.Tensor, keep_NE: torch.Tensor | None, costs: Costs, ahead: int,
           first: int) -> None:
    """See `plan_naive`; at least one row."""
    const = constants(t.where_LE.shape[1], t.slot_LS.shape[1], t.link_K3.shape[0], keep_NE is not None, costs)
    plan_rows[(len(rows_N),)](t.where_LE, t.home_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.taken_LS, t.done_LS, t.load_LE,
                              t.link_LE, t.link_K3, t.budget_L3, t.step, rows_N, prob_NE, prob_NE if keep_NE is None else keep_NE, ahead,
                              first, num_warps=1, **const)
