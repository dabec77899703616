"""The kernels for a few tokens and MXFP4: their text, on a CPU, with each MMA and conversion as a model, beside the law."""

from __future__ import annotations

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


def numbers(word: Tensor, shape: torch.Size) -> torch.Tensor:
    """[..., 2] FP64: the two BF16 numbers of each word."""
    return word.v.to(torch.int32).expand(shape).contiguous().view(torch.bfloat16).view(*shape, 2).double()


def products(a: list[Tensor], v: list[Tensor]) -> tuple[Tensor, ...]:
    """Two chained m16n8k16 of every warp, from zero; of its threads [W, 8, 4] (PTX ISA, "Matrix fragments for mma.m16n8k16")."""
    shape = torch.broadcast_shapes(*(x.v.shape for x in (*a, *v)))
    sums = torch.zeros(shape[0], 16, 8, dtype=torch.float64)
    for half in (0, 1):
        A, B = torch.zeros(shape[0], 16, 16, dtype=torch.float64), torch.zeros(shape[0], 16, 8, dtype=torch.float64)
        for i, x in enumerate(a[4 * half : 4 * half + 4]):
            A[:, 8 * (i % 2) : 8 * (i % 2) + 8, 8 * (i // 2) : 8 * (i // 2) + 8] = numbers(x, shape).flatten(2)
        for i, x in enumerate(v[2 * half : 2 * half + 2]):
            B[:, 8 * i : 8 * i + 8] = numbers(x, shape).flatten(2).mT
        sums = (sums + A @ B).float().double()
    return tuple(Tensor(sums[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2].float()) for i in range(4))


def bits(word: torch.Tensor) -> torch.Tensor:
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def asm(text, constraints, args, dtype, is_pure, pack):
    if "griddepcontrol" in text or "prefetch" in text:
        return None
    if "mma.sync" in text:
        return products(args[:8], args[8:])
    if "shfl" in text:
        x = args[0].v
        return Tensor(((x[..., :1] + x[..., 1:2]) + (x[..., 2:3] + x[..., 3:])).expand(x.shape).contiguous())
    if "fma.rn" in text:
        # one or two sums; only of the thread whose block it is
        *given, f, u, q, b = args[: 6]
        sums = [x.v for x in args[6:]]
        mine = q.v == b
        if len(sums) == 1:
            return Tensor(torch.where(mine, sums[0] + given[0].v * f.v + given[1].v * u.v, sums[0]))
        return tuple(Tensor(torch.where(mine, s + d.v * x.v, s)) for s, d, x in zip(sums, given, (f, u)))
    if "prmt" in text:
        byte = args[0].v.to(torch.int64) >> 8 * args[1].v & 255
        return Tensor(bits(byte + 62 << 23).view(torch.float32))
    if "mul.rn.bf16x2" in text:
        number = args[0].v.contiguous().view(torch.bfloat16).double() * 2.0**64
        return Tensor(number.to(torch.bfloat16).view(torch.int32))
    word = args[0].v.to(torch.int64) & 0xFFFFFFFF
    for op, number in re.findall(r"(and|mul\.lo|shf\.r\.wrap)\.\w+ [^;]*?(0x\w+|\d+);", text):
        n = int(number, 0)
        word = word & n if op == "and" else word * n & 0xFFFFFFFF if op == "mul.lo" else (word >> n | word << 32 - n) & 0xFFFFFFFF
    return Tensor(bits(word))


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

        def modules(program, count, *rest):
            out = space(program, count, *rest)
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
            paths = fused_token_parts.__file__, fused_token.__file__
            Launch(name, *paths, asm=asm, names={"entry": entry, "NONE": 0, "BF16": 2})[(programs,)](*args, **same)

    return run


def call(gluon, form, x, ids, weights, recs, limit):
    memory = recs[0]._base
    memory = memory[: len(memory) // 8 * 8]
    where = torch.tensor([r.data_ptr() for r in recs])
    h = torch.full((ids.numel(), -(-form.width // 256) * 256), float("nan"), dtype=x.dtype)
    out = torch.full_like(x, float("nan"))
    same, _, programs = fused_token.constants(form, "gate_up", len(recs), len(x), limit != 0)
    gluon("gate_up", programs, memory, x, ids, where, h, limit, 1.702, **same)
    same, _, programs = fused_token.constants(form, "down", len(recs), len(x), limit != 0)
    gluon("down", programs, memory, h, ids, weights, where, out, **same)
    return out


@pytest.mark.parametrize(
    ("form", "limit", "ids"),
    [
        # 3 tiles and 2, both with a last one that is not whole; in descending order
        (Form("mxfp4", 288, 160, "bfloat16"), 7.0, [[4, 2, 1, 0]]),
        # 3 tiles and 9: an odd last tile; an expert that is named twice, one that is masked; two tokens
        (Form("mxfp4", 384, 1056), 0.0, [[3, -1, 0, 3], [1, 4, 2, 0]]),
        # 9 tiles: both rings go round; ids that are no expert's, on both sides
        (Form("mxfp4", 1056, 1184, "bfloat16"), 7.0, [[5, 1, 1 << 40, -3]]),
    ],
)
def test_same_as_the_law(gluon, monkeypatch, form, limit, ids):
    monkeypatch.setattr(fused_token, "DOWN_RING", 3)
    ids = torch.tensor(ids)
    recs, g = records(form, 5, device="cpu"), torch.Generator().manual_seed(2)
    x = torch.randn(len(ids), form.hidden, generator=g).to(torch.bfloat16)
    weights = torch.rand(ids.shape, generator=g)
    got = call(gluon, form, x, ids, weights, recs, limit)
    assert error(got, moe_records(x, ids, weights, recs, form, limit, 1.702, torch.float64)) < BOUND[x.dtype]


def test_experts_are_added_in_ascending_order(gluon):
    """Outputs 2^30, -2^30, 1 and 0 (the biases of empty matrices): only in this order is their sum 1."""
    form = Form("mxfp4", 480, 160, "bfloat16")
    recs = records(form, 4, device="cpu")
    for record, bias in zip(recs, (2.0**30, -(2.0**30), 1.0, 0.0)):
        v = form.layout().views(record)
        v["down"].zero_()
        v["down_bias"].fill_(bias)
    x, ids = torch.ones(1, 480, dtype=torch.bfloat16), torch.tensor([[2, 0, 3, 1]])
    assert bool((call(gluon, form, x, ids, torch.ones(1, 4), recs, 7.0) == 1).all())


def test_who_is_served(monkeypatch):
    gpu, form, bf16 = torch.device("cuda"), Form("mxfp4", 2880, 2880, "bfloat16"), torch.bfloat16
    monkeypatch.setattr(fused_token, "ASM", types.SimpleNamespace(value=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused_token.serves(form, bf16, 1, 4, gpu)
    assert not fused_token.serves(form, bf16, fused_token.MOST + 1, 4, gpu) and not fused_token.serves(form, bf16, 1, 2, gpu)
    assert not fused_token.serves(form, bf16, 1, 4, torch.device("cpu"))
    assert not fused_token.serves(Form("mxfp4", 2880, 3072, "bfloat16"), bf16, 1, 4, gpu), "not compared on a GPU yet"
    monkeypatch.setattr(fused_token, "PROVEN", None)
    assert fused_token.serves(Form("mxfp4", 2880, 3072), bf16, 1, 4, gpu)
    for other in (Form("bfloat16", 2880, 2880, "bfloat16"), Form("mxfp4", 256, 2880), Form("mxfp4", 8448, 2880),
                  Form("mxfp4", 2880, 2880, "float32")):
        assert not fused_token.serves(other, bf16, 1, 4, gpu), other
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not fused_token.serves(form, bf16, 1, 4, gpu)
