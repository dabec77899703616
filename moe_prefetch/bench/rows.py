"""Figures on disk: a journal that a stopped run goes on from, and rows of a CSV that only ever grows."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtefactError, ConfigError

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
        for path in paths:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    self.known[self._key(entry["of"])] = dict(entry["found"])
                except (ValueError, KeyError, TypeError) as e:
                    if number < len(lines) or line.endswith("\n"):
                        raise ArtefactError(
                            "not a journal of measurements",
                            where=f"{path}:{number}",
                            expected="one JSON object a line",
                            do="name another file",
                        ) from e
        if self.path is not None and self.path.exists() and not self.path.read_text().endswith("\n"):
            self.path.write_text("".join(x for x in self.path.read_text().splitlines(keepends=True) if x.endswith("\n")))

    @staticmethod
    def _key(of: Mapping[str, Any]) -> str:
        return json.dumps(of, sort_keys=True)

    def get(self, of: Mapping[str, Any]) -> dict[str, Any] | None:
        return self.known.get(self._key(of))

    def put(self, of: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.known[self._key(of)] = dict(found)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as f:
                f.write(json.dumps({"of": of, "found": found}) + "\n")


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
    versions = []
    for package in ("torch", "triton"):
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.append("")
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as f:
        write = csv.writer(f)
        if new:
            write.writerow(COLUMNS)
        day = datetime.date.today().isoformat()
        for r in rows:
            write.writerow([bench, r.case, r.metric, f"{r.value:.6g}", r.unit, machine, *versions, commit, day, checked])
