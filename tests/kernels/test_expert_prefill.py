"""The kernel for many tokens: its text, on a CPU, with a thread for each of its roles, and what it makes beside the law."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.expert_mlp import fused

if not fused.GLUON:
    pytest.skip("this version of Triton takes the kernels in Triton", allow_module_level=True)

from moe_prefetch.kernels.expert_mlp import fused_prefill
from moe_prefetch.kernels.expert_mlp.naive import moe_records
from moe_prefetch.kernels.expert_mlp.record import Form

from .expert_cases import hidden, records, table

BOUND = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a GPU where there is none")


def routed(tokens: int, top_k: int, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with so many pairs of each expert in random places; the rest are masked. Weights."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.full((tokens, top_k), -1)
    for e, n in enumerate(counts):
        free = ((ids == -1).any(1) & (ids != e).all(1)).nonzero()[:, 0]
        for t in free[torch.randperm(len(free), generator=g)[:n]].tolist():
            ids[t, int((ids[t] == -1).nonzero()[0, 0])] = e
    assert [int((ids == e).sum()) for e in range(len(counts))] == counts
    return ids, torch.rand(tokens, top_k, generator=g)


def total(y, ids_TK, weights_TK, experts, dtype, place):
    """As `fused.total`, without a program a token in the interpreter."""
    counts_TK = (ids_TK >= 0) & (ids_TK < experts)
    rows_TK = torch.where(counts_TK, place.view(ids_TK.shape).long(), 0)
    return (torch.where(counts_TK[..., None], y[rows_TK], 0.0) * weights_TK[..., None]).sum(1).to(dtype)


@cpu_only
@pytest.mark.parametrize(
    ("form", "tokens", "top_k", "counts", "limit"),
    [
        # every width of a tile; steps that no column divides; an expert without pairs; rows beyond a block of 64 and of 128
        (Form("bfloat16", 200, 136), 300, 4, [300, 0, 64, 5, 33, 161, 193, 129], 0.0),
        # more steps than fit in the ring, clamped, another type; the sum is the kernel's
        (Form("float16", 328, 72), 100, 2, [97, 1, 96], 1.5),
        # more items of an expert than go side by side
        (Form("bfloat16", 40, 24), 640, 1, [70, 560], 0.0),
    ],
)
def test_same_as_the_law(monkeypatch, form, tokens, top_k, counts, limit):
    from .gluon_warps import Kernel

    recs, x = records(form, len(counts)), hidden(form, tokens)
    ids, weights = routed(tokens, top_k, counts)
    monkeypatch.setattr(fused, "PREFILL", True)
    monkeypatch.setattr(fused_prefill, "serves", lambda *a: True)
    monkeypatch.setattr(fused_prefill, "product", Kernel(fused_prefill.__file__, "product", list(recs), TOGETHER=2))
    if tokens > 100:
        monkeypatch.setattr(fused, "total", total)
    got = fused.launch(x, ids, weights, table(recs), form, limit, 1.702)
    want = moe_records(x, ids, weights, recs, form, limit, 1.702, torch.float64)
    assert float((got.double() - want).norm() / want.norm()) < BOUND[x.dtype]
    # columns of a tile do not meet: what is wrong in one token would stand out
    worst = ((got.double() - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-6)).max()
    assert float(worst) < 3 * BOUND[x.dtype]


def test_what_it_serves(monkeypatch):
    def serves(form, dtype=torch.bfloat16, tokens=512, top_k=2, experts=8, device="cuda", capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return fused_prefill.serves(form, dtype, tokens, top_k, experts, torch.device(device))

    mixtral = Form("bfloat16", 4096, 14336)
    half = Form("float16", 4096, 14336)
    assert serves(mixtral) and not serves(half, torch.float16), "not compared on a GPU yet"
    monkeypatch.setattr(fused_prefill, "PROVEN", ("bfloat16", "float16"))
    assert serves(half, torch.float16)
    assert not serves(mixtral, tokens=511), "too few tokens"
    assert not serves(mixtral, torch.float16), "another type than the weights'"
    assert not serves(mixtral, capability=(10, 0)) and not serves(mixtral, device="cpu")
    for form in (Form("bfloat16", 4096, 768), Form("bfloat16", 4100, 14336), Form("bfloat16", 4096, 14332),
                 Form("bfloat16", 4096, 14336, "bfloat16"), Form("fp8", 4096, 14336, "", "float32", 128), Form("mxfp4", 4096, 14336)):
        assert not serves(form), form


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("form", "limit"), [(Form("bfloat16", 512, 384), 0.0), (Form("float16", 264, 136), 0.0), (Form("bfloat16", 200, 72), 1.5)])
def test_bits_of_few_tokens(monkeypatch, form, limit):
    """A token has the bits that it has alone, whichever kernels multiply."""
    tokens, experts, top_k = 1500, 9, 3
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    monkeypatch.setattr(fused_prefill, "FROM", 1)
    monkeypatch.setattr(fused_prefill, "WIDE", 1)
    monkeypatch.setattr(fused_prefill, "PROVEN", ("bfloat16", "float16"))
    recs, x = records(form, experts), hidden(form, tokens)
    g = torch.Generator("cuda").manual_seed(0)
    ids = torch.rand(tokens, experts, device="cuda", generator=g).topk(top_k).indices
    weights = torch.rand(tokens, top_k, device="cuda", generator=g)
    where = table(recs)
    assert fused_prefill.serves(form, x.dtype, tokens, top_k, experts, x.device)
    many = fused.launch(x, ids, weights, where, form, limit, 1.702)
    assert torch.equal(many, fused.launch(x, ids, weights, where, form, limit, 1.702))
    monkeypatch.setattr(fused, "PREFILL", False)
    for at in range(0, tokens, 4):
        few = fused.launch(x[at : at + 4], ids[at : at + 4], weights[at : at + 4], where, form, limit, 1.702)
        assert torch.equal(many[at : at + 4], few)
