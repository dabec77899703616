"""Tokens into the FP16 window: the fused kernel against its law, and the law against a sentence."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.kv_take import fused
from moe_prefetch.kernels.kv_take.naive import take_naive
from moe_prefetch.kernels.kv_take.op import kv_take

from .kv_cases import compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 65504.0, -65504.0, 65519.0, 65536.0, -1e30, 2.0**-24, 2.0**-26, 1e-42]


def inputs(B: int, N: int, T: int, dk: int, dv: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K as a model makes it, [B, T, N, d] seen as [B, N, T, d], V with a last stride of 2; odd values in the first and the last token."""
    g = torch.Generator().manual_seed(B * 100 + T)
    k = torch.randn(B, T, N, dk, generator=g).to(dtype).transpose(1, 2)
    v = torch.randn(B, N, T, dv * 2, generator=g).to(dtype)[..., ::2]
    odd = torch.tensor(ODD).to(dtype)
    k[0, 0, 0, : len(odd)] = odd
    if dv:
        v[-1, -1, -1, : len(odd)] = odd
    return k.to(DEVICE), v.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("B", "N", "T", "dk", "dv"), [(1, 2, 1, 64, 64), (3, 1, 5, 80, 48), (2, 2, 33, 128, 128), (2, 1, 1, 96, 0)])
def test_fused_equals_the_law(B: int, N: int, T: int, dk: int, dv: int, dtype: torch.dtype) -> None:
    k, v = inputs(B, N, T, dk, dv, dtype)
    found = []
    for take in (take_naive, fused.take):
        # what nobody writes stays poison
        buffers = [torch.full((B, N, T + 9, d), torch.nan, dtype=torch.float16, device=DEVICE) for d in (dk, dv)]
        counts = torch.tensor([5, 7], device=DEVICE)
        take(*buffers, counts, k, v, 4)
        found.append((*(x.view(torch.int16) for x in buffers), counts))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    sides = 1 + (dv > 0)
    over = sum(abs(float(torch.tensor(x).to(dtype))) > 65504 for x in ODD)
    assert found[0][2].tolist() == [5 + sides * over, 7 + sides]
    written = found[0][0].view(torch.float16)[:, :, 4 : 4 + T]
    assert bool(written.isfinite().all()) and bool(found[0][0].view(torch.float16)[:, :, :4].isnan().all())


def test_the_op_checks_before_it_writes() -> None:
    k, v = inputs(1, 2, 3, 64, 64, torch.float32)
    buffers = [torch.zeros(1, 2, 8, 64, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for bad in ((k, v, 6), (k, v, -1), (k[:, :1], v, 0), (k, v[..., :32], 0), (k, v[:, :, :2], 0)):
        with pytest.raises(ShapeError):
            kv_take(*buffers, counts, *bad)
    assert not buffers[0].any() and not buffers[1].any() and not counts.any()
    op = torch.ops.moe_prefetch.kv_take.default
    torch.library.opcheck(op, (*buffers, counts, k, v, 2), test_utils=("test_schema", "test_faketensor"))


def test_it_compiles_for_the_gpu_it_is_for() -> None:
    launches = (
        "from moe_prefetch.kernels.kv_take import fused\n"
        "for T, dtype in ((1, torch.bfloat16), (8, torch.float16), (100, torch.float32)):\n"
        "    k = torch.zeros(2, T, 8, 128, dtype=dtype).transpose(1, 2)\n"
        "    buffer = torch.zeros(2, 8, 128, 128, dtype=torch.float16)\n"
        "    fused.take(buffer, buffer, torch.zeros(2, dtype=torch.int64), k, k, 3)\n"
    )
    assert compiled(launches) == ["take_tokens"] * 3
