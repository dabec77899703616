"""The arithmetic beside a Megatron run, without Megatron."""
from __future__ import annotations

import math

import pytest
import torch

from moe_prefetch.integrations.megatron_trainer import StageTaps, StageTrainer
from moe_prefetch.probes.targets import FitConfig
from tests.probes.synthetic import D, E, L, gates, step


def test_a_pass_that_is_not_finite_teaches_nothing() -> None:
    specs = gates()

    def taps(seed: int) -> StageTaps:
        t = step(specs, 200, seed).taps
        return StageTaps(t.residual_LTD, t.moe_input_LTD, t.logits_LTE)

    found = []
    for spoilt in (False, True):
        trainer = StageTrainer(L, E, D, specs[0].norm_eps, FitConfig(rank=16, linear=8, steps=30, warmup=2), torch.device("cpu"), None, 0)
        bad = taps(99)
        bad.moe_input_LTD[1, 3, 2] = float("nan")
        bad.logits_LTE[2, 5] = float("inf")
        if spoilt:
            trainer.accumulate(bad, specs)
        for seed in range(3):
            trainer.accumulate(taps(seed), specs)
        trainer.start(taps(0), specs)
        if spoilt:
            assert float(trainer.step(bad, specs)) == 0.0
            assert int(trainer.unsound) == 2
        for seed in range(10):
            loss = float(trainer.step(taps(seed), specs))
        assert all(p.isfinite().all() for h in trainer.horizons for p in (*h.params.values(), h.stale_n, h.var_n))
        found.append(loss)
    assert abs(found[0] - found[1]) < 0.05 * abs(found[0]), found


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("empty", ["padding", "not finite", "all"])
def test_a_start_whose_own_tokens_say_nothing(empty: str, whiten: bool) -> None:
    """The units of the loss come from the start's own pass; where that is empty the first pass that says something gives them."""
    specs = gates()

    def taps(seed: int) -> StageTaps:
        t = step(specs, 200, seed).taps
        return StageTaps(t.residual_LTD, t.moe_input_LTD, t.logits_LTE)

    nothing = taps(50)
    if empty == "padding":
        nothing = nothing.take(torch.zeros(0, dtype=torch.int64))
    else:
        nothing.moe_input_LTD[0, 0, 0] = float("nan")
    trainer = StageTrainer(L, E, D, specs[0].norm_eps, FitConfig(rank=16, linear=8, steps=60, warmup=2, whiten=whiten), torch.device("cpu"),
                           None, 0)
    for seed in range(3):
        trainer.accumulate(nothing if empty == "all" else taps(seed), specs)
    trainer.start(nothing, specs)
    losses = [float(trainer.step(taps(seed), specs)) for seed in range(40)]
    assert all(p.isfinite().all() for h in trainer.horizons for p in (*h.params.values(), h.stale_n, h.var_n))
    assert all(math.isfinite(x) for x in losses)
    assert sum(losses[-8:]) < sum(losses[1:9])


def test_rows_that_are_counted_are_rows_that_were_used() -> None:
    specs = gates()
    t = step(specs, 200, 1).taps
    taps = StageTaps(t.residual_LTD, t.moe_input_LTD, t.logits_LTE)
    trainer = StageTrainer(L, E, D, specs[0].norm_eps, FitConfig(rank=4, linear=2), torch.device("cpu"), None, 0)
    assert float(trainer.accumulate(taps, specs)) == 200
    assert float(trainer.accumulate(taps.take(torch.zeros(0, dtype=torch.int64)), specs)) == 0
    taps.moe_input_LTD[1, 3, 2] = float("nan")
    taps.logits_LTE[0, 5] = float("-inf")
    taps.residual_LTD[2, 9, 0] = float("inf")
    assert float(trainer.accumulate(taps, specs)) == 0
    kept = taps.finite()
    assert kept.tokens == 197
    assert float(trainer.accumulate(kept, specs)) == 197
    assert float(trainer.horizons[0].moments["count"]) == 397
