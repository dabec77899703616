"""The links of homes, measured: without a GPU from the CPU's memory, by the law and with a clock."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_prefetch.distributed import topology
from moe_prefetch.experts import links
from moe_prefetch.experts.homes import Block, HostHome, LocalHome
from moe_prefetch.runtime import REAL, Runtime


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (topology, links):
        monkeypatch.setattr(module, "SIZES", (1 << 10, 1 << 12, 1 << 14))
    monkeypatch.setattr(links, "PROGRAMS", {"read": 3, "move": 2})


def test_every_way_from_every_home_is_measured():
    probe = links.HomeProbe([LocalHome("cpu", REAL), HostHome(REAL)], "cpu", REAL)
    found = topology.measure(probe)
    assert [(one.place, one.way) for one in found.links] == [(p, w) for p in ("local", "host") for w in ("read", "move", "copy")]
    assert all(one.rate > 0 and one.start >= 0 for one in found.links)
    assert set(found.machine) == {"device", "homes", "torch", "driver"}


def test_bytes_do_come_and_memory_goes_back():
    released = []

    class Home(LocalHome):
        def allocate(self, nbytes):
            block = super().allocate(nbytes)
            return Block(block.mine, block.bases, lambda: released.append(nbytes))

    probe = links.HomeProbe([Home("cpu", REAL)], "cpu", REAL)
    source = torch.arange((1 << 14) // 8, dtype=torch.int64).view(torch.uint8)
    for way in ("move", "copy"):
        probe._target.zero_()
        probe.seconds("local", way, 1 << 12)
        assert torch.equal(probe._target[: 1 << 12], source[: 1 << 12]) and not probe._target[1 << 12 :].any()
    probe.seconds("local", "read", 1 << 14)
    assert np.bitwise_xor.reduce(probe._found["read"].numpy()) == np.bitwise_xor.reduce(source.view(torch.int32).numpy())
    probe.close()
    probe.close()
    assert released == [1 << 14]


def test_of_a_home_that_ranks_share_the_next_rank_is_measured():
    other = torch.full((1 << 14,), 3, dtype=torch.uint8)

    class Shared(LocalHome):
        name, rank = "peer", 1

        def allocate(self, nbytes):
            mine = super().allocate(nbytes).mine
            return Block(mine, (other.data_ptr(), mine.data_ptr()), views=(other, mine))

    probe = links.HomeProbe([Shared("cpu", REAL)], "cpu", REAL)
    probe.seconds("peer", "copy", 1 << 14)
    assert torch.equal(probe._target, other) and bool((other == 3).all())


def test_time_is_the_runtime_s():
    class Slow(Runtime):
        ticks = 0

        def now(self):
            Slow.ticks += 1
            return float(Slow.ticks)

    assert links.HomeProbe([LocalHome("cpu", REAL)], "cpu", Slow()).seconds("local", "copy", 64) == 1.0
