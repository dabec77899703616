"""The Gluon kernel over MLA pages against the naive law: its text on a CPU, and on a GPU as it is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import general_latent as general

if not general.GLUON:
    pytest.skip("this version of Triton takes the kernel in Triton", allow_module_level=True)

from moe_prefetch.kernels.kv_attend import fused_latent, fused_latent_combine, fused_latent_shares, fused_latent_steps
from moe_prefetch.kv.format import FORMATS, PageLayout

from .gluon_cpu import Launch, Tensor, inline_asm, modules
from .kv_cases import case
from .test_kv_attend_latent import compare, mla

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")


def assembly(voted: list[bool]) -> Any:
    """What the assembly of fused_latent_steps.py does; voted: the one register of the kernel's."""

    def run(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        half = lambda code: Tensor((code & 0xFF00).to(torch.int16).view(torch.float16))  # noqa: E731
        if "%nctaid" in text or ".reg .b32 voted" in text:
            return 0
        if "rcp" in text:
            return Tensor(1 / args[0].v)
        if "bar.red" in text:
            voted[0] = bool((args[0].v > 2.0**14).any())
            return Tensor(torch.zeros_like(args[0].v))
        if "voted;" in text:
            return Tensor(torch.tensor(int(voted[0])))
        if "e4m3x2" in text:
            both = args[0].v.contiguous().view(torch.float8_e4m3fn).view(*args[0].v.shape, 4).half().view(torch.int32)
            return Tensor(both[..., 0]), Tensor(both[..., 1])
        if "0x8E008E00" not in text:
            return inline_asm(text, constraints, args, dtype, is_pure, pack)
        x, lo, hi = args[0].v.int(), args[1], args[2] if "0x2404" in text else args[1]
        low = x >> 3 & 0x0E0E | x << 7 & 0x8080
        high = half(x << 8 & 0x8E00) * hi, half(x & 0x8E00) * hi
        return (half(low << 8) * lo, half(low) * lo, *high) if "0x2404" in text else high

    return run


CASES = {
    "16 heads": dict(name="fp4-quality", heads_q=16, lengths=[300]),
    "16 heads, ragged from 0": dict(name="fp4-72", heads_q=16, lengths=[0, 2, 36, 37, 165, 700]),
    "one head, learned sink": dict(name="fp4-72", heads_q=1, lengths=[420, 5], learned_sink=True),
    "40 heads are three items": dict(name="fp4-quality", heads_q=40, lengths=[200, 2]),
    "two KV heads, no sinks, no window, BF16 query": dict(
        name="fp4-72-c64", heads_q=5, heads=2, lengths=[257], sinks=0, window=0, dtype=torch.bfloat16
    ),
    "factors of pages": dict(name="fp4-72", heads_q=16, lengths=[36 + 5 * 128 + 70]),
    "equal lengths": dict(name="fp4-72", heads_q=16, lengths=[300, 300]),
    "a window of many pieces": dict(name="fp4-72", heads_q=3, lengths=[700, 30], window=400),
    "pages to the last token": dict(name="fp4-72", heads_q=16, lengths=[128 + 36, 127 + 36]),
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("programs", [1, 5])
def test_equals_the_law(what: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "FUSED", True)
    monkeypatch.setattr(fused_latent, "programs_on", lambda device: programs)
    if not torch.cuda.is_available():
        names = {"cache": cache, "torch": torch, "PageLayout": PageLayout}
        shares = fused_latent_shares.__file__
        kernel = Launch(
            "attend_latent", shares, fused_latent_steps.__file__, fused_latent.__file__, asm=assembly([False]), names=names, swizzled=True
        )
        monkeypatch.setattr(fused_latent, "attend_latent", kernel)
        monkeypatch.setattr(fused_latent, "combine_latent", Launch("combine_latent", shares, fused_latent_combine.__file__))
    spec = dict(CASES[what])
    args, options = case(mla(spec.pop("name"), 512), spec.pop("heads_q"), spec.pop("lengths"), **spec)
    if "factors" in what:
        # pages of other factors, near and far: sums change their units
        pool, table, at = args[2], args[3], args[-1].offsets["trailer"][0]
        for i, by in enumerate((1.0, 2.0, 0.5, 16.0, 2.0**-9, 2.0**-8)):
            factor = pool[table[0, i].long(), 0, at : at + 4].view(torch.float32)
            factor *= by
    compare(args, options, bound=4e-3 if "factors" in what else 1e-3)


@pytest.mark.parametrize("programs", [1, 5, 33, 264])
@pytest.mark.parametrize("pages", [[256] * 16, [264] * 16, [3] * 40, [1], [1024], [6, 1, 1, 2, 1, 1], [7, 300, 12], [9, 9, 9, 9]])
@pytest.mark.parametrize("each", [1, 3])
def test_every_page_is_someones(programs: int, pages: list[int], each: int) -> None:
    """Shares are all pages, once; slots are those of the programs that meet an item, and differ."""
    space = modules([0], 1)
    for code in Launch("share", fused_latent_shares.__file__).codes:
        exec(code, space)
    units = [n for n in pages for _ in range(each)]
    number = lambda x: Tensor(torch.tensor(x))  # noqa: E731
    total, most = number(sum(units)), number(max(units))
    shares = [tuple(map(int, space["share"](number(i), programs, total, most, len(units)))) for i in range(programs)]
    met = [range(*x) for x in shares]
    assert [u for x in met for u in x] == list(range(sum(units)))
    taken, before = [], 0
    for item, n in enumerate(units):
        s0, s1 = map(int, space["slots"](item, number(before), number(n), programs, total, most, len(units)))
        those = [i + item for i, x in enumerate(shares) if x[0] < before + n and x[1] > max(before, x[0])]
        assert list(range(s0, s1)) == those
        taken += those
        before += n
    assert len(set(taken)) == len(taken)
    assert max(taken) < programs + len(units)


def test_takes_what_it_can() -> None:
    pool = torch.zeros(2, 1, 51328, dtype=torch.uint8)

    def takes(layout: PageLayout, pool: torch.Tensor = pool, queries: int = 1, sliding: int = 0, softcap: float = 0.0) -> bool:
        return fused_latent.serves(layout, pool, queries, sliding, softcap)

    ours = mla("fp4-72", 512)
    assert takes(ours)
    assert takes(mla("fp4-quality-c64", 512))
    for layout in (mla("fp8", 512), mla("fp4-72", 256), mla("fp4-72", 512, 32), PageLayout(FORMATS["fp4-72"], 128, 128, 4)):
        assert not takes(layout)
    assert not takes(ours, pool=pool[:0])
    assert not takes(ours, pool=torch.zeros(51329, dtype=torch.uint8)[1:].view(1, 1, -1))
    assert not takes(ours, queries=2)
    assert not takes(ours, sliding=100)
    assert not takes(ours, softcap=20.0)
