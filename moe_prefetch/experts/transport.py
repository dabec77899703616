"""How messages travel between the ranks of an expert group: one-sided within a host, by the framework's collective otherwise, or both.

A transport carries an exchange in two halves (`health.OUT`, `health.BACK`): write to each `outbox`, `send`, `receive`.
"""
from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch

from ..distributed.channel import Channel
from ..distributed.groups import Group
from ..distributed.health import Waits
from ..distributed.symmetric import symmetric_memory
from ..errors import DeadlineError, PeerError, UnsupportedModelError
from ..kernels.dispatch.naive import all_to_all
from ..runtime import Runtime

ROLL_CALL = 0.1  # share of the deadline that is kept to ask who is still there when a collective has failed


class Transport(Protocol):
    """Messages of static size among `size` ranks; see `distributed.channel.Channel`, which is one."""

    size: int
    waits: Waits

    def begin(self) -> None: ...

    def outbox(self, half: int, reader: int) -> torch.Tensor: ...

    def send(self, half: int) -> None: ...

    def receive(self, half: int) -> list[torch.Tensor]: ...

    def give_up(self) -> None: ...


class Collective:
    """By all-to-all of the group's own process group, with static sizes. `far`: the places it serves (default: all), of the whole group.

    All waiting counts as transfer: a collective does not say for whom it waits. When it fails, the ranks that are left tell each other.
    """

    def __init__(self, group: Group, sizes: tuple[int, int], deadline: float, device: torch.device, runtime: Runtime,
                 far: tuple[int, ...] | None = None) -> None:
        self._group, self._deadline, self._runtime = group, deadline, runtime
        places = tuple(range(group.size)) if far is None else far
        self.size = group.size
        self._row = {place: i for i, place in enumerate(places)}
        self._far = () if far is None else tuple(p in self._row for p in range(group.size))
        self._out = [torch.zeros(len(places), n, dtype=torch.uint8, device=device) for n in sizes]
        self._in = [torch.zeros_like(t) for t in self._out]
        self.waits = Waits()
        self._broken: DeadlineError | None = None

    def begin(self) -> None:
        if self._broken is not None:
            raise self._broken
        self.waits = Waits()

    def outbox(self, half: int, reader: int) -> torch.Tensor:
        return self._out[half][self._row[reader]]

    def send(self, half: int) -> None:
        """Everything happens in `receive`."""

    def receive(self, half: int) -> list[torch.Tensor]:
        start = self._runtime.now()
        try:
            self._wait(all_to_all(self._out[half], self._in[half], self._group.process_group, self._far), start)
        except RuntimeError as e:
            self._broken = self._roll_call(start)
            raise self._broken from e
        spent = self._runtime.now() - start
        if half:
            self.waits.results = spent
        else:
            self.waits.transfer = spent
        return list(self._in[half])

    def _wait(self, work: Any, start: float) -> None:
        end, pause, now = start + self._deadline * (1 - ROLL_CALL), 0.0, self._runtime.now
        if work is None:
            return
        # Looked at and not waited for: torch takes up to a second to make the exception of a wait that ends.
        while self._out[0].device.type == "cpu" and not work.is_completed():
            if now() > end:
                raise RuntimeError("the collective did not end in time")
            self._runtime.sleep_until(now() + pause)
            pause = min(pause + 5e-6, 2e-4)
        work.wait(timedelta(seconds=max(1e-3, end - now())))

    def _roll_call(self, start: float) -> DeadlineError:
        left = start + self._deadline - self._runtime.now()
        try:
            # At least that long: every rank asks at about the same time.
            self._group.gather(b"here", max(left, self._deadline * ROLL_CALL / 2))
        except PeerError as e:
            return PeerError(f"nothing came within {self._deadline:g} s", ranks=e.ranks, where=f"group {self._group.axis}, collective",
                             expected="every rank in every layer, with or without tokens",
                             do="see what became of that rank; attach anew with the ranks that are left")
        return DeadlineError("a collective failed though every rank is there", where=f"group {self._group.axis}",
                             do="see the error it came from; raise the deadline if it was too short")

    def give_up(self) -> None:
        """The others find out by their deadline."""


class Spanning:
    """One-sided to the ranks of this host, by collective to the others."""

    def __init__(self, group: Group, sizes: tuple[int, int], deadline: float, device: torch.device, runtime: Runtime,
                 attach_deadline: float) -> None:
        self.size = group.size
        memory = symmetric_memory(group, device, runtime, attach_deadline)
        self._near = {place: i for i, place in enumerate(memory.places)}
        self._channel = Channel(memory, sizes, deadline, runtime, attach_deadline)
        self._far = tuple(p for p in range(group.size) if p not in self._near)
        self._collective = Collective(group, sizes, deadline, device, runtime, self._far)

    @property
    def waits(self) -> Waits:
        near, far = self._channel.waits, self._collective.waits
        return Waits(near.late, near.late_rank, near.transfer + far.transfer, near.results + far.results)

    def begin(self) -> None:
        self._channel.begin()
        self._collective.begin()

    def outbox(self, half: int, reader: int) -> torch.Tensor:
        near = self._near.get(reader)
        return self._collective.outbox(half, reader) if near is None else self._channel.outbox(half, near)

    def send(self, half: int) -> None:
        self._channel.send(half)

    def receive(self, half: int) -> list[torch.Tensor]:
        far = dict(zip(self._far, self._collective.receive(half), strict=True))
        near = self._channel.receive(half)
        return [far[p] if p in far else near[self._near[p]] for p in range(self.size)]

    def give_up(self) -> None:
        self._channel.give_up()


def open_transport(mode: str, group: Group, sizes: tuple[int, int], device: torch.device, deadline: float, runtime: Runtime,
                   attach_deadline: float) -> Transport:
    """The transport of a mode. Collective over the group. Raises UnsupportedModelError, ConfigError, MemoryError, PeerError."""
    if mode == "host":
        return Collective(group, sizes, deadline, device, runtime)
    if device.type != "cpu":
        raise UnsupportedModelError(f"mode {mode} on {device.type}", where="dispatch", expected="mode host or stay, or a CPU",
                                    do="use mode host")
    # What every rank decides alike: hosts of all ranks are known to all.
    if len(set(group.hosts(attach_deadline))) > 1:
        return Spanning(group, sizes, deadline, device, runtime, attach_deadline)
    return Channel(symmetric_memory(group, device, runtime, attach_deadline), sizes, deadline, runtime, attach_deadline)
