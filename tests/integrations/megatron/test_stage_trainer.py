"""The arithmetic beside a Megatron run, without Megatron."""
from __future__ import annotations

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
