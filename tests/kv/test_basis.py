"""Keys in axes of their own: scores stay, bytes depend on tokens alone, and the error on real keys is less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_prefetch.errors import ArtefactError
from moe_prefetch.kv.attention import attend, attend_as_decoded
from moe_prefetch.kv.basis import canonical_axes, felt, spread
from moe_prefetch.kv.codec import Coding, OutlierStats, StatsCollector, make_coding
from moe_prefetch.kv.format import HEAD_DIMS
from moe_prefetch.kv.outliers import LayerStats
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

from .common import attention_loop, layout, tokens

SCALE = 0.1


def correlated(n: int, heads: int, d: int, seed: int) -> torch.Tensor:
    """[heads, n, d]: few loud directions, none of them a channel, and a mean."""
    g = torch.Generator().manual_seed(seed)
    loud = torch.linspace(2, -3, d).exp2()
    turn = torch.linalg.qr(torch.randn(heads, d, d, generator=g))[0]
    return (torch.randn(heads, n, d, generator=g) * loud) @ turn + torch.randn(heads, 1, d, generator=g)


def stats_of(d: int = 64, groups: int = 2, n: int = 600) -> LayerStats:
    seen = StatsCollector(axes=True)
    seen.add(correlated(n, 2 * groups, d, 1), correlated(n, 2, d, 2), tokens(n, 2, d)[0])
    return seen.stats()


def coding(name: str = "fp4-quality", d: int = 64) -> Coding:
    return make_coding(stats_of(d), layout(name, d), 2, "importance")


def store(name: str = "fp4-quality", d: int = 64, **kw) -> LayerStore:
    code = coding(name, d)
    return LayerStore(layout(name, d), 2, code.book, basis=code.basis, **{"window": 16, "poison": True, **kw})


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_scores_stay_what_they_were(d: int) -> None:
    basis = coding(d=d).basis
    q, k = correlated(9, 6, d, 3)[None], correlated(50, 2, d, 4)[None]
    scores = lambda q, k: torch.einsum("bngtd,bnsd->bngts", q.unflatten(1, (2, 3)), k)  # noqa: E731
    want = scores(q, k)
    assert torch.allclose(scores(basis.queries(q), basis.keys(k)), want, atol=1e-5 * float(want.abs().max()))
    assert torch.allclose(basis.restore(basis.keys(k)), k, atol=1e-4)
    assert basis.into.nbytes + basis.back.nbytes == 2 * layout("fp4-quality", d).basis_bytes


def test_autocast_leaves_them_alone() -> None:
    basis = coding().basis
    q, k = torch.randn(2, 6, 3, 64), torch.randn(2, 2, 9, 64)
    plain = basis.queries(q), basis.keys(k), basis.restore(k)
    with torch.autocast("cpu", torch.bfloat16):
        cast = basis.queries(q), basis.keys(k), basis.restore(k)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_axes_are_uncorrelated_equally_loud_and_in_order() -> None:
    q, k = correlated(4000, 1, 64, 1).double(), correlated(4000, 1, 64, 2).double()
    k = k - k.mean(1, keepdim=True)
    axes = canonical_axes(q.mT @ q / 4000, k.mT @ k / 4000, k.mean(1), 4000)
    assert bool((axes.power.diff() <= 1e-9).all())
    back = torch.linalg.inv(axes.into)
    for moment in (axes.into @ (k.mT @ k / 4000) @ axes.into.mT, back.mT @ (q.mT @ q / 4000) @ back):
        rest = moment[0] / axes.power[0].sqrt()[:, None] / axes.power[0].sqrt() - torch.eye(64)
        # What is left is the ridge against few tokens: it matters on the axes that are hardly there.
        assert float(rest[:8, :8].abs().max()) < 0.1
    for outliers in (0, 1, 4, 16):
        power = spread(axes, outliers)[1][0]
        assert torch.allclose(power[:outliers], axes.power[0, :outliers])
        assert float(power[outliers:].max()) < 2.5 * float(power[outliers:].mean())
        assert float(power.sum()) == pytest.approx(float(axes.power.sum()))


def test_what_is_felt_is_how_far_the_output_moves() -> None:
    """Against a score that is moved by hand."""
    q, k, v = torch.randn(4, 20, 64).double(), torch.randn(2, 20, 64).double(), torch.randn(2, 20, 64).double()

    def outputs(error: torch.Tensor) -> torch.Tensor:
        scores = q @ k.repeat_interleave(2, 0).mT / 8 + error
        return scores.masked_fill(torch.ones(20, 20).triu(1) > 0, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 0)

    by_query, by_key = felt(q, k, v, 3)
    moved = torch.zeros(4, 20, 20).double()
    for t in range(3, 20):
        error = torch.zeros(4, 20, 20).double()
        error[:, :, t] = 1e-4
        moved[:, :, t] = ((outputs(error) - outputs(-error)) / 2e-4).square().sum(-1)
        moved[:, t, t] = 0
    want = moved.view(2, 2, 20, 20)
    for got, sums in ((by_query, want.sum(-1)), (by_key, want.sum((1, 2)))):
        mean = sums.flatten(1).mean(1).view(2, *[1] * (sums.dim() - 1))
        assert torch.allclose(got, sums + 0.1 * mean, rtol=1e-3, atol=1e-7)


def test_the_loudest_axes_are_the_outliers_and_gains_are_even() -> None:
    code = coding()
    assert code.choice.channels == ((0, 1, 2, 3),) * 2
    assert all(0.99 < g < 1.01 for row in code.choice.k_gain for g in row)
    plain = make_coding(stats_of(), layout("fp4-quality"), 2, "topn")
    assert plain.basis is None and make_coding(replace(stats_of(), axes=None), layout("fp4-quality"), 2, "importance").basis is None
    assert make_coding(stats_of(), layout("fp8"), 2, "importance").basis is None


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_does_not_depend_on_how_many_come_at_once(seed: int) -> None:
    k, v = correlated(300, 2, 64, seed)[None], tokens(300, 2, 64, seed=seed)
    whole, parts, both = store(window=0), store(window=0), store(window=0, batch=2)
    whole.append(k, v)
    at = 0
    for n in (33, 1, 1, 130, 7, 128):
        parts.append(k[:, :, at : at + n], v[:, :, at : at + n])
        at += n
    both.append(torch.cat([k, k.flip(2)]), torch.cat([v, v.flip(2)]))
    for s in (whole, parts, both):
        s.settle()
    want = whole.gather()
    for got in (parts.gather(), [x[:1] for x in both.gather()]):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    pages = whole.pages.rows[0].pages
    assert torch.equal(whole.pool[pages[:-1]], parts.pool[parts.pages.rows[0].pages[:-1]])
    assert torch.equal(whole.pool[pages[:-1]], both.pool[both.pages.rows[0].pages[:-1]])


@pytest.mark.parametrize("d", [64, 128])
def test_a_key_alone_is_kept_as_among_others(d: int) -> None:
    """In FP32 some elements in ten thousand are not: a product of one row adds in another order."""
    basis, k = coding(d=d).basis, correlated(400, 2, d, 3)[None]
    alone = torch.cat([basis.keys(k[:, :, t : t + 1]).half() for t in range(400)], 2)
    assert torch.equal(alone, basis.keys(k).half())


@pytest.mark.parametrize("name", ["fp4-72", "fp4-quality", "fp4-quality-c64"])
def test_attention_is_that_over_what_is_given_back(name: str) -> None:
    s = store(name)
    k, v, q = correlated(220, 2, 64, 5)[None], tokens(220, 2, 64, seed=6), torch.randn(1, 6, 3, 64)
    s.append(k, v)
    s.settle()
    keys, values = s.gather()
    # FP16 holds sinks and window, and nothing of either side's own axes is left in what comes back.
    assert torch.allclose(keys[:, :, :4], k[:, :, :4], atol=0.02) and torch.allclose(keys[:, :, -16:], k[:, :, -16:], atol=0.02)
    out, _ = attend(s, q, scale=SCALE)
    for h in range(6):
        want = attention_loop(q[0, h], keys[0, h // 3], values[0, h // 3], scale=SCALE, last=3)
        assert torch.allclose(out[0, h].double(), want, atol=2e-4)


def test_one_pass_equals_steps() -> None:
    code, lay = coding(), layout("fp4-quality")
    q, k, v = torch.randn(1, 6, 150, 64), correlated(150, 2, 64, 7)[None], correlated(150, 2, 64, 8)[None]
    whole = attend_as_decoded(q, k, v, lay, code.book, sinks=4, window=16, scale=SCALE, block=64, basis=code.basis)
    s = LayerStore(lay, 2, code.book, window=16, basis=code.basis)
    for t in range(150):
        s.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = attend(s, q[:, :, t : t + 1], scale=SCALE)[0]
        # One pass reads its own key and value unrounded, steps read them in FP16.
        assert torch.allclose(out[:, :, 0], whole[:, :, t], atol=0.02), t


def test_a_fixed_size_gives_the_same() -> None:
    code, lay = coding(), layout("fp4-quality")
    k, v, q = correlated(240, 2, 64, 9)[None], tokens(240, 2, 64, seed=10), torch.randn(1, 6, 1, 64)
    fixed = StaticStore(lay, 2, code.book, batch=1, max_tokens=300, window=16, basis=code.basis)
    grows = LayerStore(lay, 2, code.book, window=16, basis=code.basis)
    fixed.prefill(k[:, :, :200], v[:, :, :200])
    grows.append(k[:, :, :200], v[:, :, :200])
    for t in range(200, 240):
        for s in (fixed, grows):
            s.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    a, b = fixed.gather(), grows.gather()
    assert torch.equal(a[0][:, :, :224], b[0][:, :, :224]) or torch.allclose(a[0][:, :, :223], b[0][:, :, :223], atol=1e-5)
    assert torch.allclose(fixed.attend(q, scale=SCALE)[0], attend(grows, q, scale=SCALE)[0], atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp4-72", "fp4-quality"])
def test_on_a_gpu_pages_are_read_as_they_are_given_back(name: str) -> None:
    lay = layout(name)
    code = make_coding(stats_of(), lay, 2, "importance", "cuda")
    k, v, q = correlated(300, 2, 64, 5)[None].cuda(), tokens(300, 2, 64, seed=6).cuda(), torch.randn(1, 6, 3, 64, device="cuda")
    assert torch.equal(code.basis.keys(k).half().cpu(), coding(name).basis.keys(k.cpu()).half())
    s = LayerStore(lay, 2, code.book, basis=code.basis, window=16, device="cuda")
    s.append(k, v)
    keys, values = (x.cpu() for x in s.gather())
    out, _ = attend(s, q, scale=SCALE)
    for h in range(6):
        want = attention_loop(q[0, h].cpu(), keys[0, h // 3], values[0, h // 3], scale=SCALE, last=3)
        # The kernel rounds queries and probabilities: 7e-4 on an H200.
        assert float((out[0, h].double().cpu() - want).norm()) < 0.02 * float(want.norm())


def test_a_row_goes_only_where_keys_are_turned_alike() -> None:
    s = store()
    s.append(correlated(200, 2, 64, 1)[None], tokens(200, 2, 64))
    s.settle()
    saved = s.export_row(0)
    same = store()
    same.import_row(saved)
    assert all(torch.equal(a, b) for a, b in zip(s.gather(), same.gather(), strict=True))
    code = coding()
    other = code.basis._replace(into=code.basis.into.roll(1, -1))
    for basis in (None, other):
        with pytest.raises(ArtefactError, match="codebook"):
            LayerStore(s.layout, 2, code.book, window=16, basis=basis).import_row(saved)
    plain = LayerStore(s.layout, 2, code.book, window=16)
    plain.append(correlated(200, 2, 64, 1)[None], tokens(200, 2, 64))
    with pytest.raises(ArtefactError, match="codebook"):
        store().import_row(plain.export_row(0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_not_finite_is_counted_and_stays_alone(bad: float) -> None:
    k, v = correlated(100, 2, 64, 1)[None], tokens(100, 2, 64)
    good, hurt = store(window=0), store(window=0)
    good.append(k, v)
    k = k.clone()
    k[0, 1, 50, 7] = bad
    hurt.append(k, v)
    for s in (good, hurt):
        s.settle()
    assert int(hurt.counts.sum()) == 64 and int(good.counts.sum()) == 0
    a, b = good.gather()[0], hurt.gather()[0]
    others = [t for t in range(100) if t != 50]
    assert bool(b.isfinite().all()) and torch.allclose(a[:, :, others], b[:, :, others], atol=0.5)


def test_axes_come_back_from_disk_or_are_refused(tmp_path: Path) -> None:
    stats = OutlierStats({0: stats_of(), 3: replace(stats_of(), axes=None)})
    stats.save(tmp_path / "whole")
    back = OutlierStats.load(tmp_path / "whole")
    assert back == stats and back.layers[3].axes is None
    assert all(torch.equal(a, b) for a, b in zip(back.layers[0].axes, stats.layers[0].axes, strict=True))
    axes = stats_of().axes
    bad = [("into", axes.into[:, :5]), ("into", torch.zeros_like(axes.into)), ("power", axes.power * torch.nan), ("mean", axes.mean[:1])]
    for n, axes in enumerate(axes._replace(**{m: x}) for m, x in bad):
        OutlierStats({0: replace(stats_of(), axes=axes)}).save(tmp_path / str(n))
        with pytest.raises(ArtefactError, match="axes"):
            OutlierStats.load(tmp_path / str(n))


def test_dead_and_few_keys_have_axes_too() -> None:
    for n, k in ((1, torch.randn(1, 1, 64)), (3, torch.zeros(1, 3, 64)), (40, torch.randn(1, 40, 64))):
        seen = StatsCollector(axes=True)
        seen.add(torch.zeros(2, n, 64), k, k)
        basis = make_coding(seen.stats(), layout("fp4-quality"), 1, "importance").basis
        assert all(bool(t.isfinite().all()) for t in basis)


@pytest.mark.parametrize("layer", ["05", "21"])
@pytest.mark.parametrize("few", [64, 400])
def test_on_real_keys_the_error_is_less(shared_data: Path, layer: str, few: int) -> None:
    """Error of the outputs of real queries over real keys, not those of the calibration: the reason for the basis."""
    z = np.load(shared_data / f"smollm2_135m_L{layer}.npz")
    k, v, q = (torch.tensor(z[n]).float() for n in ("k_post", "v", "q_post_last64"))
    seen, lay = StatsCollector(axes=True), layout("fp4-quality")
    seen.add(q[:, 32:], k[:, -few:], v[:, -few:])
    error, first = [], k.shape[1] - 64
    outputs = lambda x: (q[:, :32].unflatten(0, (3, 3)) @ x[:, None, :first].mT / 8).softmax(-1) @ v[:, None, :first]  # noqa: E731
    for stats in (seen.stats(), replace(seen.stats(), axes=None)):
        code = make_coding(stats, lay, 3, "importance")
        s = LayerStore(lay, 3, code.book, window=0, basis=code.basis)
        s.append(k[None], v[None])
        s.settle()
        error.append(float((outputs(s.gather()[0][0]) - outputs(k)).norm()))
    assert error[0] < 0.9 * error[1]
