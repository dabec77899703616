"""Runs Gluon kernels on a CPU: their Python text with torch tensors in place of Gluon's, one program after the other.

Layouts are ignored, but for the swizzle of bulk copies of 128-byte lines and, where a `Launch` says so, of 16-bit tensors that products
read; other shared memory is bytes in logical order. Copies land at once, but a wait for a barrier whose copies nobody has asked for, one
that is armed twice and a page that does not exist are errors.
"""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

F8 = {"float8e5": torch.float8_e5m2, "float8e4nv": torch.float8_e4m3fn}


def unwrap(x: Any) -> Any:
    return x.v if isinstance(x, Tensor) else x


def wrap(x: Any) -> Any:
    return Tensor(x) if isinstance(x, torch.Tensor) else x


class Tensor:
    """A torch tensor with Gluon's methods; a scalar one converts itself to a number."""

    def __init__(self, v: torch.Tensor) -> None:
        self.v = v
        self.type = types.SimpleNamespace(layout=None)

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    @property
    def shape(self) -> torch.Size:
        return self.v.shape

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.v.contiguous().view(dtype) if bitcast else self.v.to(dtype))

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.v[at])

    def __index__(self) -> int:
        return int(self.v)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.v)

    def __neg__(self) -> Tensor:
        return Tensor(-self.v)


def _operator(name: str) -> None:
    def forward(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        out = getattr(torch.as_tensor(self.v), name)(unwrap(other))
        return wrap(out)

    setattr(Tensor, name, forward)
    def backward(self: Tensor, other: Any) -> Any:
        return wrap(getattr(torch.full_like(self.v, unwrap(other)), name)(self.v))

    if name not in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
        setattr(Tensor, f"__r{name[2:]}", backward)


class Pointer:
    def __init__(self, base: torch.Tensor, at: Any = 0) -> None:
        self.base, self.at = base, at
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, unwrap(self.at + unwrap(other)))

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.base, self.at[at])

    def to(self, dtype: torch.dtype) -> Pointer:
        """As another type, a scalar one; as an integer it stays what it is."""
        if dtype == torch.int64:
            return self
        at = int(self.at) * self.base.itemsize
        assert at % dtype.itemsize == 0, "a pointer that is not aligned"
        return Pointer(self.base.view(-1).view(torch.uint8)[at % dtype.itemsize :].view(dtype), at // dtype.itemsize)


for _name in "add sub mul and or xor rshift lshift floordiv mod truediv lt le gt ge eq ne".split():
    _operator(f"__{_name}__")


class Padded:
    """A shared layout: after every `interval` elements, room for `padding` more."""

    def __init__(self, pairs: list[list[int]], *rest: Any) -> None:
        self.pairs = pairs


class Swizzled:
    """A shared layout of 16-bit elements in lines of 128 bytes, whose 16-byte pieces are swizzled; wider rows are several tiles."""

    def bases(self, rows: int, columns: int) -> list[list[int]]:
        line = [[0, 1 << i] for i in range(6)] + [[1 << i, 8 << i if i < 3 else 0] for i in range(rows.bit_length() - 1)]
        return line + [[0, 64 << i] for i in range((columns // 64).bit_length() - 1)]


class Shared:
    """Bytes with a type and a shape."""

    def __init__(
        self, raw: torch.Tensor, dtype: torch.dtype, shape: list[int], order: Any = None, key: Any = None, bases: Any = None
    ) -> None:
        self.raw, self.dtype, self.shape, self.order, self.key, self.layout = raw, dtype, list(shape), order, key, bases
        self.bases = bases
        if isinstance(bases, Swizzled):
            self.bases = bases.bases(*shape) if len(shape) == 2 else None

    def view(self) -> torch.Tensor:
        if isinstance(self.bases, Padded):
            i = torch.arange(torch.Size(self.shape).numel())
            at = i + sum(i // interval * padding for interval, padding in self.bases.pairs)
            return self.raw[: len(self.raw) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)[at].view(self.shape)
        if self.bases:
            # element of a byte's address: the exclusive or of what its bits stand for
            where = self.where()
            out = torch.empty(self.shape, dtype=self.dtype)
            out[where] = self.raw[: out.numel() * self.dtype.itemsize].view(self.dtype)
            return out.permute(self.order) if self.order else out
        count = torch.Size(self.shape).numel() * self.dtype.itemsize
        v = self.raw[:count].view(self.dtype).view(self.shape)
        return v.permute(self.order) if self.order else v

    def where(self) -> tuple[torch.Tensor, ...]:
        """The element that lies at each place, of a layout of bases."""
        at = torch.arange(torch.Size(self.shape).numel())
        assert len(at) == 1 << len(self.bases)
        where = [torch.zeros_like(at) for _ in self.shape]
        for bit, basis in enumerate(self.bases):
            where = [x ^ (at >> bit & 1) * b for x, b in zip(where, basis, strict=True)]
        return tuple(where)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.raw, self.dtype, shape)

    def index(self, i: Any) -> Shared:
        size = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        layout = self.layout if isinstance(self.layout, Swizzled) else None
        return Shared(self.raw[int(i) * size :], self.dtype, self.shape[1:], key=(id(self.raw), int(i)), bases=layout)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared | Columns:
        if dim == 1:
            return Columns(self, start, length)
        size = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        return Shared(self.raw[start * size :], self.dtype, [length, *self.shape[1:]])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.raw, dtype, shape, bases=layout)

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.raw, self.dtype, self.shape, order, bases=self.bases)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.view().clone())

    def store(self, x: Tensor) -> None:
        if isinstance(self.bases, list):
            value = x.v.permute([self.order.index(i) for i in range(len(self.shape))]) if self.order else x.v
            assert list(value.shape) == self.shape, (value.shape, self.shape)
            self.raw[: value.numel() * self.dtype.itemsize].view(self.dtype).copy_(value[self.where()])
            return
        assert tuple(self.view().shape) == tuple(x.v.shape), (self.view().shape, x.v.shape)
        self.view().copy_(x.v)


class Columns:
    """Some columns of shared memory."""

    def __init__(self, whole: Shared, start: int, length: int) -> None:
        self.whole, self.at = whole, slice(start, start + length)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.whole.view()[:, self.at].clone())


class Barrier:
    def __init__(self) -> None:
        self.phase, self.armed, self.bytes = 0, False, 0

    def settle(self) -> None:
        if self.armed and self.bytes == 0:
            self.phase, self.armed = self.phase + 1, False


def inline_asm(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    if "griddepcontrol" in text:
        return None
    x = args[0].v
    if "ex2" in text:
        return Tensor(torch.exp2(x))
    if "0x8E8E8E8E" in text:
        return Tensor(x & 0x8E)
    if "0x0E0E0E0E" in text:
        return Tensor(((x >> 3) & 0x0E) | ((x << 7) & 0x80))
    bits = lambda y: y.half().view(torch.int16).int() & 0xFFFF  # noqa: E731
    if "cvt.rn.f16x2.f32" in text:
        return Tensor(bits(x) | bits(args[1].v) << 16)
    if "0x3F803F80" in text:
        # bytes of E4M3 as FP16 times 2^-8, those of two tokens beside each other
        t = (x.int() & 0xFFFF) | args[1].v.int() << 16
        return Tensor(t << 7 & 0x3F803F80), Tensor(t >> 1 & 0x3F803F80)
    assert "0x5431" in text
    # hi is FP16 rounded to four bits with integers, lo what it lacks
    word = torch.zeros_like(x)
    for i in range(2):
        half = lambda y: (y >> 16 * i).to(torch.int16).view(torch.float16)  # noqa: E731, B023
        g = half(x) * half(args[1].v)
        t = bits(g) + 0x40
        rest = (g - (t & 0xFF80).to(torch.int16).view(torch.float16)) * 4096
        lo = rest.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
        word |= (t >> 7 & 0xFF) << 8 * i | lo << 16 + 8 * i
    return Tensor(word)


def modules(program: list[int], programs: int, asm: Callable[..., Any] = inline_asm, swizzled: bool = False) -> dict[str, Any]:
    """Stand-ins for `gl`, `tma`, `mbarrier` and the rest; `program` holds the id of the one that runs; swizzled: 16-bit tensors are."""
    gl = types.SimpleNamespace()
    for name in ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32"):
        setattr(gl, name, getattr(torch, name))
    gl.abs, gl.exp2, gl.log2 = (lambda x, f=f: Tensor(f(x.v)) for f in (torch.abs, torch.exp2, torch.log2))
    gl.float8e5, gl.float8e4nv = F8["float8e5"], F8["float8e4nv"]
    gl.constexpr = lambda x: x
    for name in ("NVMMASharedLayout", "SwizzledSharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout",
                 "DistributedLinearLayout"):
        setattr(gl, name, lambda *a: None)
    if swizzled:
        gl.NVMMASharedLayout = lambda width, bits, rank: Swizzled() if (width, bits, rank) == (128, 16, 2) else None
    gl.SharedLinearLayout = lambda bases: bases
    gl.PaddedSharedLayout = Padded
    gl.static_range = range
    gl.program_id = lambda axis: program[axis]
    gl.num_programs = lambda axis: programs
    gl.inline_asm_elementwise = asm
    gl.pointer_type = lambda dtype: dtype
    gl.thread_barrier = lambda: None
    gl.allocate_shared_memory = lambda dtype, shape, layout: Shared(
        torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0x7F, dtype=torch.uint8), dtype, shape,
        bases=layout if isinstance(layout, list | Swizzled) else None)
    gl.arange = lambda a, b, layout: Tensor(torch.arange(a, b, dtype=torch.int32))
    gl.full = lambda shape, value, dtype, layout: Tensor(torch.full(shape, value, dtype=dtype))
    gl.zeros = lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=dtype))
    gl.reshape = lambda x, shape: Tensor(x.v.reshape(shape))
    gl.permute = lambda x, order: Tensor(x.v.permute(order))
    gl.join = lambda a, b: Tensor(torch.stack([a.v, b.v], dim=-1))
    gl.split = lambda x: (Tensor(x.v[..., 0]), Tensor(x.v[..., 1]))
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.broadcast = lambda a, b: tuple(map(Tensor, torch.broadcast_tensors(a.v, b.v)))
    gl.expand_dims = lambda x, axis: Tensor(x.v.unsqueeze(axis))
    gl.where = lambda c, a, b: wrap(torch.where(torch.as_tensor(unwrap(c)), torch.as_tensor(unwrap(a)), torch.as_tensor(unwrap(b))))

    def pick(choose: Callable[..., torch.Tensor]) -> Callable[[Any, Any], Any]:
        def run(a: Any, b: Any) -> Any:
            x = torch.as_tensor(unwrap(a))
            return wrap(choose(x, torch.as_tensor(unwrap(b), dtype=x.dtype)))

        return run

    gl.minimum, gl.maximum = pick(torch.minimum), pick(torch.maximum)
    gl.sum = lambda x, axis: Tensor(x.v.sum(axis, dtype=x.v.dtype))
    gl.max = lambda x, axis: Tensor(x.v.amax(axis))
    gl.associative_scan = lambda x, axis, f: Tensor(x.v.cumsum(axis, dtype=x.v.dtype))

    def load(p: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "", eviction_policy: str = "") -> Tensor:
        at = torch.as_tensor(p.at).long()
        ok = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(unwrap(mask)).expand(at.shape)
        return Tensor(torch.where(ok, p.base.reshape(-1)[torch.where(ok, at, 0)], torch.as_tensor(other, dtype=p.base.dtype)))

    def store(p: Pointer, x: Any, mask: Any = None) -> None:
        at = torch.as_tensor(p.at).long()
        value = torch.as_tensor(unwrap(x)).to(p.base.dtype).expand(at.shape)
        ok = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(unwrap(mask)).expand(at.shape)
        p.base.view(-1)[at[ok]] = value[ok]

    gl.load, gl.store = load, store
    bars: dict[Any, Barrier] = {}
    at = lambda b: bars[b.key]  # noqa: E731

    def init(bar: Shared, count: int) -> None:
        bars[bar.key] = Barrier()

    def expect(bar: Shared, size: int, pred: Any = True) -> None:
        if pred:
            assert not at(bar).armed, "a barrier is armed twice"
            at(bar).armed, at(bar).bytes = True, size

    def wait(bar: Shared, phase: Any, pred: Any = True) -> None:
        if not pred:
            return
        # complete once the phase of this parity is over
        assert at(bar).phase % 2 != int(phase), "a program would wait for ever"

    def copy(desc: Any, coord: list[Any], bar: Shared, result: Shared, pred: Any = True) -> None:
        if not pred:
            return
        out = torch.zeros(desc.block_shape, dtype=desc.base.dtype)
        base = desc.base.as_strided(desc.shape, desc.strides)
        from_, to = [], []
        for c, n, size in zip(coord, desc.block_shape, desc.shape, strict=True):
            assert 0 <= int(c) < size, "a page that does not exist"
            from_.append(slice(int(c), min(int(c) + n, size)))
            to.append(slice(0, min(n, size - int(c))))
        out[tuple(to)] = base[tuple(from_)]
        if desc.layout.swizzle_byte_width == 128:
            pieces = out.view(torch.uint8).view(-1, 8, 16)
            line = torch.arange(len(pieces))[:, None]
            out = pieces[line, torch.arange(8)[None] ^ line % 8].reshape(-1).view(out.dtype).view(out.shape)
        result.view().copy_(out)
        assert at(bar).armed
        at(bar).bytes -= out.numel() * out.element_size()
        assert at(bar).bytes >= 0
        at(bar).settle()

    def gather(result: Shared, p: Pointer, mask: Any) -> None:
        result.store(load(p, mask, 0))

    def mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
        return Tensor(a.v.float() @ b.v.float() + acc.v)

    def mma(a: Tensor | Shared, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
        y = (a.view() if isinstance(a, Shared) else a.v).float() @ b.view().float()
        return Tensor(y + acc.v if use_acc else y)

    return {
        "gl": gl,
        "gluon": types.SimpleNamespace(jit=lambda f=None, **kw: f if f else (lambda g: g), constexpr_function=lambda f: f),
        "mbarrier": types.SimpleNamespace(init=init, expect=expect, wait=wait, MBarrierLayout=lambda: None),
        "tma": types.SimpleNamespace(async_copy_global_to_shared=copy),
        "mma_v2": mma_v2,
        "warpgroup_mma": mma,
        "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else tuple(deps),
        "fence_async_shared": lambda: None,
        "async_copy": types.SimpleNamespace(async_copy_global_to_shared=gather, commit_group=lambda: None, wait_group=lambda n: None),
    }


class Launch:
    """`kernel[grid](...)` on the CPU; `paths` are the modules that the kernel and what it calls are in, `asm` stands for their assembly and
    `names` for what they import; swizzled: see `modules`.
    """

    def __init__(self, name: str, *paths: str, asm: Callable[..., Any] = inline_asm, names: dict[str, Any] | None = None,
                 swizzled: bool = False) -> None:
        self.name, self.codes, self.asm, self.names, self.swizzled = name, [], asm, names or {}, swizzled
        for path in paths:
            tree = ast.parse(Path(path).read_text())
            mine = lambda x: not isinstance(x, ast.Import | ast.ImportFrom) or getattr(x, "module", "") == "__future__"  # noqa: E731
            tree.body = [x for x in tree.body if mine(x)]
            self.codes.append(compile(tree, path, "exec"))

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, **kw: Any) -> None:
            for option in ("num_warps", "maxnreg", "launch_pdl", "enable_fp_fusion"):
                kw.pop(option, None)
            program = [0, 0]
            space = modules(program, grid[0], self.asm, self.swizzled) | self.names
            for code in self.codes:
                exec(code, space)
            for program[:] in itertools.product(range(grid[0]), range(grid[1] if len(grid) > 1 else 1)):
                space[self.name](*(Pointer(a) if isinstance(a, torch.Tensor) else a for a in args), **kw)

        return run
