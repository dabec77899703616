"""The one-sided exchange: the real `Channel` on threads with injected delays, its rules broken on purpose, and who gets the blame."""
from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from moe_prefetch.distributed.channel import Channel
from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.health import BACK, OUT, culprits
from moe_prefetch.distributed.symmetric import LINE, SharedBlock
from moe_prefetch.errors import ConfigError, PeerError
from moe_prefetch.runtime import Runtime

SIZES = (200, 300)  # bytes of a message out and back; neither is a whole line


class Host:
    """The memory of `size` ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.places, self.size = tuple(range(size)), size
        self.blocks: dict[int, list[bytearray]] = {}
        self.lock = threading.Lock()

    def of(self, rank: int) -> _Memory:
        return _Memory(self, rank)


class _Memory:
    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.places, self.rank = host, host.places, rank
        self.group = Group("ep", host.places, rank)
        self._calls = 0

    def allocate(self, nbytes: int, deadline: float = 0.0) -> SharedBlock:
        nbytes = -(-nbytes // LINE) * LINE
        with self.host.lock:
            raw = self.host.blocks.setdefault(self._calls, [bytearray(nbytes) for _ in self.places])
        self._calls += 1
        views = tuple(torch.frombuffer(r, dtype=torch.uint8) for r in raw)
        return SharedBlock(self.rank, views, tuple(v.data_ptr() for v in views), tuple(memoryview(r).cast("q") for r in raw))


def number_of(exchange: int, half: int, writer: int, reader: int) -> int:
    """What a message is filled with: any other message of the same or another exchange differs."""
    return (exchange * 31 + half * 7 + writer * 5 + reader * 3) % 251 + 1


def race(size: int, exchanges: int, kind: type[Channel], seed: int, delay: float = 0.0003) -> list[str]:
    """`exchanges` of random delays between all steps on `size` ranks; what was read that should not have been there, and other failures."""
    host, wrong = Host(size), []

    def rank_of(rank: int) -> None:
        rng = random.Random(seed * 10 + rank)

        def pause() -> None:
            if rng.random() < 0.3:
                time.sleep(rng.random() * delay * 10)

        try:
            channel = kind(host.of(rank), SIZES, deadline=20.0)
            for n in range(1, exchanges + 1):
                channel.begin()
                for half in (OUT, BACK):
                    def fill(half: int = half, n: int = n) -> None:
                        for reader in range(size):
                            pause()
                            channel.outbox(half, reader).fill_(number_of(n, half, rank, reader))
                    channel.half(half, fill, pause) if isinstance(channel, Violation) else (fill(), pause(), channel.send(half))
                    for writer, got in enumerate(channel.receive(half)):
                        pause()
                        if got.tolist() != [number_of(n, half, writer, rank)] * len(got):
                            wrong.append(f"rank {rank} exchange {n} half {half} from {writer}: {set(got.tolist())}")
        except Exception as e:  # noqa: BLE001 (reported by the main thread)
            wrong.append(repr(e))

    threads = [threading.Thread(target=rank_of, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    assert not any(t.is_alive() for t in threads)
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_message_is_whole_whatever_the_delays(size):
    assert race(size, 60, Channel, seed=size) == []


class Violation(Channel):
    """A rule broken on purpose."""

    def half(self, half, fill, pause):
        fill()
        pause()
        self.send(half)


class FlagFirst(Violation):
    """The flag is raised before the message is written."""

    def half(self, half, fill, pause):
        self.send(half)
        pause()
        fill()


class NoResults(Violation):
    """Does not wait for the others' results before it goes on."""

    def receive(self, half):
        return [] if half == BACK else super().receive(half)


class OneInbox(Violation):
    """No turns: every exchange uses the same inboxes."""

    def _inbox(self, reader, half, writer):
        number, self.number = self.number, 0
        try:
            return super()._inbox(reader, half, writer)
        finally:
            self.number = number


class Neither(NoResults, OneInbox):
    """Neither turns nor waiting for results."""


class OneRowOnly(Violation):
    """Waits for some message in place of every one."""

    def receive(self, half):
        while not any(self._flag(self.rank, half, r) >= self.number for r in range(self.size)):
            time.sleep(1e-5)
        return [self._inbox(self.rank, half, r) for r in range(self.size)]


@pytest.mark.parametrize("kind", [FlagFirst, Neither, OneRowOnly])
def test_a_broken_rule_is_seen(kind):
    assert any(race(3, 60, kind, seed=s, delay=0.002) for s in range(5))


@pytest.mark.parametrize("kind", [NoResults, OneInbox])
def test_inboxes_by_turns_and_waiting_for_results_are_each_enough(kind):
    """So a rank may send the next rows before it has the results, and a reader may use results in place."""
    assert race(3, 40, kind, seed=1) == []


def test_a_rank_of_the_channel_leaves_while_others_finish():
    """What a rank has completed, others may still complete after it left; the next exchange names it."""
    host = Host(2)
    one, two = (Channel(host.of(r), SIZES, deadline=5.0) for r in range(2))
    for c in (one, two):
        c.begin()
    for half in (OUT, BACK):
        one.send(half)
        two.send(half)
        one.receive(half)
        if half == OUT:
            two.receive(half)
    one.give_up()
    two.receive(BACK)
    two.begin()
    two.send(OUT)
    with pytest.raises(PeerError, match="rank 0: it left") as e:
        two.receive(OUT)
    assert e.value.ranks == (0,)
    for c in (one, two):
        with pytest.raises(PeerError):
            c.begin()


def test_more_ranks_than_a_word_has_bits_are_refused():
    with pytest.raises(ConfigError, match="63 ranks"):
        Channel(Host(63).of(0), SIZES)


def test_waiting_gives_up_at_its_deadline_by_the_runtimes_clock():
    class Clock(Runtime):
        time = 0.0

        def now(self) -> float:
            return self.time

        def sleep_until(self, deadline: float) -> None:
            self.time = deadline + 0.01

    clock = Clock()
    channel = Channel(Host(3).of(1), SIZES, deadline=30.0, runtime=clock)
    channel.begin()
    channel.send(OUT)
    with pytest.raises(PeerError, match="ranks 0, 2: nothing came within 30 s") as e:
        channel.receive(OUT)
    assert e.value.ranks == (0, 2) and 30.0 <= clock.time < 30.1


# blame ----------------------------------------------------------------------------------------------------------------------
def stall(ranks: int, exchanges: int, rng: random.Random) -> tuple[dict[tuple[int, int, int], int], list[tuple[int, int, int]], set[int]]:
    """Ranks take steps in a random order until one after another cannot go on, because some of them stopped at a random step.

    Returns flags by (reader, half, writer), what each rank left waits for (rank, half, number), and who stopped.
    """
    flags = {(r, h, w): 0 for r in range(ranks) for h in (OUT, BACK) for w in range(ranks)}
    stopped: set[int] = set()

    def program(rank: int):
        for n in range(1, exchanges + 1):
            for half in (OUT, BACK):
                for reader in range(ranks):
                    yield None
                    flags[reader, half, rank] = n
                while any(flags[rank, half, w] < n for w in range(ranks)):
                    yield half, n

    runs = {r: program(r) for r in range(ranks)}
    state: dict[int, tuple[int, int] | None] = dict.fromkeys(range(ranks))
    victims = rng.sample(range(ranks), rng.choice((1, 1, 1, 2)) if ranks > 2 else 1)
    after = {v: rng.randrange(ranks * 2 * exchanges) for v in victims}
    idle = 0
    while idle < 400 and runs:
        rank = rng.choice(list(runs))
        if rank in after:
            after[rank] -= 1
            if after[rank] < 0:
                stopped.add(rank)
                del runs[rank]
                continue
        try:
            state[rank] = next(runs[rank])
        except StopIteration:
            del runs[rank]
            state[rank] = None
            continue
        idle = idle + 1 if state[rank] else 0
    return flags, [(r, *state[r]) for r in runs if state[r]], stopped


def test_blame_falls_on_who_stopped_and_on_nobody_else():
    rng, told = random.Random(0), 0
    for _ in range(1500):
        ranks = rng.choice((2, 3, 4, 6))
        flags, waiting, stopped = stall(ranks, 3, rng)
        for rank, half, number in waiting:
            missing = tuple(w for w in range(ranks) if flags[rank, half, w] < number)
            if missing:
                blamed = set(culprits(lambda r, h, w: flags[r, h, w], ranks, half, number, missing))  # noqa: B023
                assert blamed and blamed <= stopped, (blamed, stopped, missing)
                told += 1
    assert told > 1500
