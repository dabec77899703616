"""Counters, gauges and histograms without a dependency; `snapshot()` is what reports and exporters read."""
from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]

# Upper bounds in seconds, 10 us to 10 s, three to a decade.
TIME_BOUNDS = tuple(m * 10.0**e for e in range(-5, 1) for m in (1.0, 2.0, 5.0)) + (10.0,)


class Histogram:
    """Counts per bucket (the last one is everything above the highest bound), with sum and count."""

    __slots__ = ("bounds", "counts", "total", "count")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total, self.count = bounds, [0] * (len(bounds) + 1), 0.0, 0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value
        self.count += 1


class Metrics:
    """One registry per session. Thread-safe; labels are keyword arguments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}

    @staticmethod
    def _key(name: str, labels: Mapping[str, object]) -> tuple[str, Labels]:
        return name, tuple(sorted((k, str(v)) for k, v in labels.items()))

    def add(self, name: str, value: float = 1, **labels: object) -> None:
        """Raise a counter. Raises ValueError for a negative value: counters only grow."""
        if value < 0:
            raise ValueError(f"counter {name} can't fall (value {value})")
        key = self._key(name, labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + value

    def set(self, name: str, value: float, **labels: object) -> None:
        with self._lock:
            self._gauges[self._key(name, labels)] = value

    def observe(self, name: str, seconds: float, **labels: object) -> None:
        key = self._key(name, labels)
        with self._lock:
            self._histograms.setdefault(key, Histogram(TIME_BOUNDS)).observe(seconds)

    def value(self, name: str, **labels: object) -> float:
        """A counter's or gauge's value; 0 when it was never touched."""
        key = self._key(name, labels)
        with self._lock:
            return self._counters.get(key, self._gauges.get(key, 0))

    def snapshot(self) -> dict[str, list[dict[str, object]]]:
        """Everything, as plain JSON-able data, in a stable order."""
        with self._lock:
            return {
                "counters": [{"name": n, "labels": dict(lb), "value": v} for (n, lb), v in sorted(self._counters.items())],
                "gauges": [{"name": n, "labels": dict(lb), "value": v} for (n, lb), v in sorted(self._gauges.items())],
                "histograms": [
                    {"name": n, "labels": dict(lb), "bounds": h.bounds, "counts": list(h.counts), "sum": h.total, "count": h.count}
                    for (n, lb), h in sorted(self._histograms.items(), key=lambda kv: kv[0])
                ],
            }
