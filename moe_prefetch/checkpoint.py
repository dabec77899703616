"""The only file that opens artefacts: safetensors and JSON, never pickle.

On the way in: size cap, safe parser, contained path, hash, then bytes. On the way out: temporary file, fsync, rename, fsync of
the folder; a reader sees the old artefact or the new one, never a mixture. Format: https://github.com/huggingface/safetensors
"""
from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load, save

from .errors import ArtefactError, DeadlineError
from .runtime import REAL, Runtime

MAX_JSON = 64 << 20
MAX_HEADER = 100 << 20
_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
           "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
           "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def check_writable(folder: Path) -> None:
    """Whether files can be put there, or where the folder would be made: before long work whose result will go there. Nothing stays.
    Raises ArtefactError."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p))
    try:
        with tempfile.TemporaryFile(dir=there):
            return
    except OSError as e:
        raise ArtefactError(f"nothing can be written there: {e.strerror}", where=str(folder), do="name another folder") from e


def check_own(folder: Path, names: Sequence[str], said: Mapping[str, str]) -> None:
    """Before an artefact is written into `folder` as files `names`: none is there, or the last one, JSON, says `said`. Raises
    ArtefactError: they are something else's."""
    there = [name for name in names if os.path.lexists(folder / name)]
    found = None
    with suppress(ArtefactError):
        found = read_json(folder / names[-1])
    if there and not (isinstance(found, dict) and said.items() <= found.items()):
        raise ArtefactError(f"its {' and '.join(there)} would be replaced", where=str(folder),
                            expected=f"a new folder, or one whose {names[-1]} says {' '.join(said.values())}", do="name another folder" +
                            ("" if found is not None else f"; or, if a save was cut off there, delete {' and '.join(there)}"))


def contained(root: Path, name: str) -> Path:
    """`root / name`, refused when it would leave `root` (dot-dot, absolute path, symlink, NUL, sub-folder).

    Raises ArtefactError.
    """
    if not name or "\0" in name or name != os.path.basename(name) or name in (".", ".."):
        raise ArtefactError(f"file name {name!r} would leave its folder", where=str(root), expected="a plain file name",
                            do="do not use this artefact: it was made by hand or by an attacker")
    path = root / name
    if path.is_symlink():
        raise ArtefactError(f"{name!r} is a symbolic link", where=str(root), expected="a regular file", do="copy the file itself")
    return path


def _open_regular(path: Path) -> BinaryIO:
    """Open for reading. Raises ArtefactError for anything but a regular file: opening a pipe would wait, a device never ends."""
    try:
        # Looked at first: an `opener` with O_NONBLOCK would lose the file when Ctrl-C strikes in it.
        regular = stat.S_ISREG(os.stat(path).st_mode)
        f = open(path, "rb") if regular else None
    except (OSError, ValueError) as e:
        raise ArtefactError(f"can't be read: {getattr(e, 'strerror', None) or e}", where=str(path),
                            do="check the path and its permissions") from e
    if f is None:
        raise ArtefactError("is no regular file", where=str(path), expected="a file", do="check the path")
    return f


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) != len(dict(pairs)):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def read_json(path: Path, *, cap: int = MAX_JSON) -> Any:
    """Parse a JSON file of at most `cap` bytes. Raises ArtefactError (missing, too large, not JSON, NaN or
    Infinity, a key twice)."""
    path = Path(path)
    with _open_regular(path) as f:
        data = f.read(cap + 1)
    if len(data) > cap:
        raise ArtefactError(f"larger than {cap} bytes", where=str(path), expected="a small JSON file",
                            do="check that this is the right file")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as e:
        raise ArtefactError(f"not valid JSON: {e}", where=str(path), expected="UTF-8 JSON", do="make the artefact again") from e


def sha256_file(path: Path) -> str:
    with _open_regular(Path(path)) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; any dtype."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")


def sha256_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of names, dtypes, shapes and bytes, independent of order, device and strides."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        h.update(f"{name}|{t.dtype}|{tuple(t.shape)}|".encode())
        h.update(tensor_bytes(t))
    return h.hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The system's errors of writing name no file; `path` is meant."""
    try:
        yield
    except OSError as e:
        if e.errno is not None and e.filename is None:
            e.filename = str(path)
        raise


@contextmanager
def atomic_file(path: Path, runtime: Runtime = REAL) -> Iterator[BinaryIO]:
    """Write `path` piece by piece through a temporary file in its folder; it appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _beside(path)
    try:
        # Not mkstemp: its files can be read by nobody else, whatever the user's umask says.
        with _naming(path), open(tmp, "xb") as f:
            yield f
            f.flush()
            runtime.fsync(f.fileno())
        runtime.replace(tmp, path)
        sync_folder(path.parent, runtime)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path, runtime: Runtime = REAL) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        runtime.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def exclusive(folder: Path, runtime: Runtime = REAL, *, wait_s: float = 600.0) -> Iterator[None]:
    """Hold a folder's advisory lock, so that two processes never build in it at once. Raises DeadlineError after `wait_s`.

    The system gives the lock back when its holder ends in any way. Drives without such locks (some network drives) go unguarded.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = runtime.now() + wait_s
        while not _locked(fd, runtime):
            if runtime.now() > end:
                raise DeadlineError(f"another process has worked in the folder for {wait_s:g} s", where=str(folder),
                                    do="wait for it, or give each process a folder of its own")
            runtime.sleep_until(min(runtime.now() + 0.05, end))
        yield
    finally:
        os.close(fd)


def _locked(fd: int, runtime: Runtime) -> bool:
    try:
        return runtime.try_lock(fd)
    except OSError as e:
        if e.errno in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            return True
        raise


def write_together(files: Mapping[Path, bytes], runtime: Runtime = REAL) -> None:
    """Write files that belong together: all of them whole beside their places, then renamed one after the other, in order. A full drive, or
    an end while bytes are written, leaves what was there; a reader between two renames sees two generations, which a digest tells it."""
    ready: list[tuple[Path, Path]] = []
    try:
        for path, data in ((Path(p), d) for p, d in files.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            ready.append((_beside(path), path))
            with _naming(path), open(ready[-1][0], "xb") as f:
                runtime.write(f.fileno(), data)
                runtime.fsync(f.fileno())
        for tmp, path in ready:
            runtime.replace(tmp, path)
    except BaseException:
        for tmp, _ in ready:
            tmp.unlink(missing_ok=True)
        raise
    for folder in dict.fromkeys(path.parent for _, path in ready):
        sync_folder(folder, runtime)


def write_text(path: Path, text: str, runtime: Runtime = REAL) -> None:
    write_together({path: text.encode("utf-8")}, runtime)


def json_bytes(value: Any) -> bytes:
    """Sorted, NaN refused."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("utf-8")


def write_json(path: Path, value: Any, runtime: Runtime = REAL) -> None:
    """Atomic, sorted, NaN refused."""
    write_together({path: json_bytes(value)}, runtime)


def tensors_bytes(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file."""
    return save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata=dict(meta or {}))


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str] | None = None, runtime: Runtime = REAL) -> None:
    """Atomic safetensors file."""
    write_together({path: tensors_bytes(tensors, meta)}, runtime)


def load_tensors(path: Path, *, sha256: str | None = None, cap: int | None = None) -> dict[str, torch.Tensor]:
    """Read a safetensors file; with `sha256` its bytes are checked first. Raises ArtefactError naming the file.

    The file is read once, so what was checked is what is used, and nobody can cut it short under a memory map.
    """
    path = Path(path)
    with _open_regular(path) as f:
        size = os.fstat(f.fileno()).st_size
        if cap is not None and size > cap:
            raise ArtefactError(f"{size} bytes, more than the {cap} expected here", where=str(path), do="check that this is the right file")
        head = f.read(8)
        if len(head) < 8 or struct.unpack("<Q", head)[0] > min(MAX_HEADER, size):
            raise ArtefactError("not a safetensors file, or truncated", where=str(path), expected="a header length within the file",
                                do="make or fetch the file again")
        data = head + f.read(size - 8)
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise ArtefactError("its bytes differ from what the manifest says", where=str(path), expected=f"sha256 {sha256[:16]}…",
                            do="the file was altered or cut short: make or fetch it again")
    try:
        return load(data)
    except Exception as e:  # safetensors raises its own error, KeyError (a dtype torch lacks), ValueError, RuntimeError
        raise ArtefactError(f"not a valid safetensors file: {e}", where=str(path), do="make or fetch the file again") from e


def read_jsonl(path: Path, *, cap_line: int = MAX_JSON) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time. Raises ArtefactError naming the line: too long, cut short, not an object."""
    path = Path(path)
    with _open_regular(path) as f:
        number = 0
        while line := f.readline(cap_line + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > cap_line:
                raise ArtefactError(f"a line of more than {cap_line} bytes", where=where, do="check that this is the right file")
            try:
                value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
            except (ValueError, RecursionError) as e:
                raise ArtefactError(f"not valid JSON: {e}", where=where, expected="one object a line", do="make the artefact again") from e
            if not isinstance(value, dict):
                raise ArtefactError(f"a {type(value).__name__}, no object", where=where, do="check that this is the right file")
            yield value


def read_span(path: Path, offset: int, nbytes: int) -> bytearray:
    """`nbytes` from `offset` of a regular file. Raises ArtefactError when the file ends before."""
    path = Path(path)
    with _open_regular(path) as f:
        size = os.fstat(f.fileno()).st_size
        if not (0 <= offset and 0 <= nbytes <= size - offset):
            raise ArtefactError(f"no {nbytes} bytes at offset {offset}", where=str(path), expected=f"within {size} bytes",
                                do="the file was cut short: record it again")
        f.seek(offset)
        return bytearray(f.read(nbytes))


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file: its place there, nothing read yet."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _stored_in(path: Path) -> dict[str, Stored]:
    """What a safetensors file says it holds, every place checked to lie in the file. Tensors of a dtype that torch lacks are left out."""
    with _open_regular(path) as f:
        size, head = os.fstat(f.fileno()).st_size, f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(MAX_HEADER, size - 8):
            raise ArtefactError("not a safetensors file, or truncated", where=str(path), expected="a header length within the file",
                                do="make or fetch the file again")
        data = f.read(length)
    out, spans = {}, []
    try:
        for name, entry in json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys).items():
            if name == "__metadata__":
                continue
            shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
            if any(type(n) is not int or not 0 <= n < 1 << 48 for n in (*shape, start, end)) or end > size - 8 - length:
                raise ValueError(f"{name} lies outside of the file")
            spans.append((start, end))
            if entry["dtype"] in _STORED:
                out[name] = Stored(path, _STORED[entry["dtype"]], shape, 8 + length + start)
                if out[name].nbytes != end - start:
                    raise ValueError(f"{name} has {end - start} bytes, its shape and dtype say {out[name].nbytes}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ArtefactError(f"its header is not valid: {e}", where=str(path), do="make or fetch the file again") from e
    spans.sort()
    if any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
        raise ArtefactError("two of its tensors lie over each other", where=str(path), do="make or fetch the file again")
    return out


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint folder by name: every `*.safetensors` that its index names, or without an index every one there.

    Raises ArtefactError: a shard is missing or damaged, leaves the folder, or holds a name twice.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        said = read_json(index)
        files = said.get("weight_map") if isinstance(said, dict) else None
        if not isinstance(files, dict) or not all(isinstance(n, str) for n in files.values()):
            raise ArtefactError("no weight_map", where=str(index), expected="names of tensors and files", do="fetch the checkpoint again")
        names = sorted(set(files.values()))
    else:
        files, names = None, sorted(p.name for p in folder.glob("*.safetensors"))
    out: dict[str, Stored] = {}
    for name in names:
        # Hugging Face's cache keeps files as links to blobs beside the folder: what a link leads to is checked to be a file.
        path = folder / name if (folder / name).is_symlink() and name == os.path.basename(name) else contained(folder, name)
        found = _stored_in(path)
        if twice := out.keys() & found.keys():
            raise ArtefactError(f"{sorted(twice)[0]} stands in two files", where=str(path), do="keep one checkpoint a folder")
        out.update(found)
    if files is not None and (missing := files.keys() - out.keys()):
        raise ArtefactError(f"{sorted(missing)[0]} is in no file", where=str(index), expected=files[sorted(missing)[0]],
                            do="fetch the checkpoint again")
    return out


def read_stored(entry: Stored, row: int | None = None) -> torch.Tensor:
    """A tensor, or one row of its first axis, in memory of its own. Raises ArtefactError: the file was cut short."""
    if row is not None and not (entry.shape and 0 <= row < entry.shape[0]):
        raise ArtefactError(f"no row {row}", where=str(entry.path), expected=f"a tensor of more than {row} rows", do="check the checkpoint")
    shape = entry.shape if row is None else entry.shape[1:]
    nbytes = prod(shape) * entry.dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=entry.dtype)
    data = read_span(entry.path, entry.offset + (row or 0) * nbytes, nbytes)
    return torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype).view(shape)


def load_arrays(path: Path, *, cap: int = 1 << 30) -> dict[str, torch.Tensor]:
    """The arrays of a NumPy .npz file; pickled objects are refused. Raises ArtefactError."""
    path = Path(path)
    with _open_regular(path) as f:
        if os.fstat(f.fileno()).st_size > cap:
            raise ArtefactError(f"more than {cap} bytes", where=str(path), do="check that this is the right file")
        try:
            with np.load(f, allow_pickle=False) as data:
                if sum(info.file_size for info in data.zip.infolist()) > cap:
                    raise ValueError(f"it unpacks to more than {cap} bytes")
                return {name: torch.from_numpy(data[name]) for name in data.files}
        except Exception as e:  # numpy and zipfile raise ValueError, BadZipFile, EOFError, TypeError, AttributeError, zlib.error
            raise ArtefactError(f"not a plain .npz file: {e}", where=str(path), do="make or fetch the file again") from e
