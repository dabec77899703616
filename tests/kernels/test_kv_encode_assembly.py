"""The encoder's assembly, run lane by lane on a CPU, does what the law says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_prefetch.kernels.kv_encode import assembly, fused_pages
from moe_prefetch.kernels.kv_encode import naive as law
from moe_prefetch.kernels.kv_encode.records import shares

from .ptx_lanes import LANES, U32, Warp

START, SHARED = 512, 48992  # where a program's shared memory begins, its bytes
G, Q = LANES // 4, LANES % 4


def table() -> np.ndarray:
    """Shared memory, as programs fill it."""
    rows = fused_pages.table_on(torch.device("cpu"))
    out = torch.cat([rows[:208].repeat(1, 16).flatten(), rows[208:].flatten()]).numpy().view(np.uint8)
    return np.concatenate([np.zeros(START, np.uint8), out, np.full(SHARED - len(out), 0x7F, np.uint8)])


def numbers(count: int, turn: int) -> torch.Tensor:
    """Two rows of eight groups of lanes, `count` numbers each; zeros, ties and quiet rows among them."""
    x = torch.randn(16, count) * torch.exp2(torch.randint(-105 if turn % 4 == 0 else -12, 17, (16, 1)).float())
    if turn % 3 == 1:
        x = (x / x.abs().amax(-1, keepdim=True) * 24).round() * torch.exp2(torch.randint(-30, 10, (16, 1)).float())
    return x * (torch.rand(16, count) < 0.2) if turn % 5 == 2 else x


def u32(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().numpy().view(U32)


def lanes(x: torch.Tensor, outs: int) -> dict[str, np.ndarray]:
    """Operands from `outs` on: sixteen channels a lane of rows g and g + 8."""
    found = {}
    for j in range(16):
        ch = torch.from_numpy(8 * Q + j % 8 + 32 * (j // 8))
        found |= {f"${outs + 2 * j + r}": u32(x[torch.from_numpy(G + 8 * r), ch]) for r in (0, 1)}
    return found


def both(operand: int, x: np.ndarray) -> dict[str, np.ndarray]:
    return {f"${operand}": x, f"${operand + 1}": x}


def places(operand: int) -> dict[str, np.ndarray]:
    """A lane's place in a row of the table, where that begins, and the factor 128."""
    start, wide = (np.full(32, x, U32) for x in (START, 128))
    return both(operand, (LANES % 16 * 8).astype(U32)) | both(operand + 2, start) | both(operand + 4, wide)


@pytest.mark.parametrize("blocks", [1, 2])
def test_scales_and_codes(blocks: int) -> None:
    """Lane 4 g + q has channels 8 q to 8 q + 7 and 32 + 8 q to 32 + 8 q + 7 of rows g and g + 8."""
    shared, block, place = table(), 64 // blocks, (LANES % 16 * 8).astype(U32)
    own = torch.from_numpy(G + 8 * (Q // 2)), torch.from_numpy(Q % blocks)
    for turn in range(24):
        x = numbers(64, turn)
        w = shares(torch.rand(1, 64) ** 3 + 0.01, block)[0]
        mag = x.abs().unflatten(-1, (blocks, block))
        found = Warp(shared).run(assembly.most(blocks), lanes(x, 2) | both(34, place) | {"encode_most": np.zeros(32, U32)})
        assert (found["$0"] == u32(mag.amax(-1)[own])).all(), turn
        for limit in (mag.amax(), mag.amax() * 1.0001):
            told = Warp(np.full(4, limit.item(), np.float32).view(np.uint8)).run(assembly.loud(), found | {"$1": np.full(32, 8, U32)})["$0"]
            assert (told == (mag.amax() >= limit).numpy()).all(), turn
        outs = 2 * blocks + 2
        inputs = lanes(x, outs) | places(outs + 32) | both(outs + 70, found["$0"])
        for j in range(16):
            ch = torch.from_numpy(8 * Q + j % 8 + 32 * (j // 8))
            inputs |= both(outs + 38 + 2 * j, w[ch].numpy().astype(U32) << U32(8) * (G % 4).astype(U32))
        found = Warp(shared).run(assembly.choose(blocks), inputs)
        zero = mag.amax(-1) < law.TINY
        scale = law._chosen_scale(mag, w.unflatten(-1, (blocks, block)).expand_as(mag))
        want = scale.masked_fill(zero, law.ZERO_SCALE)
        assert (found[f"${outs - 2}"] == u32(want[own])).all(), turn
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
                got = np.stack([words[f"${r}"], words[f"${2 + r}"]], 1).view(np.uint8) + np.uint8(1)
                rows, ch = torch.from_numpy(G + 8 * r)[:, None], torch.from_numpy(8 * Q + 32 * half)[:, None] + torch.arange(8)
                assert ((got >> 7 << 3 | got >> 1 & 7) == code[rows, ch].numpy()).all(), turn


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_number_that_is_none_shows_in_the_largest_and_reads_from_shared_memory(blocks: int) -> None:
    for odd in ([float("nan")], [float("inf"), float("nan")], [1e38, -float("inf")], [float("nan"), 3e38, 1e-30]):
        x = torch.randn(16, 64)
        x[torch.randint(16, (9,)), torch.randint(64, (9,))] = torch.tensor(odd)[torch.arange(9) % len(odd)]
        found = Warp(table()).run(
            assembly.most(blocks), lanes(x, 2) | both(34, (LANES % 16 * 8).astype(U32)) | {"encode_most": np.zeros(32, U32)})
        limit = np.full(1, 65504, np.float32).view(np.uint8)
        assert (Warp(limit).run(assembly.loud(), found | {"$1": np.zeros(32, U32)})["$0"] == 1).all()
        outs = 2 * blocks + 2
        inputs = lanes(x, outs) | places(outs + 32) | both(outs + 70, found["$0"])
        for j in range(16):
            inputs |= both(outs + 38 + 2 * j, np.full(32, 7, U32) << U32(8) * (G % 4).astype(U32))
        # an address outside of a program's memory would be out of bounds here
        Warp(table()).run(assembly.choose(blocks), inputs)


@pytest.mark.parametrize("count", [64, 128])
def test_least_of_numbers(count: int) -> None:
    x = torch.rand(4 + count) * 1e30
    for at in (4, count // 2 + 3, count + 3):
        x[at] /= 1e6
        warp = Warp(x.numpy().copy().view(np.uint8))
        warp.run(assembly.least(count), {"$1": np.zeros(32, U32)})
        assert warp.shared.view(np.float32)[0] == x[4:].min()


ODD = torch.tensor([float("nan"), float("inf"), -float("inf"), 7e4, -1e30, 65504.0, -0.0, 1e-40, 3.0])


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_numbers_are_cleaned_and_counted(kind: str, dtype: torch.dtype) -> None:
    """But for channels without gain, the outliers, which are counted where they are stored."""
    for share in (0.0, 0.02, 0.5):
        # of a lane: rows, halves, channels
        shape = 32, 2, 2, 8
        x = torch.where(torch.rand(shape) < share, ODD[torch.randint(len(ODD), shape)], torch.randn(shape) * 100).to(dtype)
        gain = (torch.rand(2, 8) < 0.9).float()
        shared = np.zeros((2, 256, 16), np.uint8)
        shared[:, :64] = x.permute(2, 0, 1, 3).contiguous().view(torch.int16).numpy().view(np.uint8).reshape(2, 64, 16)
        at, gains = (LANES * 32).astype(U32), {}
        for j in range(16):
            gains |= both(38 + 2 * j, np.full(32, gain.flatten()[j].item(), np.float32).view(U32))
        there = np.stack([LANES % 3 > 0, LANES % 5 > 0], 1)
        on = {"$34": there[:, 0].astype(U32), "$35": there[:, 1].astype(U32), "$36": at}
        some = torch.where(torch.from_numpy(there)[:, :, None, None], x, 0.0)
        for text, inputs, want in ((assembly.read(kind), {}, x.float()), (assembly.clean(kind), on | gains, law.clean(some)[0])):
            warp = Warp(shared.reshape(-1))
            found = warp.run(text.replace("+64]", "+4096]"), {"$32": at, "$33": at + U32(16)} | inputs)
            got = np.stack([found[f"${2 * j + r}"] for r in (0, 1) for j in range(16)], 1).view(np.float32)
            assert np.array_equal(got, want.numpy().reshape(32, 32), equal_nan=True)
            assert (np.signbit(got) == np.signbit(want.numpy().reshape(32, 32)))[~np.isnan(got)].all()
        assert warp.counted.tolist() == [int(c) for c in law.clean(torch.where(gain > 0, some, 0.0))[1:]]


def test_outliers_are_cleaned_and_counted() -> None:
    x = torch.cat([ODD, torch.randn(23) * 40000]).bfloat16()
    mean = torch.randn(32) * 3e4
    warp = Warp(np.zeros(4, np.uint8))
    found = warp.run(assembly.outlier(), {"$1": u32(x.float()), "$2": u32(mean), "$3": np.zeros(32, U32)})["$0"]
    clean, *counts = law.clean(x)
    want = (clean - mean).clamp(-law.FP16_MAX, law.FP16_MAX).half().view(torch.int16).numpy().view(np.uint16)
    assert ((found & U32(0xFFFF)) == want).all()
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
