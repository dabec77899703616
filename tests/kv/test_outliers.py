from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.errors import ArtefactError, ConfigError, ShapeError
from moe_prefetch.kv.codec import OutlierStats, StatsCollector, book_of, make_coding
from moe_prefetch.kv.outliers import POLICIES, LayerStats, choose, rank

from .common import layout


def collect(
    n: int = 400, loud: dict[int, float] | None = None, bias: dict[int, float] | None = None, q_loud: dict[int, float] | None = None
) -> LayerStats:
    q, k, v = torch.randn(4, n, 64), torch.randn(2, n, 64), torch.randn(2, n, 64)
    for x, change in ((k, loud), (q, q_loud)):
        for c, f in (change or {}).items():
            x[..., c] *= f
    for c, b in (bias or {}).items():
        k[..., c] += b
    s = StatsCollector()
    s.add(q, k, v)
    return s.stats()


def test_importance_asks_the_query_topn_does_not() -> None:
    stats = collect(loud={3: 10.0, 9: 8.0}, q_loud={9: 4.0, 3: 0.01, 20: 30.0})
    assert [r[0] for r in rank(stats, "topn", 1)] == [3, 3]
    assert [r[:2] for r in rank(stats, "importance", 2)] == [[9, 20]] * 2 or [sorted(r) for r in rank(stats, "importance", 2)] == [
        [9, 20]
    ] * 2
    assert all(3 not in r for r in rank(stats, "importance", 2))


def test_a_constant_channel_needs_no_outlier_since_its_mean_is_taken_away() -> None:
    stats = collect(bias={5: 600.0}, loud={11: 6.0})
    assert all(r[0] == 11 for r in rank(stats, "topn", 1))
    assert abs(choose(stats, "topn", 2).k_mean[0][5] - 600) < 1


def test_sigma_is_three_standard_deviations_over_the_layer_and_may_choose_none() -> None:
    flat = collect()
    assert rank(LayerStats(1, flat.q2, flat.k1, flat.k2, [[1.0] * 64] * 2, flat.v2), "sigma", 4) == [[], []]
    stats = collect(loud={7: 40.0})
    assert rank(stats, "sigma", 4) == [[7], [7]]
    ka = [m for row in stats.ka for m in row]
    mean = sum(ka) / len(ka)
    edge = mean + 3 * math.sqrt(sum((m - mean) ** 2 for m in ka) / len(ka))
    assert all((m > edge) == (c in (7,)) for row in stats.ka for c, m in enumerate(row))
    assert sum(m > edge for row in stats.ka for m in row) == 2
    assert choose(stats, "sigma", 4).channels == ((7, -1, -1, -1),) * 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["fp4-72", "fp4-quality"])
def test_the_share_of_outliers_is_at_most_five_per_cent(policy: str, name: str) -> None:
    for dim in (64, 128):
        lay = layout(name, dim)
        s = StatsCollector()
        s.add(torch.randn(4, 50, dim), torch.randn(2, 50, dim), torch.randn(2, 50, dim))
        choice = choose(s.stats(), policy, lay.outliers)
        assert choice.share(dim, dim) <= 0.05 and (choice.share(dim, dim) == 0 or policy != "none")


@given(st.lists(st.floats(0, 1e30), min_size=64, max_size=64), st.lists(st.floats(0, 1e30), min_size=64, max_size=64))
def test_any_moments_give_finite_positive_gains_and_sorted_channels(q2: list[float], k2: list[float]) -> None:
    stats = LayerStats(1, [q2], [[0.0] * 64], [k2], [[0.0] * 64], [k2])
    for policy in POLICIES:
        choice = choose(stats, policy, 4)
        for rows in (choice.k_gain, choice.v_gain):
            assert all(2.0**-6 <= g <= 2.0**6 for g in rows[0])
        for rows in (choice.k_weight, choice.v_weight):
            assert all(math.isfinite(w) and w >= 0 for w in rows[0])
        used = [c for c in choice.channels[0] if c >= 0]
        assert used == sorted(set(used)) and len(choice.channels[0]) == 4


def test_same_moments_same_choice() -> None:
    stats = collect()
    assert choose(stats, "importance", 4) == choose(stats, "importance", 4)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="importance"):
        rank(collect(), "best", 4)  # type: ignore[arg-type]


def test_moments_are_what_they_say() -> None:
    q, k, v = torch.randn(4, 90, 64), torch.randn(2, 90, 64), torch.randn(2, 90, 64)
    whole, parts = StatsCollector(), StatsCollector()
    whole.add(q, k, v)
    parts.add(q[:, :7], k[:, :7], v[:, :7])
    parts.add(q[:, 7:], k[:, 7:], v[:, 7:])
    for m in ("q2", "k1", "k2", "ka", "v2"):
        assert np.allclose(getattr(whole.stats(), m), getattr(parts.stats(), m))
    assert np.allclose(whole.stats().q2, q.pow(2).mean(1).unflatten(0, (2, 2)).mean(1))
    assert np.allclose(whole.stats().k1, k.mean(1), atol=1e-5)


def test_calibration_refuses_what_is_not_finite_or_empty() -> None:
    with pytest.raises(ShapeError, match="Inf or NaN"):
        StatsCollector().add(torch.randn(2, 3, 64), torch.full((2, 3, 64), torch.nan), torch.randn(2, 3, 64))
    with pytest.raises(ShapeError, match="no token"):
        StatsCollector().stats()


def test_stats_come_back_from_disk(tmp_path: Path) -> None:
    stats = OutlierStats({0: collect(bias={5: 600.0}), 7: collect()})
    stats.save(tmp_path / "cal")
    back = OutlierStats.load(tmp_path / "cal")
    assert back == stats
    assert choose(back.layers[7], "importance", 4) == choose(stats.layers[7], "importance", 4)


def test_altered_stats_are_refused(tmp_path: Path) -> None:
    OutlierStats({0: collect()}).save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for change in ({"version": 99}, {"kind": "probe"}, {"tokens": {"3": 1}}, {"tokens": "x"}, {"sha256": "0" * 64}):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ArtefactError):
            OutlierStats.load(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    data = bytearray((tmp_path / "stats.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "stats.safetensors").write_bytes(data)
    with pytest.raises(ArtefactError, match="manifest"):
        OutlierStats.load(tmp_path)


def test_a_choice_for_another_layout_is_refused() -> None:
    with pytest.raises(ShapeError):
        book_of(choose(collect(), "importance", 3), layout("fp4-quality"))


def test_formats_without_outliers_get_the_neutral_codebook() -> None:
    book, _, choice = make_coding(collect(), layout("nvfp4"), 2, "importance")
    assert choice is None and bool((book[1] == 0).all()) and bool((book[2] == 1).all())


@pytest.mark.parametrize("layer", ["05", "21"])
def test_on_real_keys_importance_loses_least(shared_data: Path, layer: str) -> None:
    """Logit error of real queries on real keys, by policy: the reason for the default."""
    from moe_prefetch.kv.store import LayerStore

    z = np.load(shared_data / f"smollm2_135m_L{layer}.npz")
    k, v, q = (torch.tensor(z[n]).float() for n in ("k_post", "v", "q_post_last64"))
    error = {}
    lay = layout("fp4-quality", outliers=3)
    s = StatsCollector()
    s.add(q, k[:, -64:], v[:, -64:])
    stats = s.stats()
    for policy in ("importance", "topn", "none"):
        cache = LayerStore(lay, 3, make_coding(stats, lay, 3, policy).book, window=0)
        cache.append(k[None], v[None])
        cache.settle()
        got = cache.gather()[0][0]
        logits = lambda x: q.unflatten(0, (3, 3)).flatten(1, 2) @ x.mT  # noqa: E731
        error[policy] = float((logits(got) - logits(k)).norm() / logits(k).norm())
    assert error["importance"] < error["topn"] < error["none"]
