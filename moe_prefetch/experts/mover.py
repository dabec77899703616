"""Moves records from their home into slots, on threads. Acts on plans; decides nothing.

Demand reads go before fetches ahead. A fetch that has not started can be cancelled; one that has started ends, and publishes its
slot. All shared state (queue, slot table) is under one condition, `lock`.
"""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..config import ExpertsConfig
from ..errors import ConfigError, DeadlineError, SessionError
from ..runtime import Runtime
from ..types import Move, Plan
from .slots import SlotTable
from .store import DiskStore


class JobState(IntEnum):
    QUEUED = 0
    STARTED = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4


@dataclass(eq=False)
class Job:
    """One record on its way. `slot` is -1 for a bounce buffer. The job owns its buffer until it ends."""

    layer: int
    expert: int
    slot: int
    generation: int
    buffer: torch.Tensor
    state: JobState = JobState.QUEUED
    abandoned: bool = False  # nobody waits any more: the mover gives the bounce buffer back
    error: BaseException | None = field(default=None, repr=False)

    @property
    def move(self) -> Move:
        return Move(self.layer, self.expert, self.slot, self.generation)


class Drive:
    """A drive as a queue: one request's first byte comes after `latency`, bytes of all requests share `bandwidth`."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.bandwidth, self.latency = bandwidth, latency
        self._free_at = 0.0
        self._lock = threading.Lock()

    def done_at(self, start: float, nbytes: int) -> float:
        """When a request issued at `start` has all its bytes (monotonic seconds)."""
        with self._lock:
            self._free_at = max(start + self.latency, self._free_at) + nbytes / self.bandwidth
            return self._free_at


def modelled(experts: ExpertsConfig, record_bytes: int) -> Drive | None:
    """The drive that a configuration models, if it does. Raises ConfigError: one whose reads under way could outlast the deadline, so that
    passes and `detach` would give up on it."""
    if experts.drive is None:
        return None
    longest = experts.drive.latency + experts.threads * record_bytes / experts.drive.bandwidth
    if longest > experts.deadline:
        raise ConfigError(f"the modelled drive takes {longest:.3g} s for {experts.threads} records of {record_bytes} bytes, one a thread",
                          where="experts.drive", expected=f"no more than experts.deadline, {experts.deadline:g} s",
                          do="raise experts.drive.bandwidth or experts.deadline, or lower experts.threads")
    return Drive(experts.drive.bandwidth, experts.drive.latency)


class Mover:
    """Threads that fill slots of `table` and bounce buffers from `store`, once `start` is called.

    `buffers[layer][slot]` is the memory of a slot, allocated once: addresses never change. `poison` (tests) is called on the buffer
    of a slot about to be overwritten and of a cancelled one, so that a late reader shows.
    """

    def __init__(self, store: DiskStore, table: SlotTable, runtime: Runtime, *, threads: int, deadline: float, drive: Drive | None = None,
                 poison: Callable[[torch.Tensor], None] | None = None) -> None:
        self.store, self.table, self.lock = store, table, threading.Condition()
        self._runtime, self._drive, self._deadline, self._poison = runtime, drive, deadline, poison
        self.buffers = [[runtime.allocate(store.layout.nbytes) for _ in range(table.num_slots)] for _ in range(table.num_layers)]
        self._all_bounce = [runtime.allocate(store.layout.nbytes) for _ in range(bounce_buffers(threads))]
        self._bounce = [*self._all_bounce]
        self._urgent: deque[Job] = deque()
        self._ahead: deque[Job] = deque()
        self._filling: dict[tuple[int, int], Job] = {}
        self._reading: set[Job] = set()
        self.closed = False
        self._moved, self._wasted, self._cancelled = ([0] * table.num_layers for _ in range(3))
        self.started = 0
        self.read_s = 0.0
        self._process = runtime.process()
        self._threads: list[threading.Thread] = []
        self._wanted = threads

    def start(self, owner: object = None) -> None:
        """Start the threads; `close` ends them, also after an interrupt in here, and so does `owner` when it is dropped without a word.
        Raises SessionError."""
        if owner is not None:
            weakref.finalize(owner, self._abandon).atexit = False
        while len(self._threads) < self._wanted:
            try:
                self._threads.append(self._runtime.start_thread(self._work, f"moe-prefetch-mover-{len(self._threads)}"))
            except RuntimeError as e:
                raise SessionError(f"mover thread {len(self._threads) + 1} of {self._wanted} can't be started: {e}",
                                   do="lower experts.threads, or raise the system's limit") from e

    # under self.lock ------------------------------------------------------------------------------------------------
    def prefetch(self, plan: Plan) -> None:
        """Claim the plan's slots and queue its moves. Hold `lock`."""
        for m in plan.moves:
            self._claim(m.layer, m.slot, m.expert, ahead=True)
        if plan.moves:
            self.lock.notify_all()

    def demand(self, layer: int, expert: int, slot: int | None) -> Job | None:
        """Queue an urgent read into a slot (None: a bounce buffer). Returns None when no bounce buffer is free. Hold `lock`."""
        if slot is not None:
            job = self._claim(layer, slot, expert, ahead=False)
        elif self._bounce:
            job = Job(layer, expert, -1, -1, self._bounce.pop())
            self._urgent.append(job)
        else:
            return None
        self.lock.notify_all()
        return job

    def take_counts(self, layer: int) -> tuple[int, int, int]:
        """(records that crossed the link, slots thrown out unread, fetches cancelled) of a layer since the last call."""
        with self.lock:
            counts = self._moved[layer], self._wasted[layer], self._cancelled[layer]
            self._moved[layer] = self._wasted[layer] = self._cancelled[layer] = 0
            return counts

    def _claim(self, layer: int, slot: int, expert: int, *, ahead: bool) -> Job:
        generation, evicted = self.table.begin_fill(layer, slot, expert, ahead=ahead)
        job = Job(layer, expert, slot, generation, self.buffers[layer][slot])
        if self._poison:
            self._poison(job.buffer)
        self._filling[layer, expert] = job
        (self._ahead if ahead else self._urgent).append(job)
        self._wasted[layer] += evicted is not None and evicted.wasted
        return job

    def filling(self, layer: int, expert: int) -> Job | None:
        """The job that is bringing an expert into a slot. Hold `lock`."""
        return self._filling.get((layer, expert))

    def unstarted(self, layer: int) -> tuple[Job, ...]:
        """Fetches ahead for a layer that have not started. Hold `lock`."""
        return tuple(j for j in self._ahead if j.layer == layer)

    def cancel(self, job: Job) -> None:
        """Take back a fetch that has not started. Hold `lock`."""
        self._ahead.remove(job)
        self._cancelled[job.layer] += 1
        self._take_back(job)

    def _take_back(self, job: Job) -> None:
        job.state = JobState.CANCELLED
        if job.slot < 0:
            self.free_bounce(job)
        else:
            self._filling.pop((job.layer, job.expert), None)
            self.table.cancel(job.layer, job.slot, job.generation)

    def free_bounce(self, job: Job) -> None:
        """Give back the bounce buffer of a finished job. Hold `lock`."""
        if self._poison:
            self._poison(job.buffer)
        self._bounce.append(job.buffer)

    def abandon(self, job: Job) -> None:
        """Nobody will wait for a demanded job any more (its layer failed). Never blocks. Hold `lock`."""
        if job.state is JobState.QUEUED:
            self._urgent.remove(job)
            self._take_back(job)
        elif job.slot < 0 and job.state is JobState.STARTED:
            job.abandoned = True
        elif job.slot < 0:
            self.free_bounce(job)

    def wait(self, job: Job) -> None:
        """Block until a job has ended. Hold `lock` (it is released meanwhile). Raises its error, or DeadlineError."""
        end = self._runtime.now() + self._deadline
        while job.state < JobState.DONE:
            left = end - self._runtime.now()
            if left <= 0:
                raise DeadlineError(f"an expert did not come within {self._deadline:g} s", where=f"layer {job.layer}, expert {job.expert}",
                                    expected="a drive that answers", do="check the drive, or raise experts.deadline")
            self.lock.wait(left)
        if job.error is not None:
            raise job.error

    def drain(self) -> None:
        """Cancel what has not started and wait for what has. Hold `lock`. Raises DeadlineError."""
        for job in list(self._ahead):
            self.cancel(job)
        end = self._runtime.now() + self._deadline
        while self._reading or self._urgent:
            left = end - self._runtime.now()
            if left <= 0:
                job = next(iter(self._reading or self._urgent))
                raise DeadlineError(f"a read did not end within {self._deadline:g} s", where=f"layer {job.layer}, expert {job.expert}",
                                    expected="a drive that answers", do="check the drive, then try again")
            self.lock.wait(left)

    def reset(self) -> None:
        """Forget every slot, lease and job, after an interrupt struck a pass anywhere at all; no reader may be alive.

        Raises DeadlineError when a read hangs; then call again.
        """
        # It may have struck between taking the lock and the block that gives it back.
        with contextlib.suppress(RuntimeError):
            while True:
                self.lock.release()
        with self.lock:
            for queue in (self._urgent, self._ahead):
                for job in queue:
                    job.state = JobState.CANCELLED
                queue.clear()
            # A thread still writes into the buffer of what it reads.
            self.drain()
            self._filling.clear()
            self._bounce = [*self._all_bounce]
            self.drop_slots()

    def drop_slots(self) -> None:
        """Empty all slots and count those that were fetched ahead in vain. Hold `lock`; nothing may be leased or under way."""
        for layer, unread in enumerate(self.table.clear()):
            self._wasted[layer] += unread

    def scratch(self) -> torch.Tensor:
        """A record's worth of memory that is free once `drain` has returned."""
        return self._all_bounce[0]

    # threads --------------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self.lock:
                while not (self._urgent or self._ahead or self.closed):
                    self.lock.wait()
                if self.closed:
                    return
                job = (self._urgent or self._ahead).popleft()
                job.state = JobState.STARTED
                self._reading.add(job)
                self.started += 1
                self._moved[job.layer] += 1
            seconds = 0.0
            try:
                start = self._runtime.now()
                self.store.read_into(job.layer, job.expert, job.buffer)
                if self._drive:
                    self._runtime.sleep_until(self._drive.done_at(start, self.store.layout.nbytes))
                seconds = self._runtime.now() - start
            except BaseException as e:  # noqa: BLE001  # handed to whoever waits for the job
                job.error = e
            with self.lock:
                self._reading.discard(job)
                self.read_s += seconds
                if job.slot >= 0:
                    self._filling.pop((job.layer, job.expert), None)
                    (self.table.cancel if job.error else self.table.publish)(job.layer, job.slot, job.generation)
                job.state = JobState.FAILED if job.error else JobState.DONE
                if job.abandoned:
                    self.free_bounce(job)
                self.lock.notify_all()

    def held_bytes(self) -> int:
        """Bytes of slots and bounce buffers."""
        return self.store.layout.nbytes * (self.table.num_layers * self.table.num_slots + len(self._all_bounce))

    def close(self) -> None:
        """Stop the threads and give the memory back; waits for reads under way. Raises DeadlineError when one hangs: call again."""
        if not self.forked:
            with self.lock:
                self.closed = True
                self._urgent.clear()
                self._ahead.clear()
                self.lock.notify_all()
            end = self._runtime.now() + self._deadline
            for thread in self._threads:
                thread.join(max(0.0, end - self._runtime.now()))
            if any(t.is_alive() for t in self._threads):
                raise DeadlineError(f"a mover thread did not stop within {self._deadline:g} s", where="closing the session",
                                    do="check the drive: a read hangs")
        self.buffers, self._all_bounce, self._bounce = [], [], []

    def _abandon(self) -> None:
        """Nobody is left to ask for anything. Called while memory is collected: it waits for nobody long."""
        self.closed = True
        if not self.forked and self.lock.acquire(timeout=1.0):
            self._urgent.clear()
            self._ahead.clear()
            self.lock.notify_all()
            self.lock.release()

    @property
    def forked(self) -> bool:
        """Whether this is the child of the process that made the mover: no thread came along, and the lock may be held for ever."""
        return self._runtime.process() != self._process

    def check_usable(self) -> None:
        """Raises SessionError."""
        if self.forked:
            raise SessionError("the process was forked while a session was attached", expected="attach in the process that computes",
                               do="attach after the fork, or start workers with the spawn method")


def bounce_buffers(threads: int) -> int:
    """One a thread, and one that is being computed from."""
    return threads + 1
