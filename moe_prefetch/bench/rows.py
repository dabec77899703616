"""Figures on disk: a journal that a stopped run goes on from, and rows of a CSV that only ever grows."""

from __future__ import annotations

import csv
import datetime
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import check_writable
from ..errors import ArtefactError, ConfigError
from ..runtime import REAL

BEGINS = b'{"of": '
COLUMNS = ("bench", "case", "metric", "value", "unit", "machine", "torch", "triton", "commit", "date", "checked")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one case."""

    case: str
    metric: str
    value: float
    unit: str


class Journal:
    """One JSON line per measurement, written as soon as it is known. `paths`: all are read, the first is written (none: memory only).

    A last line that was cut off in the middle is not a measurement. Raises ArtefactError for a file that is no journal.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.path = paths[0] if paths else None
        self.known: dict[str, dict[str, Any]] = {}
        if self.path is not None and not self.path.exists():
            check_writable(self.path.absolute().parent)
        for path in paths:
            if path != self.path and not path.exists():
                raise ArtefactError("a journal can't be read: it is not there", where=str(path), expected="only the first may be new",
                                    do="correct its name, or leave it out")  # fmt: skip
            self._read(path)

    def _read(self, path: Path) -> None:
        kept, size = 0, path.stat().st_size if path.exists() else 0
        try:
            lines = path.read_bytes().splitlines(keepends=True) if size or path.is_dir() else []
        except OSError as e:
            raise ArtefactError(f"a journal can't be read: {e.strerror}", where=str(path), do="name another file") from e
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self.known[self._key(entry["of"])] = dict(entry["found"])
                kept += len(line)
            except (ValueError, KeyError, TypeError) as e:
                # A last line that was cut off begins as ours do.
                if number < len(lines) or line.endswith(b"\n") or line[: len(BEGINS)] != BEGINS[: len(line)]:
                    raise ArtefactError("not a journal of measurements", where=f"{path}:{number}", expected="one JSON object a line",
                                        do="name another file") from e  # fmt: skip
        if path == self.path and kept < size:
            os.truncate(path, kept)
        elif path == self.path and lines and not lines[-1].endswith(b"\n"):
            with path.open("a") as f:
                f.write("\n")

    @staticmethod
    def _key(of: Mapping[str, Any]) -> str:
        return json.dumps(of, sort_keys=True)

    def get(self, of: Mapping[str, Any]) -> dict[str, Any] | None:
        return self.known.get(self._key(of))

    def put(self, of: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.known[self._key(of)] = dict(found)
        if self.path is not None:
            _append(self.path, json.dumps({"of": of, "found": found}) + "\n")


@functools.cache
def checkpoint_id(model: str) -> dict[str, str]:
    """Which checkpoint a folder holds: a hash of its files' names, sizes and times. Nothing for a model that has a name."""
    if not Path(model).is_dir():
        return {}
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in Path(model).iterdir() if p.is_file())
    return {"checkpoint": hashlib.sha256(repr(files).encode()).hexdigest()[:16]}


def choice(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression over names of cases. Raises ConfigError."""
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ConfigError(f"{pattern!r} is no regular expression: {e}", where=where, expected="one over names of cases",
                          do="see --help") from e


def machine_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or platform.machine()


def append_rows(path: Path, bench: str, rows: Sequence[Row], *, machine: str, commit: str, checked: str) -> None:
    """Append rows to a CSV, with a header when it is new. `checked` names the test that proves what was measured."""
    versions = {}
    for package in ("torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    day = datetime.date.today().isoformat()
    stamp = {"machine": machine, **versions, "commit": commit, "date": day, "checked": checked}
    add_rows(path, [{"bench": bench, "case": r.case, "metric": r.metric, "value": f"{r.value:.6g}", "unit": r.unit, **stamp} for r in rows])


def check_rows(path: Path) -> None:
    """Whether rows can be appended to `path`: a new file, or one of rows. Raises ArtefactError. To be asked before what is measured."""
    check_writable(path.absolute().parent)
    try:
        with path.open(newline="") as f:
            head = f.readline(1000)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as e:
        raise ArtefactError(f"rows can't be added: {getattr(e, 'strerror', None) or 'it is no text'}", where=str(path),
                            do="name another file") from e  # fmt: skip
    if head and head.strip().split(",") != list(COLUMNS):
        raise ArtefactError("a file of something else than rows", where=str(path), expected=",".join(COLUMNS), do="name another file")


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows, each with all of COLUMNS, under a header when the file is new. Raises ArtefactError."""
    check_rows(path)
    there = path.read_bytes() if path.exists() else b""
    text = io.StringIO("" if not there or there.endswith(b"\n") else "\r\n", newline="")
    text.seek(0, os.SEEK_END)
    write = csv.DictWriter(text, COLUMNS)
    if not there:
        write.writeheader()
    write.writerows(rows)
    _append(path, text.getvalue())


def _append(path: Path, text: str) -> None:
    """All of it, or the file stays as it is. Raises ArtefactError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as f:
            size = f.tell()
            try:
                REAL.write(f.fileno(), text.encode("utf-8"))
            except BaseException:
                f.truncate(size)
                raise
    except OSError as e:
        raise ArtefactError(f"nothing can be added: {e.strerror}", where=str(path),
                            do="see to the room on its drive and to its permissions, then run it again") from e  # fmt: skip
