"""Experts at home: one contiguous aligned record per expert (all its parts), in memory or in a file.

Record file, version 4: a folder with `manifest.json` (geometry, digests) and `records-<16 hex digits>.bin`, record (layer, expert) at
(layer * num_experts + expert) * record_bytes, each as `kernels/expert_mlp/record.py` has it. The manifest is written last and names the
file, so an interrupted build leaves the old pair or none.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import checkpoint
from ..errors import ArtefactError, DeadlineError, UnsupportedModelError
from ..kernels.expert_mlp.record import Piece, RecordLayout
from ..runtime import ALIGN, Runtime

log = logging.getLogger(__name__)

FORMAT, VERSION, MANIFEST = "moe_prefetch.records", 4, "manifest.json"
REBUILD = f"delete {MANIFEST} and records-*.bin there; they are rebuilt from the model at the next attach"
# While a session is attached its records are the only copy of the experts.
KEEP = ("keep the file: it alone has the experts' weights now. Mend the drive and detach again; if the record stays as it is, load the "
        "model anew from its checkpoint")
_REMEDY = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space on the drive, or set experts.path to a folder on another"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in the way: set experts.path to a folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "set experts.path to a folder that can be written, or give the permission"),
}
_DIGEST, _FILE = re.compile("[0-9a-f]{64}"), re.compile(r"records-[0-9a-f]{16}\.bin")
_LEFTOVER = re.compile(r"\.(records-[0-9a-f]{16}\.bin|manifest\.json)\.[0-9a-f]{12}\.tmp")


class ExpertSource(Protocol):
    """Where experts come from and go back to: a live model seen through an integration, experts modules, a checkpoint."""

    num_layers: int
    num_experts: int

    def tensors(self, layer: int, expert: int) -> Mapping[str, Piece]:
        """The expert's parts, in record order."""


class LocalStore:
    """Home `local`: the model's own tensors; nothing moves. Read by one thread at a time."""

    def __init__(self, source: ExpertSource, runtime: Runtime) -> None:
        self.source, self._runtime = source, runtime
        self.layout = RecordLayout.of(source.tensors(0, 0))
        self._layouts = {0: self.layout}
        self._aligned: torch.Tensor | None = None

    def layout_of(self, layer: int) -> RecordLayout:
        """A layer's own: here layers may differ, in dtype for one."""
        if layer not in self._layouts:
            self._layouts[layer] = RecordLayout.of(self.source.tensors(layer, 0))
        return self._layouts[layer]

    def views(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """An expert's parts, valid until the next call. BLAS may round differently at another alignment or stride, so where the model's own
        memory has neither (odd widths, transposed weights), a copy that has them is used."""
        parts = self.source.tensors(layer, expert)
        ready = {name: t for name, t in parts.items()
                 if isinstance(t, torch.Tensor) and (t.device.type != "cpu" or (t.data_ptr() % ALIGN == 0 and t.is_contiguous()))}
        if len(ready) == len(parts):
            return ready
        layout = self.layout_of(layer)
        if self._aligned is None or len(self._aligned) < layout.nbytes:
            self._aligned = self._runtime.allocate(layout.nbytes)
        layout.pack(parts, self._aligned, stamp=(0, layer, expert))
        return layout.views(self._aligned)


class DiskStore:
    """Home `disk`: the record file. Holds it open, so that it can be read even after its name is gone."""

    def __init__(self, path: Path, digests: list[str], source: ExpertSource, layout: RecordLayout, runtime: Runtime, weights: int) -> None:
        self.path, self.digests, self.layout, self._runtime, self.weights = path, digests, layout, runtime, weights
        self.num_layers, self.num_experts = source.num_layers, source.num_experts
        self._advice = KEEP
        try:
            self._file = runtime.open_read(path)
        except OSError as e:
            raise ArtefactError(f"the record file can't be opened: {e.strerror}", where=str(path), do=REBUILD) from e

    # making ---------------------------------------------------------------------------------------------------------
    @classmethod
    def obtain(cls, folder: Path, source: ExpertSource, runtime: Runtime, progress: Callable[[int, int], None] | None = None, *,
               weights: int = 1) -> DiskStore:
        """The records of `source` in `folder`: those that are there when they hold exactly its weights, else written now.

        `weights` is the version of the weights that every record carries. Processes take turns. Raises ArtefactError (damaged, made for
        another geometry, drive full or not writable), DeadlineError.
        """
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with checkpoint.exclusive(folder, runtime):
                if (folder / MANIFEST).exists():
                    store = cls.open(folder, source, runtime, weights=weights)
                    if store is not None:
                        return store
                    log.warning("the record file in %s holds other weights than the model: it is written again", folder)
                return cls.create(folder, source, runtime, progress, weights=weights)
        except BaseException as e:
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if isinstance(e, OSError) and not isinstance(e, DeadlineError):
                raise ArtefactError(f"the records can't be written: {e.strerror}", where=str(folder),
                                    expected="a folder with space for them",
                                    do=_REMEDY.get(e.errno or 0, "check the drive, then try again")) from e
            raise

    @classmethod
    def create(cls, folder: Path, source: ExpertSource, runtime: Runtime, progress: Callable[[int, int], None] | None = None, *,
               weights: int = 1) -> DiskStore:
        """Write every expert of `source` into `folder` and open the result; what was there stays until the new is whole.

        Hold the folder's lock. Raises OSError when the drive is full; nothing is left then.
        """
        layout = RecordLayout.of(source.tensors(0, 0))
        total = source.num_layers * source.num_experts
        if (free := runtime.free_bytes(folder)) < total * layout.nbytes:
            raise OSError(errno.ENOSPC, f"{total * layout.nbytes} bytes are needed, {free} are free")
        _sweep(folder, keep="")
        buffer = runtime.allocate(layout.nbytes)
        data, digests = checkpoint.tensor_bytes(buffer), []
        name = f"records-{secrets.token_hex(8)}.bin"
        try:
            with checkpoint.atomic_file(folder / name, runtime) as f:
                for i in range(total):
                    layer, expert = divmod(i, source.num_experts)
                    tensors = source.tensors(layer, expert)
                    if RecordLayout.of(tensors) != layout:
                        raise UnsupportedModelError("experts differ in shape or dtype", where=f"layer {layer}, expert {expert}",
                                                    expected="one layout for all", do="use home: local with this model")
                    layout.pack(tensors, buffer, stamp=(weights, layer, expert))
                    digests.append(hashlib.sha256(data).hexdigest())
                    runtime.write(f.fileno(), data)
                    if progress:
                        progress(i + 1, total)
            # Opened before the manifest names it: from here on it is this store's, whoever rebuilds the folder.
            store = cls(folder / name, digests, source, layout, runtime, weights)
            try:
                checkpoint.write_json(folder / MANIFEST, {
                    "format": FORMAT, "version": VERSION, "weights": weights, "file": name, "layers": source.num_layers,
                    "experts": source.num_experts, "record_bytes": layout.nbytes, "parts": layout.to_json(), "digests": digests}, runtime)
            except BaseException:
                store.close()
                raise
        except BaseException:
            # A manifest that stands already (only making sure of it failed) names the new file: then that is what stays.
            if _named(folder) == name:
                _sweep(folder, keep=name)
            else:
                (folder / name).unlink(missing_ok=True)
            raise
        _sweep(folder, keep=name)
        return store

    @classmethod
    def open(cls, folder: Path, source: ExpertSource, runtime: Runtime, *, weights: int = 1) -> DiskStore | None:
        """Open what `create` wrote, every record checked against its digest; None when it holds other weights than `source`, or another
        version of them.

        Raises ArtefactError naming the fault.
        """
        m = read_manifest(folder)
        layout = RecordLayout.of(source.tensors(0, 0))
        want = {"layers": source.num_layers, "experts": source.num_experts, "record_bytes": layout.nbytes, "parts": layout.to_json()}
        for key, value in want.items():
            if m[key] != value:
                raise ArtefactError(f"the record file was made for another model: {key} is {m[key]!r}", where=str(folder),
                                    expected=f"{key} = {value!r}", do=f"name another folder, or {REBUILD}")
        store = cls(checkpoint.contained(folder, m["file"]), m["digests"], source, layout, runtime, weights)
        try:
            if not store._matches(source):
                store.close()
                return None
            store._verify()
        except BaseException:
            store.close()
            raise
        return store

    def _verify(self) -> None:
        """Before the model's weights are given up. Raises ArtefactError."""
        buffer, self._advice = self._runtime.allocate(self.layout.nbytes), REBUILD
        for i in range(len(self.digests)):
            self.read_whole(*divmod(i, self.num_experts), buffer)
        self._advice = KEEP

    def _matches(self, source: ExpertSource) -> bool:
        buffer = self._runtime.allocate(self.layout.nbytes)
        for i, digest in enumerate(self.digests):
            layer, expert = divmod(i, self.num_experts)
            self.layout.pack(source.tensors(layer, expert), buffer, stamp=(self.weights, layer, expert))
            if hashlib.sha256(checkpoint.tensor_bytes(buffer)).hexdigest() != digest:
                return False
        return True

    def unlink(self) -> None:
        """Remove the file's name and its folder, if nothing else is in it; reading goes on until `close`."""
        for p in (self.path.parent / MANIFEST, self.path):
            p.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    # reading --------------------------------------------------------------------------------------------------------
    def read_into(self, layer: int, expert: int, buffer: torch.Tensor) -> None:
        """Read one record into a uint8 buffer (thread-safe). Raises ArtefactError: a short file, a drive that fails, another record."""
        where = f"{self.path}, layer {layer}, expert {expert}"
        if self._file.closed:
            raise ArtefactError("the record file is closed", where=where)
        try:
            self._runtime.pread_into(self._file.fileno(), checkpoint.tensor_bytes(buffer[: self.layout.nbytes]),
                                     (layer * self.num_experts + expert) * self.layout.nbytes, where)
        except ArtefactError as e:
            raise ArtefactError(e.what, where=where, expected=e.expected, do=self._advice) from e
        except OSError as e:
            raise ArtefactError(f"a record can't be read: {e.strerror}", where=where, do="check the drive, then try again") from e
        if (stamp := self.layout.stamp_of(buffer)) != (self.weights, layer, expert):
            raise ArtefactError("a record was altered: it says weights {}, layer {}, expert {}".format(*stamp), where=where,
                                expected=f"weights {self.weights}, layer {layer}, expert {expert}", do=self._advice)

    def read_whole(self, layer: int, expert: int, buffer: torch.Tensor) -> None:
        """`read_into`, and every byte is compared with what was written. Raises ArtefactError."""
        self.read_into(layer, expert, buffer)
        digest = self.digests[layer * self.num_experts + expert]
        if hashlib.sha256(checkpoint.tensor_bytes(buffer[: self.layout.nbytes])).hexdigest() != digest:
            raise ArtefactError("a record was altered", where=f"{self.path}, layer {layer}, expert {expert}",
                                expected=f"sha256 {digest[:16]}…", do=self._advice)

    def close(self) -> None:
        self._file.close()


def _named(folder: Path) -> object:
    """The file that the folder's manifest names, None without a manifest."""
    try:
        m = checkpoint.read_json(folder / MANIFEST)
    except ArtefactError:
        return None
    return m.get("file") if isinstance(m, dict) else None


def _sweep(folder: Path, keep: str) -> None:
    """Remove what interrupted builds left, and with `keep` every other record file. Hold the folder's lock."""
    for p in folder.iterdir():
        if _LEFTOVER.fullmatch(p.name) or (keep and p.name != keep and _FILE.fullmatch(p.name)):
            with contextlib.suppress(OSError):
                p.unlink()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a record folder, its types and the file's size checked; no model is needed. Raises ArtefactError."""
    m = checkpoint.read_json(checkpoint.contained(folder, MANIFEST))
    where = str(folder / MANIFEST)
    if not isinstance(m, dict) or m.get("format") != FORMAT:
        raise ArtefactError("the folder is something else's", where=where, expected=f"a new folder, or format {FORMAT}",
                            do="name another folder")
    if type(m.get("version")) is not int or m["version"] != VERSION:
        raise ArtefactError("no record manifest of this version", where=where, expected=f"format {FORMAT}, version {VERSION}", do=REBUILD)
    counts = [m.get(key) for key in ("layers", "experts", "record_bytes")]
    # Bounded, so that products stay file sizes. `type`, since True is an int and equal to 1.
    if any(type(n) is not int or not 1 <= n <= 1 << 40 for n in counts) or not isinstance(m.get("parts"), list):
        raise ArtefactError("the manifest is incomplete", where=where, expected="layers, experts, record_bytes and parts", do=REBUILD)
    if type(m.get("weights")) is not int:
        raise ArtefactError("the manifest is incomplete", where=where, expected="weights, a version number", do=REBUILD)
    layers, experts, record_bytes = counts
    digests, name = m.get("digests"), m.get("file")
    listed = isinstance(digests, list) and len(digests) == layers * experts
    if not listed or not all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in digests):
        raise ArtefactError("the manifest is incomplete", where=where, expected=f"{layers * experts} digests", do=REBUILD)
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ArtefactError(f"the manifest names the file {name!r}", where=where, expected="records-<16 hex digits>.bin", do=REBUILD)
    path = checkpoint.contained(folder, name)
    try:
        size = path.stat().st_size
    except OSError as e:
        raise ArtefactError(f"the record file can't be read: {e.strerror}", where=str(path), do=REBUILD) from e
    if size != layers * experts * record_bytes:
        raise ArtefactError(f"the record file has {size} bytes", where=str(path), expected=f"{layers * experts * record_bytes} bytes",
                            do=REBUILD)
    return m
