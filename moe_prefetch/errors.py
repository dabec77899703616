"""One small tree of errors. Each says what happened, where, what was expected, and what to do."""
from __future__ import annotations


class MoEPrefetchError(Exception):
    """Base of every error this library raises on purpose.

    what      the fault, in one clause
    where     layer, expert, rank, key or file
    expected  what would have been right
    do        the next step for the person who reads this
    """

    def __init__(self, what: str, *, where: str = "", expected: str = "", do: str = "") -> None:
        self.what, self.where, self.expected, self.do = what, where, expected, do
        parts = [what + (f" [{where}]" if where else "")]
        if expected:
            parts.append(f"Expected: {expected}")
        if do:
            parts.append(f"What to do: {do}")
        super().__init__(". ".join(p.rstrip(".") for p in parts) + ".")


class ConfigError(MoEPrefetchError, ValueError):
    """The configuration is wrong. `problems` lists every fault found, not the first."""

    def __init__(self, what: str, *, problems: tuple[str, ...] = (), **kw: str) -> None:
        self.problems = problems
        super().__init__(what, **kw)


class BudgetError(ConfigError):
    """A budget can't be met: zero slots, more slots than experts, too few bytes."""


class UnsupportedModelError(MoEPrefetchError, TypeError):
    """The model has no MoE layers, or its family is not supported."""


class ArtefactError(MoEPrefetchError):
    """A file is truncated, altered, hostile or of another version. Nothing of it was used."""


class ProbeMismatchError(ArtefactError):
    """A probe was made for another model: dimensions or gate hash differ."""


class ReleaseError(MoEPrefetchError):
    """A fitted probe is worse than the unfitted gate on a text it is meant for. It was not written."""


class ShapeError(MoEPrefetchError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class CacheError(MoEPrefetchError):
    """A KV cache operation that can't be done without guessing (a crop below the window, a write to a shared page)."""


class DeadlineError(MoEPrefetchError, TimeoutError):
    """Something that was waited for did not come in time."""


class PeerError(DeadlineError):
    """Other ranks did not come in time, or gave up. `ranks` are their places in the group; the group is of no more use."""

    def __init__(self, what: str, *, ranks: tuple[int, ...], **kw: str) -> None:
        self.ranks = ranks
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {what}", **kw)


class IntegrityError(MoEPrefetchError, AssertionError):
    """An invariant of ours does not hold: a defect of the library. Please report it."""


class SessionError(MoEPrefetchError, RuntimeError):
    """A session is used in a way it can't serve: attached twice, closed, entered from another thread."""
