"""The general attention against the naive law: every format, odd head dims, groups, drafts, masks; unused bytes are all ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import fused, general, general_latent
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_attend.op import path_of
from moe_prefetch.kernels.kv_encode.records import encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .kv_cases import case, relative

# Junk in unused slots is NaN in the interpreter's arithmetic before it is masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")


def layout(name: str, k_dim: int, outliers: int = 0, v_dim: int | None = None) -> PageLayout:
    return PageLayout(FORMATS[name], k_dim, k_dim if v_dim is None else v_dim, outliers)


def compare(args: list[Any], kw: dict[str, Any], bound: float = 1e-3) -> None:
    out, lse = general.attend(*args, **kw)
    want, want_lse = attend_naive(*args, **kw)
    seen = want_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert bool((out[~seen] == 0).all())
    assert relative(out, want) < bound
    # Queries are rounded to FP16: an error of a score grows with the score.
    assert bool(((lse - want_lse).abs() < 5e-3 + 2e-4 * want_lse.abs())[seen].all())


@pytest.mark.parametrize("dim", [80, 112, 128, *(pytest.param(d, marks=pytest.mark.nightly) for d in (64, 96, 192, 256))])
@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-72", "fp4-quality-c64", "nvfp4", "mxfp4"])
def test_every_format_at_every_head_dim(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "programs_on", lambda *_: 3)
    outliers = 3 if FORMATS[name].max_bits else 0
    compare(*case(layout(name, dim, outliers), 4, [180, 40]))


CASES = {
    "one query head, ragged from 0": dict(args=("fp8", 96), group=1, lengths=[0, 1, 5, 36, 37, 165]),
    "groups of 16, two heads": dict(args=("fp4-72", 80, 1), group=16, lengths=[300, 165], heads=2),
    "odd group, no sinks": dict(args=("nvfp4", 80), group=5, lengths=[300], sinks=0),
    "no window, 16 outliers": dict(args=("fp4-quality", 112, 16), group=7, lengths=[200], window=0),
    "draft of 3, ragged": dict(args=("fp4-72", 96, 2), group=4, lengths=[300, 190], draft=3, q_len=[3, 1]),
    "draft of 8, groups of 6: three items a head": dict(args=("fp16", 80), group=6, lengths=[300, 420], draft=8, q_len=[8, 5], sliding=100),
    "draft of 8 at head dim 256": dict(args=("fp8", 256), group=3, lengths=[200], draft=8),
    "sliding window": dict(args=("mxfp4", 96), group=8, lengths=[300, 420], sliding=150),
    "sliding window within the FP16 one": dict(args=("fp4-quality", 112, 4), group=4, lengths=[420], sliding=20, learned_sink=True),
    "soft cap, learned sink": dict(args=("fp4-quality", 80, 3), group=4, lengths=[300, 5, 0], softcap=20.0, learned_sink=True),
    "soft cap over FP8": dict(args=("fp8", 80), group=4, lengths=[300], softcap=20.0),
    "V narrower than K": dict(args=("fp8", 192, 0, 128), group=2, lengths=[300]),
    "V wider than K": dict(args=("fp4-72", 64, 1, 96), group=2, lengths=[300]),
    "BF16 query": dict(args=("fp4-72", 112, 2), group=4, lengths=[300], dtype=torch.bfloat16),
    "scales among the codes": dict(args=("fp4-quality", 80, 7), group=4, lengths=[300], softcap=20.0),
    "the same, two for each token of V's channels": dict(args=("fp4-quality-c64", 128, 8), group=4, lengths=[300], heads=2),
    "16 places of scales": dict(args=("fp4-quality", 256, 16), group=2, lengths=[200]),
    "a page to the last token": dict(args=("fp8", 80), group=4, lengths=[128 + 36, 256 + 36, 255 + 36]),
}


@pytest.mark.parametrize("what", CASES)
def test_equals_the_law(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "programs_on", lambda *_: 4)
    spec = dict(CASES[what])
    compare(*case(layout(*spec.pop("args")), spec.pop("group"), spec.pop("lengths"), **spec))


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-quality", "mxfp4"])
def test_peaky_scores(name: str) -> None:
    args, kw = case(layout(name, 80), 4, [300], loud=1.0)
    args[0] *= 8
    compare(args, kw, 4e-3)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_values_of_very_different_size(name: str) -> None:
    """The tokens that count have values 2^20 times smaller than others of their page."""
    args, kw = case(layout(name, 80), 4, [200])
    q, pool, spec, book = args[0], args[2], args[12], args[11]
    n = int(args[4][0])
    k, v = torch.randn(n, 1, 80), torch.randn(n, 1, 80) * 2e-4
    v[::3] *= 2.0**20
    k[::3] = -30 * q[0, 0].sign()
    for page in args[3][0].tolist():
        pool[page] = 0
    encode_naive(pool, k.to(q.device), v.to(q.device), torch.tensor(runs_for(args[3][0].tolist(), 0, n, 0)).to(q.device), book, spec)
    for t in (args[7], args[9]):
        t.mul_(2e-4)
    args[0] = q[:, :1].expand(-1, 4, -1, -1).contiguous()
    compare(args, kw, 2e-3)


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-quality", "fp4-72-c64", "nvfp4", "mxfp4"])
def test_unused_bytes_never_show(name: str) -> None:
    """Other bytes where nothing is stored: the same bits come out."""
    args, kw = case(layout(name, 80, 3 if FORMATS[name].max_bits else 0), 4, [300])
    out, lse = general.attend(*args, **kw)
    table, stored = args[3], int(args[4][0])
    owned = set(table[0, : -(-stored // PAGE)].tolist())
    for page in set(range(len(args[2]))) - owned:
        args[2][page] = 0x7E
    again, lse_again = general.attend(*args, **kw)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dim", [64, 128])
def test_the_path_of_blackwell(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """q in two E4M3 terms, and the order of what the block-scaled product reads; here its operands are decoded."""
    monkeypatch.setattr(general, "native", lambda *_: True)
    compare(*case(layout("mxfp4", dim), 5, [300, 40], draft=2, learned_sink=True), 2e-3)


def test_no_row_sees_anything() -> None:
    args, kw = case(layout("fp8", 80), 4, [0, 0])
    out, lse = general.attend(*args, **kw)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def test_serves_what_it_can_read() -> None:
    for name in FORMATS:
        for dim in (64, 80, 96, 112, 128, 192, 256):
            assert general.serves(layout(name, dim), 8)
    assert not general.serves(PageLayout(FORMATS["fp4-72"], 512, 0, 0, 64), 16)


def test_each_layout_takes_the_fastest_path_that_reads_it() -> None:
    gpu = torch.device("cuda")
    assert path_of(gpu, layout("fp4-72", 128, 4), 8) is fused.attend
    for name, dim in (("fp8", 128), ("fp16", 64), ("nvfp4", 128), ("fp4-72", 80), ("fp4-72-c64", 128)):
        assert path_of(gpu, layout(name, dim), 8) is general.attend
    assert path_of(gpu, PageLayout(FORMATS["fp4-72"], 512, 0, 0, 64), 16) is general_latent.attend
    assert path_of(gpu, PageLayout(FORMATS["nvfp4"], 512, 0, 0, 64), 16) is attend_naive
    assert path_of(torch.device("cpu"), layout("fp8", 128), 8) is attend_naive
