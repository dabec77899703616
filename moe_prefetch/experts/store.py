"""Experts at home: one contiguous aligned record per expert (all its parts), in memory or in a file.

Record file, version 1: a folder with `manifest.json` (geometry, digests) and `records-<hash>.bin`, record (layer, expert) at
(layer * num_experts + expert) * record_bytes. Parts start at multiples of 64 bytes, records at multiples of 4096. The manifest is
written last and names the file, so an interrupted build leaves the old pair or none.
"""
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import checkpoint
from ..errors import ArtefactError
from ..runtime import ALIGN, Runtime

VERSION = 1
PAGE = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a record: its place in bytes from the record's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where each part of an expert lies in its record. The same for every expert of a store."""

    parts: tuple[Part, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> RecordLayout:
        parts, offset = [], 0
        for name, t in tensors.items():
            part = Part(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), offset)
            if part.dtype not in DTYPES:
                raise ArtefactError(f"dtype {part.dtype} can't be stored yet", where=name, expected=", ".join(DTYPES), do="convert the model")
            parts.append(part)
            offset += -(-part.nbytes // ALIGN) * ALIGN
        return cls(tuple(parts), -(-offset // PAGE) * PAGE)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parts of the record in a uint8 buffer of at least `nbytes`, without a copy."""
        return {p.name: buffer[p.offset : p.offset + p.nbytes].view(DTYPES[p.dtype]).view(p.shape) for p in self.parts}

    def pack(self, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy `tensors` (any strides) into a uint8 buffer."""
        for name, view in self.views(buffer).items():
            view.copy_(tensors[name])

    def to_json(self) -> list[dict[str, Any]]:
        return [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "offset": p.offset} for p in self.parts]


class ExpertSource(Protocol):
    """Where experts come from and go back to: a live model, seen through an integration."""

    num_layers: int
    num_experts: int

    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """The expert's parts, in record order."""


class LocalStore:
    """Home `local`: the model's own tensors; nothing moves."""

    def __init__(self, source: ExpertSource) -> None:
        self.source = source
        self.layout = RecordLayout.of(source.tensors(0, 0))

    def views(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        return self.source.tensors(layer, expert)


class DiskStore:
    """Home `disk`: the record file."""

    def __init__(self, folder: Path, path: Path, manifest: dict[str, Any], layout: RecordLayout, runtime: Runtime) -> None:
        self.folder, self.path, self.layout, self._runtime = folder, path, layout, runtime
        self.num_layers, self.num_experts = manifest["layers"], manifest["experts"]
        self.digests: list[str] = manifest["digests"]
        self._fd: int | None = runtime.open_read(path)

    # making ---------------------------------------------------------------------------------------------------------
    @classmethod
    def create(cls, folder: Path, source: ExpertSource, runtime: Runtime, progress: Callable[[int, int], None] | None = None) -> DiskStore:
        """Write every expert of `source` into `folder` and open the result. Raises OSError when the disk is full; nothing is left."""
        layout = RecordLayout.of(source.tensors(0, 0))
        buffer = runtime.allocate(layout.nbytes)
        data = checkpoint.tensor_bytes(buffer)
        digests, whole, total = [], hashlib.sha256(), source.num_layers * source.num_experts
        building = folder / "building"
        try:
            with checkpoint.atomic_file(building, runtime) as f:
                for layer in range(source.num_layers):
                    for expert in range(source.num_experts):
                        tensors = source.tensors(layer, expert)
                        if RecordLayout.of(tensors) != layout:
                            raise ArtefactError("experts differ in shape or dtype", where=f"layer {layer}, expert {expert}",
                                                expected="one layout for all", do="this model can't be stored yet")
                        layout.pack(tensors, buffer)
                        digests.append(hashlib.sha256(data).hexdigest())
                        whole.update(digests[-1].encode())
                        runtime.write(f.fileno(), data)
                        if progress:
                            progress(len(digests), total)
            name = f"records-{whole.hexdigest()[:16]}.bin"
            runtime.replace(building, folder / name)
        finally:
            building.unlink(missing_ok=True)
        checkpoint.write_json(folder / "manifest.json", {
            "format": "moe_prefetch.records", "version": VERSION, "file": name, "layers": source.num_layers, "experts": source.num_experts,
            "record_bytes": layout.nbytes, "parts": layout.to_json(), "digests": digests}, runtime)
        for old in folder.glob("records-*.bin"):
            if old.name != name:
                old.unlink()
        return cls.open(folder, source, runtime, verify=False)

    @classmethod
    def open(cls, folder: Path, source: ExpertSource, runtime: Runtime, *, verify: bool = True) -> DiskStore:
        """Open what `create` wrote, checked against the model's geometry; `verify` reads every record and compares its digest.

        Raises ArtefactError naming the fault.
        """
        m = checkpoint.read_json(folder / "manifest.json")
        layout = RecordLayout.of(source.tensors(0, 0))
        where = str(folder)
        rebuild = "delete the folder; it is rebuilt from the model at the next attach"
        want = {"format": "moe_prefetch.records", "version": VERSION, "layers": source.num_layers, "experts": source.num_experts,
                "record_bytes": layout.nbytes, "parts": layout.to_json()}
        for key, value in want.items():
            if not isinstance(m, dict) or m.get(key) != value:
                got = m.get(key) if isinstance(m, dict) else type(m).__name__
                raise ArtefactError(f"the record file was made for another model or version: {key} is {got!r}", where=where,
                                    expected=f"{key} = {value!r}", do=rebuild)
        total = source.num_layers * source.num_experts
        digests = m.get("digests")
        if not isinstance(digests, list) or len(digests) != total or not isinstance(m.get("file"), str):
            raise ArtefactError("the manifest is incomplete", where=where, expected=f"a file name and {total} digests", do=rebuild)
        path = checkpoint.contained(folder, m["file"])
        try:
            size = path.stat().st_size
        except OSError as e:
            raise ArtefactError(f"the record file can't be read: {e.strerror}", where=str(path), do=rebuild) from e
        if size != total * layout.nbytes:
            raise ArtefactError(f"the record file has {size} bytes", where=str(path), expected=f"{total * layout.nbytes} bytes", do=rebuild)
        store = cls(folder, path, m, layout, runtime)
        if verify:
            try:
                store._verify()
            except BaseException:
                store.close()
                raise
        return store

    def _verify(self) -> None:
        buffer = self._runtime.allocate(self.layout.nbytes)
        for i, digest in enumerate(self.digests):
            layer, expert = divmod(i, self.num_experts)
            self.read_into(layer, expert, buffer)
            if hashlib.sha256(checkpoint.tensor_bytes(buffer)).hexdigest() != digest:
                raise ArtefactError("a record was altered", where=f"{self.path}, layer {layer}, expert {expert}", expected=f"sha256 {digest[:16]}…",
                                    do="delete the folder; it is rebuilt from the model at the next attach")

    def matches(self, source: ExpertSource) -> bool:
        """Whether the file holds exactly the weights of `source`."""
        buffer = self._runtime.allocate(self.layout.nbytes)
        for i, digest in enumerate(self.digests):
            self.layout.pack(source.tensors(*divmod(i, self.num_experts)), buffer)
            if hashlib.sha256(checkpoint.tensor_bytes(buffer)).hexdigest() != digest:
                return False
        return True

    # reading --------------------------------------------------------------------------------------------------------
    def read_into(self, layer: int, expert: int, buffer: torch.Tensor) -> None:
        """Read one record into a uint8 buffer (thread-safe). Raises ArtefactError on a short file, OSError as the system does."""
        if self._fd is None:
            raise ArtefactError("the record file is closed", where=str(self.path))
        self._runtime.pread_into(self._fd, checkpoint.tensor_bytes(buffer[: self.layout.nbytes]),
                                 (layer * self.num_experts + expert) * self.layout.nbytes, f"{self.path}, layer {layer}, expert {expert}")

    def close(self) -> None:
        if self._fd is not None:
            self._runtime.close(self._fd)
            self._fd = None

    def delete(self) -> None:
        """Close, and remove the folder's files."""
        self.close()
        for p in (self.folder / "manifest.json", self.path):
            p.unlink(missing_ok=True)
        if self.folder.is_dir() and not os.listdir(self.folder):
            self.folder.rmdir()
