"""Runs a Gluon kernel whose warps have different roles on a CPU: `gluon_cpu`'s stand-ins, a thread for each role, barriers that count.

A wait that nobody ends is an error, as is a copy that no barrier expects. Quotients round to zero, as they do on a GPU.
"""

from __future__ import annotations

import ast
import threading
import types
from pathlib import Path
from typing import Any

import torch

from .gluon_cpu import Pointer, Tensor, modules, unwrap

PATIENCE = 30.0  # seconds that a role waits for another


class ToZero(ast.NodeTransformer):
    """`//` and `%` as calls of `quotient` and `rest`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.FloorDiv: "quotient", ast.Mod: "rest"}.get(type(node.op))
        return node if name is None else ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])


def quotient(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return Tensor(torch.div(torch.as_tensor(unwrap(a)), torch.as_tensor(unwrap(b)), rounding_mode="trunc"))
    return abs(a) // b * (1 if a >= 0 else -1)


def rest(a: Any, b: Any) -> Any:
    return a - quotient(a, b) * b


class Barrier:
    """As `mbarrier`: a phase is over when all have arrived and all bytes have come."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.phase, self.changed = count, count, 0, 0, threading.Condition()

    def change(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + size
            assert self.missing >= 0, "more have arrived than there are"
            assert self.missing > 0 or self.bytes >= 0, "more bytes have come than were expected"
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE), "a role would wait for ever"


class Address:
    """What a table entry holds: a record on the CPU."""

    def __init__(self, record: torch.Tensor, at: int = 0) -> None:
        self.record, self.at = record, at

    def __add__(self, other: int) -> Address:
        return Address(self.record, self.at + int(other))

    def to(self, dtype: torch.dtype) -> Pointer:
        flat = self.record[: len(self.record) // dtype.itemsize * dtype.itemsize].view(dtype)
        return Pointer(flat, self.at // dtype.itemsize)


class Described:
    """A tensor that copies read in blocks; what lies outside is zero."""

    def __init__(self, flat: torch.Tensor, at: int, shape: list[int], strides: list[int], block: list[int]) -> None:
        self.view, self.block, self.dtype = torch.as_strided(flat, shape, strides, flat.storage_offset() + at), block, flat.dtype

    def at(self, coord: list[int]) -> torch.Tensor:
        out = torch.zeros(self.block, dtype=self.dtype)
        ends = [min(c + b, n) for c, b, n in zip(coord, self.block, self.view.shape, strict=True)]
        part = self.view[tuple(slice(c, e) for c, e in zip(coord, ends, strict=True))]
        out[tuple(slice(0, n) for n in part.shape)] = part
        return out


def described(x: Any) -> Any:
    """A kernel's argument: descriptors of the host's as `Described`, tensors as pointers."""
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        return Described(x.base.reshape(-1), 0, list(x.base.shape), list(x.base.stride()), list(x.block_shape))
    return x


class Kernel:
    """`kernel[programs](*args, **constants)` of the module at `path`, one program after another; records: those that table entries name;
    own: other values for the module's constants."""

    def __init__(self, path: str, name: str, records: list[torch.Tensor], **own: Any) -> None:
        tree = ast.parse(Path(path).read_text())
        tree.body = [x for x in tree.body if kept(x)]
        tree = ast.fix_missing_locations(ToZero().visit(tree))
        self.code, self.name, self.records, self.own = compile(tree, path, "exec"), name, records, own

    def __getitem__(self, grid: tuple[int]) -> Any:
        options = ("num_warps", "maxnreg", "launch_pdl")
        return lambda *args, **kw: run(self.code, self.own, self.name, grid[0], self.records, list(args),
                                       {k: v for k, v in kw.items() if k not in options})


def kept(x: ast.stmt) -> bool:
    """Gluon's functions, constants and the future of annotations."""
    if isinstance(x, ast.FunctionDef):
        return any("gluon.jit" in ast.unparse(d) for d in x.decorator_list)
    return isinstance(x, ast.Assign) or getattr(x, "module", "") == "__future__"


def run(code: Any, own: dict[str, Any], name: str, programs: int, records: list[torch.Tensor], args: list[Any],
        constants: dict[str, Any]) -> None:
    bars: dict[Any, Barrier] = {}
    lock, home = threading.Lock(), {r.data_ptr(): r for r in records}

    def asm(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        if "griddepcontrol" in text:
            return None
        assert "ld.acquire" in text
        return Address(home[int(args[0].base[int(unwrap(args[0].at))])])

    def atomic_add(p: Pointer, n: int) -> int:
        with lock:
            at = int(unwrap(p.at))
            was = int(p.base[at])
            p.base[at] += n
            return was

    def arrive(bar: Any, count: int = 1, pred: Any = True) -> None:
        if pred:
            bars[bar.key].change(count, 0)

    def copy(desc: Described, coord: list[Any], bar: Any, result: Any) -> None:
        box = desc.at([int(unwrap(c)) for c in coord])
        result.view().copy_(box)
        bars[bar.key].change(0, -box.numel() * box.element_size())

    def describe(base: Pointer, shape: list[int], strides: list[int], block: list[int], layout: Any) -> Described:
        return Described(base.base, int(unwrap(base.at)), shape, strides, block)

    def specialize(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        assert len(roles) == len(warps) + 1 == len(registers) + 1
        faults: list[BaseException] = []

        def role(f: Any, args: tuple[Any, ...]) -> None:
            try:
                f(*args)
            except BaseException as e:  # noqa: BLE001
                faults.append(e)

        threads = [threading.Thread(target=role, args=(f, args), daemon=True) for f, args in roles]
        for t in threads:
            t.start()
        for t in threads:
            t.join(PATIENCE)
        if faults:
            raise faults[0]
        assert not any(t.is_alive() for t in threads), "a role has not ended"

    program = [0]
    space = modules(program, programs, asm)
    gl = space["gl"]
    gl.atomic_add, gl.warp_specialize, gl.exp = atomic_add, specialize, lambda x: Tensor(x.v.exp())
    space["tma"] = types.SimpleNamespace(make_tensor_descriptor=describe, async_copy_global_to_shared=copy)
    space["mbarrier"] = types.SimpleNamespace(
        MBarrierLayout=lambda: None, arrive=arrive, wait=lambda bar, parity: bars[bar.key].wait(int(unwrap(parity))),
        init=lambda bar, count: bars.__setitem__(bar.key, Barrier(count)),
        expect=lambda bar, size: bars[bar.key].change(1, size))
    space |= {"quotient": quotient, "rest": rest}
    exec(code, space)
    space |= own
    for i in range(programs):
        program[0] = i
        space[name](*(described(a) for a in args), **constants)
