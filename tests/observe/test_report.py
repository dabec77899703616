"""Reports appear whole or not at all, and say what they were given."""
from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_prefetch.errors import ArtefactError
from moe_prefetch.observe.report import Figure, Report, Table, bars, check_folder, lines, show, size


def report() -> Report:
    r = Report("Title", "Intro.", [Table("T", ("a", "b"), [("x", 1234567), ("y", 0.000123456)], "Note.")], data={"k": 1})
    r.figures = [Figure("one", "caption one", bars({"hit": [1, 2], "miss": [2, 1]}, ["p", "q"], "share", stacked=True)),
                 Figure("two", "caption two", bars({"bytes": [1, 2], "other": [3, 4]}, ["p", "q"], "MiB", stacked=False)),
                 Figure("three", "caption three", lines({"hit": [1.0, 2.0]}, "layer", "recall"))]
    return r


def test_a_report_is_markdown_json_and_figures(tmp_path):
    folder = report().save(tmp_path / "r")
    text = (folder / "report.md").read_text()
    assert "| x | 1,234,567 |" in text and "| y | 0.0001235 |" in text and "![caption one](one.png)" in text
    assert json.loads((folder / "report.json").read_text())["tables"][0]["rows"] == [["x", 1234567], ["y", 0.000123456]]
    assert all((folder / f"{n}.png").read_bytes().startswith(b"\x89PNG") for n in ("one", "two", "three"))


def test_an_earlier_report_is_replaced_and_nothing_else_ever(tmp_path):
    more = report()
    more.figures.append(Figure("four", "c", lines({"hit": [1.0, 2.0]}, "layer", "recall")))
    folder = more.save(tmp_path / "r")
    (folder / "notes.md").write_text("the user's own")
    (folder / "ckpt").mkdir()
    (folder / "ckpt" / "old.png").write_bytes(b"old")
    first = (folder / "report.json").read_text()
    assert report().save(folder) == folder
    # The earlier report's own figure goes, what is the user's stays.
    assert sorted(p.name for p in folder.iterdir()) == ["ckpt", "notes.md", "one.png", "report.json", "report.md", "three.png", "two.png"]
    assert (folder / "ckpt" / "old.png").exists() and (folder / "report.json").read_text() != first
    other = tmp_path / "other"
    other.mkdir()
    (other / "report.json").write_text('{"format": "somebody else"}')
    with pytest.raises(ArtefactError, match="not a report"):
        report().save(other)
    assert (other / "report.json").exists()


def test_a_figure_that_is_not_the_earlier_reports_stays(tmp_path):
    few = report()
    mine = few.figures.pop().name + ".png"
    folder = few.save(tmp_path / "r")
    (folder / mine).write_text("mine")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ArtefactError, match=mine):
        report().save(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_two_reports_into_one_new_folder_at_once(tmp_path):
    """One of them stands, whole."""
    for n in range(20):
        folder, start = tmp_path / str(n), threading.Barrier(4)

        def save(i, folder=folder, start=start):
            start.wait()
            return Report(f"{i}", data={"i": i}).save(folder)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(save, range(4))) == [folder] * 4
        assert sorted(p.name for p in folder.iterdir()) == ["report.json", "report.md"]
    assert len(list(tmp_path.iterdir())) == 20


def test_here_and_through_a_link(tmp_path, monkeypatch):
    folder = report().save(tmp_path / "r")
    (tmp_path / "link").symlink_to(folder)
    (folder / "report.md").write_text("")
    assert report().save(tmp_path / "link") == folder and (folder / "report.md").stat().st_size
    monkeypatch.chdir(folder)
    (folder / "report.md").write_text("")
    report().save(".")
    assert (folder / "report.md").stat().st_size and (tmp_path / "link").is_symlink()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert report().save(".") == tmp_path / "empty" and (tmp_path / "empty" / "report.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "link", "r"]


def test_what_was_not_demanded_has_no_hit_rate(tmp_path):
    import moe_prefetch
    from tests.tiny import tiny

    with moe_prefetch.attach(tiny(), {"experts": {"home": "disk", "resident": 2}}) as session:
        folder = session.report().save(tmp_path / "run")
    said = json.loads((folder / "report.json").read_text())
    assert all(layer["hit_rate"] is None for layer in said["data"]["layers"])
    assert "| 0 | 0 | 0 | 0 | 0 | - |" in (folder / "report.md").read_text()


def test_a_failing_figure_leaves_the_earlier_report(tmp_path):
    folder = report().save(tmp_path / "r")
    before = (folder / "report.md").read_bytes()
    bad = report()
    bad.figures.append(Figure("bad", "c", lambda axes: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        bad.save(folder)
    assert (folder / "report.md").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_without_matplotlib_the_tables_are_written(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    text = (report().save(tmp_path / "r") / "report.md").read_text()
    assert "moe-prefetch[report]" in text and "one, two, three" in text


def test_figures_are_no_business_of_the_users_backend(tmp_path, monkeypatch):
    """His stays, with the figures that are open in it."""
    import matplotlib
    from matplotlib import pyplot

    for change in (matplotlib.use, pyplot.switch_backend, pyplot.figure, pyplot.subplots):
        monkeypatch.setattr(f"{change.__module__}.{change.__name__}", lambda *a, **k: pytest.fail("the user's"))
    assert (report().save(tmp_path / "r") / "one.png").exists()


def test_what_is_not_finite_is_written_as_text(tmp_path):
    """The gate counts a non-finite result as an infinite drift."""
    r = Report("T", tables=[Table("t", ("a", "b"), [("x", float("inf"))])], data={"k": {"kl": float("nan"), "all": (1.0, float("-inf"))}})
    said = json.loads((r.save(tmp_path / "r") / "report.json").read_text(), parse_constant=lambda text: pytest.fail(text))
    assert said["data"] == {"k": {"kl": "nan", "all": [1.0, "-inf"]}} and said["tables"][0]["rows"] == [["x", "inf"]]


def test_numbers_are_shown_so_that_people_can_read_them():
    assert [show(v) for v in (1234567, 0.5, "x", 12345.678)] == ["1,234,567", "0.5", "x", "1.235e+04"]
    assert [size(v) for v in (12, 1536, 3 << 20, 5 << 40)] == ["12 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"]


def test_a_session_reports_itself(tmp_path):
    import torch

    import moe_prefetch
    from tests.tiny import tiny

    model = tiny()
    with moe_prefetch.attach(model, {"experts": {"home": "disk", "resident": 2}}) as session, torch.no_grad():
        model(torch.arange(10)[None])
    text = (session.report().save(tmp_path / "run") / "report.md").read_text()
    assert "2 of 8 experts" in text and "prefill" in text
    data = json.loads((tmp_path / "run" / "report.json").read_text())["data"]
    assert data["kinds"]["prefill"]["demanded"] == sum(row["demanded"] for row in data["layers"]) > 0


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_place_where_no_report_can_be_is_refused_before_work(tmp_path, place):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(ArtefactError):
        check_folder(tmp_path / "f" if place == "file" else tmp_path / "f" / "x")
    assert (tmp_path / "f").read_text() == "mine"
