"""A step of a cache of fixed size: the fused kernel against its law, and the op's promises."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.kv_slide import fused
from moe_prefetch.kernels.kv_slide.naive import Slide, slide_naive, tell_naive
from moe_prefetch.kernels.kv_slide.op import kv_slide
from moe_prefetch.kv.format import PAGE

from .kv_cases import compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 65504.0, -65504.0, 65519.0, 65536.0, -1e30, 2.0**-24, 2.0**-26, 1e-42]
BYTES = 640


def state(lengths: list[int], N: int, dk: int, dv: int, *, window: int, sinks: int, draft: int, behind: int = 0) -> Slide:
    """Rows of these lengths, whose pages lag `behind` by some tokens; every byte of memory is something else."""
    B, R, pages = len(lengths), window + 2 * draft, 3
    g = torch.Generator().manual_seed(B * 1000 + sum(lengths))
    half = lambda *shape: torch.randn(*shape, generator=g).half().to(DEVICE)  # noqa: E731
    whole = lambda *shape: torch.randint(0, 256, shape, generator=g, dtype=torch.uint8).to(DEVICE)  # noqa: E731
    length = torch.tensor(lengths, device=DEVICE)
    stored = (length - sinks - window - behind).clamp(min=0)
    table = torch.randperm(B * (pages + 1), generator=g)[: B * pages].view(B, pages)
    spare = torch.tensor([p for p in range(B * (pages + 1)) if p not in table.flatten().tolist()])
    made = Slide(
        half(B, N, R, dk), half(B, N, R, dv), half(B * N * sinks + 1, dk), half(B * N * sinks + 1, dv), whole(B * (pages + 1), N, BYTES),
        whole(1, N, BYTES), table.to(torch.int32).to(DEVICE), spare.to(DEVICE), length, stored,
        torch.full((3, B), -7, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    return made


def tokens(B: int, N: int, T: int, dk: int, dv: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K as a model makes it, [B, T, N, d] seen as [B, N, T, d], V with a last stride of 2."""
    g = torch.Generator().manual_seed(T)
    k = torch.randn(B, T, N, dk, generator=g).to(dtype).transpose(1, 2)
    v = torch.randn(B, N, T, dv * 2, generator=g).to(dtype)[..., ::2]
    k[0, 0, 0, : len(ODD)] = torch.tensor(ODD).to(dtype)
    if dv:
        v[-1, -1, -1, : len(ODD)] = torch.tensor(ODD).to(dtype)
    return k.to(DEVICE), v.to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16) if x.dtype == torch.float16 else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "N", "T", "dk", "dv", "window", "sinks", "behind"),
    [
        ([0], 2, 1, 64, 64, 16, 4, 0),
        ([3, 20, 21], 3, 1, 80, 48, 16, 4, 0),  # the last sink, the last before one is due, the first that is
        ([20 + PAGE, 21 + PAGE, 20], 1, 3, 128, 128, 16, 4, 1),  # a page ends and another opens within one step, in one row
        ([2, 40], 4, 8, 96, 96, 16, 4, 5),  # from the sinks into the window
        ([300], 8, 1, 128, 128, 100, 0, 0),  # no sinks
        ([20 + PAGE], 1, 2, 80, 0, 16, 4, 0),  # a latent: no V
    ],
)
def test_fused_equals_the_law(lengths, N: int, T: int, dk: int, dv: int, window: int, sinks: int, behind: int, dtype: torch.dtype) -> None:
    B, found = len(lengths), []
    k, v = tokens(B, N, T, dk, dv, dtype)
    for slide in (slide_naive, fused.slide):
        s = state(lengths, N, dk, dv, window=window, sinks=sinks, draft=8, behind=behind)
        before = [x.clone() for x in s]
        out = [torch.full((T, B, N, d), 9, dtype=torch.float16, device=DEVICE) for d in (dk, dv)]
        runs = torch.full((T, B, 4), -1, dtype=torch.int32, device=DEVICE)
        slide(s, *out, runs, k, v, window)
        # the last row of the sinks is nobody's
        s.sink_k[-1], s.sink_v[-1] = 0, 0
        found.append([bits(x) for x in (*s, *out, runs)])
    for name, a, b in zip((*Slide._fields, "out_k", "out_v", "runs"), *found, strict=True):
        assert torch.equal(a, b), name
    length, stored = found[0][8].tolist(), found[0][9].tolist()
    assert length == [n + T for n in lengths] and found[0][10].tolist()[:2] == [stored, length]
    for b, n in enumerate(lengths):
        due = min(T, max(0, n - window - sinks - int(before[9][b])))
        assert stored[b] == int(before[9][b]) + due
    new = found[0][0].view(torch.float16)[0, 0, lengths[0] % (window + 16)]
    assert bool(new.isfinite().all()) and float(new[3]) == 65504.0 and float(new[2]) == 0.0


def test_the_op_checks_before_it_writes() -> None:
    s = state([40, 40], 2, 64, 64, window=16, sinks=4, draft=4)
    k, v = tokens(2, 2, 3, 64, 64, torch.float32)
    before = [x.clone() for x in s]
    for bad in ((k[:1], v[:1]), (k[:, :1], v), (k[..., :32], v), (k, v[:, :, :2]), (k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))):
        with pytest.raises(ShapeError, match="at most 4 tokens"):
            kv_slide(s, *bad, 16)
    assert all(torch.equal(a, b) for a, b in zip(s, before, strict=True))
    out = [torch.zeros(3, 2, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    runs = torch.zeros(3, 2, 4, dtype=torch.int32, device=DEVICE)
    op = torch.ops.moe_prefetch.kv_slide.default
    torch.library.opcheck(op, (*s, *out, runs, k, v, 16), test_utils=("test_schema", "test_faketensor"))


def test_what_attention_is_told() -> None:
    s = state([3, 30], 1, 64, 64, window=16, sinks=4, draft=8)
    tell_naive(s)
    assert s.now_3B.tolist() == [[0, 10], [3, 30], [4, 14]]


def test_it_compiles_for_the_gpu_it_is_for() -> None:
    launches = (
        "from tests.kernels import test_kv_slide as t\n"
        "from moe_prefetch.kernels.kv_slide import fused\n"
        "for N, T, dk, dv, dtype in ((4, 1, 128, 128, torch.bfloat16), (3, 8, 64, 64, torch.float32), (1, 1, 576, 0, torch.float16)):\n"
        "    s = t.state([300, 200], N, dk, dv, window=64, sinks=4, draft=8)\n"
        "    out = [torch.zeros(T, 2, N, d, dtype=torch.float16) for d in (dk, dv)]\n"
        "    fused.slide(s, *out, torch.zeros(T, 2, 4, dtype=torch.int32), *t.tokens(2, N, T, dk, dv, dtype), 64)\n"
    )
    assert compiled(launches) == ["slide_tokens"] * 3
