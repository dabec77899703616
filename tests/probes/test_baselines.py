"""Baselines and metrics against hand-made routing with known answers."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_prefetch.errors import ShapeError
from moe_prefetch.probes import baselines, metrics
from moe_prefetch.probes.baselines import Routing
from moe_prefetch.probes.traces import read_ids

E = 8
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def routing(seed: int = 0, tokens: int = 400, layers: int = 4) -> Routing:
    """Layer l+1 uses the experts of layer l plus one, modulo E: knowing the tap's ids is knowing everything."""
    g = torch.Generator().manual_seed(seed)
    first = torch.stack([torch.randperm(E, generator=g)[:2] for _ in range(tokens)])
    ids = torch.stack([(first + i) % E for i in range(layers)], 1)
    return Routing.from_lengths(ids, torch.tensor([tokens // 4, tokens - tokens // 4]), E)


def score(predict: baselines.Predictor, r: Routing, layer: int, horizon: int) -> float:
    return metrics.recall(predict(r, layer, horizon), r.ids_TLK[:, layer])


def test_oracle_is_perfect_and_chance_is_chance() -> None:
    r = routing()
    assert score(baselines.oracle(), r, 2, 1) == 1.0
    assert abs(score(baselines.popularity(routing(1)), r, 2, 1) - 2 / E) < 0.08


@pytest.mark.parametrize("horizon", [0, 1, 2])
def test_ridge_finds_a_linear_law(horizon: int) -> None:
    assert score(baselines.ids_ridge(routing(1)), routing(2), 3, horizon) == 1.0
    with pytest.raises(ShapeError):
        baselines.ids_ridge(routing(1))(routing(2), 0, horizon)


def test_previous_token_is_causal_and_stops_at_a_sequence() -> None:
    r = routing()
    predict = baselines.previous_token(routing(1))
    got = predict(r, 1, 1)
    for t in (1, 7, 99, 101, 399):
        assert set(got[t].topk(2).indices.tolist()) == set(r.ids_TLK[t - 1, 1].tolist())
    popular = baselines.popularity(routing(1))(r, 1, 1)
    assert torch.equal(got[0], popular[0]) and torch.equal(got[100], popular[100]), "token 100 opens the second sequence"


def test_recent_load_follows_a_loop() -> None:
    r, train = routing(tokens=20), routing(1)
    got = baselines.recent_load(train, decay=0.5)(r, 2, 1)
    share = baselines.popularity(train)(r, 2, 1)[0]
    load = share.clone()
    for t in range(20):
        if t in (0, 5):
            load = share.clone()
        torch.testing.assert_close(got[t], load)
        load = load * 0.5
        load[r.ids_TLK[t, 2]] += 0.5


def test_damaged_routing_is_refused() -> None:
    with pytest.raises(ShapeError, match="expert ids"):
        Routing(torch.full((3, 1, 2), E), torch.tensor([True, False, False]), E)
    with pytest.raises(ShapeError, match="add up"):
        Routing.from_lengths(torch.zeros(5, 1, 1, dtype=torch.long), torch.tensor([2, 2]), E)


def test_metrics_by_hand() -> None:
    s = torch.tensor([[0.9, 0.8, 0.1, 0.0], [0.9, 0.1, 0.8, 0.0]])
    ids = torch.tensor([[0, 1], [0, 3]])
    assert metrics.recall(s, ids) == 0.75
    assert metrics.recall(s, ids, 4) == 1.0
    assert metrics.exact_set(s, ids) == 0.5
    assert metrics.union_recall(s, ids, 2) == pytest.approx(2 / 3)
    # Pairs .9 .9 chosen; .8 chosen, .8 not; .1 .1 not; .0 not, .0 chosen.
    want = (2 * 0.1 + 2 * abs(0.8 - 0.5) + 2 * 0.1 + 2 * 0.5) / 8
    assert metrics.calibration_error(s, ids) == pytest.approx(want, abs=1e-6)


def test_union_recall_matches_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    s = torch.rand(50, E, generator=g)
    ids = torch.stack([torch.randperm(E, generator=g)[:3] for _ in range(50)])
    found = total = 0
    for group in range(6):
        rows = [group + 6 * i for i in range(8)]
        true = {int(e) for t in rows for e in ids[t]}
        guess = {int(e) for t in rows for e in s[t].topk(3).indices}
        found, total = found + len(true & guess), total + len(true)
    assert metrics.union_recall(s, ids, 8) == pytest.approx(found / total)


def test_perfect_probabilities_have_no_calibration_error() -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.rand(20000, 4, generator=g)
    hot = torch.rand(20000, 4, generator=g) < p
    rows = hot.sum(1) == 2
    # Conditioning on two chosen of four is a bias known to be small; an over-confident forecast must come out clearly worse.
    ids = hot[rows].float().topk(2).indices
    assert metrics.calibration_error(p[rows], ids) < 0.08
    assert metrics.calibration_error((p[rows] > 0.5).float(), ids) > 0.15


@pytest.mark.skipif(not DATA.exists(), reason="third-party routing traces are not beside this checkout")
def test_ridge_on_real_traces_beats_popularity() -> None:
    train, test = read_ids(DATA / "law_topk_ids.npz", 64), read_ids(DATA / "translation_topk_ids.npz", 64)
    popular = score(baselines.popularity(train), test, 12, 1)
    assert score(baselines.ids_ridge(train), test, 12, 1) > popular + 0.05


@pytest.mark.skipif(not DATA.exists(), reason="third-party routing traces are not beside this checkout")
@pytest.mark.parametrize(("learn", "judge"), [("law", "translation"), ("translation", "law")])
def test_ids_predictor_beats_every_ridge_across_tasks(learn: str, judge: str) -> None:
    """Also the ridge that sees as many layers as it does."""
    train, test = (read_ids(DATA / f"{n}_topk_ids.npz", 64) for n in (learn, judge))
    for horizon in (1, 2):
        layers = (14,)
        ours = sum(score(baselines.ids_context(train), test, layer, horizon) for layer in layers)
        for strength, window in ((100.0, 1), (100.0, 8)):
            ridge = sum(score(baselines.ids_ridge(train, strength, window), test, layer, horizon) for layer in layers)
            assert ours > ridge, (horizon, strength, window, ours, ridge)


def test_ids_predictor_uses_the_past_of_its_own_sequence_only() -> None:
    train, r = routing(1), routing(2)
    predict = baselines.ids_context(train)
    whole = predict(r, 2, 1)
    second = Routing(r.ids_TLK[100:], r.start_T[100:], E)
    torch.testing.assert_close(whole[100:], predict(second, 2, 1))
    changed = r.ids_TLK.clone()
    changed[200:] = changed[200:].flip(0)
    torch.testing.assert_close(whole[:200], predict(Routing(changed, r.start_T, E), 2, 1)[:200])
