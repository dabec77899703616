"""The fused probe against its law, and the law against the probe."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.probe_topk import fused
from moe_prefetch.kernels.probe_topk.naive import TapWeights, pack, probe_topk_naive, tap_logits
from moe_prefetch.kernels.probe_topk.op import _probe_topk, counters_for, probe_topk
from moe_prefetch.probes.probe import GateSpec, Residual, RoutingProbe, quantise_union
from moe_prefetch.types import PROB_ONE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tap(experts: int, hidden: int, rank: int, k: int, *, targets: int = 2, linear: int = 3, sigmoid: bool = False,
        dtype: torch.dtype = torch.float32, past: bool = False) -> TapWeights:
    g = torch.Generator().manual_seed(experts + hidden)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE)

    weight = (rand(targets, experts + rank, hidden) / hidden**0.5).to(dtype)
    past_weight = (rand(targets, rank, hidden) / hidden**0.5).to(dtype) if past else None
    return TapWeights(weight, past_weight, rand(targets, rank), rand(targets, experts, rank) / 4,
                      rand(targets, experts) / 2, rand(targets, experts) / 4 if sigmoid else torch.zeros(targets, experts, device=DEVICE),
                      torch.tensor([3.0, 0.7][:targets], device=DEVICE), k, linear, 1e-6, sigmoid)


def law(x: torch.Tensor, w: TapWeights, past: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return probe_topk_naive(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, w.top_k, w.linear,
                            w.norm_eps, w.sigmoid, w.n_group, w.topk_group)


def run(x: torch.Tensor, w: TapWeights, counters: torch.Tensor | None = None,
        past: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    counters = counters_for(x.shape[0], w.out_HE.shape[0], x.device) if counters is None else counters
    out = fused.launch(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, w.top_k, w.linear,
                       w.norm_eps, w.sigmoid, counters)
    assert not counters.any(), "the counters return to zero, so that a captured graph can be replayed"
    return out


def compare(x: torch.Tensor, w: TapWeights, slack: float, past: torch.Tensor | None = None) -> None:
    (ids, prob), (want_ids, want_prob) = run(x, w, past=past), law(x, w, past)
    z = tap_logits(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.linear, w.norm_eps)
    z = torch.sigmoid(z) + w.bias_HE.unsqueeze(1) if w.sigmoid else z
    good = z.isfinite().all(-1)
    differ = (ids != want_ids).nonzero()
    for h, t, i in differ.tolist():
        assert bool(good[h, t]), "rows that say nothing have ids 0 .. K-1"
        gap = abs(float(z[h, t, ids[h, t, i].long()] - z[h, t, want_ids[h, t, i].long()]))
        assert gap < slack, f"target {h}, token {t}, place {i}: ids differ although the scores are {gap} apart"
    assert (prob - want_prob).abs().max() <= max(2, slack * PROB_ONE), (prob - want_prob).abs().max()
    assert bool(((prob >= 0) & (prob <= PROB_ONE)).all())


@pytest.mark.parametrize(("tokens", "experts", "hidden", "rank", "k"), [
    (1, 8, 40, 4, 2), (63, 32, 576, 8, 4), (17, 128, 300, 64, 8), (16, 60, 64, 16, 4), (1, 5, 1, 4, 5), (40, 64, 1000, 17, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_same_ids_and_probabilities_as_the_law(tokens: int, experts: int, hidden: int, rank: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    compare(x, tap(experts, hidden, rank, k, dtype=dtype), 2e-4)


@pytest.mark.parametrize(("tokens", "experts", "hidden", "rank"), [(1, 8, 40, 4), (33, 60, 300, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_recent_past_is_a_second_input(tokens: int, experts: int, hidden: int, rank: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    x, past = (torch.randn(tokens, hidden, generator=g).to(DEVICE, dtype) for _ in "xp")
    w = tap(experts, hidden, rank, 4, dtype=dtype, past=True)
    compare(x, w, 2e-4, past)
    compare(x, w, 2e-4)
    assert all(torch.equal(a, b) for a, b in zip(law(x, w), law(x, w, torch.zeros_like(past))))
    assert not torch.equal(law(x, w)[1], law(x, w, past)[1])
    bad = past.clone()
    bad[0, 0] = float("nan")
    compare(x, w, 2e-4, bad)
    assert run(x, w, past=bad)[0][:, 0].tolist() == [[0, 1, 2, 3]] * 2


def test_sigmoid_router_with_bias() -> None:
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    compare(x, tap(32, 96, 8, 4, sigmoid=True), 2e-4)


def test_special_rows_are_defined_and_touch_no_other() -> None:
    w = tap(32, 128, 8, 4)
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    clean_ids, _ = run(x, w)
    x[3, 5], x[7, 0], x[18, 127] = float("nan"), float("inf"), -float("inf")
    x[9], x[10] = 0.0, 1e-40
    compare(x, w, 2e-4)
    ids, _ = run(x, w)
    for row in (3, 7, 18):
        assert ids[:, row].tolist() == [[0, 1, 2, 3]] * 2
    others = [i for i in range(20) if i not in (3, 7, 9, 10, 18)]
    assert torch.equal(ids[:, others], clean_ids[:, others])
    only_bad = torch.full((5, 128), float("nan"), device=DEVICE)
    assert not run(only_bad, w)[1].any()


def test_poisoned_scratch_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = tap(24, 300, 10, 3), torch.randn(33, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want, real = run(x, w), torch.empty

    def poisoned(*shape: int, dtype: torch.dtype, **kw: object) -> torch.Tensor:
        t = real(*shape, dtype=dtype, **kw)
        return t.fill_(float("nan") if dtype.is_floating_point else -7)

    monkeypatch.setattr(fused.torch, "empty", poisoned)
    got = run(x, w)
    assert all(torch.equal(a, b) for a, b in zip(want, got))


def test_counters_serve_again_and_fewer_tokens() -> None:
    w = tap(16, 64, 4, 2)
    counters = counters_for(40, 2, DEVICE)
    for tokens in (40, 3, 40, 16, 17):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
        ids, prob = run(x, w, counters)
        want_ids, want_prob = law(x, w)
        assert torch.equal(ids, want_ids) and (prob - want_prob).abs().max() <= 2


def test_law_is_the_probe() -> None:
    """Packed weights say what RoutingProbe says, for both targets of a MoE-input tap."""
    g = torch.Generator().manual_seed(0)
    for kw in ({}, {"kind": "topk_softmax", "bias_E": torch.randn(16, generator=g)},
               {"kind": "sigmoid_group", "bias_E": 0.2 * torch.randn(16, generator=g), "n_group": 4, "topk_group": 2}):
        gates = [GateSpec(torch.randn(16, 24, generator=g), 1 + 0.2 * torch.randn(24, generator=g), 1e-6, 3, **kw) for _ in range(4)]
        r = [Residual(torch.randn(4, 8, 24, generator=g) / 4, torch.randn(4, 8, generator=g), torch.randn(4, 16, 8, generator=g) / 4,
                      torch.randn(4, 16, generator=g), 0.5 + torch.rand(4, generator=g), 2, [True, True, False, True]) for _ in range(3)]
        probe = RoutingProbe(gates, r)
        for layer in (0, 1):
            parts = [(r[h].down_LRW[layer + h], r[h].shift_LR[layer + h], r[h].up_LER[layer + h], r[h].out_LE[layer + h])
                     if r[h].used_L[layer + h] else None for h in (1, 2)]
            sharp = [1 / float(r[h].temperature_L[layer + h]) for h in (1, 2)]
            w = pack([gates[layer + 1], gates[layer + 2]], parts, sharp, 2, torch.float32)
            x = torch.randn(30, 24, generator=g)
            ids, prob = law(x, w)
            for i, h in enumerate((1, 2)):
                assert torch.equal(ids[i].sort(1).values, probe.candidates(layer, h, x).sort(1).values.int())
                want = torch.tensor(quantise_union(probe.forecast(layer, h, x)))
                assert (prob[i] - want).abs().max() <= 2


def test_op_is_honest_about_what_it_changes() -> None:
    w, x = tap(16, 64, 4, 2), torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    args = (x, None, w.weight_HND, None, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, counters_for(5, 2, DEVICE), w.top_k,
            w.linear, w.norm_eps, w.sigmoid, w.n_group, w.topk_group)
    torch.library.opcheck(_probe_topk, args)
    empty = probe_topk(x[:0], w, counters_for(0, 2, DEVICE))
    assert empty[0].shape == (2, 0, 2) and not empty[1].any()
    for bad in (x.half(), x[:, :60], x.unsqueeze(0)):
        with pytest.raises(ShapeError):
            probe_topk(bad, w, counters_for(5, 2, DEVICE))
        with pytest.raises(ShapeError, match="past"):
            probe_topk(x, w, counters_for(5, 2, DEVICE), past_TD=bad)
    with pytest.raises(ShapeError, match="counters"):
        probe_topk(x, w, counters_for(5, 2, DEVICE)[:1])


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_prefetch.kernels.probe_topk import fused
ints = ("count_ptr", "ids_ptr", "prob_ptr")
inputs = ("x_ptr", "past_ptr", "w_ptr", "past_w_ptr")
for past, dtype in ((False, "bf16"), (True, "bf16"), (False, "fp32")):
    const = dict(E=128, R=64, K=8, LINEAR=32, SIGMOID=False, PAST=past, EXACT=dtype == "fp32", EP=128, RP=64, KP=8, BT=fused.BT,
                 BN=fused.BN, SPLITS=2048 // fused.CHUNK, CHUNK=fused.CHUNK, GPU=True, ONE=65536)
    names = fused.probe_tap.arg_names
    kind = lambda n: "*i32" if n in ints else "*" + dtype if n in inputs else "*fp32"
    sig = {n: kind(n) if n.endswith("_ptr") else "constexpr" if n in const else "fp32" if n == "eps" else "i32" for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr") or n == "D"}
    k = triton.compile(ASTSource(fn=fused.probe_tap, signature=sig, constexprs=const, attrs=attrs), target=GPUTarget("cuda", 90, 32),
                       options={"num_warps": fused.WARPS})
    ptx = k.asm["ptx"]
    found = ["mma" if "mma.sync" in ptx else "no mma", "redux" if "redux.sync" in ptx else "no redux"]
    print(past, dtype, "shared", k.metadata.shared, *found)
    if len(sys.argv) > 1:
        open(f"{sys.argv[1]}/probe_{past}_{dtype}.cubin", "wb").write(k.asm["cubin"])
"""


def test_compiles_for_hopper_without_a_gpu() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" mma redux") == 3, done.stdout
