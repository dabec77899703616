"""The law of `warm`: which records of a layer are asked into L2 before its expert kernel. No number anywhere depends on it."""
from __future__ import annotations

import torch

from ...types import PROB_ONE
from ..plan.naive import Tables

LIKELY = PROB_ONE // 2


def warm_naive(t: Tables, layer: int, prob_E: torch.Tensor, chosen_E: torch.Tensor, most: int) -> None:
    """chosen_E int32 [E] becomes 1 for the first `most` experts that are at least LIKELY and whose entries lead to this memory, else 0.

    prob_E int32, as forecasts have it; a negative first element: nothing is known.
    """
    near_E = (t.link_LE[layer] < 0) | (t.where_LE[layer] != t.home_LE[layer])
    likely_E = (prob_E >= LIKELY) & near_E & (prob_E[0] >= 0)
    chosen_E.copy_(likely_E & (likely_E.cumsum(0) <= most))
