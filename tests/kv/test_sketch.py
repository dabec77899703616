from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_prefetch.errors import ShapeError
from moe_prefetch.kv import dynamic_fp4_kv_dequantize, dynamic_fp4_kv_quantize


def worst(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Largest error over its bound, element by element (outliers apart), as the docstring states it."""
    packed = dynamic_fp4_kv_quantize(x, block_size=block)
    y = dynamic_fp4_kv_dequantize(packed)
    x = x.float()
    inlier = torch.ones(x.numel(), dtype=torch.bool)
    inlier[packed.positions.long()] = False
    kept = (x.flatten() * inlier).reshape(-1, x.shape[-1])
    pad = -kept.shape[-1] % block
    amax = torch.nn.functional.pad(kept, (0, pad)).unflatten(-1, (-1, block)).abs().amax(-1)
    bound = torch.maximum(amax * (1 / 6 + 1 / 48), packed.factor * 256 / 1024).repeat_interleave(block, -1)[:, : x.shape[-1]]
    error = (y - x).abs().flatten()
    assert bool((error[~inlier] <= x.flatten()[~inlier].abs() * 2.0**-11 + 1e-7).all())
    return (error[inlier] / bound.flatten()[inlier].clamp(min=1e-30)).max()


@pytest.mark.parametrize("layer", ["05", "21"])
@pytest.mark.parametrize("name", ["k_post", "k_pre", "v"])
def test_real_keys_and_values_stay_within_the_bound(shared_data: Path, layer: str, name: str) -> None:
    x = torch.tensor(np.load(shared_data / f"smollm2_135m_L{layer}.npz")[name])
    assert worst(x) <= 1
    packed = dynamic_fp4_kv_quantize(x)
    assert 0 < packed.outlier_share < 0.05
    assert dynamic_fp4_kv_dequantize(packed).shape == x.shape


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 63, 31), (1, 1000, 80), (3, 5, 2, 64), (2, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_shape_and_dtype_round_trips(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    assert worst(x) <= 1


def test_storage_matches_its_bits() -> None:
    x = torch.randn(2, 512, 4, 128)
    p = dynamic_fp4_kv_quantize(x)
    n, m = x.numel(), len(p.values)
    assert p.held_bytes() == n // 2 + n // 32 + 4 + m * (2 + 4)
    assert p.bits_per_element() == pytest.approx(4.25 + 48 * m / n, abs=1e-3)


def test_published_faults_are_gone() -> None:
    x = torch.randn(1, 400, 64)
    x[0, :, 3] += 50.0
    x[0, 17, 9] = -40.0
    p = dynamic_fp4_kv_quantize(x)
    assert 17 * 64 + 9 in p.positions.tolist()
    assert not any(i % 64 == 3 for i in p.positions.tolist() if abs(x.flatten()[i] - 50) < 2), "a constant channel is no outlier"
    small = dynamic_fp4_kv_dequantize(dynamic_fp4_kv_quantize(x * 2.0**-10)) * 2.0**10
    assert torch.allclose(small, dynamic_fp4_kv_dequantize(p), rtol=1e-2, atol=1e-3)


def test_special_values_are_defined_and_counted() -> None:
    x = torch.randn(1, 40, 64)
    x[0, 1, 1], x[0, 2, 2], x[0, 3, 3] = torch.inf, -torch.inf, torch.nan
    p = dynamic_fp4_kv_quantize(x)
    y = dynamic_fp4_kv_dequantize(p)
    assert (p.saturated, p.nan) == (2, 1) and bool(y.isfinite().all())
    assert y[0, 1, 1] > 5e4 and y[0, 2, 2] < -5e4 and abs(float(y[0, 3, 3])) < 1
    assert bool((dynamic_fp4_kv_dequantize(dynamic_fp4_kv_quantize(torch.zeros(1, 8, 64))) == 0).all())


@pytest.mark.parametrize("bad", [torch.zeros(8), torch.zeros(2, 3, dtype=torch.int32)])
def test_bad_input_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ShapeError):
        dynamic_fp4_kv_quantize(bad)
    with pytest.raises(ShapeError):
        dynamic_fp4_kv_quantize(torch.zeros(1, 2, 3), block_size=0)
