"""An expert's record, byte by byte: one contiguous block with all that a move must carry and a kernel may read.

Parts start at multiples of 128 bytes (a line of a GPU's L2), records are multiples of 4096. Order: gate_up, down, gate_up_scale,
down_scale, gate_up_bias, down_bias, whatever else the source adds (derived values), stamp. Gate rows lie before up rows, and the axis that
a product sums over is the contiguous one. Bytes between parts are zero.

Weights are bf16, fp16 or fp32; `fp8` (E4M3 with one scale per block of block x block weights, as DeepSeek-V3's checkpoints and
transformers' FP8Experts have it); `mxfp4` (E2M1, two a byte, the even element in the low nibble, with one E8M0 byte per 32; OCP
Microscaling Formats 1.0, as gpt-oss's checkpoints have it). MXFP4's scales [rows, columns / 32] lie as [columns / 128, rows, 4], the last
four filled up with zeros: a kernel that works on 128 columns finds each row's as one aligned word, next to the other rows'.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ...errors import ShapeError, UnsupportedModelError

LINE, PAGE, GROUP = 128, 4096, 32
PLAIN = ("float32", "bfloat16", "float16")
DTYPES = {**{name: getattr(torch, name) for name in PLAIN}, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e8m0fnu": torch.float8_e8m0fnu,
          "uint8": torch.uint8}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STAMP = "stamp"
MX_SCALE_MAX = 128  # kernels multiply E2M1 by scale * 2^126 in BF16; beyond it they give NaN
MX_SCALES = ("gate_up_scale", "down_scale")
ORDER = ("gate_up", "down", "gate_up_scale", "down_scale", "gate_up_bias", "down_bias")

# One part of an expert where it lives: a tensor of any strides, or several that follow each other along the first axis (gate, up).
Piece = torch.Tensor | tuple[torch.Tensor, ...]


def pieces(piece: Piece) -> tuple[torch.Tensor, ...]:
    return piece if isinstance(piece, tuple) else (piece,)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a record: its place in bytes from the record's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (8 if self.name == STAMP else DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel has to know of a record; the places of its parts follow from it.

    weights  float32, bfloat16, float16, fp8 or mxfp4
    bias     dtype of the biases, "" without
    scale    dtype of fp8's scales (float32, bfloat16, float8_e8m0fnu), "" otherwise
    block    edge of the square that shares an fp8 scale, 0 otherwise
    """

    weights: str
    hidden: int
    width: int
    bias: str = ""
    scale: str = ""
    block: int = 0

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of each part, in record order."""
        D, F, b = self.hidden, self.width, self.block
        if self.weights == "mxfp4":
            out: dict[str, tuple[str, tuple[int, ...]]] = {
                "gate_up": ("uint8", (2 * F, D // GROUP, GROUP // 2)), "down": ("uint8", (D, F // GROUP, GROUP // 2)),
                "gate_up_scale": ("uint8", (-(-D // 128), 2 * F, 4)), "down_scale": ("uint8", (-(-F // 128), D, 4))}
        else:
            dtype = "float8_e4m3fn" if self.weights == "fp8" else self.weights
            out = {"gate_up": (dtype, (2 * F, D)), "down": (dtype, (D, F))}
            if self.weights == "fp8":
                out["gate_up_scale"] = (self.scale, (2 * -(-F // b), -(-D // b)))
                out["down_scale"] = (self.scale, (-(-D // b), -(-F // b)))
        if self.bias:
            out["gate_up_bias"], out["down_bias"] = (self.bias, (2 * F,)), (self.bias, (D,))
        return out

    def layout(self) -> RecordLayout:
        return _layout(self)

    @property
    def bytes_read(self) -> int:
        """Bytes that a kernel must read of one expert: padding and stamp are not among them."""
        return sum(p.nbytes for p in self.layout().parts if p.name != STAMP)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where each part of an expert lies in its record. The same for every expert of a store."""

    parts: tuple[Part, ...]
    nbytes: int

    @classmethod
    def _build(cls, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> RecordLayout:
        names = [n for n in ORDER if n in shapes] + [n for n in shapes if n not in ORDER]
        parts, offset = [], 0
        for name in names:
            dtype, shape = shapes[name]
            parts.append(Part(name, shape, dtype, offset))
            offset += -(-parts[-1].nbytes // LINE) * LINE
        parts.append(Part(STAMP, (8,), "int64", offset))
        return cls(tuple(parts), -(-(offset + parts[-1].nbytes) // PAGE) * PAGE)

    @classmethod
    def of(cls, tensors: Mapping[str, Piece]) -> RecordLayout:
        """The layout for an expert whose parts are like these. Raises UnsupportedModelError: a dtype that no record has, mixed pieces."""
        shapes = {}
        for name, piece in tensors.items():
            first, *rest = pieces(piece)
            dtype = str(first.dtype).removeprefix("torch.")
            if dtype not in DTYPES or name == STAMP:
                raise UnsupportedModelError(f"experts of dtype {dtype} can't be stored yet", where=name, expected=", ".join(DTYPES),
                                            do="convert the model")
            if any(t.dtype != first.dtype or t.shape[1:] != first.shape[1:] for t in rest):
                raise UnsupportedModelError("gate and up differ in dtype or width", where=name, expected="two matrices of one kind",
                                            do="use a supported model")
            shapes[name] = (dtype, (sum(t.shape[0] for t in pieces(piece)), *first.shape[1:]) if rest else tuple(first.shape))
        for name in MX_SCALES:
            if name in shapes and shapes[name][0] == "uint8":
                rows, groups = shapes[name][1]
                shapes[name] = ("uint8", (-(-groups // 4), rows, 4))
        return cls._build(shapes)

    def form(self) -> Form:
        """What kernels must know. Raises UnsupportedModelError: parts that no kernel multiplies with."""
        got = {p.name: p for p in self.parts}
        try:
            gate_up, down = got["gate_up"], got["down"]
            scale = got["gate_up_scale"].dtype if "gate_up_scale" in got else ""
            bias = got["gate_up_bias"].dtype if "gate_up_bias" in got else ""
            if gate_up.dtype == "uint8":
                form = Form("mxfp4", down.shape[0], gate_up.shape[0] // 2, bias)
            elif gate_up.dtype == "float8_e4m3fn":
                hidden, width = down.shape
                form = Form("fp8", hidden, width, bias, scale, _block(hidden, width, got["gate_up_scale"].shape, got["down_scale"].shape))
            else:
                form = Form(gate_up.dtype, *down.shape, bias)
            wrong = [n for n, want in form.shapes().items() if (got[n].dtype, got[n].shape) != want]
        except (KeyError, ValueError, TypeError) as e:
            raise UnsupportedModelError(f"a record of {', '.join(got)} has no kernel", where="experts", expected="gate_up, down and what "
                                        "their dtype needs", do="use a supported model") from e
        if wrong or form.layout().parts[: len(form.shapes())] != self.parts[: len(form.shapes())]:
            raise UnsupportedModelError(f"parts of these shapes have no kernel: {', '.join(wrong) or 'their order'}", where="experts",
                                        expected=str({n: form.shapes()[n] for n in wrong}), do="use a supported model")
        return form

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parts of the record in a uint8 buffer of at least `nbytes`, as they lie there, without a copy. The stamp is `stamp_of`'s."""
        return {p.name: buffer[p.offset : p.offset + p.nbytes].view(DTYPES[p.dtype]).view(p.shape) for p in self.parts if p.name != STAMP}

    def pack(self, tensors: Mapping[str, Piece], buffer: torch.Tensor, *, stamp: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Copy an expert's parts (any strides, any device) into a uint8 buffer, bit for bit. `stamp`: weight version, layer, expert."""
        end = 0
        for p in self.parts:
            buffer[end : p.offset].zero_()
            end = p.offset + p.nbytes
        buffer[end : self.nbytes].zero_()
        for name, view in self.views(buffer).items():
            _copy(name, tensors[name], view, out=False)
        last = self.parts[-1]
        buffer[last.offset : last.offset + last.nbytes].view(torch.int64).copy_(torch.tensor([*stamp, 0, 0, 0, 0, 0], device="cpu"))

    def unpack(self, buffer: torch.Tensor, tensors: Mapping[str, Piece]) -> None:
        """The way back: a record's parts into tensors of the same shapes, any strides, bit for bit."""
        for name, view in self.views(buffer).items():
            if name in tensors:
                _copy(name, tensors[name], view, out=True)

    def stamp_of(self, buffer: torch.Tensor) -> tuple[int, int, int]:
        """Weight version, layer and expert of the record in a buffer."""
        last = self.parts[-1]
        version, layer, expert = buffer[last.offset : last.offset + 24].view(torch.int64).tolist()
        return version, layer, expert

    def to_json(self) -> list[dict[str, Any]]:
        return [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "offset": p.offset} for p in self.parts]


@lru_cache
def _layout(form: Form) -> RecordLayout:
    if form.weights == "mxfp4" and (form.hidden % GROUP or form.width % GROUP):
        raise UnsupportedModelError(f"mxfp4 experts of {form.hidden} x {form.width}", where="experts", expected=f"multiples of {GROUP}",
                                    do="use bf16 weights")
    return RecordLayout._build(form.shapes())


def _block(hidden: int, width: int, gate_up: tuple[int, ...], down: tuple[int, ...]) -> int:
    """The edge of fp8's blocks that gives scales of these shapes, a power of two; 128 where several would."""
    for block in (128, 64, 32, 16, 256, 512):
        rows, columns = -(-hidden // block), -(-width // block)
        if (2 * columns, rows) == gate_up and (rows, columns) == down:
            return block
    raise ValueError("no block size")


def plain_scales(lying: torch.Tensor, groups: int) -> torch.Tensor:
    """MXFP4 scales [columns / 128, rows, 4] as [rows, groups]."""
    return lying.permute(1, 0, 2).flatten(1)[:, :groups]


def _copy(name: str, piece: Piece, view: torch.Tensor, *, out: bool) -> None:
    """Bits of the pieces to the view, or back. As integers: no copy may quieten a NaN or change a denormal."""
    bits, at = view.view(BITS[view.dtype.itemsize]), 0
    scales = name in MX_SCALES and view.dtype == torch.uint8
    shape = (view.shape[1], pieces(piece)[0].shape[1]) if scales else view.shape
    if sum(t.shape[0] if t.dim() else 1 for t in pieces(piece)) != (shape[0] if shape else 1):
        raise ShapeError(f"{name} has {[tuple(t.shape) for t in pieces(piece)]}", where="experts", expected=str(tuple(shape)),
                         do="experts of one store are of one shape")
    for t in pieces(piece):
        if t.dtype != view.dtype or t.shape[1:] != shape[1:] or (scales and -(-t.shape[1] // 4) != view.shape[0]):
            raise ShapeError(f"{name} is {t.dtype} {tuple(t.shape)}", where="experts", expected=f"{view.dtype} {tuple(shape)}",
                             do="experts of one store are of one shape and dtype")
        theirs = t.detach().view(bits.dtype)
        if scales:
            ours, whole = bits[:, at : at + len(t)], t.shape[1] // 4
            pairs = [(ours[:whole], theirs[:, : 4 * whole].unflatten(1, (whole, 4)).permute(1, 0, 2))] if whole else []
            pairs += [(ours[whole, :, : t.shape[1] % 4], theirs[:, 4 * whole :])] if t.shape[1] % 4 else []
        else:
            pairs = [(bits[at : at + len(t)], theirs)] if t.dim() else [(bits, theirs)]
        for mine, other in pairs:
            other.copy_(mine) if out else mine.copy_(other)
        at += len(t) if t.dim() else 0
    if scales and not out and view.shape[0] * 4 != pieces(piece)[0].shape[1]:
        bits[-1, :, pieces(piece)[0].shape[1] % 4 :] = 0
