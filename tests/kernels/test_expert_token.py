"""The kernel for one token and MXFP4: its text, on a CPU, with each MMA and conversion as a model, beside the law."""

from __future__ import annotations

import itertools
import re
import types

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.kernels.expert_mlp import fused

if not fused.GLUON:
    pytest.skip("this version of Triton takes the kernels in Triton", allow_module_level=True)

from moe_prefetch.kernels.expert_mlp import fused_token, fused_token_parts
from moe_prefetch.kernels.expert_mlp.naive import moe_records
from moe_prefetch.kernels.expert_mlp.record import Form

from . import gluon_cpu
from .expert_cases import records
from .gluon_cpu import Launch, Pointer, Tensor, unwrap
from .test_expert_mlp import BOUND, error

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a GPU where there is none")


def halves(word: Tensor, shape: torch.Size) -> torch.Tensor:
    """[..., 2] FP32: the two BF16 numbers of each word."""
    return word.v.to(torch.int32).expand(shape).contiguous().view(torch.bfloat16).view(*shape, 2).float()


def mma(a: list[Tensor], b: list[Tensor], c: list[Tensor]) -> tuple[Tensor, ...]:
    """m16n8k16 of every warp, of what its 32 threads [W, 8, 4] hold (PTX ISA, "Matrix fragments for mma.m16n8k16")."""
    shape = torch.broadcast_shapes(*(x.v.shape for x in (*a, *b, *c) if x is not None))
    warps, zero = shape[0], Tensor(torch.zeros(shape, dtype=torch.int32))
    A, B, C = torch.zeros(warps, 16, 16), torch.zeros(warps, 16, 8), torch.zeros(warps, 16, 8)
    for i, x in enumerate(zero if x is None else x for x in a):
        A[:, 8 * (i % 2) : 8 * (i % 2) + 8, 8 * (i // 2) : 8 * (i // 2) + 8] = halves(x, shape).flatten(2)
    for i, x in enumerate(b):
        B[:, 8 * i : 8 * i + 8] = halves(x, shape).flatten(2).mT
    for i, x in enumerate(c):
        C[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] = x.v.expand(shape)
    C += A @ B
    return tuple(Tensor(C[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2].clone()) for i in range(4))


def bf16x2(word: torch.Tensor, by: torch.Tensor) -> Tensor:
    """A product of two numbers in each word; exact, so that FP64 is as good."""
    word, by = torch.broadcast_tensors(word.to(torch.int32), by.to(torch.int32))
    number = lambda x: x.contiguous().view(torch.bfloat16).double()  # noqa: E731
    return Tensor((number(word) * number(by)).to(torch.bfloat16).view(torch.int32))


ADDED: list[int] = []


def asm(text, constraints, args, dtype, is_pure, pack):
    if "griddepcontrol" in text or "prefetch" in text or "ld.acquire" in text:
        return None
    if "red.release" in text:
        ADDED.append(int(args[1]))
        return None
    if "mma.sync" in text:
        return mma([args[0], None, args[1], None], args[2:4], args[4:]) if ", z," in text else mma(args[:4], args[4:6], args[6:])
    if "prmt" in text:
        # Four bytes, one of them chosen and put twice into 16 bits
        byte = args[0].v >> 8 * (args[1] & 3) & 255
        return Tensor((byte * 0x10001 << 7).to(torch.int32))
    word = args[0].v.to(torch.int64) & 0xFFFFFFFF
    for op, number in re.findall(r"(and|mul\.lo|shf\.r\.wrap)\.\w+ [^;]*?(0x\w+|\d+);", text):
        n = int(number, 0)
        word = word & n if op == "and" else word * n & 0xFFFFFFFF if op == "mul.lo" else (word >> n | word << 32 - n) & 0xFFFFFFFF
    return bf16x2(torch.where(word >= 1 << 31, word - (1 << 32), word), args[1].v)


class Type:
    """What `gl.pointer_type` gives."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.fixture
def gluon(monkeypatch):
    """A function that runs a kernel over records: addresses, and what these kernels need of Gluon beside what others do."""

    def run(name: str, programs: int, memory: torch.Tensor, *args: object, **same: object) -> None:
        plain, pointer, space = Tensor.to, Pointer.to, gluon_cpu.modules

        def to(self, dtype, bitcast=False):
            if not isinstance(dtype, Type):
                return plain(self, dtype, bitcast)
            at = self.v - memory.data_ptr()
            assert bool((at % dtype.dtype.itemsize == 0).all()), "a pointer that is not aligned"
            return Pointer(memory.view(dtype.dtype), at // dtype.dtype.itemsize)

        def pointer_to(self, dtype, bitcast=False):
            if dtype == torch.int64:
                return Tensor(torch.tensor(self.base.data_ptr()) + self.at * self.base.itemsize)
            return pointer(self, dtype.dtype)

        def modules(program, count, asm):
            out = space(program, count, asm)
            gl, load, expand = out["gl"], out["gl"].load, out["gl"].expand_dims
            copy = out["async_copy"].async_copy_global_to_shared
            gl.load = lambda p, mask=None, other=0, cache_modifier="": load(p, mask, other)
            gl.pointer_type, gl.exp = Type, lambda x: Tensor(x.v.exp())
            gl.multiple_of = gl.max_contiguous = lambda x, n: x
            gl.convert_layout = lambda x, layout, assert_trivial=False: x
            gl.expand_dims = lambda x, axis: Pointer(x.base, x.at.unsqueeze(axis)) if isinstance(x, Pointer) else expand(x, axis)
            out["async_copy"] = types.SimpleNamespace(
                async_copy_global_to_shared=lambda to, p, mask, cache_modifier: copy(to, Pointer(p.base, p.at.expand(to.shape)), mask),
                commit_group=lambda: None, wait_group=lambda n: None)
            return out

        with monkeypatch.context() as m:
            m.setattr(Tensor, "to", to)
            m.setattr(Pointer, "to", pointer_to)
            m.setattr(Pointer, "type", types.SimpleNamespace(layout=types.SimpleNamespace(parent=None)), raising=False)
            m.setattr(gluon_cpu, "modules", modules)
            entry = lambda where, e: Tensor(where.base[torch.as_tensor(unwrap(e)).long()])  # noqa: E731
            names = {"entry": entry, "NONE": 0, "BF16": 2, "count": itertools.count}
            Launch(name, fused_token_parts.__file__, fused_token.__file__, asm=asm, names=names)[(programs,)](*args, **same)

    return run


def call(gluon, form, x, ids, weights, recs, limit):
    memory = recs[0]._base
    memory = memory[: len(memory) // 8 * 8]
    where = torch.tensor([r.data_ptr() for r in recs])
    h = torch.full((ids.shape[1], form.width), float("nan"), dtype=x.dtype)
    out = torch.full_like(x, float("nan"))
    same, args = fused_token.constants(form, len(recs), limit != 0), (x, ids, weights, where, h, out, torch.zeros(4, dtype=torch.int32))
    ADDED.clear()
    # One program after the other: those that have rows of `down` find all of h the second time.
    gluon("token", fused_token.programs(form), memory, *args, limit, 1.702, **same)
    assert sum(ADDED) == 1 << 31, "the counter turns once"
    out.fill_(float("nan"))
    gluon("token", form.hidden // 16, memory, *args, limit, 1.702, **same)
    return out


@pytest.mark.parametrize(
    ("form", "limit", "ids"),
    [
        # 6 tiles, and 9 of `down`: two pieces of h, the ring goes round; an expert that is named twice, one that is masked
        (Form("mxfp4", 672, 1056), 0.0, [3, -1, 0, 3]),
        # 7 tiles: the last group has one; ids that are no expert's, on both sides
        (Form("mxfp4", 864, 160, "bfloat16"), 7.0, [5, 1, 1 << 40, -3]),
    ],
)
def test_same_as_the_law(gluon, form, limit, ids):
    recs, g = records(form, 5, device="cpu"), torch.Generator().manual_seed(2)
    x = torch.randn(1, form.hidden, generator=g).to(torch.bfloat16)
    ids, weights = torch.tensor([ids]), torch.rand(1, 4, generator=g)
    got = call(gluon, form, x, ids, weights, recs, limit)
    assert error(got, moe_records(x, ids, weights, recs, form, limit, 1.702, torch.float64)) < BOUND[x.dtype]


def test_experts_are_added_in_ascending_order(gluon):
    """Outputs 2^30, -2^30, 1 and 0 (the biases of empty matrices): only in this order is their sum 1."""
    form = Form("mxfp4", 672, 160, "bfloat16")
    recs = records(form, 4, device="cpu")
    for record, bias in zip(recs, (2.0**30, -(2.0**30), 1.0, 0.0)):
        v = form.layout().views(record)
        v["down"].zero_()
        v["down_bias"].fill_(bias)
    x, ids = torch.ones(1, 672, dtype=torch.bfloat16), torch.tensor([[2, 0, 3, 1]])
    assert bool((call(gluon, form, x, ids, torch.ones(1, 4), recs, 7.0) == 1).all())


def test_who_is_served(monkeypatch):
    gpu, form, bf16 = torch.device("cuda"), Form("mxfp4", 2880, 2880, "bfloat16"), torch.bfloat16
    chip = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(fused_token, "ASM", types.SimpleNamespace(value=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert fused_token.serves(form, bf16, 1, 4, gpu)
    assert not fused_token.serves(form, bf16, 2, 4, gpu) and not fused_token.serves(form, bf16, 1, 2, gpu)
    assert not fused_token.serves(form, bf16, 1, 4, torch.device("cpu"))
    assert not fused_token.serves(Form("mxfp4", 2880, 3072, "bfloat16"), bf16, 1, 4, gpu), "not compared on a GPU yet"
    monkeypatch.setattr(fused_token, "PROVEN", None)
    assert fused_token.serves(Form("mxfp4", 2880, 3072), bf16, 1, 4, gpu)
    for other in (Form("bfloat16", 2880, 2880, "bfloat16"), Form("mxfp4", 640, 2880), Form("mxfp4", 3104, 2880), Form("mxfp4", 2880, 3168),
                  Form("mxfp4", 2880, 2880, "float32")):
        assert not fused_token.serves(other, bf16, 1, 4, gpu), other
    chip.multi_processor_count = 114
    assert not fused_token.serves(form, bf16, 1, 4, gpu), "360 programs, three a processor, must all be there at once"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not fused_token.serves(form, bf16, 1, 4, gpu)


def test_who_shares_a_counter(monkeypatch):
    """Launches of one stream, which follow each other; nothing with a captured launch, whose replays may run beside anything."""
    stream, captured, device = types.SimpleNamespace(cuda_stream=7, synchronize=lambda: None), [False], torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    monkeypatch.setattr(fused_token, "COUNTERS", 5)
    counters = fused_token.Counters()
    captured[0] = True
    assert counters.take(device) is None, "there is nothing yet, and nothing can be made"
    captured[0] = False
    first = counters.take(device).data_ptr()
    assert counters.take(device).data_ptr() == first and first % 16 == 0
    stream.cuda_stream = 8
    places = {first, counters.take(device).data_ptr()}
    captured[0] = True
    for n in (3, 4, 5):
        places.add(counters.take(device).data_ptr())
        assert len(places) == n
    assert counters.take(device) is None, "used up"
    stream.cuda_stream, captured[0] = 7, False
    assert counters.take(device).data_ptr() == first
