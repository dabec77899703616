"""Attention over MLA pages against the naive law: heads, drafts, masks, factors; unused bytes are all ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import general_latent as general
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_encode.records import encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .kv_cases import case, relative

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")


def mla(name: str, latent: int = 256, rope: int = 64) -> PageLayout:
    return PageLayout(FORMATS[name], latent, 0, 0, rope)


def compare(args: list[Any], kw: dict[str, Any], bound: float = 1e-3, lse_bound: float = 5e-3) -> None:
    out, lse = general.attend(*args, **kw)
    want, want_lse = attend_naive(*args, **kw)
    seen = want_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert bool((out[~seen] == 0).all())
    assert relative(out, want) < bound
    assert bool(((lse - want_lse).abs() < lse_bound + 2e-4 * want_lse.abs())[seen].all())


CASES = {
    "DeepSeek-V2's shape": dict(args=("fp4-quality", 512), heads_q=16, lengths=[300]),
    "fp4-72, ragged from 0": dict(args=("fp4-72",), heads_q=16, lengths=[0, 2, 36, 37, 165]),
    "the -c64 variant is the same for a latent": dict(args=("fp4-72-c64", 256, 32), heads_q=8, lengths=[300]),
    "FP8": dict(args=("fp8",), heads_q=16, lengths=[300, 40]),
    "FP16, 16 rotary channels": dict(args=("fp16", 256, 16), heads_q=16, lengths=[300, 40]),
    "40 heads are three items": dict(args=("fp4-quality",), heads_q=40, lengths=[200, 2]),
    "draft of 8, ragged": dict(args=("fp4-quality",), heads_q=3, lengths=[200, 300], draft=8, q_len=[8, 5]),
    "sliding window, soft cap, learned sink": dict(
        args=("fp4-quality",), heads_q=16, lengths=[420, 5], sliding=150, softcap=20.0, learned_sink=True
    ),
    "no sinks, no window, BF16 query": dict(args=("fp8",), heads_q=16, lengths=[257], sinks=0, window=0, dtype=torch.bfloat16),
    "a page to the last token": dict(args=("fp4-72",), heads_q=16, lengths=[128 + 36, 127 + 36]),
}


@pytest.mark.parametrize("what", CASES)
def test_equals_the_law(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "programs_on", lambda *_: 4)
    spec = dict(CASES[what])
    compare(*case(mla(*spec.pop("args")), spec.pop("heads_q"), spec.pop("lengths"), **spec))


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp4-quality"])
def test_peaky_scores(name: str) -> None:
    args, kw = case(mla(name), 16, [300], loud=1.0)
    args[0] *= 8
    compare(args, kw, 4e-3)


@pytest.mark.parametrize("name", ["fp8", "fp4-quality"])
def test_pages_of_very_different_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page 2^12 times louder than its neighbours, and one of zeros: factors change back and forth within one program."""
    monkeypatch.setattr(general, "programs_on", lambda *_: 1)
    layout = mla(name)
    args, kw = case(layout, 16, [36 + 4 * PAGE])
    n = int(args[4][0])
    k = torch.randn(n, 1, 256 + 64) * 0.02
    k[PAGE : 2 * PAGE] *= 2.0**12
    k[PAGE : 2 * PAGE, :, 256:] = -3
    k[2 * PAGE : 3 * PAGE, :, :256] = args[11][1].cpu()
    table = args[3][0].tolist()
    args[2][table] = 0
    dev = args[2].device
    encode_naive(args[2], k.to(dev), torch.zeros(n, 1, 0, device=dev), torch.tensor(runs_for(table, 0, n, 0)).to(dev), args[11], layout)
    args[0][..., 256:] = args[0][..., 256:].abs() * 4
    compare(args, kw, 8e-3, 5e-2)


def test_unused_bytes_never_show() -> None:
    args, kw = case(mla("fp4-quality"), 16, [300])
    out, lse = general.attend(*args, **kw)
    owned = set(args[3][0, : -(-int(args[4][0]) // PAGE)].tolist())
    for page in set(range(len(args[2]))) - owned:
        args[2][page] = 0x7E
    again, lse_again = general.attend(*args, **kw)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    assert bool(out.isfinite().all())


def test_serves_what_it_can_read() -> None:
    for name in ("fp16", "fp8", "fp4-72", "fp4-quality"):
        assert general.serves(mla(name, 512), 128)
    assert not general.serves(mla("nvfp4", 512), 16)
    assert not general.serves(PageLayout(FORMATS["fp8"], 128, 128), 4)
