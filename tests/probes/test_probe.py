"""RoutingProbe: router kinds, the stale-gate law, storage."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_prefetch.errors import ArtefactError, ProbeMismatchError, ShapeError
from moe_prefetch.probes import GateSpec, RoutingProbe, quantise_union
from moe_prefetch.probes.probe import Residual, gate_hash, margins, normalise, select
from moe_prefetch.types import PROB_ONE

L, E, D, R, K, LINEAR = 4, 16, 24, 8, 3, 3


def gates(seed: int = 0, **kw: object) -> list[GateSpec]:
    g = torch.Generator().manual_seed(seed)
    return [GateSpec(torch.randn(E, D, generator=g), 1 + 0.3 * torch.randn(D, generator=g), 1e-6, K, **kw) for _ in range(L)]


def trained(seed: int = 1) -> RoutingProbe:
    g = torch.Generator().manual_seed(seed)
    def one() -> Residual:
        return Residual(torch.randn(L, R, D, generator=g), torch.randn(L, R, generator=g), torch.randn(L, E, R, generator=g),
                        torch.randn(L, E, generator=g), 0.5 + torch.rand(L, generator=g), LINEAR, [True, True, False, True])
    return RoutingProbe(gates(), [one(), one(), one()])


@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_untrained_probe_is_the_stale_gate_bitwise(tokens: int) -> None:
    specs = gates()
    zero = RoutingProbe(specs, [Residual.zero(L, E, D, R)] * 3)
    used = Residual.zero(L, E, D, R)
    used.down_LRW.normal_()
    used.used_L = [True] * L
    for probe in (RoutingProbe(specs), zero, RoutingProbe(specs, [used] * 3)):
        for layer in range(L):
            for h in probe.horizons(layer):
                x = torch.randn(tokens, D)
                g = specs[layer + h]
                stale = F.linear(g.norm_D * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), g.weight_ED)
                assert torch.equal(probe.logits(layer, h, x), stale)


def test_residual_changes_the_logits_only_where_used() -> None:
    probe, x = trained(), torch.randn(5, D)
    r = probe.residuals[1]
    n = normalise(x, probe.gates[1])
    a = n @ r.down_LRW[1].T + r.shift_LR[1]
    a = torch.where(torch.arange(R) < LINEAR, a, F.silu(a))
    want = n @ probe.gates[1].weight_ED.T + a @ r.up_LER[1].T + r.out_LE[1]
    torch.testing.assert_close(probe.logits(0, 1, x), want)
    assert torch.equal(probe.logits(1, 1, x), RoutingProbe(gates()).logits(1, 1, x)), "layer 2 is not used: stale gate"


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax"])
def test_plain_routers(kind: str) -> None:
    spec = gates(kind=kind)[0]
    z = torch.randn(100, E)
    ids = select(z, spec)
    # The definition, by sorting.
    want = torch.argsort(z.softmax(-1), -1, descending=True)[:, :K]
    assert torch.equal(ids, want)
    biased = GateSpec(spec.weight_ED, spec.norm_D, 1e-6, K, kind, torch.linspace(-3, 3, E))
    assert torch.equal(select(z, biased), torch.argsort(z + torch.linspace(-3, 3, E), -1, descending=True)[:, :K])


def deepseek_v3_choice(logits_E: torch.Tensor, bias_E: torch.Tensor, n_group: int, topk_group: int, k: int) -> set[int]:
    """Written from arXiv 2412.19437 and the model card, with loops, to share nothing with the code under test."""
    score = [1 / (1 + torch.exp(-z).item()) + b.item() for z, b in zip(logits_E, bias_E)]
    size = len(score) // n_group
    groups = [sum(sorted(score[i * size : (i + 1) * size])[-2:]) for i in range(n_group)]
    kept = sorted(range(n_group), key=lambda i: -groups[i])[:topk_group]
    pool = [e for e in range(len(score)) if e // size in kept]
    return set(sorted(pool, key=lambda e: -score[e])[:k])


def test_sigmoid_group_router_matches_a_loop() -> None:
    g = torch.Generator().manual_seed(3)
    bias = 0.3 * torch.randn(E, generator=g)
    spec = GateSpec(torch.randn(E, D, generator=g), torch.ones(D), 1e-6, K, "sigmoid_group", bias, n_group=4, topk_group=2, scaling=2.5)
    z = torch.randn(200, E, generator=g)
    for row, ids in zip(z, select(z, spec)):
        assert set(ids.tolist()) == deepseek_v3_choice(row, bias, 4, 2, K)


def test_softmax_group_limit_takes_the_best_expert_of_a_group() -> None:
    spec = GateSpec(torch.randn(6, D), torch.ones(D), 1e-6, 2, "softmax_topk", n_group=3, topk_group=1)
    z = torch.tensor([[0.0, 5.0, 4.0, 4.9, 1.0, 2.0]])
    assert set(select(z, spec)[0].tolist()) == {0, 1}, "group 0 holds the best expert, though group 1 holds the next two"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (4, 2), (4, 3), (2, 1)]), st.sampled_from(["softmax_topk", "sigmoid_group"]),
       st.booleans(), st.integers(1, 8))
def test_margin_is_positive_for_the_choice(seed: int, groups: tuple[int, int], kind: str, bias: bool, k: int) -> None:
    """Every chosen expert is at or above the boundary; without group limits every other one is below it."""
    g = torch.Generator().manual_seed(seed)
    n, t = groups
    if k > t * (E // n):
        return
    spec = GateSpec(torch.randn(E, D, generator=g), torch.ones(D), 1e-6, k, kind, torch.randn(E, generator=g) if bias else None, n, t)
    z = torch.randn(9, E, generator=g)
    m, ids = margins(z, spec), select(z, spec)
    assert bool((m.gather(1, ids) >= 0).all())
    chosen = torch.zeros(9, E, dtype=torch.bool).scatter(1, ids, True)
    if n == t:
        assert bool((m[~chosen] <= 0).all())
    assert bool(torch.isfinite(m).all())


def test_forecast_is_a_probability_and_bad_rows_stay_in_their_row() -> None:
    probe, x = trained(), torch.randn(6, D)
    x[2, 5], x[4, 0] = float("nan"), float("inf")
    p = probe.forecast(0, 2, x)
    good = [0, 1, 3, 5]
    assert p.dtype == torch.float32 and bool(((p[good] >= 0) & (p[good] <= 1)).all())
    assert bool(p[2].isnan().all()) and bool(p[4].isnan().all())
    assert torch.allclose(p[good], probe.forecast(0, 2, x[good]), atol=1e-5)
    q = quantise_union(p)
    assert len(q) == E and all(0 <= v <= PROB_ONE for v in q)
    assert all(abs(a - b) <= 1 for a, b in zip(q, quantise_union(p[good])))


def test_quantise_union_edges() -> None:
    assert quantise_union(torch.zeros(0, 3)) == (0, 0, 0)
    assert quantise_union(torch.tensor([[0.0, 1.0, 0.5]])) == (0, PROB_ONE, PROB_ONE // 2)
    assert quantise_union(torch.tensor([[0.5, 0.0], [0.5, 1.0]])) == (PROB_ONE * 3 // 4, PROB_ONE)
    assert quantise_union(torch.tensor([[float("nan"), 0.25]])) == (0, PROB_ONE // 4)


def test_bad_calls_are_refused_before_any_work() -> None:
    probe = trained()
    for layer, h, shape in ((L - 1, 1, (2, D)), (-1, 1, (2, D)), (0, 3, (2, D)), (0, 0, (2, D + 1)), (0, 0, (2, 2, D))):
        with pytest.raises(ShapeError):
            probe.logits(layer, h, torch.zeros(shape))
    with pytest.raises(ShapeError, match="top_k"):
        GateSpec(torch.zeros(4, D), torch.zeros(D), 1e-6, 5)
    with pytest.raises(ShapeError, match="groups"):
        GateSpec(torch.zeros(4, D), torch.zeros(D), 1e-6, 1, "sigmoid_group", n_group=3)
    with pytest.raises(ShapeError, match="fit into"):
        GateSpec(torch.zeros(8, D), torch.zeros(D), 1e-6, 3, "sigmoid_group", n_group=4, topk_group=1)


def test_round_trip_keeps_forecasts(tmp_path: Path) -> None:
    probe = trained()
    probe.save_pretrained(tmp_path, card="# card\n", extra={"note": 1})
    again = RoutingProbe.from_pretrained(tmp_path, gates())
    x = torch.randn(40, D)
    for layer in range(L):
        for h in probe.horizons(layer):
            # int8 rows: at most half a step of 1/127 of each row's maximum, through sums of D and R terms.
            assert (probe.logits(layer, h, x) - again.logits(layer, h, x)).abs().mean() < 0.15
            assert [r.used_L for r in again.residuals] == [r.used_L for r in probe.residuals]
    again.save_pretrained(tmp_path / "b")
    third = RoutingProbe.from_pretrained(tmp_path / "b", gates())
    assert (third.logits(0, 1, x) - again.logits(0, 1, x)).abs().mean() < 0.15
    assert (tmp_path / "README.md").read_text() == "# card\n"


def test_storage_survives_channels_of_very_different_size(tmp_path: Path) -> None:
    """Trained rows are large where the stream is small: stored, the probe must still say what it said."""
    probe = trained()
    size = torch.logspace(-3, 0.5, D)
    for r in probe.residuals:
        r.down_LRW /= size
    probe.refresh()
    probe.save_pretrained(tmp_path)
    again = RoutingProbe.from_pretrained(tmp_path, gates())
    x = torch.randn(500, D, generator=torch.Generator().manual_seed(0)) * size
    # Unit-size activations: undo the norm's rescaling of the stream as a whole.
    for layer in range(2):
        a, b = probe.logits(layer, 1, x), again.logits(layer, 1, x)
        if probe.residuals[1].used_L[layer + 1]:
            assert (a - b).std() / a.std() < 0.03


def test_probe_of_another_model_is_refused(tmp_path: Path) -> None:
    trained().save_pretrained(tmp_path)
    with pytest.raises(ProbeMismatchError, match="router weights"):
        RoutingProbe.from_pretrained(tmp_path, gates(seed=9))
    with pytest.raises(ProbeMismatchError, match="layers"):
        RoutingProbe.from_pretrained(tmp_path, gates()[:3])
    half = [GateSpec(g.weight_ED.bfloat16().float(), g.norm_D.bfloat16().float(), 1e-6, K) for g in gates()]
    RoutingProbe.from_pretrained(tmp_path, half)


def edit(folder: Path, **kw: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(kw)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("spoil", ["truncate", "flip", "version", "rank", "layers", "used", "missing", "link"])
def test_spoilt_probe_is_named_and_refused(tmp_path: Path, spoil: str) -> None:
    trained().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if spoil == "truncate":
        weights.write_bytes(data[: len(data) // 2])
    elif spoil == "flip":
        data[-3] ^= 1
        weights.write_bytes(data)
    elif spoil == "version":
        edit(tmp_path, version=99)
    elif spoil == "rank":
        edit(tmp_path, horizons={str(h): {"rank": R + 1, "linear": 1, "inputs": 1} for h in range(3)})
    elif spoil == "layers":
        # Of a size that is not to be made first and compared then.
        edit(tmp_path, layers=1 << 40)
    elif spoil == "used":
        edit(tmp_path, used={"0": None})
    elif spoil == "missing":
        (tmp_path / "config.json").unlink()
    else:
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtefactError) as e:
        RoutingProbe.from_pretrained(tmp_path, gates())
    assert str(tmp_path) in str(e.value)


def test_weights_of_channels_that_matter_least_do_not_swallow_the_others(tmp_path):
    """Found on a fitted probe: norm weights from 1e-4 to 1 make columns of `down` differ as widely; rows alone can't scale that."""
    torch.manual_seed(3)
    norm_D = torch.logspace(-4, 0, 64)
    gate = GateSpec(torch.randn(8, 64), norm_D, 1e-6, 2)
    r = Residual.zero(1, 8, 64, 16)
    r.down_LRW, r.used_L = torch.randn(1, 16, 64) / norm_D, [True]
    r.up_LER = torch.randn(1, 8, 16)
    probe = RoutingProbe([gate], (r, None, None))
    probe.save_pretrained(tmp_path)
    hidden_TD = torch.randn(50, 64)
    want, got = (p.logits(0, 0, hidden_TD) for p in (probe, RoutingProbe.from_pretrained(tmp_path, [gate])))
    assert (got - want).norm() / want.norm() < 0.02


def test_the_hash_says_what_changes_a_choice_and_nothing_else() -> None:
    base = gate_hash(gates())
    assert gate_hash([replace(g, kind="topk_softmax") for g in gates()]) == base, "the same experts, whichever framework names the router"
    for change in ({"kind": "sigmoid_group"}, {"top_k": 1}, {"shared": True}, {"norm_D": torch.ones(D) * 3}):
        assert gate_hash([replace(g, **change) for g in gates()]) != base, change
