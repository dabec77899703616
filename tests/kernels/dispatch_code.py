"""Compile the kernels of dispatch for sm_90 as they are launched, without a GPU; one JSON object each: kernel, spills, wide (16-byte
stores), system (scoped accesses), words and sent (16-byte loads that nothing caches, and stores, of words that carry a number).

The launches are the package's own: an argument that a kernel does not have fails here, which the interpreter lets pass.
"""
from __future__ import annotations

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moe_prefetch.kernels.dispatch import fused, fused_words
from moe_prefetch.kernels.dispatch.planes import Planes


class Hopper:
    """A driver that knows what a GPU is called, and no more."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def launch_all(planes: Planes) -> None:
    R, K, E, tokens = planes.ranks, planes.top_k, 16, 3
    bases, state, serve, failed = (torch.zeros(n, dtype=torch.int64) for n in (R, 8, E, 1))
    number, ids, weights = torch.zeros(R, E, dtype=torch.int64), torch.zeros(tokens, K, dtype=torch.int64), torch.zeros(tokens, K)
    hidden, result = (torch.zeros(n, planes.hidden, dtype=planes.dtype) for n in (tokens, R * planes.slots * planes.back_rows))
    rows, same = (hidden, ids, weights, serve, number, bases, state, failed, planes), (bases, state, failed)
    for waits in (True, False):
        fused.launch_put(*rows, 0, 0, 30_000_000_000, waits)
    fused.launch_wait(*same, 0, 30_000_000_000)
    fused.launch_give(result, *same, planes, 0, 0, 30_000_000_000)
    fused.launch_gather(ids, serve, torch.zeros(planes.nbytes, dtype=torch.uint8), state, planes, 1)
    for sends, takes in ((True, True), (True, False), (False, True)):
        fused_words.launch_put(*rows, 0, 30_000_000_000, sends, takes)
    fused_words.launch_give(result, ids, serve, *same, planes, 0, 30_000_000_000)


def main() -> None:
    run, found = JITFunction.run, []
    triton.runtime.driver.set_active(Hopper())
    fused_words.processors = lambda device: 132  # type: ignore[assignment]

    def compiled(self, *args, grid, warmup, **more):
        found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **more)))

    JITFunction.run = compiled
    for unreduced, dtype, ranks, hidden, top_k in ((False, torch.bfloat16, 2, 2048, 8), (True, torch.bfloat16, 2, 2048, 8),
                                                   (True, torch.float16, 3, 72, 3), (False, torch.float32, 8, 4096, 2)):
        found.clear()
        launch_all(Planes(ranks, 64, hidden, top_k, dtype, unreduced))
        for name, kernel in found:
            ptx = kernel.asm["ptx"]
            counts = {"spills": "st.local", "wide": "st.global.v4.b32", "system": ".sys.", "words": "ld.volatile.global.v2.b64",
                      "sent": "st.global.v2.b64"}
            print(json.dumps({"kernel": name, "ranks": ranks, "unreduced": unreduced, **{k: ptx.count(v) for k, v in counts.items()}}))


if __name__ == "__main__":
    main()
