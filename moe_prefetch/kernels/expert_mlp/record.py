"""An expert's record, byte by byte: one contiguous block with all that a move must carry and a kernel may read.

Parts start at multiples of 128 bytes (a line of a GPU's L2), records are multiples of 4096. Order: gate_up, down, gate_up_scale,
down_scale, gate_up_bias, down_bias, whatever else the source adds (derived values), stamp. Gate rows lie before up rows, and the axis that
a product sums over is the contiguous one. Bytes between parts are zero.

Weights are bf16, fp16 or fp32; `fp8` (E4M3 with one scale per block of block x block weights, as DeepSeek-V3's checkpoints and
transformers' FP8Experts have it); `mxfp4` (E2M1, two a byte, the even element in the low nibble, with one E8M0 byte per 32; OCP
Microscaling Formats 1.0, as gpt-oss's checkpoints have it). MXFP4 lies in tiles of 128 columns, the last filled up with zeros: codes as
[columns / 128, rows, 64] bytes, scales as [columns / 128, rows, 4], so that what a program reads is one piece. 16-bit word j of a row's 64
bytes holds the codes of columns j, 32 + j, 64 + j and 96 + j; words 2 i and 2 i + 1 share 32 bits, in which the bits of a code (sign,
exponent, mantissa: 3 to 0) lie where a rotation by PLACES brings them to bits 15, 8, 7 and 6 of their word, the place of BF16's. Those of
the last code have rotations of their own, which are one product with 2^2 + 2^7 + 2^12 where its bits stand alone.

FP8 lies in tiles of 128 columns too, [columns / 128, rows, 128] bytes. 16-bit word j of a row's 128 bytes holds the codes of columns j and
64 + j: bits 7 to 0 of the first are bits 15 and 10 to 4 of the word, the place of BF16's, those of the second bits 11, 14 to 12 and 3 to 0.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ...errors import ShapeError, UnsupportedModelError

LINE, PAGE, GROUP, TILE = 128, 4096, 32, 128
PLAIN = ("float32", "bfloat16", "float16")
DTYPES = {**{name: getattr(torch, name) for name in PLAIN}, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e8m0fnu": torch.float8_e8m0fnu,
          "uint8": torch.uint8}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STAMP = "stamp"
MX_SCALE_MAX = 128  # what kernels have been tried with: they add 62 to a scale's byte, which must stay a byte
MX_SCALES = ("gate_up_scale", "down_scale")
CODES = ("gate_up", "down")
E4M3 = "float8_e4m3fn"
# By code of a word: how far its bits 0 to 3 lie to the left of 6, 7, 8 and 15.
PLACES = ((0, 0, 0, 0), (3, 3, 3, 3), (6, 6, 6, 6), (30, 25, 25, 20))
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
                "gate_up": ("uint8", (-(-D // TILE), 2 * F, TILE // 2)), "down": ("uint8", (-(-F // TILE), D, TILE // 2)),
                "gate_up_scale": ("uint8", (-(-D // TILE), 2 * F, 4)), "down_scale": ("uint8", (-(-F // TILE), D, 4))}
        else:
            out = {"gate_up": (self.weights, (2 * F, D)), "down": (self.weights, (D, F))}
            if self.weights == "fp8":
                out = {"gate_up": (E4M3, (-(-D // TILE), 2 * F, TILE)), "down": (E4M3, (-(-F // TILE), D, TILE))}
                out["gate_up_scale"] = (self.scale, (2 * -(-F // b), -(-D // b)))
                out["down_scale"] = (self.scale, (-(-D // b), -(-F // b)))
        if self.bias:
            out["gate_up_bias"], out["down_bias"] = (self.bias, (2 * F,)), (self.bias, (D,))
        return out

    def layout(self) -> RecordLayout:
        return _layout(self)

    @property
    def bytes_read(self) -> int:
        """Bytes that stand for one expert: neither padding nor stamp."""
        if self.weights == "mxfp4":
            biases = (2 * self.width + self.hidden) * (DTYPES[self.bias].itemsize if self.bias else 0)
            return 3 * self.hidden * self.width // GROUP * (GROUP // 2 + 1) + biases
        padded = CODES if self.weights == "fp8" else ()
        codes = 3 * self.hidden * self.width if padded else 0
        return codes + sum(p.nbytes for p in self.layout().parts if p.name not in (STAMP, *padded))


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
        for name, (dtype, shape) in shapes.items():
            if _tiled(name, dtype):
                each, size = (TILE, TILE) if dtype == E4M3 else (4, 4 if name in MX_SCALES else TILE // 2)
                shapes[name] = (dtype, (-(-shape[1] // each), shape[0], size))
        return cls._build(shapes)

    def form(self) -> Form:
        """What kernels must know. Raises UnsupportedModelError: parts that no kernel multiplies with."""
        got = {p.name: p for p in self.parts}
        try:
            gate_up, down = got["gate_up"], got["down"]
            scale = got["gate_up_scale"].dtype if "gate_up_scale" in got else ""
            bias = got["gate_up_bias"].dtype if "gate_up_bias" in got else ""
            if gate_up.dtype == "uint8":
                hidden, width = down.shape[1], gate_up.shape[1] // 2
                form = Form("mxfp4", hidden, width, bias)
            elif gate_up.dtype == E4M3:
                hidden, width = down.shape[1], gate_up.shape[1] // 2
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


def _tiled(name: str, dtype: str) -> bool:
    return (dtype == "uint8" and name in MX_SCALES + CODES) or (dtype == E4M3 and name in CODES)


def plain_bytes(lying: torch.Tensor, columns: int) -> torch.Tensor:
    """E4M3 codes [columns / 128, rows, 128] as [rows, columns] bytes."""
    word = lying.contiguous().view(torch.int16)
    halves = word >> 8 & 0x80 | word >> 4 & 0x7F, word >> 4 & 0x80 | word >> 8 & 0x70 | word & 15
    return torch.cat([half.to(torch.uint8) for half in halves], -1).permute(1, 0, 2).flatten(1)[:, :columns]


def tiled_bytes(plain: torch.Tensor) -> torch.Tensor:
    """The way there: [rows, columns] bytes as [columns / 128, rows, 128]; zeros fill up the last tile."""
    whole = torch.nn.functional.pad(plain, (0, -plain.shape[1] % TILE)).unflatten(1, (-1, 2, TILE // 2))
    low, high = whole.permute(2, 1, 0, 3).to(torch.int16)
    return ((low & 0x80) << 8 | (low & 0x7F) << 4 | (high & 0x80) << 4 | (high & 0x70) << 8 | high & 15).contiguous().view(torch.uint8)


def plain_scales(lying: torch.Tensor, groups: int) -> torch.Tensor:
    """MXFP4 scales [columns / 128, rows, 4] as [rows, groups]."""
    return lying.permute(1, 0, 2).flatten(1)[:, :groups]


def plain_codes(lying: torch.Tensor, groups: int) -> torch.Tensor:
    """MXFP4 codes [columns / 128, rows, 64] as [rows, groups, 16] bytes, the even element in the low nibble."""
    words = _turned(lying.contiguous().view(torch.int32), back=True)
    return words.view(torch.uint8).unflatten(-1, (16, 4)).permute(1, 0, 3, 2).flatten(1, 2)[:, :groups]


def tiled_codes(plain: torch.Tensor) -> torch.Tensor:
    """The way there: [rows, groups, 16] as [columns / 128, rows, 64]."""
    whole = torch.nn.functional.pad(plain, (0, 0, 0, -plain.shape[1] % 4)).unflatten(1, (-1, 4))
    # Byte i of each of four groups: the codes of a word.
    return _turned(whole.permute(1, 0, 3, 2).flatten(-2).contiguous().view(torch.int32), back=False).view(torch.uint8)


def _turned(words: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Bits of 32-bit words of codes to where kernels want them, or back: every bit goes to a place of its own, so halves can go alone."""
    low, high = _tables(back, words.device)
    return low[(words & 0xFFFF).long()] | high[((words >> 16) & 0xFFFF).long()]


@lru_cache
def _tables(back: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the 65,536 values of the low and of the high 16 bits of a word become."""
    places = [(8 * q + 4 * lane + bit, ((6, 7, 8, 15)[bit] + 16 * lane + PLACES[q][bit]) % 32)
              for lane in range(2) for q in range(4) for bit in range(4)]
    value, out = torch.arange(1 << 16), []
    for half in (0, 16):
        table = torch.zeros(1 << 16, dtype=torch.int64)
        for a, b in places:
            source, to = (b, a) if back else (a, b)
            if half <= source < half + 16:
                table |= ((value >> (source - half)) & 1) << to
        out.append(torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32).to(device))
    return out[0], out[1]


def _copy(name: str, piece: Piece, view: torch.Tensor, *, out: bool) -> None:
    """Bits of the pieces to the view, or back. As integers: no copy may quieten a NaN or change a denormal."""
    bits, at, dtype = view.view(BITS[view.dtype.itemsize]), 0, str(view.dtype).removeprefix("torch.")
    tiled, codes, each = _tiled(name, dtype), name in CODES, TILE if dtype == E4M3 else 4
    columns = pieces(piece)[0].shape[1] if tiled else 0
    whole = (GROUP // 2,) if codes and dtype != E4M3 else ()
    shape = (view.shape[1], columns, *whole) if tiled else view.shape
    if sum(t.shape[0] if t.dim() else 1 for t in pieces(piece)) != (shape[0] if shape else 1):
        raise ShapeError(f"{name} has {[tuple(t.shape) for t in pieces(piece)]}", where="experts", expected=str(tuple(shape)),
                         do="experts of one store are of one shape")
    for t in pieces(piece):
        if t.dtype != view.dtype or t.shape[1:] != shape[1:] or (tiled and -(-columns // each) != view.shape[0]):
            raise ShapeError(f"{name} is {t.dtype} {tuple(t.shape)}", where="experts", expected=f"{view.dtype} {tuple(shape)}",
                             do="experts of one store are of one shape and dtype")
        theirs = t.detach().view(bits.dtype)
        mine = bits[:, at : at + len(t)] if tiled else bits[at : at + len(t)] if t.dim() else bits
        if not tiled:
            theirs.copy_(mine) if out else mine.copy_(theirs)
        elif dtype == E4M3:
            theirs.copy_(plain_bytes(mine, columns)) if out else mine.copy_(tiled_bytes(theirs))
        elif out:
            theirs.copy_(plain_codes(mine, columns) if codes else plain_scales(mine, columns))
        elif codes:
            mine.copy_(tiled_codes(theirs))
        else:
            mine.copy_(torch.nn.functional.pad(theirs, (0, -columns % 4)).view(len(t), -1, 4).permute(1, 0, 2))
        at += len(t) if t.dim() else 0
