"""For every N, the Nth call at each door of the runtime fails: the run ends in exact output or a typed error, and the model is whole."""
from __future__ import annotations

import errno
import os
import tempfile

import pytest
import torch

import moe_prefetch
from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.experts.store import read_manifest
from tests.models import DISK, FaultyRuntime, logits_of, movers, open_files, picture, prompt, settled, small

EIO, ENOSPC = (lambda: OSError(errno.EIO, "Input/output error")), (lambda: OSError(errno.ENOSPC, "No space left on device"))
DOORS = [
    ("allocate", MemoryError), ("start_thread", lambda: RuntimeError("can't start new thread")), ("open_read", EIO), ("pread_into", EIO),
    ("write", ENOSPC), ("write", EIO), ("fsync", EIO), ("replace", ENOSPC),
    *((d, KeyboardInterrupt) for d in ("allocate", "open_read", "pread_into", "write", "fsync", "replace"))]
IDS = [f"{d}-{e().args[0] if isinstance(e(), OSError) else type(e()).__name__}" for d, e in DOORS]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def want(model):
    with moe_prefetch.attach(model):
        return logits_of(model, prompt(), 2)


def one_run(model, want, config, runtime):
    """Attach, compute, detach; whatever fails is tried again once. Returns the errors met."""
    errors = []

    def twice(act):
        try:
            return act()
        except (MoEPrefetchError, KeyboardInterrupt) as e:
            errors.append(e)
            return act()

    session = twice(lambda: moe_prefetch.attach(model, config, runtime=runtime))
    assert torch.equal(twice(lambda: logits_of(model, prompt(), 2)), want)
    session.wait_idle()
    session.table.check_integrity()
    twice(session.detach)
    return errors


def nothing_left(model, before, folder):
    assert picture(model) == before
    assert not open_files()
    assert settled(lambda: not movers())
    assert os.listdir(tempfile.gettempdir()) == []
    if folder:
        assert len(os.listdir(folder)) == 2
        read_manifest(folder)


@pytest.mark.parametrize("place", ["temporary", "new folder", "same records", "other records"])
@pytest.mark.parametrize(("door", "error"), DOORS, ids=IDS)
def test_the_nth_call_fails(model, want, tmp_path, place, door, error):
    before = picture(model)
    hit = 0
    for nth in range(1, 1000):
        folder = None if place == "temporary" else tmp_path / f"records-{nth}"
        config = {"experts": {**DISK["experts"], **({"path": str(folder)} if folder else {})}}
        if place == "same records":
            moe_prefetch.attach(model, config).detach()
        elif place == "other records":
            moe_prefetch.attach(small(seed=3), config).detach()
        runtime = FaultyRuntime(door, nth, error)
        errors = one_run(model, want, config, runtime)
        nothing_left(model, before, folder)
        if runtime.calls[door] < nth:
            assert not errors
            break
        hit += 1
    # A door that is never knocked at would make this test say nothing.
    assert hit > 0 or (place == "same records" and door in ("write", "fsync", "replace"))


@pytest.mark.parametrize(("door", "error"), [d for d in DOORS if d[0] in ("write", "fsync", "replace", "open_read")],
                         ids=[i for i, d in zip(IDS, DOORS) if d[0] in ("write", "fsync", "replace", "open_read")])
def test_a_folder_that_is_built_again_is_the_old_or_the_new(model, tmp_path, door, error):
    """The records of another model stay usable until the new ones are whole."""
    other = small(seed=3)
    config = {"experts": {**DISK["experts"], "path": str(tmp_path / "records")}}
    for nth in range(1, 1000):
        moe_prefetch.attach(other, config).detach()
        runtime = FaultyRuntime(door, nth, error)
        try:
            moe_prefetch.attach(model, config, runtime=runtime).detach()
        except (MoEPrefetchError, KeyboardInterrupt):
            read_manifest(tmp_path / "records")
            assert len(os.listdir(tmp_path / "records")) == 2
        else:
            break
    assert nth > 1


def test_a_drive_that_fails_for_good(model, want, tmp_path):
    """Every read fails from some moment on: typed errors, the session stays attached, and once the drive is back nothing is lost."""
    before = picture(model)
    runtime = FaultyRuntime("pread_into", 1, EIO, ever_after=True)
    runtime.armed = False
    session = moe_prefetch.attach(model, DISK, runtime=runtime)
    runtime.armed = True
    for _ in range(3):
        with pytest.raises(MoEPrefetchError, match="can't be read"):
            logits_of(model, prompt(), 2)
        with pytest.raises(MoEPrefetchError, match="can't be read"):
            session.detach()
    runtime.armed = False
    assert torch.equal(logits_of(model, prompt(), 2), want)
    session.detach()
    nothing_left(model, before, None)


def test_records_cut_short_while_attached(model, want, tmp_path):
    before = picture(model)
    config = {"experts": {**DISK["experts"], "path": str(tmp_path / "r")}}
    session = moe_prefetch.attach(model, config)
    path = next((tmp_path / "r").glob("records-*.bin"))
    data = path.read_bytes()
    os.truncate(path, 9000)
    with pytest.raises(MoEPrefetchError, match="early"):
        logits_of(model, prompt(), 2)
    with pytest.raises(MoEPrefetchError, match="early"):
        session.detach()
    path.write_bytes(data)
    assert torch.equal(logits_of(model, prompt(), 2), want)
    session.detach()
    nothing_left(model, before, tmp_path / "r")


def test_records_deleted_while_attached(model, want, tmp_path):
    """An open file outlives its name."""
    before = picture(model)
    session = moe_prefetch.attach(model, {"experts": {**DISK["experts"], "path": str(tmp_path / "r")}})
    for p in (tmp_path / "r").iterdir():
        p.unlink()
    assert torch.equal(logits_of(model, prompt(), 2), want)
    session.detach()
    assert picture(model) == before


def test_the_weights_come_back_when_giving_them_up_fails(model, monkeypatch):
    """The last step of attach is struck half way, at each parameter."""
    before = picture(model)
    count = 2 * len(model.model.layers)
    right = torch.nn.Module.__setattr__
    for nth in range(1, count + 1):
        calls = 0

        def strike(self, name, value, nth=nth):
            nonlocal calls
            if name in ("gate_up_proj", "down_proj") and value.is_meta:
                calls += 1
                if calls == nth:
                    raise KeyboardInterrupt
            right(self, name, value)

        with monkeypatch.context() as m:
            m.setattr(torch.nn.Module, "__setattr__", strike)
            with pytest.raises(KeyboardInterrupt):
                moe_prefetch.attach(model, DISK)
        nothing_left(model, before, None)


def test_hooks_that_can_not_be_installed(model, monkeypatch):
    before = picture(model)
    right = torch.nn.Module.register_forward_pre_hook
    for nth in range(1, 6):
        calls = 0

        def strike(self, *args, nth=nth, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth:
                raise RuntimeError("no more hooks")
            return right(self, *args, **kwargs)

        with monkeypatch.context() as m:
            m.setattr(torch.nn.Module, "register_forward_pre_hook", strike)
            with pytest.raises(RuntimeError, match="no more hooks"):
                moe_prefetch.attach(model, DISK)
        nothing_left(model, before, None)
