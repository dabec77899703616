"""The journal of a benchmark goes on where it stopped, and its rows are appended whole."""

from __future__ import annotations

import csv
import resource
from contextlib import contextmanager

import pytest

from moe_prefetch.bench.rows import COLUMNS, Journal, Row, append_rows, check_rows
from moe_prefetch.errors import ArtefactError


def test_a_journal_is_read_again_and_several_are_merged(tmp_path):
    one, two = Journal([tmp_path / "a" / "one.jsonl"]), Journal([tmp_path / "two.jsonl"])
    one.put({"scheme": "x", "number": 0}, {"kl": 0.25})
    two.put({"number": 1, "scheme": "x"}, {"kl": 0.5})
    both = Journal([tmp_path / "a" / "one.jsonl", tmp_path / "two.jsonl"])
    assert both.get({"number": 0, "scheme": "x"}) == {"kl": 0.25} and both.get({"scheme": "x", "number": 1}) == {"kl": 0.5}
    assert both.get({"scheme": "y", "number": 1}) is None


def test_a_line_cut_off_by_a_kill_is_forgotten(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal([path]).put({"n": 0}, {"kl": 1.0})
    path.write_text(path.read_text() + '{"of": {"n": 1}, "fou')
    again = Journal([path])
    assert again.get({"n": 0}) and again.get({"n": 1}) is None
    again.put({"n": 1}, {"kl": 2.0})
    assert Journal([path]).get({"n": 1}) == {"kl": 2.0}


def test_a_last_line_without_its_end_is_kept_where_it_is_whole(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal([path]).put({"n": 0}, {"kl": 1.0})
    path.write_bytes(path.read_bytes()[:-1])
    Journal([path]).put({"n": 1}, {"kl": 2.0})
    again = Journal([path])
    assert again.get({"n": 0}) == {"kl": 1.0} and again.get({"n": 1}) == {"kl": 2.0}


@pytest.mark.parametrize("text", [b'{"dtype": "fp32"}', b'{"of', b"\xff\xfe\x00", b"\x00" * 30, b'{"offset": 1}'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, text):
    """Without an end of line, too, as of a file cut off."""
    path = tmp_path / "precious.json"
    path.write_bytes(text)
    if text == b'{"of':
        assert not Journal([path]).known and path.read_bytes() == b""
        return
    with pytest.raises(ArtefactError, match="not a journal"):
        Journal([path])
    assert path.read_bytes() == text
    with pytest.raises(ArtefactError, match="can't be read: Is a directory"):
        Journal([tmp_path])


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"of": {}}\n', '{"of": {}, "found": 3}\n'])
def test_what_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / "j.jsonl"
    path.write_text(text)
    with pytest.raises(ArtefactError, match="not a journal"):
        Journal([path])
    assert path.read_text() == text


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "rows.csv"
    for value in (0.125, 0.25):
        append_rows(path, "b", [Row("case", "kl", value, "nats")], machine="m", commit="c", checked="tests/t.py::t")
    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == list(COLUMNS) and [r["value"] for r in rows] == ["0.125", "0.25"]
    assert all(r["bench"] == "b" and r["commit"] == "c" and r["checked"] == "tests/t.py::t" and r["torch"] for r in rows)


@pytest.fixture
def full():
    """The system takes ten bytes more for a file, as on a drive that fills."""

    @contextmanager
    def drive(path):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return drive


def test_a_full_drive_leaves_files_as_they_were_and_is_named(tmp_path, full):
    csv_file, journal = tmp_path / "rows.csv", Journal([tmp_path / "j.jsonl"])
    add = lambda case: append_rows(csv_file, "b", [Row(case, "kl", 1.0, "")], machine="m", commit="c", checked="")  # noqa: E731
    add("one")
    journal.put({"n": 0}, {"kl": 1.0})
    for path, call in ((csv_file, lambda: add("two")), (journal.path, lambda: journal.put({"n": 1}, {"kl": 2.0}))):
        before = path.read_bytes()
        with full(path), pytest.raises(ArtefactError, match=path.name):
            call()
        assert path.read_bytes() == before
        call()
    assert [r["case"] for r in csv.DictReader(csv_file.open())] == ["one", "two"]
    assert Journal([journal.path]).get({"n": 1}) == {"kl": 2.0}


def test_a_last_row_without_its_end_is_not_gone_on_with(tmp_path):
    path = tmp_path / "rows.csv"
    for case in ("one", "two"):
        append_rows(path, "b", [Row(case, "kl", 1.0, "")], machine="m", commit="c", checked="")
        path.write_bytes(path.read_bytes().rstrip())
    assert [r["case"] for r in csv.DictReader(path.open())] == ["one", "two"]


def test_a_journal_that_can_not_be_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(ArtefactError, match="nothing can be written"):
        Journal([tmp_path / "f" / "j.jsonl"])
    # Only the first may be new: what was to be read and is not there would be measured again.
    with pytest.raises(ArtefactError, match="can't be read"):
        Journal([tmp_path / "j.jsonl", tmp_path / "misspelt.jsonl"])


@pytest.mark.parametrize("text", [b"a,b\n1,2\n", b"\xff\xfe\x00\x01", b'{"x": 1}', ",".join(COLUMNS[:-1]).encode() + b"\n"])
def test_rows_are_not_added_to_something_else(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_bytes(text)
    for call in (lambda: check_rows(path), lambda: append_rows(path, "b", [Row("c", "kl", 1.0, "")], machine="", commit="", checked="")):
        with pytest.raises(ArtefactError, match="rows"):
            call()
    assert path.read_bytes() == text
    with pytest.raises(ArtefactError, match="Is a directory"):
        check_rows(tmp_path)
    check_rows(tmp_path / "new" / "rows.csv")
