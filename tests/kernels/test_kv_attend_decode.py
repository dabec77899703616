"""The Gluon kernel of decode attention against the naive law: its text on a CPU, and on a GPU as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import fused

if not fused.GLUON:
    pytest.skip("this version of Triton takes the kernel in Triton", allow_module_level=True)

from moe_prefetch.kernels.kv_attend import fused_decode, fused_decode_steps
from moe_prefetch.kernels.kv_attend.naive import attend_naive
from moe_prefetch.kernels.kv_encode.records import encode_naive, runs_for
from moe_prefetch.kernels.kv_query import fused_decode as query
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout

from .gluon_cpu import Launch
from .test_kv_attend_fused import assert_law, case

CASES = {
    "groups of 4, 8 outliers, an empty row": dict(name="fp4-quality", dim=128, group=4, outliers=8, lengths=[300, 2, 0]),
    "groups of 8, 8 outliers, unequal loudness": dict(name="fp4-quality", dim=128, group=8, outliers=8, lengths=[900], swell=37.0),
    "groups of 8, no outliers, two heads": dict(name="fp4-72", dim=128, group=8, outliers=0, lengths=[300, 165], heads=2),
    "groups of 6, learned sink": dict(name="fp4-quality", dim=128, group=6, outliers=8, lengths=[700, 390], learned_sink=True),
    "groups of 8, 3 outliers": dict(name="fp4-72", dim=128, group=8, outliers=3, lengths=[300, 665]),
    "groups of 3, 3 outliers": dict(name="fp4-72", dim=128, group=3, outliers=3, lengths=[420]),
    "one query head, 1 outlier": dict(name="fp4-72", dim=128, group=1, outliers=1, lengths=[420]),
    "rows of one page and none among longer ones": dict(
        name="fp4-quality", dim=128, group=4, outliers=8, lengths=[165, 0, 40, 430, 20, 200], heads=2
    ),
    "rows of equal length": dict(name="fp4-72", dim=128, group=8, outliers=3, lengths=[550, 540], heads=2),
    "head dim 64, groups of 4": dict(name="fp4-72", dim=64, group=4, outliers=1, lengths=[300, 1265]),
    "head dim 64, groups of 8, unequal loudness": dict(name="fp4-72", dim=64, group=8, outliers=1, lengths=[300, 1265], swell=1 / 37),
    "head dim 64, 3 outliers, no window": dict(name="fp4-72", dim=64, group=8, outliers=3, lengths=[500], window=0, sinks=0),
    "groups of 4, 4 outliers": dict(name="fp4-quality", dim=128, group=4, outliers=4, lengths=[420], heads=2),
    "head dim 64, 4 outliers, two heads": dict(name="fp4-quality", dim=64, group=4, outliers=4, lengths=[700, 90], heads=2),
    "head dim 64, 8 outliers, two heads": dict(name="fp4-quality", dim=64, group=5, outliers=8, lengths=[700], heads=2),
}


def use(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "programs_on", lambda device, rows: programs)
    monkeypatch.setattr(fused, "DECODE", True)
    if not torch.cuda.is_available():
        paths = (x.__file__ for x in (query, fused_decode_steps, fused_decode))
        monkeypatch.setattr(fused_decode, "attend_decode", Launch("attend_decode", *paths))


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("programs", [2, 5])
def test_equals_the_law(what: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(programs, monkeypatch)
    args, kw = case(**CASES[what])
    assert_law(args, kw)


def along_q(group: int, dim: int, bits: torch.Tensor, v: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    """One head, all of whose queries see scores of about so many bits; FP16 tokens that nobody sees much of."""
    args, kw = case("fp4-quality", dim, group, 0, [len(bits) + 36])
    q, pool, table, book, layout = args[0], args[2], args[3], args[11], args[12]
    q.copy_(q[:, :1].clone())
    one = q[0, 0, 0] / q[0, 0, 0].norm()
    k = bits.to(q.device)[:, None, None] * 0.6931 * dim**0.5 / q[0, 0, 0].norm() * one
    runs = torch.tensor(runs_for(table[0].tolist(), 0, len(bits), 0), device=q.device)
    encode_naive(pool, k, v.to(q.device), runs, book, layout)
    for recent in args[6], args[8]:
        recent.copy_(-20 * one)
    return args, kw


@pytest.mark.parametrize(("group", "dim"), [(4, 128), (8, 128), (8, 64)])
@pytest.mark.parametrize("step", [1.0, 2.9, 3.1, 40.0, -40.0])
def test_pages_ahead_of_their_reference(group: int, dim: int, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that grow by less and more than the margin from page to page, and that fall."""
    use(1, monkeypatch)
    bits = torch.randn(700) + torch.arange(700) // PAGE * step
    args, kw = along_q(group, dim, bits - bits.max(), torch.randn(700, 1, dim))
    assert_law(args, kw)


def test_many_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token outweighs each other one by about 2^17, but its value is small: what the others weigh together shows.

    Scores as far apart are an eighth of a bit off, a fifth at most, as q is in two terms; without the others the error is 1.
    """
    use(1, monkeypatch)
    bits, v = torch.rand(1400) * 2 - 18, torch.full((1400, 1, 128), 500.0)
    bits[0], v[:PAGE] = 0.0, torch.randn(PAGE, 1, 128)
    args, kw = along_q(4, 128, bits, v)
    out, want = fused.attend(*args, **kw)[0], attend_naive(*args, **kw)[0]
    assert float((out - want).norm() / want.norm()) < 0.25


def test_scores_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay with the head they are in, and nothing waits for a reference that there cannot be."""
    use(2, monkeypatch)
    args, kw = case("fp4-quality", 128, 4, 8, [700], heads=2)
    want, _ = attend_naive(*args, **kw)
    at, _ = args[12].offsets["k_outliers"]
    args[2][args[3][0, 1], 0, at + 1 : at + 16 : 2] = 0x7E
    out, lse = fused.attend(*args, **kw)
    assert not bool(lse[:, :4].isfinite().any())
    assert float((out[:, 4:] - want[:, 4:]).norm() / want[:, 4:].norm()) < 2.5e-3


def test_takes_what_it_can() -> None:
    layout = PageLayout(FORMATS["fp4-quality"], 128, 128, 8)
    pool = torch.zeros(2, 1, layout.page_bytes, dtype=torch.uint8)

    def takes(
        layout: PageLayout = layout, rows: int = 8, pool: torch.Tensor = pool, queries: int = 1, sliding: int = 0, softcap: float = 0.0
    ) -> bool:
        return fused_decode.serves(layout, rows, pool, queries, sliding, softcap)

    assert takes()
    assert takes(PageLayout(FORMATS["fp4-72"], 64, 64, 1))
    assert not takes(PageLayout(FORMATS["fp4-72"], 64, 64, 2))
    assert not takes(rows=9)
    assert not takes(pool=pool[:0])
    assert not takes(pool=pool.view(-1)[8:])
    assert not takes(pool=torch.empty(1 << 38, dtype=torch.uint8, device="meta"))
    assert not takes(queries=2)
    assert not takes(sliding=100)
    assert not takes(softcap=20.0)


@pytest.mark.parametrize(
    ("most", "items", "want"), [(528, 64, 512), (528, 256, 512), (528, 8, 520), (396, 8, 392), (396, 256, 384), (3, 5, 3), (1, 6, 1)]
)
def test_shares_end_with_items(most: int, items: int, want: int) -> None:
    assert fused.shares(most, items) == want
