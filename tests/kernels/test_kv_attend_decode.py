"""The Gluon kernel of decode attention against the naive law: its text on a CPU, and on a GPU as it is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import fused

if not fused.GLUON:
    pytest.skip("this version of Triton takes the kernel in Triton", allow_module_level=True)

from moe_prefetch.kernels.kv_attend import fused_decode, fused_decode_steps
from moe_prefetch.kernels.kv_query import fused_decode as query
from moe_prefetch.kv.format import FORMATS, PageLayout

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
    "head dim 64, 8 outliers, two heads": dict(name="fp4-quality", dim=64, group=5, outliers=8, lengths=[700], heads=2),
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("programs", [2, 5])
def test_equals_the_law(what: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "programs_on", lambda device, rows: programs)
    monkeypatch.setattr(fused, "DECODE", True)
    if not torch.cuda.is_available():
        paths = (x.__file__ for x in (query, fused_decode_steps, fused_decode))
        monkeypatch.setattr(fused_decode, "attend_decode", Launch("attend_decode", *paths))
    args, kw = case(**CASES[what])
    assert_law(args, kw)


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
