"""Records that the ranks of a host share: processes over gloo, each holding its experts and reading the others' in place."""
from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import ranks
from tests.experts.layouts import E

pytestmark = pytest.mark.timeout(600)
DIFFERENCES = {"layers": "layers is", "weights": "weights is"}
PLAN = [(2, ["records", "device", *(f"differing {d}" for d in DIFFERENCES), "failing"]), (2, ["hosts"]), (3, ["records"])]


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Any]]:
    return ranks.run("tests.experts.home_cases", PLAN)


def whole(results: dict[tuple[int, str], list[Any]], world: int, case: str) -> list[Any]:
    assert not [r for r in results[world, case] if isinstance(r, str)], results[world, case]
    return results[world, case]


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_reads_every_record_where_it_is(results, world):
    said = whole(results, world, "records")
    for one in said:
        assert one["experts"] == world * E and one["home"] == "peer"
        for fact in ("same", "stamps", "law", "copy", "back", "seen", "returned"):
            assert one[fact], fact
    assert len({one["sum"] for one in said}) == 1


def test_each_rank_has_its_own_table_and_all_change_their_weights_together(results):
    for one in whole(results, 2, "device"):
        for fact in ("links", "same", "lent", "own stay", "seen", "counted"):
            assert one[fact], fact


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_refused_before_any_record(results, what):
    for one in whole(results, 2, f"differing {what}"):
        assert one["kind"] == "ConfigError" and DIFFERENCES[what] in one["text"] and one["whole"]


def test_a_rank_that_fails_leaves_nobody_without_weights(results):
    first, second = whole(results, 2, "failing")
    assert first["kind"] == "UnsupportedModelError" and first["whole"]
    assert second["kind"] == "PeerError" and second["ranks"] == [0] and second["whole"]


def test_ranks_of_several_hosts_are_refused(results):
    assert all(one["kind"] == "UnsupportedModelError" and "several hosts" in one["text"] for one in whole(results, 2, "hosts"))
