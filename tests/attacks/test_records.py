"""Hostile record folders: each is refused with an ArtefactError, in bounded time and memory, and nothing outside the folder is touched."""
from __future__ import annotations

import json
import os
import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.errors import ArtefactError
from moe_prefetch.experts.store import MANIFEST, VERSION, DiskStore, read_manifest
from moe_prefetch.runtime import REAL
from tests.experts.records import Source

DIGEST = "ab" * 32
NAME = "records-0123456789abcdef.bin"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "records"
    DiskStore.obtain(folder, Source(1, 2), REAL).close()
    path = next(folder.glob("records-*.bin"))
    path.rename(folder / NAME)
    (tmp_path / "secret.bin").write_bytes((folder / NAME).read_bytes())
    edit(folder, file=NAME)
    DiskStore.obtain(folder, Source(1, 2), REAL).close()
    return folder


def edit(folder, **change):
    m = json.loads((folder / MANIFEST).read_text())
    m.update(change)
    (folder / MANIFEST).write_text(json.dumps(m))


def refused(folder):
    start, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtefactError) as e:
        DiskStore.obtain(folder, Source(1, 2), REAL)
    assert time.perf_counter() - start < 10
    # Kilobytes; 64 MiB is the most of a JSON file that is ever read.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 600_000
    assert e.value.do
    return str(e.value)


@pytest.mark.parametrize("name", [
    "../secret.bin", "/etc/passwd", "..", ".", "", "sub/" + NAME, "records-0123456789abcdef.bin\0.txt", "records-0123456789ABCDEF.bin",
    NAME + "\n", " " + NAME,
    "records-0123456789abcdeｆ.bin", "~/" + NAME, "manifest.json", "file:///etc/passwd", "\\\\host\\share", "CON", "." * 5000, None, 3,
    True, [NAME], {"x": 1},
], ids=lambda n: repr(n)[:30])
def test_file_names(folder, name):
    edit(folder, file=name)
    refused(folder)


def test_a_symbolic_link_in_the_records_place(folder, tmp_path):
    (folder / NAME).unlink()
    (folder / NAME).symlink_to(tmp_path / "secret.bin")
    assert "symbolic link" in refused(folder)
    # Nor when it is put there between the check and the opening.
    with pytest.raises(OSError, match="symbolic"):
        REAL.open_read(folder / NAME)


def test_a_symbolic_link_in_the_manifests_place(folder, tmp_path):
    (folder / MANIFEST).rename(tmp_path / "m.json")
    (folder / MANIFEST).symlink_to(tmp_path / "m.json")
    assert "symbolic link" in refused(folder)


@pytest.mark.parametrize("which", [MANIFEST, NAME])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_things_that_are_no_files(folder, which, kind):
    """A pipe would be waited for, a device never ends."""
    (folder / which).unlink()
    if kind == "pipe":
        os.mkfifo(folder / which)
    elif kind == "folder":
        (folder / which).mkdir()
    else:
        try:
            os.mknod(folder / which, 0o020666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("this user can't make device files")
    refused(folder)


@pytest.mark.parametrize("change", [
    {"layers": True}, {"layers": 1.0}, {"layers": "1"}, {"layers": -1}, {"layers": 0}, {"layers": 1 << 62, "experts": 1 << 62},
    {"experts": 2.0},
    {"record_bytes": 4096.0}, {"record_bytes": -4096}, {"record_bytes": None}, {"version": True}, {"version": 1.0},
    {"version": 1}, {"version": VERSION + 1}, {"weights": None}, {"weights": True},
    {"version": None},
    {"format": "moe_prefetch.probe"}, {"format": None}, {"parts": {}}, {"parts": None}, {"parts": [1]}, {"digests": {}},
    {"digests": [DIGEST]},
    {"digests": [1, 2]}, {"digests": [DIGEST, None]}, {"digests": [DIGEST, DIGEST.upper()]}, {"digests": [DIGEST, DIGEST + "\n"]},
    {"digests": "ab" * 2},
    {"digests": [DIGEST] * 100_000}, {"digests": [[DIGEST]] * 2},
], ids=lambda c: str(c)[:40])
def test_manifest_values(folder, change):
    edit(folder, **change)
    refused(folder)


@pytest.mark.parametrize("text", [
    b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 200_000, b'{"layers": 1, "layers": 2}', b'{"layers": NaN}', b'{"layers": 1e999}',
    b'{"layers": ' + b"9" * 5000 + b"}", b'{"a": "' + b"x" * (65 << 20) + b'"}', b"\x80\x04\x95.", b"PK\x03\x04",
], ids=lambda t: repr(t[:20]))
def test_manifest_text(folder, text):
    (folder / MANIFEST).write_bytes(text)
    refused(folder)


def test_digests_and_records_altered_together_do_not_pass_for_the_model(folder):
    """The model itself is the judge: a folder that is consistent but holds other weights is written again, not read."""
    other = Source(1, 2, seed=9)
    DiskStore.obtain(folder, other, REAL).close()
    store = DiskStore.obtain(folder, Source(1, 2), REAL)
    buffer = REAL.allocate(store.layout.nbytes)
    store.read_into(0, 1, buffer)
    assert bytes(store.layout.views(buffer)["down"].numpy()) == bytes(Source(1, 2).down[0][1].numpy())
    store.close()


@given(data=st.data())
def test_any_single_edit_of_a_manifest_is_refused_or_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("records")
    source = Source(1, 2)
    DiskStore.obtain(folder, source, REAL).close()
    text = bytearray((folder / MANIFEST).read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    (folder / MANIFEST).write_bytes(text)
    try:
        read_manifest(folder)
        store = DiskStore.obtain(folder, source, REAL)
    except ArtefactError:
        return
    buffer = REAL.allocate(store.layout.nbytes)
    for expert in range(2):
        store.read_into(0, expert, buffer)
        assert bytes(store.layout.views(buffer)["down"].numpy()) == bytes(source.down[0][expert].numpy())
    store.close()
