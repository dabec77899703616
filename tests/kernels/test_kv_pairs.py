"""K and V in different formats on the general kernels: the bytes and the attention of the naive law."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_attend import fused as fused_attend
from moe_prefetch.kernels.kv_attend import general, general_latent
from moe_prefetch.kernels.kv_attend.op import path_of
from moe_prefetch.kernels.kv_encode import fused, general_planes, op
from moe_prefetch.kernels.kv_encode import general as others
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.op import fused_for
from moe_prefetch.kernels.kv_encode.records import encode_naive, runs_for
from moe_prefetch.kv.format import FORMATS, PAGE, PageLayout, format_of

from .kv_cases import DEVICE, book_of, case
from .test_kv_attend_general import compare
from .test_kv_encode_general import tokens

# Junk in unused slots is NaN in the interpreter's arithmetic before it is masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")
GPU = torch.device("cuda")
SERVED = ("fp16", "fp8", "fp4-72", "nvfp4", "mxfp4")
EVERY = [f"{k}+{v}" for k in SERVED for v in (*SERVED, "fp4-72-c64") if k != v]
USUAL = ("fp8+fp4-72", "fp4-72+fp8", "fp16+fp4-72", "nvfp4+fp8", "fp4-72+mxfp4", "fp8+fp4-72-c64")


def layout(name: str, k_dim: int, outliers: int | None = None, v_dim: int | None = None) -> PageLayout:
    fmt = format_of(name)
    return PageLayout(fmt, k_dim, v_dim or k_dim, (3 if fmt.max_bits else 0) if outliers is None else outliers)


# attention -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [80, pytest.param(64, marks=pytest.mark.nightly), pytest.param(128, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.nightly) for n in EVERY])
def test_every_pair(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "programs_on", lambda *_: 3)
    compare(*case(layout(name, dim), 4, [180, 40]))


CASES = {
    "one query head, ragged from 0": dict(args=("fp8+fp4-72", 96), group=1, lengths=[0, 1, 5, 36, 37, 165]),
    "groups of 16, two heads": dict(args=("fp4-72+fp8", 80, 1), group=16, lengths=[300, 165], heads=2),
    "no window, 16 outliers": dict(args=("fp4-quality+nvfp4", 112, 16), group=7, lengths=[200], window=0),
    "draft of 3, ragged": dict(args=("fp8+fp4-72", 96), group=4, lengths=[300, 190], draft=3, q_len=[3, 1]),
    "draft of 8, groups of 6: three items a head": dict(args=("fp16+fp4-72", 80), group=6, lengths=[420], draft=8, q_len=[8], sliding=100),
    "sliding window": dict(args=("mxfp4+fp8", 96), group=8, lengths=[300, 420], sliding=150),
    "soft cap, learned sink": dict(args=("fp4-quality+fp8", 80, 3), group=4, lengths=[300, 5, 0], softcap=20.0, learned_sink=True),
    "V narrower than K": dict(args=("fp8+fp4-72", 192, 0, 128), group=2, lengths=[300]),
    "V wider than K": dict(args=("fp4-72+fp8", 64, 1, 96), group=2, lengths=[300]),
    "BF16 query": dict(args=("fp8+fp4-72", 128), group=4, lengths=[300], dtype=torch.bfloat16),
    "a page to the last token": dict(args=("fp8+fp4-72", 64), group=4, lengths=[128 + 36, 256 + 36, 255 + 36]),
}


@pytest.mark.parametrize("what", CASES)
def test_attention_equals_the_law(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "programs_on", lambda *_: 4)
    spec = dict(CASES[what])
    compare(*case(layout(*spec.pop("args")), spec.pop("group"), spec.pop("lengths"), **spec))


@pytest.mark.parametrize("name", ["fp8+fp4-72", "fp4-72+fp8", "fp16+nvfp4"])
def test_unused_bytes_never_show(name: str) -> None:
    """Other bytes where nothing is stored: the same bits come out."""
    args, kw = case(layout(name, 80), 4, [300])
    out, lse = general.attend(*args, **kw)
    table, stored = args[3], int(args[4][0])
    owned = set(table[0, : -(-stored // PAGE)].tolist())
    for page in set(range(len(args[2]))) - owned:
        args[2][page] = 0x7E
    again, lse_again = general.attend(*args, **kw)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    assert bool(out.isfinite().all())


# bytes -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lay", "chunks", "dtype"),
    [
        (layout("fp8+fp4-72", 64), [20, 1, 3, 110], torch.bfloat16),
        (layout("fp8+fp4-72", 96, 0, 112), [126, 1, 1, 4], torch.float16),
        (layout("fp4-quality+fp8", 80, 5), [63, 1, 70], torch.float32),
        (layout("fp4-72+fp8", 128, 0), [1] * 3, torch.bfloat16),
        (layout("fp16+fp4-72", 128), [2, 130], torch.bfloat16),
        (layout("nvfp4+fp8", 80), [1, 1, 60, 70], torch.bfloat16),
        (layout("fp4-72+mxfp4", 112, 2, 96), [63, 66], torch.float32),
        (layout("mxfp4+fp4-quality", 80), [4, 1], torch.float16),
        (layout("fp4-72+fp4-quality", 64, 1), [100, 1], torch.bfloat16),
    ],
    ids=lambda x: f"{x.format.name}-{x.k_dim}-{x.v_dim}" if isinstance(x, PageLayout) else None,
)
def test_bytes_equal_the_law(lay: PageLayout, chunks: list[int], dtype: torch.dtype) -> None:
    heads, encode = 2, fused_for(GPU, lay)
    book = book_of(lay, heads)
    count = -(-sum(chunks) // PAGE)
    pages = torch.randperm(count).tolist()
    law = empty_pages(count, heads, lay, DEVICE)
    ours, at = law.clone(), 0
    for n in chunks:
        runs = torch.tensor(runs_for(pages, at, n, 0), dtype=torch.int32, device=DEVICE)
        k, v = tokens(n, heads, lay.k_dim, dtype), tokens(n, heads, lay.v_dim, dtype)
        want = encode_naive(law, k, v, runs, book, lay)
        got = encode(ours, k, v, runs, book, lay, most=int(runs[:, 3].max()))
        assert torch.equal(want, got)
        at += n
        parts = {part: int((law != ours)[..., a : a + size].sum()) for part, (a, size) in lay.offsets.items()}
        assert torch.equal(law, ours), f"bytes that differ: {parts}"


# who does it -----------------------------------------------------------------------------------------------------------
def test_pairs_take_the_general_kernels() -> None:
    for k in FORMATS:
        for v in FORMATS:
            if k != v:
                for dim in (64, 80, 128):
                    lay = layout(f"{k}+{v}", dim, 0)
                    assert path_of(GPU, lay, 4) is general.attend
                    assert not fused.serves(lay) and not fused_attend.serves(lay, 4) and not general_latent.serves(lay, 4)
                    assert not others.serves(lay) and not general_planes.serves(lay)
                    assert (fused_for(GPU, lay) is None) == v.endswith("-c64"), "the law writes V scales over tokens"
    assert fused_for(torch.device("cpu"), layout("fp8+fp4-72", 64)) is None

def test_a_pair_is_written_by_kernels_that_are_both_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "PROVEN", ("general",))
    assert fused_for(GPU, layout("fp8+nvfp4", 64)) is not None
    assert fused_for(GPU, layout("fp8+fp4-72", 64)) is None
