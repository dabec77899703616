"""The clock of the GPU benchmarks, on a device that is made up."""
from __future__ import annotations

import torch

from moe_prefetch.bench.timing import replay_us


def test_the_median_of_whole_replays(monkeypatch):
    clock, took = [0.0], iter([5.0, 1.0, 9.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, other):
            return other.at - self.at

    class Graph:
        def replay(self):
            clock[0] += next(took)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert replay_us(Graph(), 3) == 5000.0
