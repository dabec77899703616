"""The law of `settle` and `withdraw`: who brings a missing expert, what is taken back and counted. Words and steps: `kernels/protocol.py`.

A row of the ledger counts experts of one layer, each once in a step: COUNTS, then for every link records that were moved over it, then for
every link those that were read in place over it. What was moved, not used and is not unread was moved in vain.
"""
from __future__ import annotations

import torch

from ...types import PROB_ONE, SlotState
from ..plan.naive import Tables
from ..protocol import CANCELLED, DONE, MOVING, QUEUED, READING, USED, claim_word, expert_of, move_of, slot_word, state_of

# used: records that were moved and then read for the first time; unread: those that nobody has read yet, a state and no sum.
COUNTS = ("hit", "late", "miss", "cancelled", "used", "unread")
# Decay of the recent load, as in `experts.slots`: a step weighs 1/8.
LOAD_SHIFT = 3


def _take_back(t: Tables, layer: int, word: int, step: int, state: int) -> bool:
    """A move that nobody has started: its claim gets `state`, its slot is FREE. Whether it was so."""
    expert, slot, generation = move_of(word)
    if int(t.claim_LE[layer, expert]) != claim_word(step, QUEUED):
        return False
    t.claim_LE[layer, expert] = claim_word(step, state)
    if int(t.slot_LS[layer, slot]) == slot_word(generation, SlotState.FILLING, expert):
        t.slot_LS[layer, slot] = slot_word(generation, SlotState.FREE, -1)
    return True


def withdraw_naive(t: Tables, layer: int, prob_E: torch.Tensor, waste: int, ahead: int) -> None:
    """A nearer forecast of `layer` in step `step + ahead`: moves not started whose use no longer pays are taken back; in place.

    prob_E int32; a negative first element: nothing is known. `waste` as in `Costs`. The same as `experts.planner.cancellable`.
    """
    prob = prob_E.tolist()
    for m in range(int(t.count_L[layer]) if prob[0] >= 0 else 0):
        word = int(t.queue_LS[layer, m])
        p = prob[move_of(word)[0]]
        if p * 16 <= (PROB_ONE - p) * waste:
            _take_back(t, layer, word, int(t.step) + ahead, CANCELLED)


def settle_naive(t: Tables, layer: int, ids_P: torch.Tensor, ledger_LC: torch.Tensor) -> None:
    """`layer` starts, and its router has chosen ids_P int64 (others than 0 to E-1 are none); in place.

    Moves that nobody has started are taken back: what is demanded is read in place. The recent load follows the demand, slots that are read
    are marked USED, ledger_LC int64 [L, COUNTS + 2 K] counts. Here every move is done in one go, so nothing is ever late.
    """
    step, experts, links = int(t.step), t.where_LE.shape[1], t.link_K3.shape[0]
    demanded = {e for e in ids_P.tolist() if 0 <= e < experts}
    link_E, row = t.link_LE[layer].tolist(), [0] * ledger_LC.shape[1]
    hit, late, miss, cancelled, used, unread, moved = *range(len(COUNTS)), len(COUNTS)
    for m in range(int(t.count_L[layer])):
        word = int(t.queue_LS[layer, m])
        expert = move_of(word)[0]
        _take_back(t, layer, word, step, READING if expert in demanded else CANCELLED)
        claim = int(t.claim_LE[layer, expert])
        row[cancelled] += claim in (claim_word(step, READING), claim_word(step, CANCELLED))
        if claim in (claim_word(step, MOVING), claim_word(step, DONE)):
            row[moved + link_E[expert]] += 1
    there = set()
    for s, word in enumerate(t.slot_LS[layer].tolist()):
        if state_of(word) is SlotState.READY and expert_of(word) in demanded:
            there.add(expert_of(word))
            row[used] += not word & USED
            t.slot_LS[layer, s] = word = word | USED
        row[unread] += state_of(word) is not SlotState.FREE and not word & USED
    for e in demanded:
        near = e in there or link_E[e] < 0
        row[hit if near else miss] += 1
        if not near:
            row[moved + links + link_E[e]] += 1
    mark_E = torch.zeros(experts, dtype=torch.int32)
    mark_E[sorted(demanded)] = PROB_ONE
    t.load_LE[layer] += (mark_E.to(t.load_LE.device) - t.load_LE[layer]) >> LOAD_SHIFT
    ledger_LC[layer, unread] = 0
    ledger_LC[layer] += torch.tensor(row, device=ledger_LC.device)
    assert row[late] == 0
