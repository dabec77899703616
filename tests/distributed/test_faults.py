"""A killed and a stopped middle rank: every survivor reports it, by number, within the deadline and a tenth."""
from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import ranks

CASES = "tests.distributed.fault_cases"


Results = dict[tuple[int, str], list[Any]]
QUICK = [(3, "gather", "aaa"), (3, "host", "aaa"), (3, "gather", "aab")]
HOW = ["killed", "stopped"]


def case(count: int, world: int, mode: str, hosts: str, deadline: float, how: str) -> str:
    return f"trials {count} {world} {mode} {hosts} {deadline} {how}"


def reports(found: Results, name: str) -> list[dict[str, Any]]:
    """Every survivor's report of a case; all of the right kind and naming the right rank."""
    count, world = map(int, name.split()[1:3])
    (trials,) = found[1, name]
    assert not isinstance(trials, str), trials
    every = [said for trial in trials for said in trial]
    assert len(every) == count * (world - 1), every
    for said in every:
        assert said["kind"] == "PeerError" and said["ranks"] == [world // 2], said
    return every


@pytest.fixture(scope="module")
def quick() -> Results:
    return ranks.run(CASES, [(1, [case(2, *q, 1.0, how) for q in QUICK for how in HOW])])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("world", "mode", "hosts"), QUICK)
def test_survivors_name_the_rank(quick, how, world, mode, hosts):
    for said in reports(quick, case(2, world, mode, hosts, 1.0, how)):
        # Three times what it takes: other processes share this machine.
        assert said["after"] < 3.3


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("world", "mode"), [(3, "gather"), (4, "gather"), (3, "host")])
def test_survivors_report_within_the_deadline_and_a_tenth(how, world, mode):
    deadline, name = 2.0, case(50, world, mode, "a" * world, 2.0, how)
    late = sorted(said["after"] for said in reports(ranks.run(CASES, [(1, [name])]), name))
    print(f"{world} ranks, {mode}, {how}: {len(late)} reports, median {late[len(late) // 2]:.3f} s, last {late[-1]:.3f} s")
    assert late[-1] <= 1.1 * deadline
