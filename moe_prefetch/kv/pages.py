"""Who holds which page: pool, block tables, reference counts. Pure bookkeeping; the bytes are the codec's.

One `PageBook` serves one layer. Its methods change the books at once and return the byte work that must follow (`Copy`, `Run`), in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CacheError, IntegrityError
from .format import PAGE


class Copy(NamedTuple):
    """Copy a record (all heads) before anything is written to `dst`."""

    src: int
    dst: int


class Run(NamedTuple):
    """Encode `tokens` tokens into `page` from `slot` on, reading rows of the source from `row` on."""

    page: int
    slot: int
    row: int
    tokens: int


@dataclass(slots=True)
class Row:
    """One sequence: its pages in token order, and how many of its tokens they hold."""

    pages: list[int] = field(default_factory=list)
    stored: int = 0


class PageBook:
    """Block tables of one layer's sequences over one pool.

    limit     pages that may exist at once (None: no limit)
    evict     called with the number of pages missing when the limit is met; it may free rows and must return what it freed
    on_free   called with each page that nobody holds any more (tests poison it)
    """

    def __init__(
        self, limit: int | None = None, *, evict: Callable[[int], int] | None = None, on_free: Callable[[int], None] | None = None
    ) -> None:
        self.limit, self.evict, self.on_free = limit, evict, on_free
        self.rows: list[Row] = []
        self.refs: list[int] = []
        # Changes when the pages of some sequence do.
        self.version = 0
        self._free: list[int] = []

    @property
    def pages_made(self) -> int:
        """Pages the pool must have room for."""
        return len(self.refs)

    @property
    def pages_held(self) -> int:
        return len(self.refs) - len(self._free)

    def _alloc(self) -> int:
        if not self._free and self.limit is not None and len(self.refs) >= self.limit and not (self.evict and self.evict(1) and self._free):
            raise CacheError(
                "no page is free",
                where=f"{len(self.refs)} pages in use",
                expected="a free page",
                do="free sequences, raise the page limit, or give an evict hook",
            )
        if self._free:
            page = self._free.pop()
            self.refs[page] = 1
            return page
        self.refs.append(1)
        return len(self.refs) - 1

    def _release(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._free.append(page)
            if self.on_free:
                self.on_free(page)

    # sequences ---------------------------------------------------------------------------------------------------------
    def add(self, count: int = 1) -> None:
        """New empty sequences at the end."""
        self.rows += [Row() for _ in range(count)]
        self.version += 1

    def select(self, indices: Sequence[int]) -> None:
        """The rows become rows[i] for i in indices: reorder, repeat, drop and fork are all this. Pages are shared, not copied."""
        if bad := [i for i in indices if not 0 <= i < len(self.rows)]:
            raise CacheError(
                f"there is no sequence {bad[0]}",
                where=f"{len(self.rows)} sequences",
                expected="indices within them",
                do="check the beam indices",
            )
        new = [Row(list(self.rows[i].pages), self.rows[i].stored) for i in indices]
        for row in new:
            for page in row.pages:
                self.refs[page] += 1
        old, self.rows = self.rows, new
        self.version += 1
        for row in old:
            for page in row.pages:
                self._release(page)

    def clear(self, row: int) -> None:
        """Forget one sequence's pages; the row stays, empty."""
        pages, self.rows[row] = self.rows[row].pages, Row()
        self.version += 1
        for page in pages:
            self._release(page)

    def append(self, row: int, count: int, source_row: int) -> tuple[list[Copy], list[Run]]:
        """Make room for `count` tokens at the end of a sequence; a page that others hold too is replaced by a copy of its own first.

        Raises CacheError when no page is free; the sequence is then as before.
        """
        seq, copies, runs = self.rows[row], [], []
        start, end = seq.stored, seq.stored + count
        if count == 0:
            return [], []
        fresh: list[int] = []
        try:
            pages = list(seq.pages)
            if start % PAGE and self.refs[pages[-1]] > 1:
                fresh.append(self._alloc())
                copies.append(Copy(pages[-1], fresh[-1]))
                pages[-1] = fresh[-1]
            while len(pages) * PAGE < end:
                fresh.append(self._alloc())
                pages.append(fresh[-1])
        except CacheError:
            for page in fresh:
                self._release(page)
            raise
        if copies:
            self._release(copies[0].src)
        seq.pages, seq.stored = pages, end
        self.version += bool(fresh)
        at = start
        while at < end:
            n = min(PAGE - at % PAGE, end - at)
            runs.append(Run(pages[at // PAGE], at % PAGE, source_row + at - start, n))
            at += n
        return copies, runs

    def crop(self, row: int, stored: int, group: int = 1) -> None:
        """Keep the first `stored` tokens of the pages. What is kept is kept as it was encoded.

        Raises CacheError when the cut would fall inside a group of tokens that share a scale.
        """
        seq = self.rows[row]
        if not 0 <= stored <= seq.stored or stored % group:
            raise CacheError(
                f"can't cut stored tokens to {stored}",
                where=f"sequence {row}, {seq.stored} stored",
                expected=f"a multiple of {group} within them",
                do="keep a window at least as long as what may be rolled back",
            )
        keep = -(-stored // PAGE)
        for page in seq.pages[keep:]:
            self._release(page)
        self.version += keep < len(seq.pages)
        del seq.pages[keep:]
        seq.stored = stored

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is held exactly as often as its count says and no sequence has gaps or doubles."""
        held: Counter[int] = Counter()
        for i, row in enumerate(self.rows):
            if len(row.pages) != -(-row.stored // PAGE):
                raise IntegrityError(f"sequence {i} has {len(row.pages)} pages for {row.stored} tokens")
            if len(set(row.pages)) != len(row.pages):
                raise IntegrityError(f"sequence {i} holds a page twice")
            held.update(row.pages)
        free = Counter(self._free)
        for page, refs in enumerate(self.refs):
            if refs != held[page] or free[page] != (refs == 0):
                raise IntegrityError(f"page {page}: counted {refs}, held {held[page]} times, free {free[page]} times")
        if unknown := set(held) - set(range(len(self.refs))):
            raise IntegrityError(f"pages {sorted(unknown)} are outside the pool")


def block_table(rows: Iterable[Row], fill: int = 0) -> list[list[int]]:
    """Rectangular table of page ids; `fill` stands where a sequence has no page (it is never read)."""
    rows = list(rows)
    width = max((len(r.pages) for r in rows), default=0)
    return [r.pages + [fill] * (width - len(r.pages)) for r in rows]
