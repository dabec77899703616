"""The fused probe against its law, and the law against the probe."""
from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.probe_topk import fused
from moe_prefetch.kernels.probe_topk.naive import TapWeights, pack, probe_topk_naive, tap_logits
from moe_prefetch.kernels.probe_topk.op import EMPTY_WORD, _probe_topk, probe_topk, scratch_for
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


def run(x: torch.Tensor, w: TapWeights, scratch: torch.Tensor | None = None,
        past: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    scratch = scratch_for(x.shape[0], w) if scratch is None else scratch
    out = fused.launch(x, past, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H, w.top_k, w.linear,
                       w.norm_eps, w.sigmoid, scratch)
    assert bool((scratch == EMPTY_WORD).all()), "the scratch is as it was, so that a captured graph can be replayed"
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


def test_every_element_of_the_results_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = tap(24, 300, 10, 3), torch.randn(33, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want, real = run(x, w), torch.empty

    def poisoned(*shape: int, dtype: torch.dtype, **kw: object) -> torch.Tensor:
        t = real(*shape, dtype=dtype, **kw)
        return t.fill_(float("nan") if dtype.is_floating_point else -7)

    monkeypatch.setattr(fused.torch, "empty", poisoned)
    got = run(x, w)
    assert all(torch.equal(a, b) for a, b in zip(want, got))


def test_scratch_serves_again_and_fewer_tokens() -> None:
    w = tap(16, 64, 4, 2)
    scratch = scratch_for(40, w)
    for tokens in (40, 3, 40, 16, 17):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
        ids, prob = run(x, w, scratch)
        want_ids, want_prob = law(x, w)
        assert torch.equal(ids, want_ids) and (prob - want_prob).abs().max() <= 2


def test_no_more_scratch_is_touched_than_was_asked_for() -> None:
    for past in (False, True):
        w, x = tap(16, 600, 4, 2, past=past), torch.randn(21, 600, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        need = scratch_for(21, w).numel()
        scratch = torch.full((need + 64,), 7, dtype=torch.int32, device=DEVICE)
        scratch[:need] = EMPTY_WORD
        run(x, w, scratch[:need], x if past else None)
        assert bool((scratch[need:] == 7).all())


def test_a_nan_that_looks_like_an_empty_word_is_one_that_arrives() -> None:
    w, x = tap(16, 64, 4, 2), torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[2] = torch.full((64,), EMPTY_WORD, dtype=torch.int32).view(torch.float32)
    compare(x, w, 2e-4)
    assert run(x, w)[0][:, 2].tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("tokens", [63, 64, 1000, pytest.param(4096, marks=pytest.mark.nightly)])
def test_many_tokens_with_special_rows(tokens: int) -> None:
    """Unions over up to 4,096 tokens: weak experts keep a chance, so that the product over the tiles is not simply one."""
    w = tap(16, 32, 4, 2, targets=1)
    w.out_HE[:, 8:] -= torch.linspace(2, 9, 8, device=DEVICE)
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[3, 5], x[7, 0], x[tokens - 1, 31], x[9], x[10] = float("nan"), float("inf"), -float("inf"), 0.0, 1e-40
    (ids, prob), (want_ids, want_prob) = run(x, w), law(x, w)
    assert ids[:, [3, 7, tokens - 1]].tolist() == [[[0, 1]] * 3]
    assert (ids != want_ids).float().mean() < 1e-3 and (prob - want_prob).abs().max() <= 16
    assert bool(((want_prob > 64) & (want_prob < PROB_ONE - 64)).any())


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


@pytest.mark.parametrize("form", ["plain", "past", "unused past", "sigmoid", "groups", "one target", "fp16", "no tokens"])
def test_op_is_honest_about_what_it_changes(form: str) -> None:
    past, tokens = form == "past", 0 if form == "no tokens" else 5
    w = tap(16, 64, 4, 2, past=past, sigmoid=form in ("sigmoid", "groups"), targets=1 if form == "one target" else 2,
            dtype=torch.float16 if form == "fp16" else torch.float32)
    if form == "groups":
        w = dataclasses.replace(w, n_group=4, topk_group=2)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, w.weight_HND.dtype)
    args = (x, x.clone() if "past" in form else None, w.weight_HND, w.past_HRD, w.shift_HR, w.up_HER, w.out_HE, w.bias_HE, w.sharp_H,
            scratch_for(tokens, w), w.top_k, w.linear, w.norm_eps, w.sigmoid, w.n_group, w.topk_group)
    torch.library.opcheck(_probe_topk, args)


def test_op_refuses_what_does_not_fit() -> None:
    w, x = tap(16, 64, 4, 2), torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    empty = probe_topk(x[:0], w, scratch_for(0, w))
    assert empty[0].shape == (2, 0, 2) and not empty[1].any()
    for bad in (x.half(), x[:, :60], x.unsqueeze(0)):
        with pytest.raises(ShapeError):
            probe_topk(bad, w, scratch_for(5, w))
        with pytest.raises(ShapeError, match="past"):
            probe_topk(x, w, scratch_for(5, w), past_TD=bad)
    for scratch in (scratch_for(5, w)[:-1], scratch_for(5, w).long(), scratch_for(6, w)[1:], scratch_for(10, w)[::2]):
        with pytest.raises(ShapeError, match="scratch"):
            probe_topk(x, w, scratch)


@pytest.mark.parametrize(("arrays", "elements", "second"), [(1, 1, 0), (4, 4, 0), (4, 2, 256), (14, 4, 0), (32, 8, 64), (100, 4, 4)])
def test_the_text_that_waits_names_every_word_once(arrays: int, elements: int, second: int) -> None:
    text, constraints, pack, kinds = fused.spin(arrays, elements, second)
    words = len(kinds) * pack
    assert constraints.split(",") == ["=&r"] * words + ["l"] * 2 * pack + ["r"] * words
    assert pack <= elements and (words <= 64 or pack == 1) and len(kinds) == arrays * (2 if second else 1)
    reads = re.findall(r"setp.eq.s32 q, (\$\d+), -1;\n@q ld.volatile.global.b32 (\$\d+), \[a\+(\d+)\]", text)
    assert sorted(int(o[1:]) for o, _, _ in reads) == list(range(words)) and all(a == b for a, b, _ in reads)
    # the words of `second` are the later ones
    assert all((int(o[1:]) >= arrays * pack) == (int(far) > 0) for o, _, far in reads)
    assert re.findall(r"mov.b32 (\$\d+), (\$\d+);", text) == [(f"${i}", f"${words + 2 * pack + i}") for i in range(words)]


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from ahead import compile_only
kernels = compile_only()
import torch
from moe_prefetch.kernels.probe_topk import fused
for tokens, past, dtype in ((1, False, torch.bfloat16), (64, True, torch.bfloat16), (64, False, torch.float32)):
    e = torch.empty
    fused.launch(e(tokens, 2048, dtype=dtype), e(tokens, 2048, dtype=dtype) if past else None, e(2, 192, 2048, dtype=dtype),
                 e(2, 64, 2048, dtype=dtype) if past else None, e(2, 64), e(2, 128, 64), e(2, 128), e(2, 128), e(2), 8, 32, 1e-6, False,
                 e(1 << 20, dtype=torch.int32))
    ptx = kernels[-1].asm["ptx"]
    # the weights are asked for before the kernel waits for its predecessor
    first = ptx.index("griddepcontrol.wait")
    words = {"mma": "mma.sync", "redux": "redux.sync", "early": "griddepcontrol.launch_dependents",
             "spin": "max.u32", "sum": "atom.global.gpu.relaxed.add.u64"}
    print(*[k for k, v in words.items() if v in ptx], "ahead" if "ld.global" in ptx[:first] else "behind",
          "local" if ".local" in ptx else "registers")
"""


def test_compiles_for_hopper_without_a_gpu() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE, os.path.dirname(__file__)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("mma redux early spin sum ahead registers") == 3, done.stdout
