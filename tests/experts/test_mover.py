"""The mover: order, cancellation, deadlines, abandoned jobs, and that every byte is counted."""
from __future__ import annotations

import threading
import time

import pytest
import torch

from moe_prefetch.errors import ArtefactError, DeadlineError, SessionError
from moe_prefetch.experts.mover import Drive, JobState
from moe_prefetch.runtime import Runtime
from moe_prefetch.types import Move, Plan, SlotState
from tests.experts.records import Source, expected, mover_of, poison
from tests.models import FaultyRuntime, GateRuntime, movers, settled


@pytest.fixture
def make(tmp_path):
    made = []

    def build(source=None, **kw):
        made.append(mover_of(tmp_path / "records", source or Source(), **kw))
        return made[-1]

    yield build
    for m in made:
        m.close()
        m.store.close()
    assert settled(lambda: not movers())


def plan(*moves, layer=0):
    return Plan(layer, 0, tuple(Move(layer, e, s, 1) for e, s in moves))


class OrderRuntime(GateRuntime):
    """Which records were read, in order."""

    def __init__(self):
        super().__init__()
        self.order = []

    def pread_into(self, fd, buffer, offset, where):
        super().pread_into(fd, buffer, offset, where)
        self.order.append(offset // len(buffer))


def test_a_fetch_ahead_lands_and_is_read(make):
    source = Source()
    mover = make(source)
    with mover.lock:
        mover.prefetch(plan((3, 0), (1, 1)))
        for job in [mover.filling(0, e) for e in (3, 1)]:
            mover.wait(job)
    for slot, e in enumerate((3, 1)):
        lease = mover.table.lease(0, e, 0)
        assert lease.slot == slot
        assert torch.equal(mover.buffers[0][slot], expected(mover, source, 0, e))
    assert mover.take_counts(0) == (2, 0, 0) and mover.take_counts(0) == (0, 0, 0)


def test_addresses_never_change(make):
    mover = make(slots=2)
    before = [b.data_ptr() for layer in mover.buffers for b in layer]
    for i in range(100):
        with mover.lock:
            mover.wait(mover.demand(0, i % 5, i % 2))
    assert [b.data_ptr() for layer in mover.buffers for b in layer] == before
    assert all(p % 64 == 0 for p in before)


def test_demand_overtakes_fetches_ahead(make):
    runtime = OrderRuntime()
    mover = make(threads=1, slots=4, runtime=runtime)
    runtime.order.clear()
    runtime.shut()
    with mover.lock:
        mover.prefetch(plan((0, 0), (1, 1), (2, 2)))
    assert settled(lambda: runtime.waiting == 1)
    with mover.lock:
        urgent = mover.demand(0, 4, 3)
        bounced = mover.demand(1, 2, None)
    runtime.open()
    with mover.lock:
        mover.wait(urgent)
        mover.wait(bounced)
        mover.drain()
        mover.free_bounce(bounced)
    assert runtime.order[:3] == [0, 4, 7]


def test_only_what_has_not_started_is_cancelled(make):
    runtime = GateRuntime()
    mover = make(threads=1, slots=3, runtime=runtime)
    runtime.shut()
    with mover.lock:
        mover.prefetch(plan((0, 0), (1, 1), (2, 2)))
    assert settled(lambda: runtime.waiting == 1)
    with mover.lock:
        waiting = mover.unstarted(0)
        assert [j.expert for j in waiting] == [1, 2]
        assert mover.unstarted(1) == ()
        for job in waiting:
            mover.cancel(job)
        assert mover.filling(0, 1) is None and mover.filling(0, 0) is not None
        assert [s.state for s in mover.table.view(0).slots] == [SlotState.FILLING, SlotState.FREE, SlotState.FREE]
        # The slot may be claimed again at once; the old job can't publish into it.
        again = mover.demand(0, 4, 1)
    runtime.open()
    with mover.lock:
        mover.wait(again)
        mover.drain()
    mover.table.check_integrity()
    assert mover.table.find(0, 4) == (1, SlotState.READY)
    assert mover.take_counts(0) == (2, 0, 2)


def test_a_wait_ends_at_the_deadline_and_the_job_goes_on(make):
    runtime = GateRuntime()
    mover = make(deadline=0.2, runtime=runtime)
    runtime.shut()
    with mover.lock:
        job = mover.demand(0, 1, 0)
        start = time.perf_counter()
        with pytest.raises(DeadlineError, match="layer 0, expert 1"):
            mover.wait(job)
    assert 0.2 <= time.perf_counter() - start < 2
    runtime.open()
    with mover.lock:
        mover.wait(job)
    assert mover.table.find(0, 1) == (0, SlotState.READY)


def test_draining_ends_at_one_deadline_whatever_hangs(make):
    runtime = GateRuntime()
    mover = make(deadline=0.2, slots=4, threads=2, runtime=runtime)
    runtime.shut()
    with mover.lock:
        for e in range(4):
            mover.demand(0, e, e)
        start = time.perf_counter()
        with pytest.raises(DeadlineError):
            mover.drain()
    assert time.perf_counter() - start < 1.5
    with pytest.raises(DeadlineError):
        mover.close()
    runtime.open()


def test_bounce_buffers_come_back_by_every_way(make):
    runtime = GateRuntime()
    mover = make(threads=2, runtime=runtime, poison=poison)
    everything = sorted(b.data_ptr() for b in mover._bounce)
    with mover.lock:
        done = mover.demand(0, 1, None)
        mover.wait(done)
    runtime.shut()
    with mover.lock:
        jobs = [mover.demand(0, e, None) for e in (2, 3)]
        assert mover.demand(0, 4, None) is None
    assert settled(lambda: runtime.waiting == 2)
    with mover.lock:
        mover.abandon(done)
        queued = mover.demand(0, 4, None)
        mover.abandon(queued)
        assert queued.state is JobState.CANCELLED
        for job in jobs:
            mover.abandon(job)
            assert job.state is JobState.STARTED
        assert len(mover._bounce) == 1
    runtime.open()
    with mover.lock:
        mover.drain()
        assert sorted(b.data_ptr() for b in mover._bounce) == everything


def test_a_failed_read_frees_its_slot_and_reaches_its_reader(make):
    runtime = FaultyRuntime("pread_into", 1)
    runtime.armed = False
    mover = make(runtime=runtime)
    runtime.calls.clear()
    runtime.armed = True
    with mover.lock:
        job = mover.demand(0, 1, 0)
        with pytest.raises(ArtefactError, match="Input/output error"):
            mover.wait(job)
        assert job.state is JobState.FAILED
        assert mover.table.view(0).slots[0].state is SlotState.FREE
        mover.wait(mover.demand(0, 1, 0))
    assert mover.take_counts(0) == (2, 0, 0)


def test_a_clock_that_fails_in_a_thread_does_not_kill_the_thread(make):
    class Clock(Runtime):
        broken = False

        def now(self):
            if self.broken and threading.current_thread().name.startswith("moe-prefetch"):
                raise OSError(22, "no clock")
            return super().now()

    runtime = Clock()
    mover = make(threads=1, runtime=runtime)
    runtime.broken = True
    with mover.lock, pytest.raises(OSError, match="no clock"):
        mover.wait(mover.demand(0, 1, 0))
    runtime.broken = False
    with mover.lock:
        mover.wait(mover.demand(0, 1, 0))


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_threads_that_can_not_be_started(tmp_path, nth):
    runtime = FaultyRuntime("start_thread", nth, lambda: RuntimeError("can't start new thread"))
    with pytest.raises(SessionError, match=f"mover thread {nth} of 3"):
        mover_of(tmp_path, Source(), threads=3, runtime=runtime)
    assert settled(lambda: not movers())


def test_wasted_fetches_are_counted_once(make):
    mover = make(slots=1)
    with mover.lock:
        mover.prefetch(plan((1, 0)))
        mover.wait(mover.filling(0, 1))
        mover.prefetch(plan((2, 0)))
        mover.wait(mover.filling(0, 2))
        mover.table.release(mover.table.lease(0, 2, 0))
        mover.prefetch(plan((3, 0)))
        mover.drain()
        mover.drop_slots()
    moved, wasted, cancelled = mover.take_counts(0)
    # 1 and 3 were never read; whether 3 had started when it was drained is the threads' affair.
    assert (moved + cancelled, wasted + cancelled) == (3, 2)


def test_poison_shows_a_reader_that_comes_too_late(make):
    mover = make(slots=1, poison=poison)
    with mover.lock:
        mover.wait(mover.demand(0, 1, 0))
        stale = mover.store.layout.views(mover.buffers[0][0])["down"]
        assert not stale.isnan().any()
        mover.prefetch(plan((2, 0)))
        job = mover.filling(0, 2)
        if job is not None and job.state is JobState.QUEUED:
            assert stale.isnan().all()


def test_reset_mends_whatever_an_interrupt_left(make):
    """Every half-done state that a signal between two statements can leave."""
    source = Source()
    mover = make(source, slots=3, threads=2, poison=poison)
    with mover.lock:
        mover.wait(mover.demand(0, 0, 0))
    mover.table.lease(0, 0, 0)                              # a lease that nobody holds
    mover.table.begin_fill(0, 1, 3, ahead=True)             # a claim without a job
    mover.table._where[1][4] = 2                            # an index without a slot
    mover._bounce.pop()                                     # a buffer that nobody has
    mover.lock.acquire()                                    # a lock whose block was never entered
    mover.lock.acquire()
    mover.reset()
    assert settled(lambda: not mover.lock._is_owned())
    mover.table.check_integrity()
    assert all(s.state is SlotState.FREE for layer in range(2) for s in mover.table.view(layer).slots)
    with mover.lock:
        assert len(mover._bounce) == 3
        for e in range(3):
            mover.wait(mover.demand(0, e, e))
            assert torch.equal(mover.buffers[0][e], expected(mover, source, 0, e))


def test_close_is_final_and_may_be_repeated(make):
    mover = make()
    mover.close()
    mover.close()
    assert mover.held_bytes() == mover.store.layout.nbytes * 4  # the count of slots, no longer the memory
    assert mover.buffers == []


def test_the_drive_model():
    drive = Drive(bandwidth=1000.0, latency=0.5)
    # Alone: latency, then bytes. Together: latencies overlap, bytes queue.
    assert drive.done_at(10.0, 100) == pytest.approx(10.6)
    assert drive.done_at(10.0, 100) == pytest.approx(10.7)
    assert drive.done_at(10.3, 100) == pytest.approx(10.9)
    assert drive.done_at(20.0, 1000) == pytest.approx(21.5)


def test_a_modelled_drive_is_no_faster_than_it_says(make):
    mover = make(threads=2, slots=4, drive=Drive(bandwidth=4096 / 0.02, latency=0.01))
    start = time.perf_counter()
    with mover.lock:
        for job in [mover.demand(0, e, e) for e in range(4)]:
            mover.wait(job)
    assert time.perf_counter() - start >= 4 * 0.02


def test_many_threads_and_one_table(make):
    """Claims, cancellations, leases and waits from eight threads: no invariant breaks, and nobody reads another expert's bytes."""
    source = Source(2, 6)
    mover = make(source, slots=3, threads=4, poison=poison)
    truth = {(la, e): expected(mover, source, la, e) for la in range(2) for e in range(6)}
    errors = []

    def work(seed):
        g = torch.Generator().manual_seed(seed)

        def draw(n):
            return int(torch.randint(n, (), generator=g))

        try:
            for step in range(60):
                layer, expert, slot = draw(2), draw(6), draw(3)
                with mover.lock:
                    view = mover.table.view(layer).slots[slot]
                    free = view.state is not SlotState.FILLING and not mover.table._slots[layer][slot].leases
                    if free and mover.table.find(layer, expert) is None:
                        mover.prefetch(Plan(layer, step, (Move(layer, expert, slot, view.generation + 1),)))
                    elif mover.unstarted(layer) and draw(3) == 0:
                        mover.cancel(mover.unstarted(layer)[0])
                    if (job := mover.filling(layer, expert)) is not None and job.state is JobState.STARTED:
                        mover.wait(job)
                    lease = mover.table.lease(layer, expert, step)
                if lease is not None:
                    same = torch.equal(mover.buffers[layer][lease.slot], truth[layer, expert])
                    with mover.lock:
                        mover.table.release(lease)
                    assert same, (layer, expert, step)
        except BaseException as e:  # noqa: BLE001  # reported by the main thread
            errors.append(e)

    before = mover.started
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    with mover.lock:
        mover.drain()
    mover.table.check_integrity()
    assert mover.started > before
    assert sum(mover.take_counts(la)[0] for la in range(2)) == mover.started


def test_the_stress_test_sees_a_slot_that_is_written_while_leased(make, monkeypatch):
    """Planted: a lease that does not count. The check above then finds bytes of another expert, or poison."""
    source = Source(1, 6)
    mover = make(source, slots=1, threads=2, poison=poison)
    with mover.lock:
        mover.wait(mover.demand(0, 1, 0))
        lease = mover.table.lease(0, 1, 0)
        mover.table._slots[0][0].leases = 0
        mover.wait(mover.demand(0, 2, 0))
    assert not torch.equal(mover.buffers[0][lease.slot], expected(mover, source, 0, 1))
