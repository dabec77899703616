"""Signals, forks, kills and interpreter exit: nothing hangs, nothing is left on the drive, and a model that lives on is whole."""
from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import pytest
import torch

import moe_prefetch
from moe_prefetch.errors import MoEPrefetchError, SessionError
from moe_prefetch.experts.store import read_manifest
from moe_prefetch.integrations import transformers as integration
from moe_prefetch.runtime import Runtime
from tests.models import DISK, GateRuntime, logits_of, movers, open_files, picture, prompt, settled, small


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def resident(model):
    with moe_prefetch.attach(model):
        return logits_of(model, prompt())


class Child:
    """`act` in a forked process; `ok()` waits for its end and says whether it went well."""

    def __init__(self, act):
        self.pid = os.fork()
        if self.pid == 0:
            try:
                act()
                os._exit(0)
            except BaseException:  # noqa: BLE001  # a forked child must never return
                traceback.print_exc()
                os._exit(1)

    def ok(self, seconds=120.0):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("the child hangs")

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)


# interrupts -----------------------------------------------------------------------------------------------------------------
class Striker:
    """Raises KeyboardInterrupt once, in the main thread, some time after `act` began: what Ctrl-C does, with a signal that nobody uses."""

    def __init__(self):
        self.armed = False
        self.before = signal.signal(signal.SIGUSR1, self.handle)

    def handle(self, number, frame):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def __call__(self, act, delay):
        """Whether `act` was struck."""
        timer = threading.Timer(delay, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
        timer.start()
        try:
            self.armed = True
            act()
            self.armed = False
        except KeyboardInterrupt:
            return True
        finally:
            timer.join()
        return False

    def close(self):
        signal.signal(signal.SIGUSR1, self.before)


@pytest.fixture
def strike():
    striker = Striker()
    yield striker
    striker.close()


def test_ctrl_c_anywhere_in_a_pass(strike):
    model = small(layers=3)
    before, want = picture(model), resident(model)
    rng, hits = random.Random(1), 0
    config = {"experts": {"home": "disk", "resident": 1, "threads": 2, "deadline": 5}}
    session = moe_prefetch.attach(model, config)
    start = time.perf_counter()
    logits_of(model, prompt())
    length = time.perf_counter() - start
    while hits < 25:
        hits += strike(lambda: logits_of(model, prompt()), rng.uniform(0, length))
        assert torch.equal(logits_of(model, prompt()), want)
        session.table.check_integrity()
    session.detach()
    assert picture(model) == before
    assert settled(lambda: not movers())


@pytest.mark.parametrize("config", [DISK, {"experts": {"home": "host", "resident": 1}}], ids=["disk", "host"])
def test_ctrl_c_anywhere_in_attach_and_detach(strike, temporary, config):
    model = small()
    before = picture(model)
    rng, hits = random.Random(2), 0
    # The first time is longer than the others.
    moe_prefetch.attach(model, config).detach()
    start = time.perf_counter()
    moe_prefetch.attach(model, config).detach()
    length = time.perf_counter() - start

    held = []

    def whole():
        held.append(moe_prefetch.attach(model, config))
        held[-1].detach()

    while hits < 25:
        hits += strike(whole, rng.uniform(0, length))
        # Struck within detach, or between attach and the first use of its result: the session is there, and ends when told to.
        for session in {served.taps() for served in integration._SERVED.values()} | set(held):
            session.detach()
        held.clear()
        assert picture(model) == before
        assert settled(lambda: not movers() and not open_files())
    assert hits > 15
    # A strike between mkdtemp and the next statement may leave one empty folder; never a record.
    assert not [f for _, _, files in os.walk(temporary) for f in files]


# fork -------------------------------------------------------------------------------------------------------------------------
def test_a_forked_child_is_refused_and_may_detach():
    model = small()
    before, want = picture(model), resident(model)
    session = moe_prefetch.attach(model, DISK)
    logits_of(model, prompt())

    def in_child():
        for act in (lambda: logits_of(model, prompt()), session.wait_idle):
            with pytest.raises(SessionError, match="forked"):
                act()
        session.detach()
        assert torch.equal(resident(model), want)
        assert not movers()
        with moe_prefetch.attach(model, DISK):
            assert torch.equal(logits_of(model, prompt()), want)

    # Forked while the movers hold whatever lock they hold.
    assert Child(in_child).ok()
    assert torch.equal(logits_of(model, prompt()), want)
    session.detach()
    assert picture(model) == before


# kills ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_process_leaves_nothing(temporary, tmp_path, number):
    model = small()
    ready = tmp_path / "ready"

    def forever():
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        moe_prefetch.attach(model, DISK)
        while True:
            logits_of(model, prompt())
            ready.touch()

    child = Child(forever)
    assert settled(ready.exists, 20)
    child.kill(number)
    assert os.listdir(temporary) == []


def test_a_build_that_is_killed_is_cleaned_up_by_the_next(tmp_path):
    model = small()
    want = resident(model)
    config = {"experts": {**DISK["experts"], "path": str(tmp_path / "records")}}

    def slowly():
        moe_prefetch.attach(model, config, progress=lambda done, of: (done == 5 and (tmp_path / "ready").touch(), time.sleep(0.05)))

    child = Child(slowly)
    assert settled((tmp_path / "ready").exists, 20)
    child.kill()
    assert any(p.name.startswith(".records-") for p in (tmp_path / "records").iterdir())
    with moe_prefetch.attach(model, config):
        assert torch.equal(logits_of(model, prompt()), want)
    assert len(list((tmp_path / "records").iterdir())) == 2


# several processes ------------------------------------------------------------------------------------------------------------
def test_processes_that_attach_to_one_folder_at_once(tmp_path):
    """Two share weights, two have their own: each computes with its own, and the folder is whole."""
    models = [small(seed=s) for s in (0, 0, 1, 2)]
    wants = [resident(m) for m in models]
    config = {"experts": {**DISK["experts"], "path": str(tmp_path / "records")}}

    def work(i):
        for _ in range(3):
            with moe_prefetch.attach(models[i], config):
                for _ in range(2):
                    assert torch.equal(logits_of(models[i], prompt()), wants[i])

    children = [Child(lambda i=i: work(i)) for i in range(4)]
    assert [c.ok(60) for c in children] == [True] * 4
    read_manifest(tmp_path / "records")
    assert len(list((tmp_path / "records").iterdir())) == 2


EXIT = """
import signal, sys, time, tempfile, threading
# A shell's background job starts with interrupts ignored, and so would this child.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [{root!r}]
tempfile.tempdir = {folder!r}
import torch
from tests.models import DISK, logits_of, prompt, small
import moe_prefetch
from moe_prefetch.runtime import Runtime

class Slow(Runtime):
    def pread_into(self, fd, buffer, offset, where):
        time.sleep(0.2)
        super().pread_into(fd, buffer, offset, where)

class Eager:
    forecast = keep = lambda self, *args: ()
    next_step = lambda self, layer, step: (65536,) * 4

model = small()
session = moe_prefetch.attach(model, {{"experts": {{**DISK["experts"], "resident": 4}}}}, runtime=Slow(), forecaster=Eager(), plan="stale")
logits_of(model, prompt(1, 1), 1)
time.sleep(0.05)
assert session._mover._reading
print("in flight", flush=True)
if {how!r} == "interrupt":
    while True:
        logits_of(model, prompt(1, 1), 1)
"""


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_interpreter_exit_with_reads_in_flight(temporary, how):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    child = subprocess.Popen([sys.executable, "-c", EXIT.format(root=root, folder=str(temporary), how=how)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE,
                             text=True)
    assert child.stdout.readline() == "in flight\n", child.stderr.read()
    if how == "interrupt":
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
    start = time.perf_counter()
    _, said = child.communicate(timeout=120)
    assert time.perf_counter() - start < 10
    assert child.returncode == (0 if how == "end" else -signal.SIGINT), said
    assert said == "" if how == "end" else "KeyboardInterrupt" in said
    assert os.listdir(temporary) == []


# threads ----------------------------------------------------------------------------------------------------------------------
class Jitter(Runtime):
    """Reads that take a random while and now and then fail."""

    def __init__(self, fail: float):
        self.random, self.fail, self.armed = random.Random(4), fail, False

    def pread_into(self, fd, buffer, offset, where):
        if self.armed:
            time.sleep(self.random.random() * 0.002)
            if self.random.random() < self.fail:
                raise OSError(5, "Input/output error")
        super().pread_into(fd, buffer, offset, where)


@pytest.mark.parametrize("fail", [0.0, 0.05])
def test_many_threads_on_one_model(fail):
    """Each pass is exact or refused by a typed error; whatever order they come in, the table is whole and so is the model at the end."""
    model = small(layers=3)
    before, want = picture(model), resident(model)
    runtime = Jitter(fail)
    session = moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": 1, "threads": 3}}, runtime=runtime)
    runtime.armed = True
    done, refused, wrong = [], [], []

    def work():
        for _ in range(12):
            try:
                got = logits_of(model, prompt())
            except SessionError as e:
                refused.append(e)
                time.sleep(0.003)
            except MoEPrefetchError as e:
                (refused if fail else wrong).append(e)
            except BaseException as e:  # noqa: BLE001  # reported by the main thread
                wrong.append(e)
            else:
                done.append(torch.equal(got, want))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, wrong[:3]
    assert all(done) and len(done) + len(refused) == 72
    runtime.armed = False
    assert torch.equal(logits_of(model, prompt()), want)
    session.wait_idle()
    session.table.check_integrity()
    session.detach()
    assert picture(model) == before


def test_models_in_threads_of_their_own():
    models = [small(seed=s) for s in range(4)]
    wants, before = [resident(m) for m in models], [picture(m) for m in models]
    errors = []

    def work(i):
        try:
            for _ in range(3):
                with moe_prefetch.attach(models[i], DISK):
                    for _ in range(3):
                        assert torch.equal(logits_of(models[i], prompt()), wants[i])
        except BaseException as e:  # noqa: BLE001  # reported by the main thread
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors, errors
    assert [picture(m) for m in models] == before


def test_threads_that_attach_to_one_model_at_once():
    model = small()
    before = picture(model)
    sessions, refused = [], []
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        try:
            sessions.append(moe_prefetch.attach(model, DISK))
        except SessionError as e:
            refused.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(sessions) == 1 and len(refused) == 3
    sessions[0].detach()
    assert picture(model) == before
    assert settled(lambda: not movers() and not open_files())


def test_weights_that_another_attach_takes_while_they_are_packed():
    model, sessions = small(), []

    class Late(Runtime):
        def allocate(self, *args, **kwargs):
            # The first buffer of the slower attach: the other one runs in full before it reads a weight.
            if not sessions:
                sessions.append(moe_prefetch.attach(model, DISK))
            return super().allocate(*args, **kwargs)

    with pytest.raises(SessionError, match="attached to this model already"):
        moe_prefetch.attach(model, DISK, runtime=Late())
    sessions[0].detach()
    assert settled(lambda: not movers() and not open_files())


def test_detaching_from_another_thread_while_reads_are_in_flight():
    model = small()
    before = picture(model)
    runtime = GateRuntime()
    session = moe_prefetch.attach(model, DISK, runtime=runtime)
    logits_of(model, prompt())
    runtime.shut()
    with contextlib.suppress(IndexError), session._mover.lock:
        session._mover.demand(0, 0, None)
    threading.Timer(0.1, runtime.open).start()
    thread = threading.Thread(target=session.detach)
    thread.start()
    thread.join(20)
    assert picture(model) == before
