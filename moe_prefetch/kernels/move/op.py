"""`moe_prefetch::move`: a layer's queued moves, copied and published; in place.

On a GPU `move` runs on a side stream beside the compute stream: its caller forks it after the plan and joins it at the end of the step.
It can be captured; what it does depends on the tables alone.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ShapeError
from ..plan.naive import Tables
from .naive import move_naive

ALIGN = 128  # bytes: of records, slots and what lies between slots
# Six fill PCIe, and an HBM-bound kernel beside them takes 7 % longer than their bytes account for; beside 24 it is 28 % (H200).
PROGRAMS, MOST = 6, 24


@torch.library.custom_op("moe_prefetch::move", mutates_args=("where_LE", "slot_LS", "claim_LE", "taken_LS", "done_LS", "buffers_SB"))
def _move(where_LE: torch.Tensor, home_LE: torch.Tensor, slot_LS: torch.Tensor, queue_LS: torch.Tensor, count_L: torch.Tensor,
          claim_LE: torch.Tensor, taken_LS: torch.Tensor, done_LS: torch.Tensor, step: torch.Tensor, buffers_SB: torch.Tensor,
          records: Sequence[torch.Tensor], layer: int, nbytes: int, ahead: int, programs: int) -> None:
    none = where_LE.new_empty(0)
    t = Tables(where_LE, home_LE, slot_LS, queue_LS, count_L, claim_LE, taken_LS, done_LS, none, none, none, none, step)
    if where_LE.device.type == "cuda":
        from .fused import launch_move

        launch_move(t, layer, buffers_SB, nbytes, ahead, programs)
        return
    if len(records) != where_LE.shape[1]:
        raise ShapeError(f"{len(records)} records on a CPU", where="move", expected="one an expert", do="pass `Where.records`")
    move_naive(t, layer, buffers_SB, nbytes, records, ahead)


@_move.register_fake
def _(*args) -> None:
    return None


def move(t: Tables, layer: int, buffers_SB: torch.Tensor, nbytes: int, *, records: Sequence[torch.Tensor] = (), ahead: int = 0,
         programs: int = PROGRAMS) -> None:
    """Carry out the plan of `layer` for step `step + ahead`; see `move_naive`. `programs`: 1 to 24, one a multiprocessor.

    buffers_SB uint8 [S, stride], the layer's slots, aligned to 128 bytes as their stride is; `nbytes` a multiple of 16. `records` on a CPU.
    Raises ShapeError before any work.
    """
    layers, slots = t.slot_LS.shape
    if (buffers_SB.dtype != torch.uint8 or buffers_SB.dim() != 2 or len(buffers_SB) != slots or buffers_SB.stride(1) != 1
            or buffers_SB.stride(0) % ALIGN or buffers_SB.data_ptr() % ALIGN or buffers_SB.device != t.where_LE.device):
        raise ShapeError(f"slots in {buffers_SB.dtype} {tuple(buffers_SB.shape)}, strides {buffers_SB.stride()}", where=f"layer {layer}",
                         expected=f"uint8 [{slots}, B] on {t.where_LE.device}, aligned to {ALIGN}", do="allocate slots through a Home")
    if not 0 < nbytes <= min(buffers_SB.shape[1], 2**31 - 1) or nbytes % 16 or not 0 <= layer < layers or not 1 <= programs <= MOST:
        raise ShapeError(f"{nbytes} bytes by {programs} programs for layer {layer}", where="move",
                         expected=f"a multiple of 16 up to {buffers_SB.shape[1]}, 1 to {MOST} programs, layers 0 to {layers - 1}")
    _move(t.where_LE, t.home_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.taken_LS, t.done_LS, t.step, buffers_SB, list(records),
          layer, nbytes, ahead, programs)
