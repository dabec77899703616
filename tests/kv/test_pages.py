from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moe_prefetch.errors import CacheError, IntegrityError
from moe_prefetch.kv.format import PAGE
from moe_prefetch.kv.pages import PageBook, block_table


class Books(RuleBasedStateMachine):
    """Every sequence is modelled by the list of tokens it should hold; a pool of lists plays the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.book = PageBook(on_free=self.freed.append)
        self.pool: dict[int, list[int]] = {}
        self.want: list[list[int]] = []
        self.next = 0

    @rule()
    def add(self) -> None:
        if len(self.want) < 6:
            self.book.add()
            self.want.append([])

    @precondition(lambda self: self.want)
    @rule(data=st.data(), count=st.integers(0, 300))
    def append(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.integers(0, len(self.want) - 1))
        new = list(range(self.next, self.next + count))
        self.next += count
        copies, runs = self.book.append(row, count, 1000)
        for src, dst in copies:
            self.pool[dst] = list(self.pool[src])
        for page, slot, source, n in runs:
            assert self.book.refs[page] == 1, "a shared page is written"
            cells = self.pool.setdefault(page, [-1] * PAGE) if slot else self.pool.update({page: [-1] * PAGE}) or self.pool[page]
            cells[slot : slot + n] = new[source - 1000 : source - 1000 + n]
        self.want[row] += new

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        picks = data.draw(st.lists(st.integers(0, len(self.want) - 1), max_size=6))
        self.book.select(picks)
        self.want = [list(self.want[i]) for i in picks]

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.want) - 1))
        n = data.draw(st.integers(0, len(self.want[row])))
        self.book.crop(row, n)
        del self.want[row][n:]

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.want) - 1))
        self.book.clear(row)
        self.want[row] = []

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        self.book.check_integrity()
        for page in self.freed:
            if page in self.pool and self.book.refs[page] == 0:
                self.pool[page] = [-2] * PAGE
        self.freed.clear()
        for row, want in zip(self.book.rows, self.want, strict=True):
            got = [t for p in row.pages for t in self.pool[p]][: row.stored]
            assert got == want


TestBooks = Books.TestCase


def test_pages_come_back() -> None:
    book = PageBook()
    book.add(2)
    book.append(0, 3 * PAGE, 0)
    book.select([0, 0, 1])
    assert book.pages_held == 3
    book.select([2])
    assert book.pages_held == 0 and book.pages_made == 3
    book.append(0, 1, 0)
    assert book.pages_made == 3


def test_no_page_free_changes_nothing() -> None:
    book = PageBook(limit=2)
    book.add(2)
    book.append(0, PAGE + 5, 0)
    before = [list(r.pages) for r in book.rows]
    with pytest.raises(CacheError, match="no page is free"):
        book.append(1, 1, 0)
    assert [list(r.pages) for r in book.rows] == before and book.rows[1].stored == 0
    book.check_integrity()


def test_failed_growth_gives_back_what_it_took() -> None:
    book = PageBook(limit=3)
    book.add()
    with pytest.raises(CacheError):
        book.append(0, 4 * PAGE, 0)
    assert book.pages_held == 0
    book.append(0, 3 * PAGE, 0)
    book.check_integrity()


def test_evict_hook_makes_room() -> None:
    asked: list[int] = []

    def evict(n: int) -> int:
        asked.append(n)
        book.clear(0)
        return 1

    book = PageBook(limit=1, evict=evict)
    book.add(2)
    book.append(0, 10, 0)
    book.append(1, 10, 0)
    assert asked == [1] and book.rows[0].stored == 0 and book.rows[1].pages == [0]
    book.check_integrity()


def test_copy_before_write_only_when_shared_and_partial() -> None:
    book = PageBook()
    book.add()
    book.append(0, PAGE, 0)
    book.select([0, 0])
    assert book.append(0, 1, 0)[0] == []
    book.select([0, 0])
    copies, runs = book.append(0, 1, 0)
    assert len(copies) == 1 and copies[0].dst == runs[0].page and runs[0].slot == 1
    assert book.append(1, 1, 0)[0] == []


def test_cut_inside_a_group_is_refused() -> None:
    book = PageBook()
    book.add()
    book.append(0, 128, 0)
    with pytest.raises(CacheError, match="multiple of 64"):
        book.crop(0, 100, 64)
    book.crop(0, 64, 64)


def test_bad_indices_are_refused() -> None:
    book = PageBook()
    book.add(2)
    for bad in ([2], [-1], [0, 5]):
        with pytest.raises(CacheError):
            book.select(bad)


def test_integrity_check_sees_every_kind_of_damage() -> None:
    def fresh() -> PageBook:
        b = PageBook()
        b.add(2)
        b.append(0, PAGE + 1, 0)
        b.append(1, 1, 0)
        return b

    for damage in (
        lambda b: b.refs.__setitem__(0, 2),
        lambda b: b.rows[0].pages.pop(),
        lambda b: b.rows[0].pages.__setitem__(1, 0),
        lambda b: b._free.append(0),
        lambda b: b.rows[1].pages.__setitem__(0, 99),
        lambda b: b.rows[1].pages.__setitem__(0, 1),
    ):
        b = fresh()
        b.check_integrity()
        damage(b)
        with pytest.raises(IntegrityError):
            b.check_integrity()


def test_block_table_is_rectangular() -> None:
    book = PageBook()
    book.add(2)
    book.append(0, 300, 0)
    book.append(1, 1, 0)
    assert block_table(book.rows, fill=7) == [[0, 1, 2], [3, 7, 7]]
    assert block_table([]) == []
