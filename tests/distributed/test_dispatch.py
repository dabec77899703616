"""A MoE layer over several ranks is the single-process layer: every mode, routing and number of ranks; to the bit where it must be."""
from __future__ import annotations

import random
from statistics import median
from typing import Any

import pytest
import torch

from moe_prefetch.distributed.groups import Group
from moe_prefetch.errors import ConfigError, SessionError, ShapeError
from moe_prefetch.experts.dispatch import Dispatch, DispatchSpec
from moe_prefetch.experts.placement import Placement
from moe_prefetch.kernels.dispatch.message import Message
from moe_prefetch.kernels.dispatch.naive import from_fp8, to_fp8
from tests.distributed import ranks

pytestmark = pytest.mark.timeout(900)
CASES = "tests.distributed.dispatch_cases"
# 1,000 in all; each is computed in all three modes.
RANDOM = {2: "random_cases 400 1", 3: "random_cases 350 2", 4: "random_cases 250 3"}
SPANNING = {3: "spanning a b a", 4: "spanning a b b a"}
# A case that leaves its group broken is the last of its processes.
PLAN = [(1, ["patterns"]),
        (2, ["patterns", RANDOM[2], "overflow", "switching", "differing", "overlap", "bad_calls", "fp8_payload random", "fp8_payload zipf",
             "strays"]), (2, ["uneven"]),
        (3, ["patterns", RANDOM[3], "overflow", SPANNING[3], "switching", "differing", "overlap", "strays"]), (3, ["waits"]),
        (3, ["uneven"]),
        (4, ["patterns", RANDOM[4], SPANNING[4], "overlap"])]


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Any]]:
    return ranks.run(CASES, PLAN)


def whole(results: dict[tuple[int, str], list[Any]], world: int, case: str) -> list[Any]:
    assert not [r for r in results[world, case] if isinstance(r, str)], "\n".join(r for r in results[world, case] if isinstance(r, str))
    return results[world, case]


def right(results: dict[tuple[int, str], list[Any]], world: int, case: str, compared: int) -> list[Any]:
    found = whole(results, world, case)
    for said in found:
        assert said["wrong"] == [] and said["compared"] == compared
    assert sum(said["rows"] for said in found) > compared
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_mode_pattern_and_subset_of_empty_ranks(results, world):
    right(results, world, "patterns", 3 * 2 * 5 * 2**world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_random_cases(results, world):
    right(results, world, RANDOM[world], 3 * int(RANDOM[world].split()[1]))


@pytest.mark.parametrize("world", [2, 3])
def test_a_full_message_takes_further_exchanges_and_drops_nothing(results, world):
    for said in right(results, world, "overflow", 16):
        assert all(made == needed for made, needed in said["exchanges"])
        assert said["exchanges"][0] == [23, 23] and said["exchanges"][3] == [1, 1]


@pytest.mark.parametrize("world", [3, 4])
def test_groups_that_span_simulated_hosts(results, world):
    right(results, world, SPANNING[world], 2 * 2 * 5 * 3)


@pytest.mark.parametrize("world", [2, 3])
def test_modes_and_replicas_change_for_all_or_for_nobody(results, world):
    for said in right(results, world, "switching", 7):
        alone, unknown, foreign = said["refused"]
        assert alone["kind"] == unknown["kind"] == foreign["kind"] == "ConfigError"
        assert '"stay" on rank 0' in alone["said"] and "no such mode" in unknown["said"] and f"{world + 1} ranks" in foreign["said"]
        assert said["mode"] == "gather"


@pytest.mark.parametrize("world", [2, 3])
def test_two_configurations_are_refused_by_name(results, world):
    for found in whole(results, world, "differing"):
        for said, key in zip(found, ("capacity", "deterministic", "mode", "deadline"), strict=True):
            assert said["kind"] == "ConfigError" and f"{key} is" in said["said"] and f"on rank {world - 1}" in said["said"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_other_work_fits_between_sending_and_finishing(results, world):
    for said in right(results, world, "overlap", 10):
        assert said["early"] == "SessionError"


def test_what_is_refused_before_sending_can_be_called_again(results):
    for said in whole(results, 2, "bad_calls"):
        assert said["kinds"] == ["ShapeError"] * 5 and said["wrong"] == []


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_leaves_is_told_to_the_others_at_once(results, world):
    for rank, (layers, failed, again, gone) in enumerate(whole(results, world, "strays")):
        assert layers["kind"] in ("SessionError", "PeerError")
        assert failed["kind"] == ("MemoryError" if rank == 1 else "PeerError")
        assert again["kind"] == gone["kind"] == "PeerError" and again["ranks"] == gone["ranks"] == [1]
        # Deadlines are 60 s.
        assert all(said["seconds"] < 10 for said in (layers, failed, again, gone))


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_with_fewer_layers_is_named(results, world):
    for rank, said in enumerate(whole(results, world, "uneven")):
        if rank != 1:
            assert said["kind"] == "PeerError" and said["ranks"] == [1] and said["seconds"] < 3


def test_waiting_for_a_late_rank_is_no_transfer(results):
    """Rank 1 is 100 ms late, or in time and 100 ms slow in sending."""
    for rank, said in enumerate(whole(results, 3, "waits")):
        if rank == 1:
            continue
        assert median(late for late, _, _ in said["late"]) > 0.05 > median(late for late, _, _ in said["slow"])
        assert median(moved for _, _, moved in said["slow"]) > 0.05 > median(moved for _, _, moved in said["late"])
        assert [who for _, who, _ in said["late"]].count(1) >= 4


def test_fp8_payload_halves_the_bytes_and_keeps_the_error_of_e4m3(results):
    for pattern in ("random", "zipf"):
        for said in whole(results, 2, f"fp8_payload {pattern}"):
            assert said["same"] and said["plain"] < 0.006
            # Three bits of mantissa: 2^-4 at most for a number, 2.6 % in the mean square; a product of two carries it twice.
            assert 0.015 < said["fp8"] < 0.06
            assert said["bytes"][1] < 0.55 * said["bytes"][0]


# without processes ----------------------------------------------------------------------------------------------------------
def test_fp8_rows_on_special_values():
    x = torch.zeros(6, 300)
    x[1] = torch.linspace(-3, 3, 300)
    x[2, 5] = 1e-44
    x[3, 290] = 3e38
    x[4, 7] = float("nan")
    x[5, 130] = float("inf")
    q, scale = to_fp8(x)
    back = from_fp8(q, scale, torch.float32)
    assert scale.shape == (6, 3) and torch.equal(back[0], x[0]) and torch.equal(back[2, 100:], x[2, 100:])
    step = x[1].abs().unflatten(0, (3, 100)).amax(-1).max() / 448 * 2**5
    assert (back[1] - x[1]).abs().max() <= step / 2
    assert back[3, 290].item() == pytest.approx(3e38, rel=2**-4) and back[3, :256].abs().max() == 0
    assert back[4, 7].isnan() and not back[4, 128:].any() and not back[5, :128].any() and not back[5, 130].isfinite()


def test_messages_lie_where_they_say():
    for fp8 in (False, True):
        message = Message(5, 130, 3, torch.bfloat16, fp8=fp8)
        buffer = torch.zeros(message.out_bytes, dtype=torch.uint8)
        end = 0
        for view in message.out_views(buffer).values():
            start = view.data_ptr() - buffer.data_ptr()
            assert start % 128 == 0 and start >= end
            end = start + view.numel() * view.element_size()
        assert end <= message.out_bytes and message.out_bytes % 128 == 0
    assert Message(5, 130, 3, torch.bfloat16, unreduced=True).back_bytes >= 3 * 5 * 130 * 2


@pytest.mark.parametrize("bad", [dict(capacity=0), dict(hidden=0), dict(top_k=0), dict(dtype=torch.float64)])
def test_messages_of_no_size_are_refused(bad):
    with pytest.raises(ShapeError, match="messages of"):
        DispatchSpec(**{"hidden": 4, "top_k": 1, "dtype": torch.float32, **bad}).message()


def test_deterministic_rows_can_not_be_rounded_on_their_way():
    with pytest.raises(ConfigError, match="deterministic and fp8"):
        DispatchSpec(4, 1, torch.float32, deterministic=True, fp8=True)


def test_placements_count_every_expert_once():
    for experts in (1, 3, 8, 10, 64):
        for n in (1, 2, 3, 4, 7):
            even = Placement.even(experts, n)
            held = [even.held_by(r) for r in range(n)]
            assert sorted(e for h in held for e in h) == list(range(experts))
            assert max(map(len, held)) - min(map(len, held)) <= 1
    replicated = Placement.even(8, 4).with_replicas({0: [2], 7: [0, 1, 2]})
    # A holder serves itself; who holds none goes to one holder.
    assert [row[0] for row in replicated.serve_RE] == [0, 2, 2, 2] and [row[7] for row in replicated.serve_RE] == [0, 1, 2, 3]
    assert replicated.held_by(2) == (0, 4, 5, 7) and replicated.digest != Placement.even(8, 4).digest
    assert replicated.digest == Placement.even(8, 4).with_replicas({7: [0, 1, 2], 0: [2]}).digest


def test_copies_go_where_they_are_chosen_most():
    rng = random.Random(0)
    for _ in range(60):
        experts, n, slots = rng.choice((5, 8, 16)), rng.choice((1, 2, 3, 4)), rng.choice((0, 1, 4, 20))
        even = Placement.even(experts, n)
        load = [[rng.choice((0, 0, 1, 2, 9)) for _ in range(experts)] for _ in range(n)]
        placed = even.with_copies(load, slots)
        for r in range(n):
            new = set(placed.held_by(r)) - set(even.held_by(r))
            far = sorted((load[r][e] for e in range(experts) if e not in even.held_by(r)), reverse=True)
            assert len(new) <= slots and all(load[r][e] > 0 for e in new)
            # No other choice of as many copies keeps more of this rank's tokens at home.
            assert sum(load[r][e] for e in new) == sum(far[:slots])
            assert all(placed.serve_RE[r][e] == r for e in placed.held_by(r))
    with pytest.raises(ConfigError, match="loads of 1 ranks"):
        Placement.even(4, 2).with_copies([[1, 1, 1, 1]], 1)
    with pytest.raises(ConfigError, match="-1 slots"):
        Placement.even(4, 2).with_copies([[1] * 4] * 2, -1)


@pytest.mark.parametrize("replicas", [{8: [1]}, {-1: [1]}, {0: [0]}, {0: [1, 1]}, {0: [4]}, {0: [-1]}])
def test_bad_replica_maps_are_refused(replicas):
    with pytest.raises(ConfigError):
        Placement.even(8, 4).with_replicas(replicas)


@pytest.mark.parametrize("rows", [(), ((),), ((0, 1), (0,)), ((0, 2), (0, 1)), ((0, -1), (0, 1))])
def test_bad_placements_are_refused(rows):
    with pytest.raises(ConfigError):
        Placement(rows)


@pytest.mark.parametrize("mode", ["stay", "gather", "host"])
def test_what_one_rank_alone_can_see(mode):
    """Experts that return one row for all, a flight that is finished twice, a dispatch that was closed."""
    x, ids, weights = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    give = [lambda layer, rows, i, w: rows[:1]]

    def open_one() -> Dispatch:
        experts = lambda *args: give[0](*args)  # noqa: E731
        return Dispatch(Group.of(), DispatchSpec(4, 1, torch.float32), Placement.even(2, 1), mode, local=experts, everywhere=experts)

    with pytest.raises(ShapeError, match="a row for each row"):
        open_one()(0, x, ids, weights)
    give[0] = lambda layer, rows, i, w: rows * w
    dispatch = open_one()
    flight = dispatch.begin(0, x, ids, weights)
    assert torch.equal(flight.finish(), x)
    if mode != "stay":
        with pytest.raises(SessionError, match="was finished"):
            flight.finish()
        assert torch.equal(dispatch(1, x, ids, weights), x)
        dispatch.close()
        with pytest.raises(SessionError, match="closed"):
            dispatch(2, x, ids, weights)
