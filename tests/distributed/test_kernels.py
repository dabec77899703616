"""The Triton kernels of mode gather, under the interpreter: the layer, and each rule of their protocol."""
from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import ranks
from tests.distributed.test_dispatch import right, whole

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(900)
PLAN = [(1, ["device_gather 2"]), (2, ["device_gather 2", "device_dispatch", "device_numbers", "device_turns kept"]),
        (2, ["device_turns broken"]), (2, ["device_deadlines words", "device_deadlines planes"]),
        (2, ["device_gather 2 planes", "device_dispatch planes"]),
        (3, ["device_gather 1", "device_deadline"]), (3, ["device_gather 1 planes", "device_deadline planes"])]


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Any]]:
    return ranks.run("tests.distributed.kernel_cases", PLAN)


@pytest.mark.parametrize(("world", "count", "protocol"), [(1, 2, ""), (2, 2, ""), (3, 1, ""), (2, 2, " planes"), (3, 1, " planes")])
def test_the_kernels_under_the_interpreter(results, world, count, protocol):
    right(results, world, f"device_gather {count}{protocol}", 3 * 2 * count)


@pytest.mark.parametrize("protocol", ["", " planes"])
def test_dispatch_over_the_kernels(results, protocol):
    for said in right(results, 2, f"device_dispatch{protocol}", 11):
        assert said["refused"] == ["SessionError"] * 5 + ["ShapeError"]


def test_words_that_are_still_to_be_taken_are_not_overwritten(results):
    right(results, 2, "device_turns kept", 4)
    broken = whole(results, 2, "device_turns broken")
    assert broken[0]["kind"] == "PeerError", broken


def test_numbers_go_round_and_no_word_grows_old(results):
    for said in right(results, 2, "device_numbers", 10):
        assert said["ages"] <= 4 * said["slots"]


@pytest.mark.parametrize("protocol", ["", " planes"])
def test_a_kernel_gives_up_at_its_deadline_and_names_the_rank(results, protocol):
    for said in whole(results, 3, f"device_deadline{protocol}")[:2]:
        assert said["kind"] == "PeerError" and said["ranks"] == [2] and said["nan"] and said["late"] == 1 << 2


@pytest.mark.parametrize("protocol", ["words", "planes"])
def test_who_does_not_come_is_waited_for_once(results, protocol):
    one, eight = whole(results, 2, f"device_deadlines {protocol}")[1]
    assert eight < 4 * one
