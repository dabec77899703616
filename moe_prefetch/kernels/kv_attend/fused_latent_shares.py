"""Which pages a program of `fused_latent.attend_latent` attends over, and the slots that an item's partial results lie in, in Gluon.

Items are (sequence, KV head, 16 query heads), units their pages; the units of all items form one list. Where all lengths are equal every
item has programs of its own, so that none prepares queries twice. Else shares of the list differ by a unit, the first programs having more:
they are first on their multiprocessor, and ready first. A program writes slot `program + item`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _split(programs, total, most, items):
    """Units of a share and how many shares have one more; whether items have programs of their own: `few` items n, the others n + 1."""
    each = total // programs
    n = programs // items
    return each, total - each * programs, n, items - (programs - n * items), (total == most * items) & (most <= n * (each + 2))


@gluon.jit
def share(program, programs, total, most, items):
    """Units from, to of a program; `most` is the longest item's number."""
    each, more, n, few, alone = _split(programs, total, most, items)
    unit = program * each + gl.minimum(program, more)
    end = unit + each + (program < more).to(gl.int32)
    late = program >= few * n
    j = program - gl.where(late, few * n, 0)
    n = gl.maximum(gl.where(late, n + 1, n), 1)
    i = j // n
    j -= i * n
    each = most // n
    more = most - each * n
    first = (gl.where(late, few, 0) + i) * most + j * each + gl.minimum(j, more)
    return gl.where(alone, first, unit), gl.where(alone, first + each + (j < more).to(gl.int32), end)


@gluon.jit
def _program_of(unit, each, more):
    """The program whose share of the list a unit is in."""
    edge = more * (each + 1)
    return gl.where(unit < edge, unit // (each + 1), more + (unit - edge) // gl.maximum(each, 1))


@gluon.jit
def slots(item, before, units, programs, total, most, items):
    """Slots from, to of an item of so many units, with `before` ahead of it in the list."""
    each, more, n, few, alone = _split(programs, total, most, items)
    first = item * n + gl.maximum(item - few, 0)
    end = first + gl.minimum(gl.where(item < few, n, n + 1), units)
    s0 = gl.where(alone, first, _program_of(before, each, more))
    s1 = gl.where(alone, end, _program_of(before + units - 1, each, more) + 1)
    return s0 + item, s1 + item
