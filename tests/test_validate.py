"""`check` names every problem of a config file, also those that only the drive shows, and needs neither a model nor a GPU."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from moe_prefetch.errors import ArtefactError
from moe_prefetch.experts.store import DiskStore
from moe_prefetch.integrations.transformers import gates
from moe_prefetch.kv.codec import OutlierStats
from moe_prefetch.kv.outliers import LayerStats
from moe_prefetch.probes.probe import RoutingProbe
from moe_prefetch.runtime import REAL, Runtime
from moe_prefetch.validate import check
from tests.experts.records import Source
from tests.models import small


@pytest.fixture
def sound(tmp_path):
    """A config whose every file is there."""
    RoutingProbe(gates(small())).save_pretrained(tmp_path / "probe")
    row = [[1.0, 2.0]]
    stats = LayerStats(**{f: ({"tokens": 3, "axes": None}.get(f, row)) for f in LayerStats.__dataclass_fields__})
    OutlierStats({0: stats}).save(tmp_path / "cal")
    DiskStore.obtain(tmp_path / "records", Source(1, 2), REAL).close()
    path = tmp_path / "c.yaml"
    path.write_text("experts: {home: disk, path: records, plan: probe}\nprobe: {path: probe}\nkv: {format: fp4-72, calibration: cal}\n")
    return path


def test_a_sound_config(sound):
    assert check(sound) == []
    assert check(str(sound)) == []


def test_every_problem_at_once(sound):
    folder = sound.parent
    (folder / "probe" / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "cal" / "manifest.json").unlink()
    next((folder / "records").glob("*.bin")).unlink()
    text = sound.read_text().replace("plan: probe", "plan: probe, thread: 2, deadline: -1")
    sound.write_text(text.replace("format: fp4-72", "format: fp4, window: 8"))
    found = check(sound)
    assert len(found) == 6
    for key, word in (("experts.thread", "did you mean 'threads'"), ("experts.deadline", "greater than 0"), ("kv.format", "given: 'fp4'"),
                      ("probe.path", "safetensors"), ("kv.calibration", "can't be read"), ("experts.path", "record file can't be read")):
        assert sum(p.startswith(key) and word in p for p in found) == 1, (key, found)
    assert all("\n" not in p for p in found)


@pytest.mark.parametrize("text", ["", "[", "- 1", "a: &x 1\nb: *x"], ids=repr)
def test_files_that_can_not_be_parsed(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    found = check(tmp_path / "c.yaml")
    assert len(found) == bool(text)


def test_a_file_that_is_not_there(tmp_path):
    assert len(check(tmp_path / "nowhere.yaml")) == 1
    assert len(check(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["missing", "file", "version", "json", "hash", "cut", "format", "parts"])
def test_probes(sound, damage):
    folder = sound.parent / "probe"
    config = json.loads((folder / "config.json").read_text())
    if damage == "missing":
        sound.write_text(sound.read_text().replace("probe: {path: probe}", "probe: {path: prob}"))
    elif damage == "file":
        (folder / "model.safetensors").unlink()
    elif damage == "json":
        (folder / "config.json").write_text("{")
    elif damage == "cut":
        os.truncate(folder / "model.safetensors", 9)
    else:
        config.update({"version": {"version": 99}, "hash": {"weights_sha256": "0" * 64}, "format": {"format": "x"},
                       "parts": {"format": None}}[damage])
        (folder / "config.json").write_text(json.dumps(config))
    found = check(sound)
    assert len(found) == 1 and found[0].startswith("probe.path: ")


def test_record_folders(sound):
    folder = sound.parent
    assert check(sound) == []

    def with_path(path):
        sound.write_text(f"experts: {{home: disk, path: {path}}}\n")
        return check(sound)

    assert with_path("new/folder") == []
    (folder / "plain").write_text("x")
    for path in ("plain", "plain/below", "plain/far/below"):
        found = with_path(path)
        assert len(found) == 1 and "is no folder" in found[0]
    assert not (folder / "new").exists()


def test_folders_of_something_else_are_left_to_their_owners(sound):
    """The advice is another folder, never to delete this one; and nobody writes over another's manifest."""
    folder = sound.parent
    records, stats = (folder / "records" / "manifest.json").read_text(), OutlierStats.load(folder / "cal")
    with pytest.raises(ArtefactError, match="another folder"):
        stats.save(folder / "records")
    stats.save(folder / "cal")
    with pytest.raises(ArtefactError, match="another folder"):
        DiskStore.obtain(folder / "cal", Source(1, 2), REAL)
    assert (folder / "records" / "manifest.json").read_text() == records and OutlierStats.load(folder / "cal") == stats
    sound.write_text("experts: {home: disk, path: cal}\n")
    (found,) = check(sound)
    assert "another folder" in found and "delete" not in found
    sound.write_text("fit: {out: cal}\n")
    assert check(sound) == []
    (folder / "cal" / "config.json").write_text('{"model_type": "mixtral"}')
    (found,) = check(sound)
    assert found.startswith("fit.out: ") and "would be replaced" in found
    sound.write_text("fit: {out: cal/config.json/x}\n")
    (found,) = check(sound)
    assert found.startswith("fit.out: ") and "config.json is no folder" in found


def test_a_folder_that_can_not_be_written(sound):
    class ReadOnly(Runtime):
        def writable(self, folder):
            return False

    # Records that are there need no writing.
    assert check(sound, ReadOnly()) == []
    sound.write_text("experts: {home: disk, path: elsewhere}\n")
    found = check(sound, ReadOnly())
    assert len(found) == 1 and "can't be written to" in found[0]


def test_writable_is_the_systems_answer(tmp_path):
    assert REAL.writable(tmp_path)
    assert not REAL.writable(tmp_path / "nowhere")
    if os.geteuid() != 0:
        tmp_path.chmod(0o555)
        assert not REAL.writable(tmp_path)
        tmp_path.chmod(0o755)
    (tmp_path / "file").touch()
    assert not REAL.writable(tmp_path / "file")


def test_a_deepspeed_section_is_checked(tmp_path):
    section = {"probe": {"path": "p"}, "experts": {"home": "disk"}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 1, "moe_prefetch": section}))
    found = check(tmp_path / "ds.json")
    assert len(found) == 1 and found[0].startswith("probe.path")


def test_a_section_of_almost_that_name_is_told(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 1, "moe_prefech": {}}))
    assert any("did you mean 'moe_prefetch'" in line for line in check(tmp_path / "ds.json"))


def test_no_model_and_no_gpu_are_touched(sound):
    code = ("import sys\nfrom moe_prefetch.validate import check\nimport torch\nassert check(sys.argv[1]) == []\n"
            "assert not torch.cuda.is_initialized()\nassert 'transformers' not in sys.modules")
    subprocess.run([sys.executable, "-c", code, str(sound)], check=True)
    assert torch.cuda.is_initialized() is False or torch.cuda.is_available()
