"""What Prometheus reads is what the ledger and the registries hold, at any time and from any thread."""
from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families as parse

import moe_prefetch
from moe_prefetch.metrics import Metrics
from moe_prefetch.observe.exporter import Exporter
from tests.tiny import tiny

DISK = {"experts": {"home": "disk", "resident": 4, "plan": "lru", "threads": 1}}


def prompt() -> torch.Tensor:
    return torch.arange(1, 9)[None]


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(s.name, frozenset(s.labels.items())): s.value for f in parse(generate_latest(registry).decode()) for s in f.samples}


def test_a_session_is_its_ledger():
    registry, model = CollectorRegistry(), tiny()
    with moe_prefetch.attach(model, DISK) as session:
        registry.register(Exporter(session, model="tiny"))
        model.generate(prompt(), max_new_tokens=6, do_sample=False)
        session.wait_idle()
        during = samples(registry)
        for i, t in enumerate(session.ledger.layers):
            at = {("model", "tiny"), ("layer", str(i))}
            found = {k: during["moe_prefetch_experts_total", frozenset(at | {("found", k)})] for k in ("hit", "late", "miss")}
            assert found == {k: getattr(t, k) for k in found} and sum(found.values()) == t.demanded > 0
            for name, field in {"prefetches_unread": "wasted", "prefetches_cancelled": "cancelled", "expert_bytes_moved": "bytes_moved",
                                "expert_bytes_unread": "bytes_wasted", "stall_seconds": "stall_s"}.items():
                assert during[f"moe_prefetch_{name}_total", frozenset(at)] == pytest.approx(getattr(t, field))
        held = session.held_bytes()
        assert all(during["moe_prefetch_expert_bytes", frozenset({("model", "tiny"), ("where", k)})] == n for k, n in held.items())
        assert sum(v for (name, _), v in during.items() if name == "moe_prefetch_expert_bytes_moved_total") > 0
    # Afterwards, too: counters never fall.
    after = samples(registry)
    assert after.keys() == during.keys() and all(after[k] >= v for k, v in during.items() if k[0].endswith("_total"))


@pytest.mark.parametrize("home", ["disk", "host", "local"])
def test_scrapes_beside_generation_change_nothing(home):
    """Over HTTP, from the server's threads, without a pause; counters only grow and the tokens stay."""
    model, registry, stop = tiny(), CollectorRegistry(), threading.Event()
    want = model.generate(prompt(), max_new_tokens=12, do_sample=False)
    seen: list[float] = []
    config = {"disk": DISK, "host": {"experts": {"home": "host", "resident": 4, "plan": "recent"}}, "local": None}
    with moe_prefetch.attach(model, config[home]) as session:
        registry.register(Exporter(session))
        server, thread = start_http_server(0, "127.0.0.1", registry)

        def scrape() -> None:
            while not stop.is_set():
                with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as page:
                    families = list(parse(page.read().decode()))
                seen.append(sum(s.value for f in families for s in f.samples if s.name == "moe_prefetch_experts_total"))

        reader = threading.Thread(target=scrape)
        reader.start()
        try:
            got = model.generate(prompt(), max_new_tokens=12, do_sample=False)
        finally:
            stop.set()
            reader.join()
            server.shutdown()
            server.server_close()
            thread.join()
        demanded = session.ledger.total.demanded
    assert want.tolist() == got.tolist()
    assert seen == sorted(seen) and 0 <= seen[-1] <= demanded


def test_a_registry_has_its_counters_gauges_and_histograms():
    metrics, registry = Metrics(), CollectorRegistry()
    metrics.add("dispatch_exchanges", 3)
    metrics.set("probe_fit_recall", 0.5, stage=0, horizon=1)
    metrics.set("probe_fit_recall", 0.75, stage=0)
    for seconds in (5e-6, 1e-5, 3e-3, 99.0):
        metrics.observe("dispatch_late_seconds", seconds, rank=2)
    registry.register(Exporter(metrics, rank_of="1"))
    got, own = samples(registry), ("rank_of", "1")
    assert got["moe_prefetch_dispatch_exchanges_total", frozenset({own})] == 3
    assert got["moe_prefetch_probe_fit_recall", frozenset({own, ("stage", "0"), ("horizon", "1")})] == 0.5
    assert got["moe_prefetch_probe_fit_recall", frozenset({own, ("stage", "0"), ("horizon", "")})] == 0.75
    at = lambda bound: got["moe_prefetch_dispatch_late_seconds_bucket", frozenset({own, ("rank", "2"), ("le", bound)})]  # noqa: E731
    assert [at(b) for b in ("1e-05", "0.002", "0.005", "10.0", "+Inf")] == [2, 2, 3, 3, 4]
    rank = frozenset({own, ("rank", "2")})
    assert got["moe_prefetch_dispatch_late_seconds_count", rank] == 4
    assert got["moe_prefetch_dispatch_late_seconds_sum", rank] == pytest.approx(99.003015)


def test_what_has_no_metrics_is_refused():
    with pytest.raises(TypeError, match="Linear has no metrics; expected a Session or a Metrics"):
        Exporter(torch.nn.Linear(1, 1))


def test_series_that_could_not_be_told_apart_are_refused():
    with moe_prefetch.attach(tiny()) as one, moe_prefetch.attach(tiny()) as two:
        with pytest.raises(ValueError, match="CollectorRegistry of its own"):
            Exporter(one, Metrics(), two)
        with pytest.raises(ValueError, match="'layer'"):
            Exporter(one, layer="0")
        registries = [CollectorRegistry(), CollectorRegistry()]
        for registry, session in zip(registries, (one, two)):
            registry.register(Exporter(session, Metrics()))
        assert samples(registries[0]) == samples(registries[1])


def test_without_the_package_the_error_names_the_extra():
    code = "import sys; sys.modules['prometheus_client'] = None; import moe_prefetch.observe.exporter"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1 and "pip install 'moe_prefetch[metrics]'" in ran.stderr
