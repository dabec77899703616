"""The encoder's assembly, run lane by lane on a CPU, does what the law says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_prefetch.kernels.kv_encode import assembly, fused_pages
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.records import shares

from .ptx_lanes import LANES, U32, Warp

START = 512  # where a program's shared memory begins
G, Q = LANES // 4, LANES % 4


def table() -> np.ndarray:
    """Shared memory, as programs fill it."""
    rows = fused_pages.table_on(torch.device("cpu"))
    out = torch.cat([rows[:208].repeat(1, 16).flatten(), rows[208:].flatten()]).numpy().view(np.uint8)
    return np.concatenate([np.zeros(START, np.uint8), out, np.full(4096, 0x7F, np.uint8)])


def numbers(count: int, turn: int) -> torch.Tensor:
    """Two rows of eight groups of lanes, `count` numbers each; zeros, ties and quiet rows among them."""
    x = torch.randn(16, count) * torch.exp2(torch.randint(-105 if turn % 4 == 0 else -12, 17, (16, 1)).float())
    if turn % 3 == 1:
        x = (x / x.abs().amax(-1, keepdim=True) * 24).round() * torch.exp2(torch.randint(-30, 10, (16, 1)).float())
    return x * (torch.rand(16, count) < 0.2) if turn % 5 == 2 else x


def u32(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().numpy().view(U32)


@pytest.mark.parametrize("blocks", [1, 2])
def test_scales_and_codes(blocks: int) -> None:
    """Lane 4 g + q has channels 8 q to 8 q + 7 and 32 + 8 q to 32 + 8 q + 7 of rows g and g + 8."""
    shared, block = table(), 64 // blocks
    for turn in range(24):
        x = numbers(64, turn)
        w = shares(torch.rand(1, 64) ** 3 + 0.01, block)[0]
        outs = 2 * blocks + 2
        inputs = {}
        for j in range(16):
            ch = torch.from_numpy(8 * Q + j % 8 + 32 * (j // 8))
            for r in (0, 1):
                inputs[f"${outs + 2 * j + r}"] = u32(x[torch.from_numpy(G + 8 * r), ch])
                inputs[f"${outs + 36 + 2 * j + r}"] = w[ch].numpy().astype(U32) << U32(8) * (G % 4).astype(U32)
        for r in (0, 1):
            inputs[f"${outs + 32 + r}"] = (LANES % 16 * 8 + START).astype(U32)
            inputs[f"${outs + 34 + r}"] = np.full(32, 128, U32)
        found = Warp(shared).run(assembly.choose(blocks), inputs)
        mag = x.abs().unflatten(-1, (blocks, block))
        zero = mag.amax(-1) < law.TINY
        scale = law._chosen_scale(mag, w.unflatten(-1, (blocks, block)).expand_as(mag))
        want = scale.masked_fill(zero, law.ZERO_SCALE)
        own = want[torch.from_numpy(G + 8 * (Q // 2)), torch.from_numpy(Q % blocks)]
        assert (found[f"${outs - 2}"] == u32(own)).all(), turn
        inverse = torch.where(zero, 0.0, 4.0 / scale)
        code = law._rounded(x, scale.masked_fill(zero, 0.0).repeat_interleave(block, -1))
        for h in range(blocks):
            for r in (0, 1):
                assert (found[f"${2 * h + r}"] == u32(inverse[torch.from_numpy(G + 8 * r), h])).all(), turn
        for half in (0, 1):
            h = half if blocks == 2 else 0
            inputs = {f"${4 + 2 * j + r}": found[f"${outs + 2 * (j + 8 * half) + r}"] for j in range(8) for r in (0, 1)}
            inputs |= {f"${20 + r}": found[f"${2 * h + r}"] for r in (0, 1)}
            words = Warp(shared).run(assembly.codes(), inputs)
            for r in (0, 1):
                got = np.stack([words[f"${r}"], words[f"${2 + r}"]], 1).view(np.uint8)
                rows, ch = torch.from_numpy(G + 8 * r)[:, None], torch.from_numpy(8 * Q + 32 * half)[:, None] + torch.arange(8)
                got = got + np.uint8(1)
                assert ((got >> 7 << 3 | got >> 1 & 7) == code[rows, ch].numpy()).all(), turn


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_numbers_are_cleaned_and_counted(kind: str, dtype: torch.dtype) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 7e4, -1e30, 65504.0, -0.0, 1e-40, 3.0])
    for share in (0.0, 0.02, 0.5):
        shape = 32, 2, 2, 8
        x = torch.where(torch.rand(shape) < share, odd[torch.randint(len(odd), shape)], torch.randn(shape) * 100).to(dtype)
        # by half, lane and row
        shared = np.zeros((2, 256, 16), np.uint8)
        shared[:, :64] = x.permute(1, 0, 2, 3).contiguous().view(torch.int16).numpy().view(np.uint8).reshape(2, 64, 16)
        warp = Warp(shared.reshape(-1))
        at = (LANES * 32).astype(U32)
        found = warp.run(assembly.read(kind), {"$32": at, "$33": at + U32(16), "$34": at, "$35": at})
        want, *counts = law.clean(x)
        got = np.stack([found[f"${2 * (8 * half + j) + r}"] for half in (0, 1) for r in (0, 1) for j in range(8)], 1).view(np.float32)
        assert (got.view(U32) == want.numpy().reshape(32, 32).view(U32)).all()
        assert warp.counted.tolist() == [int(c) for c in counts]


def test_bytes_of_scales() -> None:
    for turn in range(200):
        scale = (8 + torch.randint(0, 8, (32,))) * torch.exp2(torch.randint(-110, 20, (32,)).float())
        factor = torch.randint(-110, 20, (32,)).clamp(min=int(torch.log2(scale.max())) - 12)
        found = Warp(np.zeros(4, np.uint8)).run(assembly.scale_byte(), {"$1": u32(scale), "$2": u32(factor.int())})["$0"]
        assert (found == law.scale_bytes(scale, factor).numpy()).all(), turn


def test_both_planes_make_bytes() -> None:
    lo, hi = (torch.randint(0, 1 << 32, (32,)).numpy().astype(U32) & U32(0x8E8E8E8E) for _ in range(2))
    nibble = lambda x: (x.view(np.uint8) >> 7 << 3) | (x.view(np.uint8) + np.uint8(1) >> 1 & 7)  # noqa: E731
    got = Warp(np.zeros(4, np.uint8)).run(assembly.bytes_of_planes(), {"$1": lo, "$2": hi})["$0"]
    want = law._byte(torch.from_numpy(nibble(lo)), torch.from_numpy(nibble(hi)))
    assert (got.view(np.uint8) == want.numpy()).all()
    pairs = Warp(np.zeros(4, np.uint8)).run(assembly.in_pairs(), {"$2": lo, "$3": hi})
    got = np.stack([pairs["$0"], pairs["$1"]], 1).view(np.uint8).reshape(32, 4, 2)
    assert (got == np.stack([lo.view(np.uint8).reshape(32, 4), hi.view(np.uint8).reshape(32, 4)], -1)).all()
