"""Counters, gauges, histograms: exact under threads, JSON-able, ordered."""
from __future__ import annotations

import json
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.metrics import TIME_BOUNDS, Histogram, Metrics


def test_counters_only_grow():
    m = Metrics()
    m.add("reads")
    m.add("reads", 2.5)
    assert m.value("reads") == 3.5
    with pytest.raises(ValueError, match="can't fall"):
        m.add("reads", -1)
    assert m.value("reads") == 3.5


def test_labels_tell_series_apart_in_any_order():
    m = Metrics()
    m.add("bytes", 1, layer=0, home="disk")
    m.add("bytes", 2, home="disk", layer=0)
    m.add("bytes", 5, layer=1, home="disk")
    m.add("bytes", 7)
    assert m.value("bytes", layer=0, home="disk") == 3
    assert m.value("bytes", layer="0", home="disk") == 3
    assert m.value("bytes", layer=1, home="disk") == 5 and m.value("bytes") == 7 and m.value("bytes", layer=2) == 0


def test_gauges_take_the_last_value():
    m = Metrics()
    m.set("held", 5)
    m.set("held", -3)
    assert m.value("held") == -3 and m.value("never") == 0


@given(st.lists(st.floats(0, 1e3), max_size=40))
def test_histograms(values):
    h = Histogram(TIME_BOUNDS)
    for v in values:
        h.observe(v)
    assert h.count == len(values) == sum(h.counts) and h.total == pytest.approx(sum(values))
    for i, bound in enumerate(TIME_BOUNDS):
        assert sum(h.counts[: i + 1]) == sum(v <= bound for v in values)


def test_bounds_are_ordered():
    assert list(TIME_BOUNDS) == sorted(set(TIME_BOUNDS)) and TIME_BOUNDS[0] == 1e-5 and TIME_BOUNDS[-1] == 10.0


def test_a_snapshot_is_plain_ordered_and_a_copy():
    m = Metrics()
    for layer in (2, 0, 1):
        m.add("b", layer=layer)
        m.add("a", layer=layer)
        m.observe("wait", 0.003, layer=layer)
        m.set("g", layer, layer=layer)
    snap = m.snapshot()
    assert json.loads(json.dumps(snap)) == json.loads(json.dumps(snap))
    names = [(c["name"], c["labels"]["layer"]) for c in snap["counters"]]
    assert names == [(name, layer) for name in "ab" for layer in "012"]
    assert [h["count"] for h in snap["histograms"]] == [1, 1, 1] and len(snap["gauges"]) == 3
    m.add("a", layer=0)
    m.observe("wait", 1, layer=0)
    assert snap["counters"][0]["value"] == 1 and snap["histograms"][0]["count"] == 1 and sum(snap["histograms"][0]["counts"]) == 1


def test_threads_lose_nothing():
    m = Metrics()

    def work():
        for i in range(500):
            m.add("n", 1, thread=i % 3)
            m.observe("t", 1e-4)
            m.set("g", i)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(c["value"] for c in m.snapshot()["counters"]) == 4000
    assert m.snapshot()["histograms"][0]["count"] == 4000
