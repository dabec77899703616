"""Who is to blame when something did not come, and how long was waited for whom. Pure: flags in, ranks out."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OUT, BACK = 0, 1  # the two halves of an exchange: rows to their experts, results back

# flag(reader, half, writer): number of the last exchange whose message `writer` has delivered to `reader`.
Flag = Callable[[int, int, int], int]


def culprits(flag: Flag, ranks: int, half: int, number: int, missing: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks that hold up exchange `number`, given those whose message of this half has not come.

    A rank that lacks what it needs is excused, and whoever owes it that is asked instead: results need every rank's rows, rows need every
    result of the exchange before.
    """
    found, seen = set(), set()
    asked = [(rank, half, number) for rank in missing]
    while asked:
        rank, half, number = asked.pop()
        if (rank, half, number) in seen:
            continue
        seen.add((rank, half, number))
        needs = (OUT, number) if half == BACK else (BACK, number - 1)
        owing = [other for other in range(ranks) if flag(rank, needs[0], other) < needs[1]]
        if owing:
            asked += [(other, *needs) for other in owing]
        else:
            found.add(rank)
    return tuple(sorted(found))


@dataclass
class Waits:
    """Seconds that one exchange waited.

    late      until the last rank had arrived at all, and which one that was (-1: nobody was waited for)
    transfer  from then until every rank's rows were here
    results   for results, which includes the others' computing
    """

    late: float = 0.0
    late_rank: int = -1
    transfer: float = 0.0
    results: float = 0.0
