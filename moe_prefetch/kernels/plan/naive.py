"""The law of `plan`: `experts.planner.plan_value` for many layers at once, in integer tensors, and the words that it changes.

N rows are planned, each a layer of the tables (L layers, E experts, S slots, S moves at most, K links). Everything is an integer, so the
law, the kernel and the pure planner agree bit for bit. Words and steps: `kernels/protocol.py`.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ...types import PROB_ONE, SlotState
from ..protocol import EXPERT_MASK, GENERATION_AT, QUEUED, SLOT_AT, STATE_AT, STEP_AT


@dataclass(frozen=True, slots=True)
class Costs:
    """The planner's constants: `WASTE` and `KEEP` in sixteenths, `HYSTERESIS` in units of 1/PROB_ONE."""

    waste: int
    keep: int
    hysteresis: int


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The words of one GPU, and what its plans are bound by. All contiguous, on one device.

    where_LE, home_LE, slot_LS, queue_LS  int64; count_L, claim_LE, taken_LS, done_LS  int32
    load_LE    int32, the recent load
    link_LE    int32, which link an expert's home is behind; -1: its home is this memory
    link_K3    int32, of each link: ticks a record takes, ticks it is busy for, what a miss over it costs in sixteenths (at most 16)
    budget_L3  int32, of each layer: most moves, ticks until it starts (0: not known), waste that is left (-1: any)
    step       int32 [1], the number of the running step
    """

    where_LE: torch.Tensor
    home_LE: torch.Tensor
    slot_LS: torch.Tensor
    queue_LS: torch.Tensor
    count_L: torch.Tensor
    claim_LE: torch.Tensor
    taken_LS: torch.Tensor
    done_LS: torch.Tensor
    load_LE: torch.Tensor
    link_LE: torch.Tensor
    link_K3: torch.Tensor
    budget_L3: torch.Tensor
    step: torch.Tensor


def better(key_NE: torch.Tensor) -> torch.Tensor:
    """[N, i, j]: whether j comes before i; greater keys first, the lower number among equals."""
    n = torch.arange(key_NE.shape[1], device=key_NE.device)
    return (key_NE[:, None, :] > key_NE[:, :, None]) | ((key_NE[:, None, :] == key_NE[:, :, None]) & (n[None, :] < n[:, None]))


def plan_naive(t: Tables, rows_N: torch.Tensor, prob_NE: torch.Tensor, keep_NE: torch.Tensor | None, costs: Costs, ahead: int,
               first: int) -> None:
    """Plan layers rows_N, int64 [N], all different, for step `step + ahead`, and re-home what their plans throw out; in place.

    prob_NE int32, a negative first element says that nothing is known; keep_NE int32, or None: the recent load. `first` as in `Budget`.
    """
    rows_N = rows_N.long()
    load_NE, slot_NS, link_NE, budget_N3 = t.load_LE[rows_N], t.slot_LS[rows_N], t.link_LE[rows_N].long(), t.budget_L3[rows_N].long()
    use = torch.where(prob_NE[:, :1] < 0, load_NE, prob_NE).long()
    score = use + ((load_NE.long() * costs.keep).div(16, rounding_mode="floor") if keep_NE is None else keep_NE.long())
    link_K3 = t.link_K3.long()
    remote = link_NE >= 0
    behind = link_NE.clamp_min(0)
    worth = torch.where(remote, link_K3[behind, 2], 0)
    gain = (score - ((PROB_ONE - use) * costs.waste).div(16, rounding_mode="floor")) * worth >> 4
    state, expert, generation = slot_NS >> STATE_AT & 3, (slot_NS & EXPERT_MASK) - 1, slot_NS >> GENERATION_AT
    resident = torch.zeros_like(use, dtype=torch.int64).scatter_add_(1, expert.clamp_min(0), (expert >= 0).long()) > 0
    pays = remote & ~resident & (use * 16 > (PROB_ONE - use) * costs.waste)

    # Of the candidates behind one link, those that it can bring in time.
    before = better(gain) & pays[:, None, :]
    turn = (before & (link_NE[:, None, :] == link_NE[:, :, None])).sum(2)
    time, queued, window = link_K3[:, 0], link_K3[:, 1], budget_N3[:, 1:2]
    bound = (window > 0) & (time > 0)
    room = torch.where(bound, (window - queued).clamp_min(0).div(time.clamp_min(1), rounding_mode="floor"), use.shape[1])
    pays = pays & (turn < room.gather(1, behind))

    # The best of those, each for the cheapest slot that is left.
    before = before & pays[:, None, :]
    rank = before.sum(2)
    spent = torch.where(before, (PROB_ONE - use)[:, None, :], 0).sum(2) + PROB_ONE - use
    open_ = state != SlotState.FILLING
    cost = torch.where(state == SlotState.READY, (score * worth >> 4).gather(1, expert.clamp_min(0)), 0)
    order = (better(-cost) & open_[:, None, :]).sum(2)
    match = (rank[:, :, None] == order[:, None, :]) & open_[:, None, :]  # [N, E, S]
    number = torch.arange(slot_NS.shape[1], device=slot_NS.device)
    slot_NE = (match * number).sum(2)
    chosen = pays & match.any(2) & (rank < budget_N3[:, :1]) & (gain - cost.gather(1, slot_NE) > costs.hysteresis)
    chosen &= (budget_N3[:, 2:] < 0) | (spent <= budget_N3[:, 2:])

    # Links take turns, from `first` on.
    links = t.link_K3.shape[0]
    place = turn * links + (link_NE - first) % links
    at = ((place[:, None, :] < place[:, :, None]) & chosen[:, None, :]).sum(2)

    n, e = chosen.nonzero(as_tuple=True)
    layer, s, m, generation_M = rows_N[n], slot_NE[n, e], at[n, e], generation[n, slot_NE[n, e]] + 1
    old = expert[n, s]
    gone = old >= 0
    t.where_LE[layer[gone], old[gone]] = t.home_LE[layer[gone], old[gone]]
    t.slot_LS[layer, s] = generation_M << GENERATION_AT | int(SlotState.FILLING) << STATE_AT | (e + 1)
    t.claim_LE[layer, e] = (t.step.int() + ahead << STEP_AT | QUEUED).expand(len(n))
    t.queue_LS[layer, m] = generation_M << GENERATION_AT | s << SLOT_AT | e
    t.count_L[rows_N] = chosen.sum(1).int()
    t.taken_LS[rows_N], t.done_LS[rows_N] = 0, 0
    spent_N = torch.where(chosen, PROB_ONE - use, 0).sum(1)
    t.budget_L3[rows_N, 2] = torch.where(budget_N3[:, 2] < 0, budget_N3[:, 2], budget_N3[:, 2] - spent_N).int()
