"""`settle` and `withdraw` in Triton, each one warp: all moves of a layer at once, each by the steps of `kernels/protocol.py`.

A lane without a move compares with a word that never is. There are at least as many lanes' worth of moves as lanes, so that no two lanes
stand for one move.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import PROB_ONE, SlotState
from ..plan.naive import Tables
from ..protocol import CANCELLED, DONE, EXPERT_MASK, GENERATION_AT, MOVING, QUEUED, READING, SLOT_AT, STATE_AT, STEP_AT, USED
from .naive import COUNTS, LOAD_SHIFT

C_EXPERT, C_GENERATION, C_SLOT, C_STATE, C_STEP = (tl.constexpr(x) for x in (EXPERT_MASK, GENERATION_AT, SLOT_AT, STATE_AT, STEP_AT))
C_QUEUED, C_MOVING, C_DONE, C_READING, C_CANCELLED = (tl.constexpr(x) for x in (QUEUED, MOVING, DONE, READING, CANCELLED))
FILLING, READY, C_USED = tl.constexpr(int(SlotState.FILLING) << STATE_AT), tl.constexpr(int(SlotState.READY)), tl.constexpr(USED)
FREE, ONE, SHIFT, NEVER = tl.constexpr(int(SlotState.FREE)), tl.constexpr(PROB_ONE), tl.constexpr(LOAD_SHIFT), tl.constexpr(-1)
FIXED, UNREAD = tl.constexpr(len(COUNTS)), tl.constexpr(COUNTS.index("unread"))
CHUNK = 256  # ids that are counted together


@triton.jit
def take_back(slot_ptr, claim, word, expert, slot, tag, chosen, state):
    """The claims of moves as they were; those `chosen` that nobody had started get `state`, and their slots are FREE."""
    queued = tag | C_QUEUED
    seen = tl.atomic_cas(claim, tl.where(chosen, queued, NEVER), expert * 0 + tag | state, sem="acq_rel", scope="gpu")
    empty = word >> C_GENERATION << C_GENERATION
    filling = empty | FILLING | (expert + 1).to(tl.int64)
    tl.atomic_cas(slot_ptr + slot, tl.where(chosen & (seen == queued), filling, NEVER), empty, sem="acq_rel", scope="gpu")
    return seen


@triton.jit
def queue_of(queue_ptr, count_ptr, layer, S: tl.constexpr, SP: tl.constexpr):
    """(word, expert, slot, whether it counts) of each move."""
    m = tl.arange(0, SP)
    on = m < tl.load(count_ptr + layer)
    word = tl.load(queue_ptr + layer * S + m, mask=on, other=0)
    return word, (word & C_EXPERT).to(tl.int32), (word >> C_SLOT).to(tl.int32) & C_EXPERT, on


@triton.jit(do_not_specialize=["layer", "ahead"])
def withdraw_moves(slot_ptr, queue_ptr, count_ptr, claim_ptr, step_ptr, prob_ptr, layer, ahead, E: tl.constexpr, S: tl.constexpr,
                   SP: tl.constexpr, WASTE: tl.constexpr):
    word, expert, slot, on = queue_of(queue_ptr, count_ptr, layer, S, SP)
    prob = tl.load(prob_ptr + expert, mask=on, other=0)
    chosen = on & (tl.load(prob_ptr) >= 0) & (prob * 16 <= (prob * -1 + ONE) * WASTE)
    tag = tl.load(step_ptr) + ahead << C_STEP
    take_back(slot_ptr + layer * S, claim_ptr + layer * E + expert, word, expert, slot, tag, chosen, C_CANCELLED)


@triton.jit(do_not_specialize=["layer", "PAIRS"])
def settle_layer(slot_ptr, queue_ptr, count_ptr, claim_ptr, load_ptr, link_ptr, step_ptr, ids_ptr, ledger_ptr, layer, PAIRS,
                 E: tl.constexpr, S: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
                 CHUNK: tl.constexpr):
    e, s = tl.arange(0, EP), tl.arange(0, SP)
    on_e = e < E
    load = tl.load(load_ptr + layer * E + e, mask=on_e, other=0)
    link = tl.load(link_ptr + layer * E + e, mask=on_e, other=-1)
    word, expert, slot, on = queue_of(queue_ptr, count_ptr, layer, S, SP)
    tag = tl.load(step_ptr) << C_STEP
    asked = tl.zeros((EP,), tl.int32)
    first = layer * 0
    while first < PAIRS:
        i = first + tl.arange(0, CHUNK)
        id_ = tl.load(ids_ptr + i, mask=i < PAIRS, other=-1)
        real = (id_ >= 0) & (id_ < E)
        asked += tl.histogram(tl.where(real, id_, 0).to(tl.int32), EP, mask=real)
        first += CHUNK

    # Each missing expert gets one claimant.
    wanted = on & (tl.gather(asked, expert, 0) > 0)
    claim = claim_ptr + layer * E + expert
    seen = take_back(slot_ptr + layer * S, claim, word, expert, slot, tag, on, tl.where(wanted, C_READING, C_CANCELLED))
    moving = tag | C_MOVING
    late = (wanted & (seen == moving)).to(tl.int32)
    waits = late
    while tl.max(waits, 0) > 0:
        # Their mover has a program on the chip, which can finish each of them alone.
        now = tl.atomic_add(claim, 0, mask=waits > 0, sem="acquire", scope="gpu")
        waits = tl.where(now == moving, waits, 0)
    tl.debug_barrier()

    held = tl.load(slot_ptr + layer * S + s, mask=s < S, other=0, volatile=True)
    state = (held >> C_STATE).to(tl.int32) & 3
    ready = state == READY
    its = tl.where(ready, (held & C_EXPERT).to(tl.int32) - 1, 0)
    read = ready & (tl.gather(asked, its, 0) > 0)
    fresh = read & ((held & C_USED) == 0)
    tl.store(slot_ptr + layer * S + s, held | C_USED, mask=fresh)
    tl.store(load_ptr + layer * E + e, load + (tl.where(asked > 0, ONE, 0) - load >> SHIFT), mask=on_e)

    away = (asked > 0) & (tl.histogram(its, EP, mask=ready) == 0)
    missing = away & (link >= 0)
    hits = tl.sum(read.to(tl.int32), 0) + tl.sum((away & (link < 0)).to(tl.int32), 0)
    lates, misses = tl.sum(late, 0), tl.sum(missing.to(tl.int32), 0)
    moved = on & ((seen == moving) | (seen == (tag | C_DONE)))
    back = on & ((seen == (tag | C_QUEUED)) | (seen == (tag | C_CANCELLED)))
    backs, uses = tl.sum(back.to(tl.int32), 0), tl.sum(fresh.to(tl.int32), 0)
    unread = tl.sum(((state != FREE) & ((held & C_USED) == 0)).to(tl.int32), 0) - uses
    c, k = tl.arange(0, 8), tl.arange(0, KP)
    row = ledger_ptr + layer * (FIXED + 2 * K)
    count = tl.where(c == 0, hits - lates, tl.where(c == 1, lates, tl.where(c == 2, misses, tl.where(c == 3, backs, uses))))
    tl.store(row + c, tl.where(c < UNREAD, tl.load(row + c, mask=c < FIXED) + count, unread), mask=c < FIXED)
    over = tl.histogram(tl.where(moved, tl.gather(link, expert, 0), 0), KP, mask=moved)
    tl.store(row + FIXED + k, tl.load(row + FIXED + k, mask=k < K) + over, mask=k < K)
    over = tl.histogram(tl.where(missing, link, 0), KP, mask=missing)
    tl.store(row + FIXED + K + k, tl.load(row + FIXED + K + k, mask=k < K) + over, mask=k < K)


def launch_withdraw(t: Tables, layer: int, prob_E: torch.Tensor, waste: int, ahead: int) -> None:
    """See `withdraw_naive`."""
    slots = t.slot_LS.shape[1]
    withdraw_moves[(1,)](t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.step, prob_E, layer, ahead, E=t.where_LE.shape[1], S=slots,
                         SP=max(32, triton.next_power_of_2(slots)), WASTE=waste, num_warps=1)


def launch_settle(t: Tables, layer: int, ids_P: torch.Tensor, ledger_LC: torch.Tensor) -> None:
    """See `settle_naive`."""
    experts, slots, links = t.where_LE.shape[1], t.slot_LS.shape[1], t.link_K3.shape[0]
    settle_layer[(1,)](t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.load_LE, t.link_LE, t.step, ids_P, ledger_LC, layer, ids_P.numel(),
                       E=experts, S=slots, K=links, EP=max(32, triton.next_power_of_2(experts)), SP=max(32, triton.next_power_of_2(slots)),
                       KP=max(32, triton.next_power_of_2(links)), CHUNK=CHUNK, num_warps=1)
