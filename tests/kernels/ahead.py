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


def main() -> None:
    import sys

    import torch

    from moe_prefetch.kernels.kv_attend import fused
    from moe_prefetch.kernels.kv_encode.records import neutral_book
    from moe_prefetch.kv.format import PAGE, PageLayout, format_of

    fused.programs_on = lambda device, rows: 528
    kernels = compile_only()
    for name in sys.argv[1:] or SHAPES:
        B, N, G, D, tokens, outliers, softcap = SHAPES[name]
        layout = PageLayout(format_of("fp4-quality"), D, D, outliers)
        i32 = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
        half = lambda n, B=B, N=N, D=D: torch.zeros(B, N, n, D, dtype=torch.float16)  # noqa: E731
        kernels.clear()
        fused.attend(
            torch.zeros(B, N * G, 1, D, dtype=torch.bfloat16),
            i32(B),
            torch.zeros(1, N, layout.page_bytes, dtype=torch.uint8),
            i32(B, -(-tokens // PAGE)),
            i32(B),
            i32(B),
            half(4),
            half(4),
            half(65),
            half(65),
            i32(B),
            neutral_book(layout, N),
            layout,
            scale=D**-0.5,
            softcap=softcap,
        )
        print(name, *(k.metadata.name for k in kernels), flush=True)


if __name__ == "__main__":
    main()
