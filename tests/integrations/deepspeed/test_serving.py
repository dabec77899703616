"""Inference over one and two ranks: our part changes no bit of what DeepSpeed computes, wherever the experts are."""
from __future__ import annotations

import pytest
import torch

from moe_prefetch.experts.store import RecordLayout
from tests.integrations.deepspeed.ranks import run
from tests.tiny import FAMILIES

pytestmark = [pytest.mark.framework, pytest.mark.timeout(1200)]
TINY = [f"{kind} {family}" for kind in ("autotp", "autoep") for family in FAMILIES]


@pytest.fixture(scope="module")
def tiny_runs():
    return run("tests.integrations.deepspeed.serving", [(1, [*TINY, "own_layer", "own_inference"]), (2, [*TINY, "own_layer"])])


@pytest.fixture(scope="module")
def smolmoe_runs():
    from moe_prefetch.integrations import smolmoe

    smolmoe.build(progress=False)
    return run("tests.integrations.deepspeed.serving", [(1, ["smolmoe"]), (2, ["smolmoe"])])


def check(ranks):
    for found in ranks:
        assert isinstance(found, dict), found
        assert found["bitwise"] and found["absent"] > 0
        assert found["stock"] < 1e-5


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", TINY)
def test_tiny_models(tiny_runs, world, case):
    ranks = tiny_runs[world, case]
    check(ranks)
    for found in ranks:
        assert found["tokens"] and found["plain"] < 1e-5 and found["moved"] > 0
        # What the cache costs is what it costs without DeepSpeed; among ranks rounding may tip an element over.
        assert 0 < found["kl"] < 0.1 and found["kl"] == pytest.approx(found["kl_plain"], rel=0.25)
        if case.startswith("autoep"):
            # Each rank keeps a quarter of its share of the experts, and buffers for reads in flight.
            expert = RecordLayout.of({"gate_up": torch.empty(64, 64), "down": torch.empty(64, 32)})
            assert found["held"]["total"] == 4 * 8 * expert.nbytes // world
            # Ranks of an expert group hold different experts, so each has a file of its own; under AutoTP all share one.
            assert found["files"] == (["records"] if world == 1 else ["records/rank-0-of-2", "records/rank-1-of-2"])
        else:
            assert found["files"] == ["records"] and found["split"]


@pytest.mark.parametrize("world", [1, 2])
def test_deepspeeds_own_layer(tiny_runs, world):
    check(tiny_runs[world, "own_layer"])
    assert all(found["restored"] for found in tiny_runs[world, "own_layer"])


def test_deepspeeds_own_layer_through_init_inference(tiny_runs):
    check(tiny_runs[1, "own_inference"])
    (found,) = tiny_runs[1, "own_inference"]
    assert found["restored"] and found["refused"]
    assert found["one"] == [(2, 2)] * 3


@pytest.mark.model
@pytest.mark.parametrize("world", [1, 2])
def test_smolmoe(smolmoe_runs, world):
    for kinds in smolmoe_runs[world, "smolmoe"]:
        assert isinstance(kinds, list), kinds
        assert len(kinds) == world  # alone; under AutoEP and under AutoTP
        check(kinds)
        for found in kinds:
            assert found["tokens"] and found["plain"] < 1e-4
            assert 0 < found["kl"] < 0.05 and found["kl"] == pytest.approx(found["kl_plain"], rel=0.5)
