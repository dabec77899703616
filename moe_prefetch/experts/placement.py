"""Which rank serves which expert for whom: pure, equal on every rank, checked once.

A replica is an expert that several ranks hold. Each source rank has exactly one server for an expert, so no result is counted twice.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """`serve_RE[r][e]`: the rank that computes expert e for tokens of rank r. Ranks are places in the expert group."""

    serve_RE: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = len(self.serve_RE)
        if not ranks or not self.serve_RE[0] or len({len(row) for row in self.serve_RE}) != 1:
            raise ConfigError("a placement without ranks or experts, or with rows of different lengths", where="placement",
                              expected="one row a rank, one server an expert", do="use Placement.even")
        if wrong := sorted({r for row in self.serve_RE for r in row if not 0 <= r < ranks}):
            raise ConfigError(f"servers {wrong} are no ranks", where="placement", expected=f"0 to {ranks - 1}", do="use Placement.even")

    @classmethod
    def of_owners(cls, owner_E: Sequence[int], ranks: int) -> Placement:
        """One holder for each expert. Raises ConfigError."""
        return cls((tuple(owner_E),) * ranks)

    @classmethod
    def even(cls, experts: int, ranks: int) -> Placement:
        """Consecutive experts, as even as it goes: the first ranks hold one more where it does not go up. Raises ConfigError."""
        share, more = divmod(experts, max(ranks, 1))
        return cls.of_owners([r for r in range(ranks) for _ in range(share + (r < more))], ranks)

    def with_replicas(self, replicas: Mapping[int, Iterable[int]]) -> Placement:
        """Further holders: expert -> ranks. A rank with a copy serves itself; the others spread over all holders, in order.

        Raises ConfigError: an expert or a rank that there is not, or a rank that is named twice for an expert or holds it already.
        """
        rows = [list(row) for row in self.serve_RE]
        for e, extra in sorted(replicas.items()):
            if not 0 <= e < self.experts:
                raise ConfigError(f"there is no expert {e}", where="replicas", expected=f"0 to {self.experts - 1}", do="mend the map")
            holders = [*sorted({row[e] for row in self.serve_RE}), *extra]
            if len(set(holders)) != len(holders) or not all(0 <= r < self.ranks for r in holders):
                raise ConfigError(f"expert {e} on ranks {holders}", where="replicas", expected="different ranks of the group",
                                  do="mend the map")
            for rank, row in enumerate(rows):
                row[e] = rank if rank in holders else holders[rank % len(holders)]
        return Placement(tuple(map(tuple, rows)))

    def with_copies(self, load_RE: Sequence[Sequence[int]], slots: int) -> Placement:
        """Copies where they spare most travel: each rank takes the experts that its own tokens choose most among those it does not hold.

        load_RE [R][E]: how often tokens of a rank choose an expert, counted or forecast, the same numbers on every rank; `slots`: copies a
        rank has room for. Ties go to the lower expert, and nothing is copied that nobody is to choose. Raises ConfigError: other sizes.
        """
        if len(load_RE) != self.ranks or any(len(row) != self.experts for row in load_RE) or slots < 0:
            raise ConfigError(f"loads of {len(load_RE)} ranks, {slots} slots", where="placement",
                              expected=f"{self.ranks} rows of {self.experts} numbers", do="count every expert for every rank")
        replicas: dict[int, list[int]] = {}
        for rank, load_E in enumerate(load_RE):
            held = set(self.held_by(rank))
            wanted = sorted((e for e in range(self.experts) if load_E[e] > 0 and e not in held), key=lambda e: (-load_E[e], e))
            for e in wanted[:slots]:
                replicas.setdefault(e, []).append(rank)
        return self.with_replicas(replicas)

    @property
    def ranks(self) -> int:
        return len(self.serve_RE)

    @property
    def experts(self) -> int:
        return len(self.serve_RE[0])

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Experts that a rank serves for somebody, ascending: the order of its own records."""
        return tuple(e for e in range(self.experts) if any(row[e] == rank for row in self.serve_RE))

    @property
    def digest(self) -> str:
        """Equal for equal placements; what ranks compare."""
        return hashlib.sha256(repr(self.serve_RE).encode()).hexdigest()[:16]
