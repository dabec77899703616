"""`moe_prefetch::plan`: the plans of some layers, their slots claimed, the entries of what they throw out pointed home; in place.

On a GPU one Triton launch. It runs once for (layer, step), beside compute, after the layer's last readers and before its mover and its
`settle`.
"""
from __future__ import annotations

from dataclasses import fields

import torch

from ...errors import ShapeError
from ..protocol import EXPERT_MASK
from .naive import Costs, Tables, plan_naive

CHANGED = ("where_LE", "slot_LS", "queue_LS", "count_L", "claim_LE", "taken_LS", "done_LS", "budget_L3")


@torch.library.custom_op("moe_prefetch::plan", mutates_args=CHANGED)
def _plan(where_LE: torch.Tensor, home_LE: torch.Tensor, slot_LS: torch.Tensor, queue_LS: torch.Tensor, count_L: torch.Tensor,
          claim_LE: torch.Tensor, taken_LS: torch.Tensor, done_LS: torch.Tensor, load_LE: torch.Tensor, link_LE: torch.Tensor,
          link_K3: torch.Tensor, budget_L3: torch.Tensor, step: torch.Tensor, rows_N: torch.Tensor, prob_NE: torch.Tensor,
          keep_NE: torch.Tensor | None, waste: int, keep: int, hysteresis: int, ahead: int, first: int) -> None:
    t = Tables(where_LE, home_LE, slot_LS, queue_LS, count_L, claim_LE, taken_LS, done_LS, load_LE, link_LE, link_K3, budget_L3, step)
    costs = Costs(waste, keep, hysteresis)
    if not len(rows_N):
        return
    if where_LE.device.type == "cuda":
        from .fused import launch

        launch(t, rows_N, prob_NE, keep_NE, costs, ahead, first)
    else:
        plan_naive(t, rows_N, prob_NE, keep_NE, costs, ahead, first)


@_plan.register_fake
def _(*args) -> None:
    return None


def plan(t: Tables, rows_N: torch.Tensor, prob_NE: torch.Tensor, costs: Costs, *, keep_NE: torch.Tensor | None = None, ahead: int = 0,
         first: int = 0) -> None:
    """Plan layers rows_N (int32 [N], all different) for step `step + ahead`; see `plan_naive`.

    prob_NE, keep_NE int32 [N, E], 0 to PROB_ONE; a negative first probability: nothing is known, the recent load speaks. Raises ShapeError
    before any work.
    """
    (layers, experts), slots, rows = t.where_LE.shape, t.slot_LS.shape[1], len(rows_N)
    shapes = {"E": (layers, experts), "S": (layers, slots), "L": (layers,), "3": (layers, 3), "K": (t.link_K3.shape[0], 3), "1": (1,)}
    for f in fields(t):
        x = getattr(t, f.name)
        want = shapes["1" if f.name == "step" else "K" if f.name == "link_K3" else f.name[-1]]
        dtype = torch.int64 if f.name in ("where_LE", "home_LE", "slot_LS", "queue_LS") else torch.int32
        _check(f.name, x, want, dtype, t.where_LE.device)
    _check("rows_N", rows_N, (rows,), torch.int32, t.where_LE.device)
    for name, x in (("prob_NE", prob_NE), ("keep_NE", keep_NE)):
        if x is not None:
            _check(name, x, (rows, experts), torch.int32, t.where_LE.device)
    if experts > EXPERT_MASK or not 1 <= slots <= experts or not 1 <= t.link_K3.shape[0] <= 64 or not 0 <= first < t.link_K3.shape[0]:
        raise ShapeError(f"{experts} experts, {slots} slots, {t.link_K3.shape[0]} links, the first {first}", where="plan",
                         expected=f"1 to E slots, at most {EXPERT_MASK} experts, 1 to 64 links")
    _plan(*(getattr(t, f.name) for f in fields(t)), rows_N, prob_NE, keep_NE, costs.waste, costs.keep, costs.hysteresis, ahead, first)


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous() or x.device != device:
        raise ShapeError(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}", where="plan",
                         expected=f"contiguous {dtype} {shape} on {device}", do="make the tables with one device's layout")
