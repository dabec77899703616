"""How the programs of the Gluon kernel share out pages: equal shares, but for what a multiprocessor serves later."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# By how many 1024ths of a share the first two of 1, 3 or 4 programs on a multiprocessor take more than a mean one.
MORE = {1: (0, 0), 3: (56, 40), 4: (48, 16)}


def even(programs: int, items: int, ranks: int) -> int:
    """Of `programs`, `ranks` on a multiprocessor, the number, little below, whose shares end most often where items of equal length do."""
    least = max(ranks, programs * 15 // 16)
    return max((p for p in range(programs - programs % ranks, least - 1, -ranks)), key=lambda p: (math.gcd(p, items), p), default=programs)


@gluon.jit
def _cut(p, programs, total):
    return total // programs * p + total % programs * p // programs


@gluon.jit
def _edge(i, FIRST, SECOND, RANKS: gl.constexpr):
    """Where share i of a period begins, in 1024ths of a share."""
    return i * 1024 + gl.where(i == 1, FIRST, 0) + (gl.where(i == 3, SECOND, 0) if RANKS == 4 else gl.where(i == 2, 0 - SECOND, 0))


@gluon.jit
def share_of(program, programs, total, FIRST, SECOND, RANKS: gl.constexpr):
    """A program's share of the list of pages: its number in the order of the list, its first page, the one after its last.

    Of the RANKS programs of a multiprocessor those that came first are served first, so the first two take FIRST and SECOND 1024ths of
    a share more than the others. A period of RANKS shares has one of each, in an order in which two of four are no more than two means.
    """
    if RANKS == 1:
        i = 0
        j = program
        periods = programs
    else:
        periods = programs // RANKS
        rank = program // periods
        j = program % periods
        i = gl.where(rank == 0, 0, gl.where(rank == RANKS - 1, 1, rank + 1))
    at = _cut(j, periods, total)
    size = _cut(j + 1, periods, total) - at
    unit = at + (size * _edge(i, FIRST, SECOND, RANKS) + RANKS * 512) // (RANKS * 1024) if RANKS > 1 else at
    end = at + (size * _edge(i + 1, FIRST, SECOND, RANKS) + RANKS * 512) // (RANKS * 1024) if RANKS > 1 else at + size
    # of fewer pages than programs the first ones take one each
    few = total < programs
    unit = gl.where(few, gl.minimum(program, total), unit)
    end = gl.where(few, gl.minimum(program + 1, total), end)
    return gl.where(few, program, j * RANKS + i), unit, gl.where(program < programs, end, unit)
