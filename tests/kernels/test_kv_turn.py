"""Rows times each head's matrix: the fused kernel against its law, and the law against a sum that is written out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.kv_turn import fused
from moe_prefetch.kernels.kv_turn.naive import turn_naive
from moe_prefetch.kernels.kv_turn.op import kv_turn

from .kv_cases import compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(B: int, N: int, G: int, T: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as a model makes them, [B, T, H, d] seen as [B, H, T, d]; matrices FP16."""
    g = torch.Generator().manual_seed(B * 100 + T)
    x = torch.randn(B, T, N * G, d, generator=g).to(dtype).transpose(1, 2)
    return x.to(DEVICE), torch.randn(N, d, d, generator=g).half().to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("B", "N", "G", "T", "d"),
                         [(1, 2, 1, 1, 64), (3, 1, 4, 3, 80), (2, 2, 7, 1, 112), (63, 1, 1, 1, 128), (1, 1, 1, 8, 256)])
def test_fused_equals_the_law(B: int, N: int, G: int, T: int, d: int, dtype: torch.dtype) -> None:
    x, m = inputs(B, N, G, T, d, dtype)
    exact = torch.einsum("bngtd,nde->bngte", x.double().unflatten(1, (N, G)), m.double()).flatten(1, 2)
    for matrix in (m, m.float()):
        wide = fused.turn(x, matrix, True)
        # FP64 sums leave the rounding to FP32 alone.
        assert torch.equal(wide, exact.float()) and torch.equal(wide, turn_naive(x, matrix, True))
    narrow = fused.turn(x, m.float(), False)
    assert (narrow - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (turn_naive(x, m.float(), False) - exact).abs().max() <= 1e-5 * exact.abs().max()
    # Either side of the matrix: a view, whose strides are swapped.
    back = fused.turn(x, m.mT, True)
    assert torch.equal(back, turn_naive(x, m.mT.contiguous(), True))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, m = inputs(5, 2, 2, 3, 64, torch.bfloat16)
    for wide in (True, False):
        together = fused.turn(x, m, wide)
        for b in range(5):
            for t in range(3):
                assert torch.equal(fused.turn(x[b : b + 1, :, t : t + 1], m, wide)[0, :, 0], together[b, :, t])
    x[1, 0, 2, 5], x[2, 3, 0, 1] = torch.nan, torch.inf
    there = fused.turn(x, m, False).isfinite().all(-1)
    assert not there[1, 0, 2] and not there[2, 3, 0] and int((~there).sum()) == 2


def test_the_op_checks_its_shapes() -> None:
    x, m = inputs(2, 2, 3, 1, 64, torch.bfloat16)
    for bad in (m[0], m[:, :32], m[..., :32], torch.cat([m, m]).contiguous()[:4]):
        with pytest.raises(ShapeError):
            kv_turn(x, bad, True)
    assert kv_turn(x[:0], m, True).shape == (0, 6, 1, 64)
    for wide in (True, False):
        args = (x, m.float().mT, wide)
        torch.library.opcheck(torch.ops.moe_prefetch.kv_turn.default, args, test_utils=("test_schema", "test_faketensor"))
        assert kv_turn(*args).is_contiguous()


def test_it_compiles_for_the_gpu_it_is_for() -> None:
    launches = (
        "from moe_prefetch.kernels.kv_turn import fused\n"
        "for d, wide in ((64, True), (128, False), (128, True), (256, True)):\n"
        "    x = torch.zeros(2, 1, 8, d, dtype=torch.bfloat16).transpose(1, 2)\n"
        "    fused.turn(x, torch.zeros(2, d, d, dtype=torch.float16).mT, wide)\n"
    )
    assert compiled(launches) == ["turn_rows"] * 4
