"""Runs a piece of straight PTX, as `inline_asm_elementwise` has it, for the 32 lanes of a warp.

Registers are uint32 of every lane; a branch switches lanes off up to its label. Only what our assembly uses is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

LANES = np.arange(32)
U32, F32, F16 = np.uint32, np.float32, np.float16


def halves(x: np.ndarray) -> np.ndarray:
    return x.view(F16).reshape(32, 2)


def words(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(U32).reshape(32)


def add_rz(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """FP32 sum of positive numbers, cut off; exact in FP64, since their exponents are at most 24 apart or the small one does not count."""
    exact = a.astype(np.float64) + b.astype(np.float64)
    near = exact.astype(F32)
    return np.where(near.astype(np.float64) > exact, np.nextafter(near, F32(0)), near)


def product(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """mma.m16n8k32 of unsigned bytes."""
    A, B = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    g, t = LANES // 4, LANES % 4
    for i in range(4):
        for r, (row, k) in enumerate(((0, 0), (8, 0), (0, 16), (8, 16))):
            A[g + row, 4 * t + k + i] = a[r] >> U32(8 * i) & U32(255)
        for r in (0, 1):
            B[4 * t + 16 * r + i, g] = b[r] >> U32(8 * i) & U32(255)
    D = A @ B
    return [(c[i] + D[g + i // 2 * 8, 2 * t + i % 2]).astype(U32) for i in range(4)]


class Warp:
    def __init__(self, shared: np.ndarray) -> None:
        self.shared, self.counted, self.registers = shared, np.zeros(2, np.int64), {}

    def value(self, name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), U32)
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", name):
            return np.full(32, int(name, 0) & 0xFFFFFFFF, U32)
        return LANES.astype(U32) if name == "%laneid" else self.registers[name]

    def run(self, text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Registers afterwards; `inputs` by operand, as uint32."""
        self.registers = dict(inputs)
        on, until = np.ones(32, bool), ""
        for line in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
            line = line.strip()
            while label := re.match(r"(\w+):\s*", line):
                on, until = np.ones(32, bool), ""
                line = line[label.end() :]
            if not line or line.startswith((".reg", "griddepcontrol")):
                continue
            guard = re.match(r"@(!?)(\w+)\s+", line)
            mine = on.copy()
            if guard:
                p = self.registers[guard[2]].astype(bool)
                mine &= ~p if guard[1] else p
                line = line[guard.end() :]
            op, _, rest = line.partition(" ")
            if op == "bra":
                on, until = on & ~mine, rest
                continue
            packs = op == "mov.b32" and rest.rstrip().endswith("}")
            self.step("pack" if packs else op, [x.strip("{} ") for x in rest.split(",")], mine)
        assert not until
        return self.registers

    def put(self, name: str, x: np.ndarray, mine: np.ndarray) -> None:
        old = self.registers.get(name, np.full(32, 0xDEADBEEF, U32))
        self.registers[name] = np.where(mine, x, old).astype(U32)

    def step(self, op: str, args: list[str], mine: np.ndarray) -> None:
        if op.startswith("mma"):
            v = [self.value(x) for x in args[4:]]
            for name, x in zip(args, product(v[:4], v[4:6], v[6:]), strict=False):
                self.put(name, x, mine)
        elif op.startswith(("ld.shared", "ld.global")):
            where = re.fullmatch(r"\[([^\]+ ]+)(?: *\+ *(\d+))?\]", args[-1])
            assert where
            at = self.value(where[1]) + U32(where[2] or 0)
            for i, name in enumerate(args[:-1]):
                self.put(name, self.shared.view(U32)[at // 4 + U32(i)], mine)
        elif op == "st.shared.b32":
            self.shared.view(U32)[self.value(args[0].strip("[]"))[mine] // 4] = self.value(args[1])[mine]
        elif op.startswith("red."):
            self.counted[int("+8" in args[0])] += int(self.value(args[1])[mine].sum())
        elif op == "mov.b32" and len(args) == 3:
            for i in (0, 1):
                self.put(args[i], halves(self.value(args[2]).copy())[:, i].copy().view(np.uint16).astype(U32), mine)
        else:
            d, *v = args[0], *(x for x in args[1:])
            self.put(d, self.compute(op, [self.value(x) for x in v] if op[:4] != "shfl" else [self.value(v[0])], v), mine)

    def compute(self, op: str, v: list[np.ndarray], raw: list[str]) -> np.ndarray:
        f, i = ([x.astype(U32).view(kind) for x in v] for kind in (F32, np.int32))
        simple: dict[str, Callable[[], np.ndarray]] = {
            "mov.b32": lambda: v[0], "mov.u32": lambda: v[0], "mov.f32": lambda: v[0], "cvt.u64.u32": lambda: v[0], "mov.u64": lambda: v[0],
            "pack": lambda: v[0] & U32(0xFFFF) | v[1] << U32(16), "vote.sync.any.pred": lambda: np.full(32, v[0].any()),
            "and.b32": lambda: v[0] & v[1], "or.b32": lambda: v[0] | v[1], "shl.b32": lambda: v[0] << v[1],
            "shr.u32": lambda: v[0] >> v[1], "shr.b32": lambda: v[0] >> v[1], "shr.s32": lambda: (i[0] >> i[1]).view(U32),
            "sub.s32": lambda: v[0] - v[1], "min.s32": lambda: np.minimum(i[0], i[1]).view(U32), "max.u32": lambda: np.maximum(v[0], v[1]),
            "redux.sync.min.u32": lambda: np.full(32, v[0].min()),
            "setp.lt.s32": lambda: i[0] < i[1],
            "add.u32": lambda: v[0] + v[1], "sub.u32": lambda: v[0] - v[1], "mul.lo.u32": lambda: v[0] * v[1],
            "mad.lo.u32": lambda: v[0] * v[1] + v[2], "mad.lo.s32": lambda: v[0] * v[1] + v[2], "min.u32": lambda: np.minimum(v[0], v[1]),
            "abs.f32": lambda: v[0] & U32(0x7FFFFFFF), "max.f32": lambda: np.fmax(f[0], f[1]).view(U32),
            "min.f32": lambda: np.fmin(f[0], f[1]).view(U32), "mul.f32": lambda: (f[0] * f[1]).view(U32),
            "add.rz.f32": lambda: add_rz(f[0], f[1]).view(U32), "setp.ne.u32": lambda: v[0] != v[1], "setp.lt.f32": lambda: f[0] < f[1],
            "setp.gt.f32": lambda: f[0] > f[1], "setp.nan.f32": lambda: np.isnan(f[0]) | np.isnan(f[1]),
            "setp.geu.f32": lambda: ~(f[0] < f[1]), "setp.gtu.f32": lambda: ~(f[0] <= f[1]), "setp.neu.f32": lambda: f[0] != f[1],
            "setp.nan.and.f32": lambda: np.isnan(f[0]) & (v[2] != 0), "setp.gt.and.f32": lambda: (f[0] > f[1]) & (v[2] != 0),
            "selp.b32": lambda: np.where(v[2] != 0, v[0], v[1]), "selp.f32": lambda: np.where(v[2] != 0, v[0], v[1]),
            "sub.f32": lambda: (f[0] - f[1]).view(U32), "max.NaN.f32": lambda: np.maximum(f[0], f[1]).view(U32),
            "min.xorsign.abs.f16x2": lambda: words(np.minimum(*(np.abs(halves(x)) for x in v))) | (v[0] ^ v[1]) & U32(0x80008000),
            "mul.rn.f16x2": lambda: words(halves(v[0]) * halves(v[1])),
            "cvt.f32.f16": lambda: v[0].astype(np.uint16).view(F16).astype(F32).view(U32),
            "cvt.rn.f16.f32": lambda: f[0].astype(F16).view(np.uint16).astype(U32),
            "cvt.rn.f16x2.f32": lambda: words(np.stack([f[1], f[0]], 1).astype(F16)),
        }  # fmt: skip
        if op in simple:
            return simple[op]()
        if op == "lop3.b32":
            bits = [(int(raw[3], 0) >> i & 1, i) for i in range(8)]
            terms = [(v[0] if i & 4 else ~v[0]) & (v[1] if i & 2 else ~v[1]) & (v[2] if i & 1 else ~v[2]) for on, i in bits if on]
            return np.bitwise_or.reduce(terms)
        if op == "prmt.b32":
            both = np.stack([v[0], v[1]], 1).view(np.uint8).reshape(32, 8)
            pick = (v[2][:, None] >> (4 * np.arange(4)).astype(U32) & U32(7)).astype(np.int64)
            return np.ascontiguousarray(np.take_along_axis(both, pick, 1)).view(U32).reshape(32)
        if op == "shfl.sync.bfly.b32":
            return v[0][LANES ^ int(raw[1])]
        assert op == "shfl.sync.idx.b32", op
        assert raw[2] == "0x1C1F", raw
        return v[0][(LANES & 28) | int(raw[1])]
