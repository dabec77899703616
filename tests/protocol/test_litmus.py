"""The protocol in every order of its steps: the rules hold, and each violation is found."""
from __future__ import annotations

import pytest

from moe_prefetch.kernels import protocol
from moe_prefetch.kernels.protocol import move_of, move_word, slot_word
from moe_prefetch.types import SlotState

from .explore import Explorer, Walk
from .faults import FAULTS, GOOD, swap
from .litmus import RuleError
from .scenes import decode, filling, outlived, random_decode, ranks, two_steps, weights

NIGHT = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=NIGHT) for n in range(4, 200))])
def test_every_order_of_two_layers_three_slots_two_horizons_two_steps(seed: int) -> None:
    assert Explorer(two_steps(GOOD, seed)).run() > 100


@pytest.mark.parametrize("scene", [
    filling, outlived, ranks, weights, lambda p: decode(p, [[(0,), (0, 1)]], slots=2, experts=3, copiers=1, readers=1)],
    ids=["filling", "outlived", "ranks", "weights", "every_plan"])
def test_every_order_of(scene) -> None:
    assert Explorer(scene(GOOD)).run() > 100


@pytest.mark.parametrize("name", FAULTS)
def test_found(name: str) -> None:
    """The scene is clean under the protocol and broken by the one change."""
    scene, protocol_, finding = FAULTS[name]
    assert Explorer(scene(GOOD)).run() > 10
    with pytest.raises(RuleError, match=f"^({finding})"):
        Explorer(scene(protocol_)).run()


def walks(seeds: range, steps: int) -> int:
    taken = 0
    for seed in seeds:
        taken += Walk(random_decode(GOOD, seed, steps), seed).run()
    return taken


def test_a_hundred_thousand_random_steps() -> None:
    assert walks(range(110), 10) > 100_000


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_ten_million_random_steps(part: int) -> None:
    assert walks(range(1_000 + 1_150 * part, 1_000 + 1_150 * (part + 1)), 10) > 1_000_000


def test_random_orders_find_violations_too() -> None:
    """A few hundred orders each; the subtlest violations take more."""
    found = set()
    for name, (scene, faulty, _) in FAULTS.items():
        for seed in range(300):
            try:
                Walk(scene(faulty), seed).run()
            except RuleError:
                found.add(name)
                break
    assert len(found) >= 14, sorted(set(FAULTS) - found)


def test_words_hold_what_they_are_made_of() -> None:
    for generation in (0, 1, 12345, 2**31 - 1):
        for expert in (-1, 0, 7, 65534):
            for state in SlotState:
                word = slot_word(generation, state, expert)
                assert 0 <= word < 2**63
                assert (protocol.generation_of(word), protocol.state_of(word), protocol.expert_of(word)) == (generation, state, expert)
                assert protocol.expert_of(word | protocol.USED) == expert
                assert protocol.generation_of(word | protocol.USED) == generation
        assert move_of(move_word(generation, 513, 300)) == (300, 513, generation)
    assert len({protocol.claim_word(step, state) for step in range(4) for state in range(6)}) == 24


def test_the_model_reads_what_it_says() -> None:
    """A scene's end without any mover: every read is of home, and the explorer sees one order."""
    scene = swap(plans={}, demands=[[(0,), (1,)]])(GOOD)
    assert Explorer(scene).run() == 1 + len(scene.nodes) + sum(_length(n) for n in scene.nodes)


def _length(node) -> int:
    steps = 0
    actor = node.make()
    result = None
    try:
        while True:
            op = actor.send(result)
            result = {"Load": 0, "Pick": (), "Acquire": ("home", 9, 0, 0)}.get(type(op).__name__)
            steps += 1
    except StopIteration:
        return steps
