"""What `warm` asks for: kernel against law; that it changes nothing else is its signature."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.warm import fused
from moe_prefetch.kernels.warm.naive import LIKELY, warm_naive
from moe_prefetch.kernels.warm.op import _warm, warm

from .plan_cases import copy, same, states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NBYTES = 20_000 // 16 * 16


def case(experts: int, seed: int = 0):
    """Tables whose entries lead home, or for every other expert to memory of this device; forecasts; room for the choice."""
    t, prob, _ = states(3, experts, max(1, experts // 2), 2, seed, DEVICE)
    memory = torch.zeros(NBYTES + 128, dtype=torch.uint8, device=DEVICE)
    t.where_LE[:], t.home_LE[:] = memory.data_ptr(), memory.data_ptr()
    t.home_LE[:, ::2] += 16
    prob[:, 0].clamp_min_(0)
    prob[2, 0] = -1
    return t, prob, torch.full((experts,), 7, dtype=torch.int32, device=DEVICE), memory


@pytest.mark.parametrize("experts", [1, 8, 63, 300])
@pytest.mark.parametrize("most", [0, 1, 5, 1000])
def test_chooses_as_the_law(experts: int, most: int) -> None:
    t, prob, chosen, _memory = case(experts)
    before, want = copy(t), chosen.clone()
    for layer in range(3):
        warm_naive(t, layer, prob[layer], want, most)
        fused.launch(t, layer, prob[layer], chosen, most, NBYTES)
        assert torch.equal(chosen, want)
        near = (t.link_LE[layer] < 0) | (t.where_LE[layer] != t.home_LE[layer])
        assert int(want.sum()) == (min(most, int(((prob[layer] >= LIKELY) & near).sum())) if layer < 2 else 0)
    assert same(before, t) == []


def test_op_is_honest_and_refuses_what_does_not_fit() -> None:
    t, prob, chosen, _memory = case(8)
    torch.library.opcheck(_warm, (t.where_LE, t.home_LE, t.link_LE, prob[0].contiguous(), chosen, 0, 3, NBYTES))
    good = {"layer": 1, "prob_E": prob[1], "chosen_E": chosen, "most": 2, "nbytes": NBYTES}
    warm(t, **good)
    for bad in ({"layer": 3}, {"prob_E": prob[1].long()}, {"chosen_E": chosen[:4]}, {"most": -1}, {"nbytes": 24}, {"nbytes": 0}):
        with pytest.raises(ShapeError):
            warm(t, **{**good, **bad})
