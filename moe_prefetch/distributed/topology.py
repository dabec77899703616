"""How fast bytes come from where they are: measured once on a machine, read from a file afterwards.

A place is where bytes lie, as this process sees it: `local` (its own GPU), `peer` (another one), `host`. A way is how they come: `copy` (a
copy engine), `move` (a kernel that copies), `read` (a kernel that reads them where they are and keeps nothing).
"""
from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import checkpoint
from ..errors import ArtefactError, UnsupportedModelError
from ..runtime import REAL, Runtime

log = logging.getLogger(__name__)

FORMAT, VERSION = "moe_prefetch.topology", 1
SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Link:
    """nbytes take `start` + nbytes / `rate` seconds; `rate` bytes a second."""

    place: str
    way: str
    start: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        return self.start + nbytes / self.rate


class Probe(Protocol):
    """What measures links: GPUs (`experts.links`), or a test."""

    def machine(self) -> Mapping[str, str]:
        """What figures depend on: devices, driver, versions. Other words, other figures."""

    def ways(self) -> Sequence[tuple[str, str]]:
        """(place, way) of every link that there is."""

    def seconds(self, place: str, way: str, nbytes: int) -> float:
        """How long one transfer took."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The links of one machine."""

    machine: Mapping[str, str]
    links: tuple[Link, ...]

    def link(self, place: str, way: str) -> Link:
        """Raises UnsupportedModelError: there is no such link."""
        for one in self.links:
            if (one.place, one.way) == (place, way):
                return one
        raise UnsupportedModelError(f"bytes do not come from {place} by {way} here", where="topology",
                                    expected=", ".join(f"{one.place} by {one.way}" for one in self.links) or "a link",
                                    do="choose another home for experts")

    def fastest(self, place: str, nbytes: int) -> Link:
        """The way by which that many bytes come from a place soonest. Raises UnsupportedModelError: there is none."""
        ways = [one for one in self.links if one.place == place]
        return min(ways, key=lambda one: one.seconds(nbytes)) if ways else self.link(place, "any way")


def fitted(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(start, rate) that miss the samples (bytes, seconds) by the least in proportion; start is never negative."""
    # Least squares of (start + n / rate - t) / t; where that starts before zero, without a start.
    rows = [(1 / t, n / t) for n, t in samples]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    det = aa * bb - ab * ab
    start, per_byte = ((a * bb - b * ab) / det, (aa * b - ab * a) / det) if det > 1e-12 * aa * bb else (0.0, b / bb)
    if start < 0 or per_byte <= 0:
        start, per_byte = 0.0, b / bb
    return start, 1 / per_byte


def measure(probe: Probe) -> Topology:
    """Every link of the probe, each by the middle of several transfers of several sizes."""
    links = []
    for place, way in probe.ways():
        samples = []
        for nbytes in SIZES:
            probe.seconds(place, way, nbytes)
            samples.append((nbytes, sorted(probe.seconds(place, way, nbytes) for _ in range(REPEATS))[REPEATS // 2]))
        links.append(Link(place, way, *fitted(samples)))
    return Topology(dict(probe.machine()), tuple(links))


def obtain(folder: Path, probe: Probe, runtime: Runtime = REAL) -> Topology:
    """The topology of this machine from `folder`, measured and kept there when it is not there yet.

    A file that is damaged, or for another machine, is measured again: nothing is lost with it. Raises ArtefactError: `folder` can't be
    written.
    """
    machine = dict(probe.machine())
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"topology-{name}.json"
    if path.exists():
        try:
            kept = _read(path, machine)
        except ArtefactError as e:
            log.warning("links are measured again: %s", e)
        else:
            if [(one.place, one.way) for one in kept.links] == list(probe.ways()):
                return kept
    found = measure(probe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept_links = [asdict(one) for one in found.links]
        checkpoint.write_json(path, {"format": FORMAT, "version": VERSION, "machine": machine, "links": kept_links}, runtime)
    except OSError as e:
        raise ArtefactError(f"the measured links can't be kept: {e.strerror}", where=str(path), expected="a folder that can be written",
                            do="name another folder") from e
    return found


def _read(path: Path, machine: Mapping[str, str]) -> Topology:
    m: Any = checkpoint.read_json(path)
    expected = f"format {FORMAT}, version {VERSION}, this machine, links with places, ways, starts and rates"
    if not isinstance(m, dict) or (m.get("format"), m.get("version"), m.get("machine")) != (FORMAT, VERSION, machine):
        raise ArtefactError("no topology of this machine", where=str(path), expected=expected, do="delete it")
    links = []
    for one in m["links"] if isinstance(m.get("links"), list) else [None]:
        names = one if isinstance(one, dict) and set(one) == {"place", "way", "start", "rate"} else {}
        words, numbers = [names.get(k) for k in ("place", "way")], [names.get(k) for k in ("start", "rate")]
        if not all(isinstance(w, str) for w in words) or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ArtefactError("a link is incomplete", where=str(path), expected=expected, do="delete it")
        if numbers[0] < 0 or numbers[1] <= 0:
            raise ArtefactError("a link with a rate or start that no link has", where=str(path), expected=expected, do="delete it")
        links.append(Link(words[0], words[1], float(numbers[0]), float(numbers[1])))
    return Topology(dict(machine), tuple(links))
