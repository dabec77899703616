"""Recorded tokens as the fitting loop takes them: sources of shards, and batches cut across them."""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ..errors import ShapeError
from .collect import Step
from .targets import Taps


class Source(Protocol):
    """Shards of recorded steps: `traces.Trace`, or `Memory`. `identity` tells its tokens from others: a fit that was interrupted goes on
    with the same ones only, or those learnt from could be judged on."""

    def __len__(self) -> int: ...

    def shard(self, index: int) -> Step: ...

    @property
    def tokens(self) -> int: ...

    @property
    def identity(self) -> str: ...


def digest(taps: Sequence[Taps]) -> str:
    """Hash of what the routers said: no two texts have it in common."""
    found = hashlib.sha256()
    for t in taps:
        found.update(t.logits_LTE.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Steps already in memory as a source. `name` is its identity where values are not to be compared: a recording that is made anew."""

    steps: Sequence[Step]
    name: str = ""

    def __len__(self) -> int:
        return len(self.steps)

    def shard(self, index: int) -> Step:
        return self.steps[index]

    @property
    def tokens(self) -> int:
        return sum(s.taps.tokens for s in self.steps)

    @property
    def identity(self) -> str:
        return self.name or digest([s.taps for s in self.steps])


def ranks() -> tuple[int, int]:
    """(this rank, how many there are); (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def batches(source: Source, size: int, epoch: int, seed: int, past_eps: float | None = None) -> Iterator[Taps]:
    """This rank's batches of one epoch, of `size` tokens each: its shards in random order, their tokens shuffled, a batch filled from as
    many shards as it takes. Every rank yields the same number, whatever the sizes of its shards, so that no collective is missed: an
    equal share of the tokens, going round again where a rank holds fewer. With `past_eps` (the norms' epsilon) the taps hold the recent
    past. Raises ShapeError when this rank's shards hold no token."""
    rank, world = ranks()
    mine = [i for i in range(len(source)) if i % world == rank] or [rank % max(1, len(source))]
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    left, parts, missing, times = max(1, source.tokens // (size * world)), [], size, 1
    while True:
        found = 0
        for i in torch.randperm(len(mine), generator=generator).tolist():
            taps = source.shard(mine[i]).taps_with_past(past_eps)
            found += taps.tokens
            order = torch.cat([torch.randperm(taps.tokens, generator=generator) for _ in range(times)])
            while len(order):
                parts.append(taps.take(order[:missing]))
                order, missing = order[missing:], missing - parts[-1].tokens
                if missing:
                    continue
                yield parts[0] if len(parts) == 1 else Taps.join(parts)
                left, parts, missing = left - 1, [], size
                if not left:
                    return
        if not found:
            raise ShapeError("the shards hold no tokens", where="fit", expected="recorded text", do="record some first")
        # Fewer tokens than a batch: each is taken several times, and its shard read once.
        times = max(1, -(-size // found))
