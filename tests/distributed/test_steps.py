"""What all ranks decide between steps: from the same words the same, and replicas that spare travel."""
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.distributed.groups import Group
from moe_prefetch.errors import ConfigError, ShapeError
from moe_prefetch.experts.placement import Placement
from moe_prefetch.experts.steps import Replan, Steps, replan, travelling
from tests.distributed import ranks

pytestmark = pytest.mark.timeout(600)
PLAN = [(1, ["decisions"]), (2, ["decisions", "graphs", "refused", "leaves"]), (2, ["late"]),
        (3, ["decisions", "decisions a b a", "graphs"]), (3, ["late"])]


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Any]]:
    return ranks.run("tests.distributed.step_cases", PLAN)


def whole(results: dict[tuple[int, str], list[Any]], world: int, case: str) -> list[Any]:
    assert not [r for r in results[world, case] if isinstance(r, str)], "\n".join(r for r in results[world, case] if isinstance(r, str))
    return results[world, case]


@pytest.mark.parametrize(("world", "case"), [(1, "decisions"), (2, "decisions"), (3, "decisions"), (3, "decisions a b a")])
def test_every_rank_is_told_the_same_and_it_follows_from_what_all_said(results, world, case):
    found = whole(results, world, case)
    assert [said["shared"] for said in found] == ["a b" not in case] * world
    told = [said["told"] for said in found]
    even = now = Placement.even(8, world)
    loads, changes, rule = [[0] * 8 for _ in range(world)], 0, Replan(2, every=5)
    for n, steps in enumerate(zip(*told, strict=True)):
        assert len({str(step[:4]) for step in steps}) == 1
        most = max(step[4] for step in steps)
        size, mode = next((s, m) for s, m in ((4, "gather"), (16, "host"), (64, "stay")) if s >= most)
        loads = [[a + b for a, b in zip(old, step[5], strict=True)] for old, step in zip(loads, steps, strict=True)]
        fresh = False
        if (n + 1) % 5 == 0:
            wanted = replan(now, even, loads, rule)
            fresh, now, loads = wanted != now, wanted, [[0] * 8 for _ in range(world)]
        changes += fresh
        assert steps[0][:4] == [size, mode, [list(row) for row in now.serve_RE], fresh]
    assert (changes > 0) == (world > 1)


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_that_is_captured_once_serves_other_replicas(results, world):
    for said in whole(results, world, "graphs"):
        assert said["wrong"] == [] and said["compared"] == 24 and said["fresh"] > 0
        assert said["captured"] == [[2, "gather"], [4, "stay"], [9, "host"]]


def test_what_ranks_do_not_share_is_refused(results):
    for rank, said in enumerate(whole(results, 2, "refused")):
        assert said["kinds"] == ["ConfigError"] * 5 + ["ShapeError"] * 3
        assert "modes is" in said["sizes"] and f"rank {rank}" in said["sizes"] and said["size"] == 4


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_not_come_is_named(results, world):
    for rank, said in enumerate(whole(results, world, "late")):
        if rank != 1:
            assert said["kind"] == "PeerError" and said["ranks"] == [1] and said["seconds"] < 3


def test_a_rank_that_leaves_is_named_at_once(results):
    said = whole(results, 2, "leaves")[0]
    assert said["kind"] == "PeerError" and said["ranks"] == [1] and said["seconds"] < 10


def test_steps_that_can_not_be_are_refused_by_one_rank_alone():
    even = Placement.even(8, 1)
    for every in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="every"):
            Replan(2, every=every)
    for modes in ("gather", ["gather"], None):
        with pytest.raises(ConfigError, match="sizes"):
            Steps(Group.of(), modes, even)
    steps = Steps(Group.of(), {4: "gather"}, even)
    for tokens in (-1, 1.5, 5):
        with pytest.raises(ShapeError, match="tokens"):
            steps.next(tokens)
    assert steps.next(0).size == 4


# without processes ----------------------------------------------------------------------------------------------------------
LOADS = st.integers(1, 4).flatmap(lambda r: st.integers(r, 9).flatmap(
    lambda e: st.lists(st.lists(st.integers(0, 50), min_size=e, max_size=e), min_size=r, max_size=r)))


@given(LOADS, LOADS, st.integers(0, 4), st.floats(0.0, 1.0))
def test_replicas_change_only_for_less_travel(before, load, slots, gain):
    R, E = len(load), len(load[0])
    even, rule = Placement.even(E, R), Replan(slots, gain=gain)
    now = replan(even, even, [[row[e % len(row)] for e in range(E)] for row in (before[r % len(before)] for r in range(R))], rule)
    after = replan(now, even, load, rule)
    assert after == now or travelling(after, load) < gain * travelling(now, load)
    for placement in (now, after):
        for rank in range(R):
            assert len(placement.held_by(rank)) <= len(even.held_by(rank)) + slots
    assert replan(after, even, load, rule) == after
