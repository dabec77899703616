"""Compile for sm_90, without a GPU, every kernel that a call would launch.

usage: python tests/kernels/ahead.py [SHAPE ...]
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Chip:
    """What Triton asks its driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> list[Any]:
    """From now on launches in this process compile and do nothing else; their kernels are put into the list. Not under the interpreter."""
    kernels: list[Any] = []
    driver.set_active(Chip())
    JITFunction.__getitem__ = lambda self, grid: lambda *a, **k: kernels.append(self.warmup(*a, grid=grid, **k))
    return kernels


# name: batch, KV heads, query heads of each, head dim, tokens, outliers, soft cap
SHAPES = {
    "long": (8, 8, 4, 128, 32768, 8, 0.0),
    "alone": (1, 8, 8, 128, 131072, 3, 0.0),
    "capped": (2, 2, 5, 64, 900, 1, 20.0),
    "short": (8, 8, 4, 128, 2048, 0, 0.0),
    "wide": (2, 1, 16, 128, 300, 16, 0.0),
}


def call(batch: int, heads: int, group: int, dim: int, tokens: int, outliers: int, softcap: float) -> None:
    """One step of attention over pages of a format with that many outlier channels."""
    import torch

    from moe_prefetch.kernels.kv_attend import fused
    from moe_prefetch.kernels.kv_encode.records import neutral_book
    from moe_prefetch.kv.format import PAGE, PageLayout, format_of

    fused.programs_on = lambda device, rows: 528
    layout = PageLayout(format_of("fp4-quality"), dim, dim, outliers)
    i32 = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
    half = lambda n: torch.zeros(batch, heads, n, dim, dtype=torch.float16)  # noqa: E731
    fused.attend(
        torch.zeros(batch, heads * group, 1, dim, dtype=torch.bfloat16),
        i32(batch),
        torch.zeros(1, heads, layout.page_bytes, dtype=torch.uint8),
        i32(batch, -(-tokens // PAGE)),
        i32(batch),
        i32(batch),
        half(4),
        half(4),
        half(65),
        half(65),
        i32(batch),
        neutral_book(layout, heads),
        layout,
        scale=dim**-0.5,
        softcap=softcap,
    )


def main() -> None:
    import sys

    kernels = compile_only()
    for name in sys.argv[1:] or SHAPES:
        kernels.clear()
        call(*SHAPES[name])
        print(name, *(k.metadata.name for k in kernels), flush=True)


if __name__ == "__main__":
    main()
