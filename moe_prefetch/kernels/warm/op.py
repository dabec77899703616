"""`moe_prefetch::warm`: likely records of a layer into L2, while something else runs. On a CPU nothing but the choice."""
from __future__ import annotations

import torch

from ...errors import ShapeError
from ..plan.naive import Tables
from .naive import warm_naive


@torch.library.custom_op("moe_prefetch::warm", mutates_args=("chosen_E",))
def _warm(where_LE: torch.Tensor, home_LE: torch.Tensor, link_LE: torch.Tensor, prob_E: torch.Tensor, chosen_E: torch.Tensor, layer: int,
          most: int, nbytes: int) -> None:
    none = where_LE.new_empty(0)
    t = Tables(where_LE, home_LE, none, none, none, none, none, none, none, link_LE, none, none, none)
    if where_LE.device.type == "cuda":
        from .fused import launch

        launch(t, layer, prob_E, chosen_E, most, nbytes)
    else:
        warm_naive(t, layer, prob_E, chosen_E, most)


@_warm.register_fake
def _(*args) -> None:
    return None


def warm(t: Tables, layer: int, prob_E: torch.Tensor, chosen_E: torch.Tensor, most: int, nbytes: int) -> None:
    """Ask for the records of up to `most` experts of `layer`; see `warm_naive`. prob_E, chosen_E int32 [E], contiguous.

    `nbytes` of a record, a multiple of 16. Raises ShapeError before any work.
    """
    layers, experts = t.where_LE.shape
    good = all(x.dtype == torch.int32 and x.shape == (experts,) and x.is_contiguous() and x.device == t.where_LE.device
               for x in (prob_E, chosen_E))
    if not good or not 0 <= layer < layers or most < 0 or nbytes <= 0 or nbytes % 16:
        raise ShapeError(f"a forecast {prob_E.dtype} {tuple(prob_E.shape)} for layer {layer}, records of {nbytes} bytes", where="warm",
                         expected=f"contiguous int32 [{experts}] on {t.where_LE.device}, layers 0 to {layers - 1}, multiples of 16")
    _warm(t.where_LE, t.home_LE, t.link_LE, prob_E, chosen_E, layer, most, nbytes)
