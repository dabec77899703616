"""One-sided exchanges between the ranks of a host: rows to their experts, results back, straight into each other's memory.

Every rank has a block of symmetric memory: flags, and an inbox for each half of an exchange and each sender, twice, used by turns. A sender
writes its message into the receiver's inbox and then the number of the exchange into its flag there. Numbers only grow, so nothing is ever
reset. Nobody asks for sizes and nobody acknowledges: a rank that has all results of exchange n knows that everybody has read its rows of n
and, since they had its results of n - 1, that the inbox of n + 1 is free.

Flags: ARRIVED says that a rank has begun an exchange, before any row is written, so that waiting for a late rank is told from transfer;
GAVE_UP that it has left, because of whom, and from which exchange on.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ConfigError, IntegrityError, PeerError
from ..runtime import REAL, Runtime
from .groups import DEADLINE
from .health import BACK, OUT, Waits, culprits
from .symmetric import LINE, SymmetricMemory

ARRIVED, GAVE_UP = 2, 3
KINDS = 4
WORDS = LINE // 8  # a flag has a line of its own
MOST = 62  # ranks; GAVE_UP is a set of them in one word
SPINS, PAUSE = 50, 20e-6


class Channel:
    """The CPU's end of it, over `symmetric.CpuMemory`; collective to open. Places are those of `memory.places`, 0 to `size` - 1.

    deadline  seconds that a rank waits for another, in every wait
    After a PeerError the channel is of no more use, on any rank.
    """

    def __init__(self, memory: SymmetricMemory, sizes: tuple[int, int], deadline: float = 30.0, runtime: Runtime = REAL,
                 attach_deadline: float = DEADLINE) -> None:
        self.size, self.rank, self.deadline = len(memory.places), memory.rank, deadline
        if self.size > MOST:
            raise ConfigError(f"{self.size} ranks on one host", where=f"group {memory.group.axis}", expected=f"at most {MOST}",
                              do="use dispatch mode host")
        self._places, self._runtime, self._axis = memory.places, runtime, memory.group.axis
        self._sizes = tuple(-(-s // LINE) * LINE for s in sizes)
        self._flags = KINDS * self.size * LINE
        self._block = memory.allocate(self._flags + 2 * self.size * sum(self._sizes), attach_deadline)
        self._words = self._block.words
        self.number = 0
        self._open = False
        self.waits = Waits()
        self._broken: PeerError | None = None

    # flags -------------------------------------------------------------------------------------------------------------------
    def _at(self, kind: int, writer: int) -> int:
        return (kind * self.size + writer) * WORDS

    def _flag(self, reader: int, kind: int, writer: int) -> int:
        return self._words[reader][self._at(kind, writer)]

    def _raise(self, kind: int, value: int, word: int = 0) -> None:
        # From the neighbour on, so that not everybody writes to the same rank at once.
        for step in range(1, self.size + 1):
            self._words[(self.rank + step) % self.size][self._at(kind, self.rank) + word] = value

    def _inbox(self, reader: int, half: int, writer: int) -> torch.Tensor:
        at = self._flags + (self.number & 1) * self.size * sum(self._sizes)
        at += half * self.size * self._sizes[OUT] + writer * self._sizes[half]
        return self._block.views[reader][at : at + self._sizes[half]]

    # an exchange -------------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Start the next exchange. Raises PeerError where the channel has failed before."""
        if self._broken is not None:
            raise self._broken
        self.number += 1
        self._open = True
        self.waits = Waits()
        self._raise(ARRIVED, self.number)

    def outbox(self, half: int, reader: int) -> torch.Tensor:
        """Where this rank writes its message to `reader`: uint8, the reader's own memory."""
        return self._inbox(reader, half, self.rank)

    def send(self, half: int) -> None:
        """All messages of a half are written."""
        self._raise(half, self.number)

    def receive(self, half: int) -> list[torch.Tensor]:
        """Every rank's message to this one, uint8, in order of ranks; valid until the exchange after the next begins.

        Raises PeerError: some rank did not send within the deadline, or gave up.
        """
        now = self._runtime.now
        start = now()
        absent, missing = set(range(self.size)), set(range(self.size))
        arrived, spins = start, 0
        while True:
            for rank in tuple(absent if half == OUT else ()):
                if self._flag(self.rank, ARRIVED, rank) >= self.number:
                    absent.discard(rank)
                    if spins:
                        arrived, self.waits.late_rank = now(), rank
            missing = {r for r in missing if self._flag(self.rank, half, r) < self.number}
            if not missing:
                break
            self._heed()
            if now() - start > self.deadline:
                self._fail(half, tuple(sorted(missing)))
            spins += 1
            if spins > SPINS:
                self._runtime.sleep_until(now() + PAUSE)
        if half == OUT:
            self.waits.late, self.waits.transfer = arrived - start, now() - arrived
        else:
            assert half == BACK
            self.waits.results = now() - start
            self._open = False
        return [self._inbox(self.rank, half, r) for r in range(self.size)]

    # failure -----------------------------------------------------------------------------------------------------------------
    def give_up(self, because: Sequence[int] = ()) -> None:
        """Tell the others that this rank leaves, because of ranks (default: itself). They hear of it where they wait for what it owes."""
        if self._broken is None:
            blamed = tuple(because) or (self.rank,)
            self._broken = self._error(blamed, "the exchange was given up")
            # What this rank has completed, others may still be completing.
            self._raise(GAVE_UP, self.number if self._open else self.number + 1, 1)
            self._raise(GAVE_UP, sum(1 << r for r in blamed))

    def _heed(self) -> None:
        for rank in range(self.size):
            if blamed := self._flag(self.rank, GAVE_UP, rank):
                if rank != self.rank and self._words[self.rank][self._at(GAVE_UP, rank) + 1] <= self.number:
                    said = "it left" if blamed == 1 << rank else f"it holds up the others, says rank {self._places[rank]}"
                    self._broken = self._error(tuple(r for r in range(self.size) if blamed >> r & 1), said)
                    raise self._broken

    def _fail(self, half: int, missing: tuple[int, ...]) -> None:
        blamed = culprits(self._flag, self.size, half, self.number, missing)
        if not blamed:
            raise IntegrityError(f"exchange {self.number} waits for {missing} and nobody is to blame", where=f"group {self._axis}")
        error = self._error(blamed, f"nothing came within {self.deadline:g} s")
        self.give_up(blamed)
        self._broken = error
        raise error

    def _error(self, blamed: tuple[int, ...], what: str) -> PeerError:
        return PeerError(what, ranks=tuple(self._places[r] for r in blamed), where=f"group {self._axis}, exchange {self.number}",
                         expected="every rank in every layer, with or without tokens",
                         do="see what became of that rank; attach anew with the ranks that are left")
