"""Reading memory at an address: kernel against law, in the interpreter or on a GPU."""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.in_place import fused
from moe_prefetch.kernels.in_place.naive import BLOCK, read
from moe_prefetch.kernels.in_place.op import _in_place, in_place

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def memory(nbytes: int) -> torch.Tensor:
    raw = torch.randint(0, 256, (nbytes + 128,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).to(DEVICE)
    return raw[-raw.data_ptr() % 128 :][:nbytes]


@pytest.mark.parametrize("words", [0, 4, 8, 60, 1000, BLOCK, 3 * BLOCK + 4])
@pytest.mark.parametrize("programs", [1, 2, 7])
def test_folds_and_copies_are_the_law(words, programs):
    source = memory(max(4 * words, 4))
    where = torch.tensor([source.data_ptr()], dtype=torch.int64, device=DEVICE)
    want, copy = read(source[: 4 * words].cpu(), programs)
    out = torch.full((4 * words // 16 * 16 + 32,), 0xA5, dtype=torch.uint8, device=DEVICE)
    sums = torch.full((programs,), 77, dtype=torch.int32, device=DEVICE)
    fused.launch(where, out.view(torch.int32), sums, words, programs, True)
    assert torch.equal(out[: 4 * words].cpu(), copy) and bool((out[4 * words :] == 0xA5).all()) and bool((sums == 77).all())
    out.fill_(0xA5)
    fused.launch(where, out.view(torch.int32), sums, words, programs, False)
    assert torch.equal(sums.cpu(), want) and bool((out == 0xA5).all())
    words_in_all = source[: 4 * words].cpu().view(torch.int32).numpy()
    assert np.bitwise_xor.reduce(want.numpy()) == np.bitwise_xor.reduce(words_in_all, initial=0)


def test_the_op_reads_the_twin_on_a_cpu_and_the_address_on_a_gpu():
    source = memory(4096)
    where, sums = torch.tensor([source.data_ptr()], dtype=torch.int64, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    in_place(where, 4096, sums, memory=[source])
    assert torch.equal(sums.cpu(), read(source.cpu(), 3)[0])
    out = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    in_place(where, 4096, sums, out=out, memory=[source])
    assert torch.equal(out, source)
    torch.library.opcheck(_in_place, (where, out, sums, 4096, True, [source]))
    torch.library.opcheck(_in_place, (where, out, sums, 4096, False, [source]))


def test_what_does_not_fit_is_refused_before_any_work():
    source = memory(64)
    where, sums = torch.tensor([source.data_ptr()], dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    good = {"where": where, "nbytes": 64, "found": sums, "memory": [source]}
    bad = [{"nbytes": 60}, {"nbytes": -16}, {"where": where.int()}, {"where": where[0]}, {"found": sums.long()}, {"found": sums[:0]},
           {"out": torch.zeros(32, dtype=torch.uint8, device=DEVICE)}, {"out": torch.zeros(64, dtype=torch.int8, device=DEVICE)}]
    bad += [{"memory": []}, {"memory": [source[:32]]}] if DEVICE == "cpu" else []
    for change in bad:
        with pytest.raises(ShapeError) as e:
            in_place(**{**good, **change})
        assert e.value.expected and e.value.do
