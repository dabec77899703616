"""Cases of the benchmark of dispatch; `test_dispatch.py` runs them in processes of their own, over gloo."""
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an operator's first call imports it: once before the fork, instead of once a rank

from moe_prefetch.bench import dispatch as job
from moe_prefetch.bench import dispatch_ways as ways
from moe_prefetch.distributed.groups import Group


class Twice(ways.AllGather):
    """A wrong way: every expert counts twice."""

    name = "twice"

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(n, x_TD, ids_TK, weights_TK)


class Fails(ways.Way):
    """A way that this installation can't run, on one rank."""

    name = "fails"

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        if self.bank.rank == 1:
            raise RuntimeError("no such kernel")
        return x_TD


def everything(rank: int, world: int, real: str = "") -> Any:
    """Every case of the small model, or a real routing of a model with six experts a token."""
    group, found, ids = Group.of(), {}, os.environ["IDS"] if real else ""
    models = job.TINY if not ids else {"six": ways.Model(job.Form("float32", 24, 16), 64, 6)}
    todo = job.cases_of(models, world, ".", bool(ids), 0 if ids else 2)
    more = None if ids else lambda bank, tokens: [Twice, Fails] if tokens == 5 else []
    keep = lambda case, said: found.update({case: said})  # noqa: E731
    job.play(group, torch.device("cpu"), todo, models, Path(ids) if ids else None, 600.0, keep, more)
    return found


def over(rank: int, world: int) -> Any:
    """No time at all, and then as much as one case takes: ranks stop together."""
    found: list[str] = []
    todo = job.cases_of(job.TINY, world, "uniform", False)
    job.play(Group.of(), torch.device("cpu"), todo, job.TINY, None, -1.0, lambda case, said: found.append(case))
    none = len(found)
    if rank == 0:
        clock = iter([0.0, 0.0, 10.0])
        job.time = type("clock", (), {"perf_counter": lambda: next(clock)})  # type: ignore[assignment]
    job.play(Group.of(), torch.device("cpu"), todo, job.TINY, None, 5.0, lambda case, said: found.append(case))
    job.time = time  # type: ignore[assignment]
    return [none, len(found)]


def megatron(rank: int, world: int) -> Any:
    """Megatron-core's MoELayer, with its experts and with ours, by both dispatchers."""
    from moe_prefetch.integrations import megatron_cpu

    megatron_cpu.install()
    megatron_cpu.seed(1)
    from benchmarks.dispatch_megatron import ways as more

    found: dict[str, Any] = {}
    models = {"eight": ways.Model(job.Form("float32", 40, 24), 8, 3)}
    todo = job.cases_of(models, world, "_t5_", False)
    job.play(Group.of(), torch.device("cpu"), todo, models, None, 600.0, lambda case, said: found.update({case: said}), more)
    return found
