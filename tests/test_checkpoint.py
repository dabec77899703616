"""The only door to artefacts: whole or not at all on the way out, nothing hostile on the way in."""
from __future__ import annotations

import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch import checkpoint
from moe_prefetch.checkpoint import (
    atomic_file,
    contained,
    exclusive,
    load_tensors,
    read_json,
    save_tensors,
    sha256_file,
    sha256_tensors,
    write_json,
    write_together,
)
from moe_prefetch.errors import ArtefactError, DeadlineError
from moe_prefetch.runtime import REAL
from tests.models import FaultyRuntime


# out ----------------------------------------------------------------------------------------------------------------------
def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def half():
        with atomic_file(path) as f:
            f.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert read_json(path) == {"old": 1} and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("code", [5, 28], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("door", ["fsync", "replace", "write"])
def test_every_io_fault_leaves_old_or_new(tmp_path, door, code):
    old, new = {"w": torch.zeros(9)}, {"w": torch.ones(9)}
    path = tmp_path / "a.safetensors"
    for nth in range(1, 9):
        save_tensors(path, old)
        runtime = FaultyRuntime(door, nth, lambda: OSError(code, os.strerror(code)))
        try:
            save_tensors(path, new, runtime=runtime)
        except OSError:
            assert load_tensors(path)["w"].sum() in (0, 9)
            assert os.listdir(tmp_path) == ["a.safetensors"]
        else:
            assert load_tensors(path)["w"].sum() == 9
            break
    else:
        raise AssertionError(f"{door} never ran out of calls")
    assert nth > 1


@pytest.mark.parametrize("door", ["fsync", "write"])
def test_files_that_belong_together_are_written_before_any_is_replaced(tmp_path, door):
    files = {tmp_path / name: name.encode() * 1000 for name in ("a", "b", "c")}
    write_together({p: b"old" for p in files})
    for nth in range(1, 4):
        with pytest.raises(OSError, match="No space left") as e:
            write_together(files, FaultyRuntime(door, nth, lambda: OSError(28, os.strerror(28))))
        assert e.value.filename == str(tmp_path / "abc"[nth - 1])
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == dict.fromkeys("abc", b"old")
    write_together(files)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == files


KILLED = """
import sys, torch
from pathlib import Path
from moe_prefetch.checkpoint import save_tensors, write_json, sha256_file
folder = Path(sys.argv[1])
print("ready", flush=True)
i = 0
while True:
    i += 1
    save_tensors(folder / "w.safetensors", {"w": torch.full((20000,), float(i))})
    write_json(folder / "m.json", {"i": i, "pad": "x" * 20000})
"""


def test_a_killed_writer_leaves_whole_files(tmp_path):
    torn = random.Random(5)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(0.1 + torn.random() / 5)
        child.send_signal(signal.SIGKILL)
        child.wait()
        if (tmp_path / "w.safetensors").exists():
            w = load_tensors(tmp_path / "w.safetensors")["w"]
            assert len(w) == 20000 and w.min() == w.max() > 0
        if (tmp_path / "m.json").exists():
            assert len(read_json(tmp_path / "m.json")["pad"]) == 20000
    assert (tmp_path / "m.json").exists()


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            write_json(tmp_path / "a.json", 1)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o666 & ~mask


def test_json_out_refuses_what_json_in_would(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_tensors_keep_their_bits(tmp_path):
    tensors = {"a": torch.arange(12.).reshape(3, 4).t(), "b": torch.tensor(float("nan")), "c": torch.zeros(0, 3), "d": torch.ones(2).half()}
    save_tensors(tmp_path / "x" / "t.safetensors", tensors, {"k": "v"})
    back = load_tensors(tmp_path / "x" / "t.safetensors", sha256=sha256_file(tmp_path / "x" / "t.safetensors"))
    assert sha256_tensors(back) == sha256_tensors(tensors)


def test_hash_of_tensors_knows_name_dtype_shape_and_value():
    base = {"a": torch.zeros(2, 2), "b": torch.ones(3)}
    one = torch.ones(3)
    others = [{"a": torch.zeros(4), "b": one}, {"c": torch.zeros(2, 2), "b": one}, {"a": torch.zeros(2, 2, dtype=torch.int32), "b": one},
              {"a": torch.zeros(2, 2), "b": -one}, {"a": torch.zeros(2, 2)}]
    assert len({sha256_tensors(t) for t in [base, *others]}) == 6
    assert sha256_tensors(dict(reversed(base.items()))) == sha256_tensors(base)


# contained paths ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0", "..\0", "a/", "./a", "a/../b"])
def test_names_that_leave_their_folder(tmp_path, name):
    with pytest.raises(ArtefactError, match="would leave"):
        contained(tmp_path, name)


@given(st.text(max_size=12))
def test_no_name_leaves_its_folder(name):
    try:
        path = contained(checkpoint.Path("/nowhere/root"), name)
    except ArtefactError:
        return
    assert os.path.dirname(os.path.normpath(path)) == "/nowhere/root"


def test_links_are_refused(tmp_path):
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert contained(tmp_path, "real") == tmp_path / "real"
    for name in ("link", "dangling"):
        with pytest.raises(ArtefactError, match="symbolic link"):
            contained(tmp_path, name)


# in -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("read", [read_json, load_tensors, sha256_file], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "nul"])
def test_what_is_no_file(tmp_path, read, kind):
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = checkpoint.Path("/dev/zero")
    elif kind == "nul":
        path = tmp_path / "a\0b"
    with pytest.raises(ArtefactError):
        read(path)


@pytest.mark.parametrize("text", [b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000, b"1" * 5000,
                                  b"{'a': 1}", b"\x80\x04."],
                         ids=lambda t: repr(t[:16]))
def test_hostile_json(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ArtefactError, match="not valid JSON"):
        read_json(tmp_path / "a.json")


def test_json_is_capped(tmp_path):
    (tmp_path / "a.json").write_text("[" + "1," * 100 + "1]")
    assert len(read_json(tmp_path / "a.json", cap=203)) == 101
    with pytest.raises(ArtefactError, match="larger than"):
        read_json(tmp_path / "a.json", cap=202)


def header(value, data=b"", length=None):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("data", [
    b"", b"1234567", struct.pack("<Q", 0), struct.pack("<Q", 1 << 63), struct.pack("<Q", 2**64 - 1), header(b"{", b"x" * 8),
    header(b"\xff" * 9), header([1]),
    header({"a": F32}), header({"a": F32}, b"x" * 7), header({"a": F32}, b"x" * 9), header({"a": F32}, b"x" * 8, length=1 << 40),
    header({"a": {**F32, "dtype": "F31"}}, b"x" * 8), header({"a": {**F32, "shape": [3]}}, b"x" * 8),
    header({"a": {**F32, "shape": [-2]}}, b"x" * 8),
    header({"a": {**F32, "shape": [2**32, 2**32]}}, b"x" * 8), header({"a": {**F32, "data_offsets": [8, 0]}}, b"x" * 8),
    header({"a": {**F32, "data_offsets": [0, 2**63]}}, b"x" * 8), header({"a": F32, "b": F32}, b"x" * 8),
    header({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"x" * 20), header({"a": {"dtype": "F32"}}, b"x" * 8),
    header(b'{"a":' * 5000), b"\x80\x04\x95" + b"x" * 40, b"PK\x03\x04" + b"x" * 40, b"\x93NUMPY" + b"x" * 40, b"GGUF" + b"x" * 40,
], ids=lambda d: repr(d[8:30]))
def test_hostile_tensor_files(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(ArtefactError, match=r"a\.safetensors"):
        load_tensors(tmp_path / "a.safetensors")


def test_a_cut_or_altered_tensor_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": torch.arange(6.), "v": torch.ones(3)})
    data, digest = path.read_bytes(), sha256_file(path)
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(ArtefactError):
            load_tensors(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with pytest.raises(ArtefactError):
            load_tensors(path, sha256=digest)
        try:  # without a digest, an altered value can't be seen, but an altered frame is never more than an error of ours
            load_tensors(path)
        except ArtefactError:
            pass


def test_tensor_files_are_capped(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": torch.zeros(100)})
    size = path.stat().st_size
    load_tensors(path, cap=size)
    with pytest.raises(ArtefactError, match="more than"):
        load_tensors(path, cap=size - 1)


def test_what_was_hashed_is_what_is_used(tmp_path):
    """A file that is cut or replaced after it was read changes nothing: no memory map is left behind."""
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": torch.arange(100_000.)})
    w = load_tensors(path)["w"]
    os.truncate(path, 10)
    assert torch.equal(w, torch.arange(100_000.))


# turns ------------------------------------------------------------------------------------------------------------------------
def test_a_folder_has_one_holder(tmp_path):
    with exclusive(tmp_path, REAL):
        with pytest.raises(DeadlineError, match="another process"), exclusive(tmp_path, REAL, wait_s=0.1):
            pass
    with exclusive(tmp_path, REAL, wait_s=0.1):
        pass


def test_a_dead_holder_holds_nothing(tmp_path):
    code = ("import sys, time; from pathlib import Path; from moe_prefetch.checkpoint import exclusive\n"
            "with exclusive(Path(sys.argv[1])):\n print(1, flush=True); time.sleep(60)")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    with pytest.raises(DeadlineError), exclusive(tmp_path, REAL, wait_s=0.05):
        pass
    child.kill()
    child.wait()
    with exclusive(tmp_path, REAL, wait_s=1):
        pass


@pytest.mark.parametrize("name", ["there", "there/new", "there/new/below"])
def test_asking_whether_a_folder_can_be_written_leaves_nothing(name, tmp_path):
    (tmp_path / "there").mkdir()
    checkpoint.check_writable(tmp_path / name)
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize("name", ["afile", "afile/new", "gone", "gone/new", "/proc/x"])
def test_a_folder_that_can_not_be_written(name, tmp_path):
    (tmp_path / "afile").write_text("kept")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtefactError, match="nothing can be written there"):
        checkpoint.check_writable(tmp_path / name)
    assert (tmp_path / "afile").read_text() == "kept" and not (tmp_path / "nowhere").exists()
