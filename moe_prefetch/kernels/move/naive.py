"""The law of `move`: the queue of one layer, carried out in one go. Words and steps: `kernels/protocol.py`."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ...types import SlotState
from ..plan.naive import Tables
from ..protocol import DONE, MOVING, QUEUED, claim_word, move_of, slot_word


def move_naive(t: Tables, layer: int, buffers_SB: torch.Tensor, nbytes: int, records: Sequence[torch.Tensor], ahead: int) -> None:
    """Bring what is queued for `layer` in step `step + ahead` and claimed by nobody into its slots, and publish it; in place.

    buffers_SB uint8 [S, stride]: the layer's slots; a record has `nbytes`, the rest of a slot is not touched. `records`: the bytes that
    home_LE's addresses lead to, one uint8 tensor an expert.
    """
    step = int(t.step) + ahead
    for m in range(int(t.count_L[layer])):
        expert, slot, generation = move_of(int(t.queue_LS[layer, m]))
        if int(t.claim_LE[layer, expert]) not in (claim_word(step, QUEUED), claim_word(step, MOVING)):
            continue
        t.claim_LE[layer, expert] = claim_word(step, MOVING)
        buffers_SB[slot, :nbytes] = records[expert][:nbytes]
        if int(t.slot_LS[layer, slot]) == slot_word(generation, SlotState.FILLING, expert):
            t.where_LE[layer, expert] = buffers_SB[slot].data_ptr()
            t.slot_LS[layer, slot] = slot_word(generation, SlotState.READY, expert)
        t.claim_LE[layer, expert] = claim_word(step, DONE)
