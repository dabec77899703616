"""Every demand is settled here: how many experts were there, late or missing, and which bytes moved for nothing."""
from __future__ import annotations

import operator
from dataclasses import asdict, dataclass

from ..types import Settlement


@dataclass
class Totals:
    """Sums over settlements; experts are counted per (layer, step), distinct. `bytes_wasted` was fetched ahead and never read."""

    hit: int = 0
    late: int = 0
    miss: int = 0
    wasted: int = 0
    cancelled: int = 0
    bytes_moved: int = 0
    bytes_wasted: int = 0
    stall_s: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def demanded(self) -> int:
        return self.hit + self.late + self.miss

    @property
    def hit_rate(self) -> float:
        return self.hit / self.demanded if self.demanded else 1.0

    def as_dict(self) -> dict[str, float | None]:
        """For JSON; without a demand there is no hit rate."""
        return {**asdict(self), "demanded": self.demanded, "hit_rate": self.hit_rate if self.demanded else None}


class Ledger:
    """Totals over all layers, per layer, and split into decode (one token a sequence) and prefill by the caller's label.

    One thread settles at a time; others may look meanwhile: what they see is whole, since nothing that they can hold changes.
    """

    def __init__(self, num_layers: int, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.layers = [Totals() for _ in range(num_layers)]
        self.kinds: dict[str, Totals] = {}

    def settle(self, s: Settlement, kind: str) -> None:
        more = Totals(s.hit, s.late, s.miss, s.wasted, s.cancelled, s.bytes_moved, s.wasted * self.record_bytes, s.stall_s)
        self.layers[s.layer] += more
        self.kinds = {**self.kinds, kind: self.kinds.get(kind, Totals()) + more}

    @property
    def total(self) -> Totals:
        return sum(self.layers, Totals())
