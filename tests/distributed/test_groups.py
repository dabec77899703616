"""Groups in one shape, words before payload, and memory that ranks of a host share."""
from __future__ import annotations

from typing import Any

import pytest

from moe_prefetch.distributed.groups import Grid, Group
from moe_prefetch.distributed.symmetric import symmetric_memory
from moe_prefetch.errors import ConfigError
from tests.distributed import ranks
from tests.integrations.megatron.checks import environment

pytestmark = pytest.mark.timeout(600)
CASES = "tests.distributed.group_cases"
TWO_HOSTS = "hosts a b a"
PLAN = [(2, ["plain", "twice", "agreement", "real_host", "memory_refusals", "absent"]),
        (3, ["plain", "forgets", "agreement", TWO_HOSTS, "absent"]), (4, ["plain", "twice", "hosts a b b a", "hosts a b c d"])]


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Any]]:
    return ranks.run(CASES, PLAN)


def whole(results: dict[tuple[int, str], list[Any]], world: int, case: str) -> list[Any]:
    assert not [r for r in results[world, case] if isinstance(r, str)], results[world, case]
    return results[world, case]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_group_knows_its_ranks_and_hears_every_word(results, world):
    for rank, said in enumerate(whole(results, world, "plain")):
        assert said["ranks"] == list(range(world)) and said["rank"] == rank
        assert said["words"] == [[r] * (r + 1) for r in range(world)]
        members = [r for r in range(world) if r != 1]
        if rank == 1:
            assert said["odd"] is None and said["stranger"]["kind"] == "ConfigError"
        else:
            assert said["odd"] == [members, members.index(rank)]


@pytest.mark.parametrize("world", [2, 4])
def test_two_objects_over_one_group_do_not_read_each_other(results, world):
    assert all(all(said) for said in whole(results, world, "twice"))


def test_words_that_all_have_read_leave_the_store(results):
    for said in whole(results, 3, "forgets"):
        assert said == [False] * 4 + [True] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_are_refused_by_name(results, world):
    last = world - 1
    for differs, lacks, other in whole(results, world, "agreement"):
        assert differs["kind"] == lacks["kind"] == other["kind"] == "ConfigError"
        assert f"128 on rank {last}" in differs["said"] and "capacity is 64 on rank" in differs["said"]
        assert "mode" not in differs["said"]
        assert 'fp8 is true on rank 0, "nothing" on rank' in lacks["said"]
        assert "this" in other["said"] and "that" in other["said"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_not_attach_is_named(results, world):
    for rank, said in enumerate(whole(results, world, "absent")):
        if rank != 1:
            assert said["kind"] == "PeerError" and said["ranks"] == [1] and "rank 1" in said["said"]
            assert 0.9 < said["seconds"] < 5


def test_ranks_of_a_simulated_host_share_memory_and_others_do_not(results):
    for world, case, hosts in ((3, TWO_HOSTS, "aba"), (4, "hosts a b b a", "abba"), (4, "hosts a b c d", "abcd")):
        for rank, said in enumerate(whole(results, world, case)):
            mates = [r for r in range(world) if hosts[r] == hosts[rank]]
            assert said["hosts"] == list(hosts) and said["neighbours"] == said["places"] == mates
            assert said["rank"] == mates.index(rank)
            assert said["bytes"] == [m + 1 for m in mates] and said["aligned"] and said["words"]


def test_processes_of_this_machine_are_on_one_host(results):
    assert whole(results, 2, "real_host") == [1, 1]


def test_memory_is_refused_on_every_rank_alike(results):
    for sizes, full, zero in whole(results, 2, "memory_refusals"):
        assert sizes["kind"] == "ConfigError" and "nbytes is" in sizes["said"]
        assert full["kind"] == "MemoryError" and "rank 1" in full["said"]
        assert zero


def test_a_process_alone_is_a_group():
    group = Group.of()
    assert group.ranks == (0,) and group.gather(b"x") == [b"x"] and group.neighbours() == (0,)
    group.agree("test", {"a": 1})
    block = symmetric_memory(group, "cpu").allocate(100)
    assert block.mine.numel() == 128 and not block.mine.any() and len(block.views) == 1
    assert Grid.of().ep.size == 1


def test_what_is_no_group_is_refused():
    with pytest.raises(ConfigError, match="no process group"):
        Group.of("ep")
    with pytest.raises(ConfigError, match="no axis experts"):
        Grid.of(experts=None)
    with pytest.raises(ConfigError, match="place 2"):
        Group("ep", (0, 1), 2)
    with pytest.raises(ConfigError, match="distinct"):
        Group("ep", (0, 0), 0)


LAYOUTS = [(4, "megatron 2 2 1 1"), (4, "megatron 1 4 1 1"), (4, "megatron 2 2 2 1"), (3, "megatron 1 3 1 1"), (4, "megatron 2 2 1 2")]


@pytest.mark.framework
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_megatrons_groups(version):
    plan = [(w, [c for n, c in LAYOUTS if n == w]) for w in (3, 4)]
    found = ranks.run(CASES, plan, {"PYTHONPATH": environment(version)["PYTHONPATH"]})
    for world, case in LAYOUTS:
        for said in whole(found, world, case):
            assert said["same"], said
            assert said["words"] == said["grid"]["ep"][0] and said["empty"] == "ConfigError"


@pytest.mark.framework
def test_deepspeeds_groups():
    pytest.importorskip("deepspeed")
    found = ranks.run(CASES, [(4, ["deepspeed 2"]), (3, ["deepspeed 3"])])
    for world, size in ((4, 2), (3, 3)):
        for rank, said in enumerate(whole(found, world, f"deepspeed {size}")):
            assert said["same"] and said["words"] == said["grid"]["ep"][0] and said["empty"] == "ConfigError"
            assert said["grid"]["dp"][0] == list(range(world)) and said["grid"]["tp"] == [[rank], 0]
            assert said["grid"]["ep"][0] == ([rank // 2 * 2, rank // 2 * 2 + 1] if size == 2 else [0, 1, 2])
