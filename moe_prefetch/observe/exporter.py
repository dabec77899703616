"""What was hit, late, missing and moved, as Prometheus metrics (extra `metrics`)."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any

from ..metrics import Metrics

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("prometheus_client is missing: pip install 'moe_prefetch[metrics]'", name=e.name) from e

PREFIX = "moe_prefetch_"
# Fields of a layer's Totals: metric and help.
COUNTERS = {
    "wasted": ("prefetches_unread", "Experts fetched ahead and thrown out unread"),
    "cancelled": ("prefetches_cancelled", "Fetches taken back before they began"),
    "bytes_moved": ("expert_bytes_moved", "Bytes of experts brought into slots"),
    "bytes_wasted": ("expert_bytes_unread", "Bytes of experts fetched ahead and never read"),
    "stall_s": ("stall_seconds", "Seconds that forward passes waited for experts"),
}


class Exporter:
    """A collector for a `prometheus_client` registry: `REGISTRY.register(Exporter(session))`, then `start_http_server(9400)`.

    sources  a session of `attach`, and the `Metrics` that a `Dispatcher` or a `ProbeFit` was given
    labels   on every series: rank=3, model="qwen"

    A scrape asks nothing of the device: of home `host` it tells what the last finished pass had sent. It may run in any thread.
    Raises TypeError for another source, ValueError for two sessions or a label that series have already, ModuleNotFoundError (at import)
    without prometheus_client.
    """

    def __init__(self, *sources: Any, **labels: object) -> None:
        for s in sources:
            if not isinstance(s, Metrics) and not hasattr(s, "so_far"):
                raise TypeError(f"{type(s).__name__} has no metrics; expected a Session or a Metrics")
        if sum(not isinstance(s, Metrics) for s in sources) > 1:
            raise ValueError("two sessions would have the same series: give each an Exporter in a CollectorRegistry of its own")
        if taken := {"layer", "found", "where"} & labels.keys():
            raise ValueError(f"series have a label {sorted(taken)[0]!r} of their own: name it otherwise")
        self._sources, self._labels = sources, {k: str(v) for k, v in labels.items()}

    def collect(self) -> Iterator[Metric]:
        for s in self._sources:
            yield from self._registry(s) if isinstance(s, Metrics) else self._session(s)

    def describe(self) -> list[Metric]:
        """Names change as things happen, so none is promised: registering must not look at a session."""
        return []

    def _session(self, session: Any) -> Iterator[Metric]:
        layers, own, values = session.so_far().layers, tuple(self._labels), tuple(self._labels.values())
        demanded = CounterMetricFamily(PREFIX + "experts", "Experts that layers asked for, by how they were found: distinct per pass",
                                       labels=(*own, "layer", "found"))
        for i, t in enumerate(layers):
            for found in ("hit", "late", "miss"):
                demanded.add_metric((*values, str(i), found), getattr(t, found))
        yield demanded
        for field, (name, text) in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=(*own, "layer"))
            for i, t in enumerate(layers):
                family.add_metric((*values, str(i)), getattr(t, field))
            yield family
        held = GaugeMetricFamily(PREFIX + "expert_bytes", "Bytes of experts: on the model's device, and in all", labels=(*own, "where"))
        for where, n in session.held_bytes().items():
            held.add_metric((*values, where), n)
        yield held

    def _registry(self, metrics: Metrics) -> Iterator[Metric]:
        for kind, rows in metrics.snapshot().items():
            of: Any = {"counters": CounterMetricFamily, "gauges": GaugeMetricFamily, "histograms": HistogramMetricFamily}[kind]
            for name, series in groupby(rows, key=lambda row: str(row["name"])):
                series = [({**self._labels, **row["labels"]}, row) for row in series]
                names = tuple(dict.fromkeys(n for labels, _ in series for n in labels))
                family = of(PREFIX + name, name.replace("_", " "), labels=names)
                for labels, row in series:
                    # A label that this series lacks is an empty one: to Prometheus the same.
                    what = (row["value"],) if kind != "histograms" else (self._buckets(row), row["sum"])
                    family.add_metric([labels.get(n, "") for n in names], *what)
                yield family

    @staticmethod
    def _buckets(row: dict[str, Any]) -> list[tuple[str, float]]:
        """Prometheus counts what is at or below each bound."""
        return list(zip((*map(str, row["bounds"]), "+Inf"), accumulate(row["counts"])))
