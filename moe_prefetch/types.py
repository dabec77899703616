"""Nouns of the library, frozen; imports nothing of ours and no torch.

Letters in tensor names (`hidden_TD` is a tensor of shape [tokens, hidden]):

    B batch          S sequence position    T tokens of a step (flattened B and S)
    L MoE layer      E expert               K top-k chosen experts     C candidates
    D hidden         F expert FFN width     R rank of a low-rank factor
    H query heads    N KV heads             G query heads per KV head  d head_dim
    P pages          t token within a page  c scale block              O outlier channels

A *layer* in the expert wing is the index among the model's MoE layers (0-based), not the decoder layer's number.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

# Probabilities that the planner sees are integers: p = q / PROB_ONE. Integers make the plan equal on CPU and GPU.
PROB_ONE = 1 << 16


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of one layer in one step.

    `prob_E[e]` is P(at least one token of the step routes to expert e), in units of 1/PROB_ONE; its length is the number
    of experts. An empty tuple says "nothing known". `horizon` is the number of MoE layers between tap and target (0, 1, 2).
    """

    layer: int
    step: int
    horizon: int
    prob_E: tuple[int, ...]


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of a layer as the planner sees it. `expert` is -1 when FREE. `last_use` is the step of the last lease."""

    expert: int
    state: SlotState
    generation: int
    last_use: int


@dataclass(frozen=True, slots=True)
class Residency:
    """All slots of one layer, and the decayed load of each expert (units of 1/PROB_ONE)."""

    layer: int
    slots: tuple[SlotView, ...]
    load_E: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Bring `expert` of `layer` into `slot`; `generation` is the slot's generation once the move has been accepted."""

    layer: int
    expert: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The one plan of (layer, step): moves, dearest first. Everything not named is left alone or read in place."""

    layer: int
    step: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to read one slot; the slot is not written while it is held. `epoch` is the weight version."""

    layer: int
    expert: int
    slot: int
    generation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the router decided for one layer in one step: distinct experts in ascending order, with token counts."""

    layer: int
    step: int
    experts: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settlement:
    """How one demand was met, counted in distinct experts; bytes are those that crossed the link."""

    layer: int
    step: int
    hit: int
    late: int
    miss: int
    wasted: int
    cancelled: int
    bytes_moved: int
    stall_s: float
