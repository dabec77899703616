"""Training with our section: the model's losses and parameters keep every bit, and the probe learns."""
from __future__ import annotations

import pytest

from tests.integrations.deepspeed.ranks import run

pytestmark = [pytest.mark.framework, pytest.mark.timeout(1200)]
CASES = {1: ["fitted 0", "fitted 2", "too_short", "unwritable", "after", "running"],
         2: ["fitted 0", "fitted 1", "fitted 2", "uneven", "too_short", "unwritable", "autoep"], 4: ["fitted 0", "fitted 2"]}


@pytest.fixture(scope="module")
def runs():
    return run("tests.integrations.deepspeed.training", list(CASES.items()))


def of(runs, world, case):
    for found in runs[world, case]:
        assert isinstance(found, dict), found
    return runs[world, case]


@pytest.mark.parametrize(("world", "case"), [(w, c) for w, cs in CASES.items() for c in cs if c.startswith("fitted")])
def test_the_model_keeps_every_bit_and_the_probe_learns(runs, world, case):
    for found in of(runs, world, case):
        assert found["losses"] and found["parameters"]
        probe = found["probe"]
        assert len(probe) == 30 and sum(probe[-10:]) < 0.9 * sum(probe[:10])
        assert found["written"] and found["read"]
        assert found["again"] == 30
        assert found["hooks"] == 0


def test_ranks_with_different_numbers_of_tokens(runs):
    for found in of(runs, 2, "uneven"):
        assert found["steps"] > 10 and found["held"] > 0


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_was_too_short(runs, world):
    found = of(runs, world, "too_short")
    assert [f["error"] for f in found] == ["ShapeError", "SessionError"][:world] and found[0]["left_out"]


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_is_told_that_nothing_can_be_written(runs, world):
    for rank, found in enumerate(of(runs, world, "unwritable")):
        assert found["errors"] == [("ArtefactError", True), ("SessionError", True)]
        assert found["written"] == (rank == 0)


def test_the_fit_begins_after_the_first_passes(runs):
    (found,) = of(runs, 1, "after")
    assert found["early"] == 0 < found["late"]


def test_nothing_else_gets_the_model_while_a_fit_runs(runs):
    (found,) = of(runs, 1, "running")
    assert all(text.startswith("SessionError") for text in found["refused"].values()), found["refused"]
    assert len(found["refused"]) == 5 and found["hooks"] and found["learnt"]


def test_autoep_with_recomputed_blocks(runs):
    for found in of(runs, 2, "autoep"):
        assert found["losses"] and found["seen"] == 20
        assert len(found["probe"]) > 10 and sum(found["probe"][-4:]) < sum(found["probe"][:4])
