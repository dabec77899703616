"""Between steps all ranks say what they have before them, and each decides alike how the next step runs: its size, mode and replicas.

A step is captured in a graph once for each size and mode, and what is agreed here selects the graph. Other replicas need no other graph:
tables keep their addresses (`Dispatch.switch`). Within a host words go through memory that ranks share, without the framework's store.
Nobody switches alone, and a rank that does not come is named.
"""
from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..distributed.channel import Channel
from ..distributed.groups import DEADLINE, Group
from ..distributed.health import BACK, OUT
from ..distributed.symmetric import LINE, ORDERED, symmetric_memory
from ..errors import ConfigError, ShapeError
from ..runtime import REAL, Runtime
from .dispatch import MODES, Mode
from .placement import Placement


@dataclass(frozen=True, slots=True)
class Step:
    """How a step runs. `size`: the most tokens of a rank that it is made for; `fresh`: the placement is another than in the step before."""

    size: int
    mode: Mode
    placement: Placement
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Replan:
    """When and how replicas are chosen. Every `every` steps, from what ranks said since the last time; a rank has room for `slots` copies.
    Others than now only if tokens would then choose experts of other ranks at most `gain` times as often."""

    slots: int
    every: int = 256
    gain: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every is {self.every!r}", where="replan", expected="a whole number of steps", do="correct it")


def travelling(placement: Placement, load_RE: Sequence[Sequence[int]]) -> int:
    """How many choices of an expert are served by another rank than the token's."""
    return sum(n for r, load_E in enumerate(load_RE) for e, n in enumerate(load_E) if placement.serve_RE[r][e] != r)


def replan(now: Placement, even: Placement, load_RE: Sequence[Sequence[int]], rule: Replan) -> Placement:
    """Pure: what all ranks come to from the same numbers. Raises ConfigError."""
    wanted = even.with_copies(load_RE, rule.slots)
    return wanted if travelling(wanted, load_RE) < rule.gain * travelling(now, load_RE) else now


class Steps:
    """Collective to open, and `next` before every step. Raises ConfigError: ranks that differ, no such size or mode; PeerError.

    modes     by size, the most tokens that a rank has in a step of it
    replan    None: replicas stay as they are
    deadline  seconds that a rank waits for another
    """

    def __init__(self, group: Group, modes: Mapping[int, Mode], placement: Placement, *, replan: Replan | None = None,
                 deadline: float = 30.0, attach_deadline: float = DEADLINE, runtime: Runtime = REAL) -> None:
        sizes = [m for m in modes if isinstance(m, int) and m >= 1] if isinstance(modes, Mapping) else []
        if not sizes or len(sizes) < len(modes) or not all(mode in MODES for mode in modes.values()):
            raise ConfigError(f"steps {modes!r}", where="steps", expected=f"sizes of 1 or more, modes {', '.join(MODES)}",
                              do="mend them")
        group.agree("steps", {"modes": str(sorted(modes.items())), "placement": placement.digest, "replan": str(replan)}, attach_deadline)
        self.group, self._modes, self._replan = group, dict(sorted(modes.items())), replan
        self._even = self._placement = placement
        self._load_RE = [[0] * placement.experts for _ in range(group.size)]
        self._steps = 0
        self._deadline, self._channel = deadline, None
        # One answer for all ranks: through shared memory where all are on one host whose stores are seen in order.
        able = all(m.decode() in ORDERED for m in group.gather(platform.machine().encode(), attach_deadline))
        if able and len(set(group.hosts(attach_deadline))) == 1:
            memory = symmetric_memory(group, "cpu", runtime, attach_deadline)
            self._channel = Channel(memory, (8 * (1 + placement.experts), LINE), deadline, runtime, attach_deadline)

    def next(self, tokens: int, load_E: torch.Tensor | None = None) -> Step:
        """The step that all ranks run next, if this one has `tokens` tokens.

        load_E int64 [E], on the host: how often this rank's tokens chose an expert since the last call, or will by a forecast. Raises
        ShapeError, before anybody is told: no whole number of tokens, or more than the largest size; other experts; PeerError.
        """
        experts = self._placement.experts
        fits = 0 <= tokens <= max(self._modes) and tokens == int(tokens)
        if not fits or (load_E is not None and (load_E.shape != (experts,) or load_E.dtype != torch.int64)):
            raise ShapeError(f"{tokens} tokens, load {None if load_E is None else (load_E.dtype, tuple(load_E.shape))}", where="steps",
                             expected=f"0 to {max(self._modes)}, int64 [{experts}]", do="open it with the sizes that steps have")
        said_RN = self._tell(torch.cat([torch.tensor([tokens]), torch.zeros(experts, dtype=torch.int64) if load_E is None else load_E]))
        self._steps += 1
        most = int(said_RN[:, 0].max())
        size = next(s for s in self._modes if s >= most)
        fresh = False
        if self._replan is not None:
            self._load_RE = [[a + b for a, b in zip(old, new, strict=True)]
                             for old, new in zip(self._load_RE, said_RN[:, 1:].tolist(), strict=True)]
            if self._steps % self._replan.every == 0:
                wanted = replan(self._placement, self._even, self._load_RE, self._replan)
                fresh, self._placement = wanted != self._placement, wanted
                self._load_RE = [[0] * experts for _ in range(self.group.size)]
        return Step(size, self._modes[size], self._placement, fresh)

    def _tell(self, word_N: torch.Tensor) -> torch.Tensor:
        """Every rank's words, [R, N]."""
        size, channel = 8 * len(word_N), self._channel
        if channel is None:
            words = self.group.gather(word_N.numpy().tobytes(), self._deadline)
            return torch.frombuffer(bytearray(b"".join(words)), dtype=torch.int64).view(self.group.size, -1)
        channel.begin()
        for r in range(self.group.size):
            channel.outbox(OUT, r)[:size].view(torch.int64).copy_(word_N)
        channel.send(OUT)
        said = torch.stack([box[:size].view(torch.int64) for box in channel.receive(OUT)])
        # The other half too: who is to blame for what does not come is found by who was the last to go on.
        channel.send(BACK)
        channel.receive(BACK)
        return said

    def close(self) -> None:
        """Leave. Ranks that still wait for this one are told."""
        if self._channel is not None:
            self._channel.give_up()
