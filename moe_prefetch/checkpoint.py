"""The only file that opens artefacts: safetensors and JSON, never pickle.

On the way in: size cap, safe parser, contained path, hash, then bytes. On the way out: temporary file, fsync, rename, fsync of
the folder; a reader sees the old artefact or the new one, never a mixture. Format: https://github.com/huggingface/safetensors
"""
from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .errors import ArtefactError
from .runtime import REAL, Runtime

MAX_JSON = 64 << 20
MAX_HEADER = 100 << 20
FILE_MODE = 0o644  # a temporary file is born private; an artefact is for whoever may read its folder


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


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def read_json(path: Path, *, cap: int = MAX_JSON) -> Any:
    """Parse a JSON file of at most `cap` bytes. Raises ArtefactError (missing, too large, not JSON, NaN or Infinity)."""
    path = Path(path)
    try:
        with open(path, "rb") as f:
            data = f.read(cap + 1)
    except OSError as e:
        raise ArtefactError(f"can't be read: {e.strerror}", where=str(path), do="check the path and its permissions") from e
    if len(data) > cap:
        raise ArtefactError(f"larger than {cap} bytes", where=str(path), expected="a small JSON file", do="check that this is the right file")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ArtefactError(f"not valid JSON: {e}", where=str(path), expected="UTF-8 JSON", do="make the artefact again") from e


def sha256_file(path: Path) -> str:
    with open(path, "rb") as f:
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


@contextmanager
def atomic_file(path: Path, runtime: Runtime = REAL) -> Iterator[BinaryIO]:
    """Write `path` through a temporary file in its folder; it appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        os.fchmod(fd, FILE_MODE)
        with os.fdopen(fd, "wb") as f:
            yield f
            f.flush()
            runtime.fsync(f.fileno())
        runtime.replace(Path(tmp), path)
        sync_folder(path.parent, runtime)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path, runtime: Runtime = REAL) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        runtime.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str, runtime: Runtime = REAL) -> None:
    with atomic_file(path, runtime) as f:
        f.write(text.encode("utf-8"))


def write_json(path: Path, value: Any, runtime: Runtime = REAL) -> None:
    """Atomic, sorted, NaN refused."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", runtime)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str] | None = None, runtime: Runtime = REAL) -> None:
    """Atomic safetensors file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.fchmod(fd, FILE_MODE)
    os.close(fd)
    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, tmp, metadata=dict(meta or {}))
        fd = os.open(tmp, os.O_RDONLY)
        try:
            runtime.fsync(fd)
        finally:
            os.close(fd)
        runtime.replace(Path(tmp), path)
        sync_folder(path.parent, runtime)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def load_tensors(path: Path, *, sha256: str | None = None, cap: int | None = None) -> dict[str, torch.Tensor]:
    """Read a safetensors file; with `sha256` its bytes are checked first. Raises ArtefactError naming the file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            head = f.read(8)
    except OSError as e:
        raise ArtefactError(f"can't be read: {e.strerror}", where=str(path), do="check the path and its permissions") from e
    if cap is not None and size > cap:
        raise ArtefactError(f"{size} bytes, more than the {cap} expected here", where=str(path), do="check that this is the right file")
    if len(head) < 8 or struct.unpack("<Q", head)[0] > min(MAX_HEADER, size):
        raise ArtefactError("not a safetensors file, or truncated", where=str(path), expected="a header length within the file",
                            do="make or fetch the file again")
    if sha256 is not None and sha256_file(path) != sha256:
        raise ArtefactError("its bytes differ from what the manifest says", where=str(path), expected=f"sha256 {sha256[:16]}…",
                            do="the file was altered or cut short: make or fetch it again")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as e:
        raise ArtefactError(f"not a valid safetensors file: {e}", where=str(path), do="make or fetch the file again") from e
