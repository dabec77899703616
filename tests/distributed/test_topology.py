"""Links measured once and read from a file afterwards."""
from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.distributed.topology import SIZES, Link, Topology, fitted, measure, obtain
from moe_prefetch.errors import ArtefactError, UnsupportedModelError
from moe_prefetch.runtime import Runtime

TRUE = {("local", "read"): (2e-6, 4e12), ("peer", "copy"): (25e-6, 380e9), ("peer", "move"): (4e-6, 220e9), ("host", "read"): (3e-6, 49e9)}


class Fake:
    """A machine whose links are known; every fifth transfer is disturbed."""

    def __init__(self, machine: str = "one", links=TRUE) -> None:
        self.calls, self._machine, self._links = 0, machine, links

    def machine(self):
        return {"gpu": self._machine}

    def ways(self):
        return list(self._links)

    def seconds(self, place, way, nbytes):
        self.calls += 1
        start, rate = self._links[place, way]
        return (start + nbytes / rate) * (3 if self.calls % 5 == 0 else 1)


def test_measured_links_are_the_true_ones():
    found = measure(Fake())
    for (place, way), (start, rate) in TRUE.items():
        link = found.link(place, way)
        assert link.rate == pytest.approx(rate, rel=1e-3) and link.start == pytest.approx(start, rel=1e-3)
        assert link.seconds(SIZES[2]) == pytest.approx(start + SIZES[2] / rate, rel=1e-3)
    # Few bytes by the way that starts soonest, many by the fastest.
    assert found.fastest("peer", 1 << 10).way == "move" and found.fastest("peer", 1 << 30).way == "copy"
    for what in (lambda: found.link("disk", "copy"), lambda: found.fastest("disk", 1)):
        with pytest.raises(UnsupportedModelError, match="disk"):
            what()


@given(st.floats(0, 1e-3), st.floats(1e6, 1e13))
def test_a_line_is_found_again(start, rate):
    got = fitted([(n, start + n / rate) for n in SIZES])
    for n in SIZES:
        assert got[0] >= 0 and got[0] + n / got[1] == pytest.approx(start + n / rate, rel=1e-3)


def test_transfers_that_get_cheaper_with_size_have_no_negative_start():
    start, rate = fitted([(n, n**1.2 * 1e-12) for n in SIZES])
    assert start == 0 and rate > 0
    start, rate = fitted([(n, 1 / n) for n in SIZES])
    assert start == 0 and rate > 0
    assert fitted([(100, 1.0)]) == (0.0, 100.0)


def test_measured_once_and_for_each_machine(tmp_path):
    first, again, other = Fake(), Fake(), Fake("another")
    found = obtain(tmp_path / "new", first)
    assert first.calls and obtain(tmp_path / "new", again) == found and again.calls == 0
    assert obtain(tmp_path / "new", other).machine == {"gpu": "another"} and other.calls
    assert len(list((tmp_path / "new").iterdir())) == 2
    # Another GPU was added: its link is not in the file.
    more = Fake(links={**TRUE, ("peer", "read"): (1e-6, 1e9)})
    assert obtain(tmp_path / "new", more).link("peer", "read") and more.calls


@pytest.mark.parametrize("damage", [
    lambda m: m.update(format="x"), lambda m: m.update(version=2), lambda m: m.update(machine={"gpu": "two"}), lambda m: m.update(links={}),
    lambda m: m["links"][0].pop("rate"), lambda m: m["links"][0].update(rate=0.0), lambda m: m["links"][0].update(rate=True),
    lambda m: m["links"][0].update(start=-1.0), lambda m: m["links"][0].update(place=3),
    lambda m: m["links"].__setitem__(0, 1)], ids=range(10))
def test_a_damaged_file_is_measured_again_and_said(tmp_path, caplog, damage):
    found = obtain(tmp_path, Fake())
    (path,) = tmp_path.iterdir()
    m = json.loads(path.read_text())
    damage(m)
    for text in (json.dumps(m), path.read_text()[:20], ""):
        path.write_text(text)
        probe = Fake()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert obtain(tmp_path, probe) == found
        assert probe.calls and "measured again" in caplog.text
        assert obtain(tmp_path, Fake()) == found


def test_a_full_drive_is_an_error_of_ours(tmp_path):
    class Full(Runtime):
        def fsync(self, fd):
            raise OSError(28, "no space left on device")

    with pytest.raises(ArtefactError, match="can't be kept"):
        obtain(tmp_path, Fake(), Full())
    assert not list(tmp_path.glob("topology-*"))


def test_links_are_values():
    assert Topology({}, (Link("a", "b", 0.0, 1.0),)) == Topology({}, (Link("a", "b", 0.0, 1.0),))
