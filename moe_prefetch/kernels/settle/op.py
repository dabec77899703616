"""`moe_prefetch::settle`: a layer starts, and every missing expert gets one claimant; `moe_prefetch::withdraw`: moves given up. In place.

One warp each on a GPU; `settle` on the compute stream, `withdraw` beside it, before that layer's `settle`. When `settle` has ended, no
demanded expert is on its way any more.
"""
from __future__ import annotations

import torch

from ...errors import ShapeError
from ..plan.naive import Tables
from .naive import COUNTS, settle_naive, withdraw_naive


def _tables(where_LE: torch.Tensor, slot_LS: torch.Tensor, queue_LS: torch.Tensor, count_L: torch.Tensor, claim_LE: torch.Tensor,
            load_LE: torch.Tensor, link_LE: torch.Tensor, link_K3: torch.Tensor, step: torch.Tensor) -> Tables:
    none = where_LE.new_empty(0)
    return Tables(where_LE, none, slot_LS, queue_LS, count_L, claim_LE, none, none, load_LE, link_LE, link_K3, none, step)


@torch.library.custom_op("moe_prefetch::settle", mutates_args=("slot_LS", "claim_LE", "load_LE", "ledger_LC"))
def _settle(where_LE: torch.Tensor, slot_LS: torch.Tensor, queue_LS: torch.Tensor, count_L: torch.Tensor, claim_LE: torch.Tensor,
            load_LE: torch.Tensor, link_LE: torch.Tensor, link_K3: torch.Tensor, step: torch.Tensor, ids_P: torch.Tensor,
            ledger_LC: torch.Tensor, layer: int) -> None:
    t = _tables(where_LE, slot_LS, queue_LS, count_L, claim_LE, load_LE, link_LE, link_K3, step)
    if where_LE.device.type == "cuda":
        from .fused import launch_settle

        launch_settle(t, layer, ids_P, ledger_LC)
    else:
        settle_naive(t, layer, ids_P, ledger_LC)


@torch.library.custom_op("moe_prefetch::withdraw", mutates_args=("slot_LS", "claim_LE"))
def _withdraw(where_LE: torch.Tensor, slot_LS: torch.Tensor, queue_LS: torch.Tensor, count_L: torch.Tensor, claim_LE: torch.Tensor,
              step: torch.Tensor, prob_E: torch.Tensor, layer: int, waste: int, ahead: int) -> None:
    none = where_LE.new_empty(0)
    t = _tables(where_LE, slot_LS, queue_LS, count_L, claim_LE, none, none, none, step)
    if where_LE.device.type == "cuda":
        from .fused import launch_withdraw

        launch_withdraw(t, layer, prob_E, waste, ahead)
    else:
        withdraw_naive(t, layer, prob_E, waste, ahead)


@_settle.register_fake
def _(*args) -> None:
    return None


@_withdraw.register_fake
def _(*args) -> None:
    return None


def settle(t: Tables, layer: int, ids_TK: torch.Tensor, ledger_LC: torch.Tensor) -> None:
    """`layer` starts in step `step`, between its router and its expert kernel; see `settle_naive`.

    ids_TK int64 of any shape, contiguous; ledger_LC int64 [L, COUNTS + 2 K], contiguous. Raises ShapeError before any work.
    """
    layers, columns = t.where_LE.shape[0], len(COUNTS) + 2 * t.link_K3.shape[0]
    for what, x, shape in (("ids", ids_TK, ids_TK.shape), ("ledger", ledger_LC, (layers, columns))):
        if x.dtype != torch.int64 or x.shape != shape or not x.is_contiguous() or x.device != t.where_LE.device or not 0 <= layer < layers:
            raise ShapeError(f"{what} {x.dtype} {tuple(x.shape)} for layer {layer}", where="settle",
                             expected=f"contiguous int64 {tuple(shape)} on {t.where_LE.device}, layers 0 to {layers - 1}",
                             do="pass the router's ids")
    _settle(t.where_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.load_LE, t.link_LE, t.link_K3, t.step, ids_TK.reshape(-1),
            ledger_LC, layer)


def withdraw(t: Tables, layer: int, prob_E: torch.Tensor, waste: int, *, ahead: int = 0) -> None:
    """A nearer forecast of `layer` gives moves up that nobody has started; see `withdraw_naive`.

    prob_E int32 [E], contiguous. Raises ShapeError before any work.
    """
    layers, experts = t.where_LE.shape
    if (prob_E.dtype != torch.int32 or prob_E.shape != (experts,) or not prob_E.is_contiguous() or prob_E.device != t.where_LE.device
            or not 0 <= layer < layers):
        raise ShapeError(f"a forecast {prob_E.dtype} {tuple(prob_E.shape)} for layer {layer}", where="withdraw",
                         expected=f"contiguous int32 [{experts}] on {t.where_LE.device}, layers 0 to {layers - 1}",
                         do="pass a row of a probe's")
    _withdraw(t.where_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.step, prob_E, layer, waste, ahead)
