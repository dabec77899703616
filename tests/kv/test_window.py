"""The FP16 window against plain concatenation, and integers on their way to the device."""

from __future__ import annotations

import random

import pytest
import torch

from moe_prefetch.kv.ints import DeviceInts
from moe_prefetch.kv.window import SPARE, WASTE, Window


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_operations_equals_concatenation(seed: int) -> None:
    rng, size = random.Random(seed), [1, 5, 17, 70][seed % 4]
    w, counts = Window(2, 3, 16, 8, size, "cpu"), torch.zeros(2, dtype=torch.int64)
    k, v = torch.zeros(2, 3, 0, 16), torch.zeros(2, 3, 0, 8)
    for _ in range(200):
        what = rng.choice(["append"] * 4 + ["keep"] * 3 + ["crop", "select"])
        n = rng.choice([1, 1, 1, 2, 7, 150])
        if what == "append":
            new = torch.randn(2, 3, n, 16).half().float(), torch.randn(2, 3, n, 8).half().float()
            taken = w.append(*new, counts)
            assert all(torch.equal(a.float(), b) for a, b in zip(taken, new, strict=True))
            k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
        elif what == "keep":
            n = min(size, k.shape[2])
            w.keep(n)
            k, v = k[:, :, k.shape[2] - n :], v[:, :, v.shape[2] - n :]
            # what a prompt took is given back
            assert w.buffer_k.shape[2] <= max(size, n) + SPARE + WASTE
        elif what == "crop":
            w.crop(n)
            k, v = k[:, :, : max(0, k.shape[2] - n)], v[:, :, : max(0, v.shape[2] - n)]
        else:
            w.select(torch.tensor([1, 1]))
            k, v = k[[1, 1]], v[[1, 1]]
        assert torch.equal(w.k.float(), k) and torch.equal(w.v.float(), v) and w.columns == k.shape[2]
    assert not counts.any()


def test_steps_are_written_in_place_and_the_buffer_has_few_sizes() -> None:
    """A kernel is compiled for each size of the buffer: few on the way to a full window, one from there on."""
    w, counts = Window(1, 1, 8, 8, 200, "cpu"), torch.zeros(2, dtype=torch.int64)
    sizes, places = [], set()
    for i in range(600):
        w.append(torch.full((1, 1, 1, 8), float(i)), torch.zeros(1, 1, 1, 8), counts)
        w.keep(min(200, i + 1))
        sizes.append(w.buffer_k.shape[2])
        if i > 300:
            places.add(w.buffer_k.data_ptr())
    assert len(set(sizes)) == 3 and len(set(sizes[210:])) == 1 and len(places) == 1
    assert w.k[0, 0, :, 0].tolist() == [float(i) for i in range(400, 600)]


@pytest.mark.parametrize("settle", [1, 32])
def test_decode_sees_few_sizes_whatever_the_prompt(settle: int) -> None:
    """Prompts of any length, then steps and drafts: a kernel that reads the buffer is compiled for two or three sizes."""
    seen = set()
    for prompt in range(100, 260, 7):
        w, counts = Window(1, 1, 8, 8, 64 + settle, "cpu"), torch.zeros(2, dtype=torch.int64)
        live = prompt
        for step in (prompt, 1, 1, 8, 1, 10, 1, 1, 5, 1):
            if step < prompt:
                w.keep(live := 64 + (live - 64) % settle)
            w.append(torch.zeros(1, 1, step, 8), torch.zeros(1, 1, step, 8), counts)
            if step == prompt:
                w.keep(live := 96 + (live - 96) % settle)
            else:
                live += step
                seen.add(w.buffer_k.shape[2])
    assert len(seen) <= 3


def test_equal_integers_are_one_tensor() -> None:
    ints = DeviceInts(keep=3)
    a = ints([1, 2, 3], "cpu")
    assert a.dtype == torch.int32 and a.tolist() == [1, 2, 3] and ints((1, 2, 3), torch.device("cpu")) is a
    assert ints([[1, 2], [3, 4]], "cpu").tolist() == [[1, 2], [3, 4]] and ints([], "cpu").shape == (0,)
    ints([9], "cpu")
    assert ints([1, 2, 3], "cpu") is not a, "only the last ones are kept"


def test_a_tensor_is_read_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or own(self))
    ints, t = DeviceInts(), torch.tensor([2, 0, 1])
    assert [ints.read(t) for _ in range(4)] == [[2, 0, 1]] * 4 and len(reads) == 1
    t[0] = 5
    assert ints.read(t) == [5, 0, 1] and ints.read(torch.tensor(7)) == 7 and ints.read(t.clone()) == [5, 0, 1]
    with torch.inference_mode():
        t = torch.tensor([1])
        assert ints.read(t) == [1]
        t[0] = 2
        assert ints.read(t) == [2]
