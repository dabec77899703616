"""The journal of a benchmark goes on where it stopped, and its rows are appended whole."""

from __future__ import annotations

import csv

import pytest

from moe_prefetch.bench.rows import COLUMNS, Journal, Row, append_rows
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
