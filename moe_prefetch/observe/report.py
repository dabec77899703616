"""Reports: tables and figures in a folder, as Markdown with PNG beside it and the same numbers as JSON.

All files are written whole before the first is put in place, and an earlier report's are replaced. Without matplotlib (extra `report`) the
tables are written and the missing figures are named.
"""
from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..errors import ArtefactError
from ..experts.ledger import Totals

MARK = "moe_prefetch.report"
# One colour per meaning, in every figure of the library.
COLOURS = {"hit": "#4c9f70", "late": "#e0a030", "miss": "#c8503c", "wasted": "#8a8a8a", "bytes": "#3d6fa5", "other": "#7a5aa0"}

Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """`rows` are in the order of `columns`; floats are shown with four significant digits. `note` says how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    note: str = ""

    def text(self) -> list[tuple[str, ...]]:
        return [tuple(show(c) for c in row) for row in self.rows]

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in row) + " |" for row in self.text()]
        return "\n".join(lines + (["", self.note] if self.note else []) + [""])


@dataclass(frozen=True)
class Figure:
    """`draw(axes)` draws on one matplotlib Axes."""

    name: str
    caption: str
    draw: Callable[[Any], None]


@dataclass
class Report:
    title: str
    intro: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path | str) -> Path:
        """Write `folder` (report.md, report.json, PNG figures) and return it: all of them whole, then put in place
        (`checkpoint.write_together`). Files of an earlier report there are replaced; what else lies beside them stays.

        Raises ArtefactError when the folder holds no report but something else, or beside one a file with the name of a new figure.
        """
        folder = Path(folder).resolve()
        check_folder(folder)
        lines, pictures = self._draw()
        there = [name for name in pictures if os.path.lexists(folder / name)]
        before = _figures(folder)
        if theirs := [name for name in there if name not in before]:
            raise ArtefactError(f"{', '.join(theirs)} would be replaced, and the report there has no such figure", where=str(folder),
                                do="move it away, or name another folder")
        tables = [{"title": t.title, "columns": t.columns, "rows": t.rows} for t in self.tables]
        data = {"format": MARK, "title": self.title, "tables": _plain(tables), "figures": sorted(pictures), "data": _plain(self.data)}
        text = "\n".join([f"# {self.title}", "", self.intro, ""] + [t.markdown() for t in self.tables] + lines)
        # First what says whose the others are.
        files = {"report.json": checkpoint.json_bytes(data), "report.md": text.encode("utf-8"), **pictures}
        checkpoint.write_together({folder / name: content for name, content in files.items()})
        for name in before:
            if name not in pictures:
                (folder / name).unlink(missing_ok=True)
        return folder

    def _draw(self) -> tuple[list[str], dict[str, bytes]]:
        """Markdown that shows the figures, and their files by name."""
        lines: list[str] = []
        pictures: dict[str, bytes] = {}
        if not self.figures:
            return lines, pictures
        try:
            # Not pyplot: its backend and open figures are the user's.
            from matplotlib.figure import Figure as Canvas
        except ImportError:
            names = ", ".join(f.name for f in self.figures)
            return [f"Figures left out ({names}): install moe-prefetch[report] to draw them.", ""], pictures
        for figure in self.figures:
            canvas = Canvas(figsize=(8, 4), dpi=120, layout="constrained")
            axes = canvas.subplots()
            figure.draw(axes)
            axes.spines[["top", "right"]].set_visible(False)
            canvas.savefig(file := io.BytesIO(), format="png")
            pictures[f"{figure.name}.png"] = file.getvalue()
            lines += [f"![{figure.caption}]({figure.name}.png)", "", f"*{figure.caption}*", ""]
        return lines, pictures


def check_folder(folder: Path) -> None:
    """Whether a report can be written as `folder`. Raises ArtefactError when it holds something else, or can't be made."""
    # Names with a dot in front are no one's work, such as what another process is about to put in place.
    if folder.exists() and not (folder.is_dir() and (all(p.name.startswith(".") for p in folder.iterdir()) or _report(folder))):
        raise ArtefactError("there is something that is not a report", where=str(folder), expected="an empty or new folder",
                            do="name another folder")
    checkpoint.check_writable(folder.parent)


def _plain(value: Any) -> Any:
    """As JSON knows it: an infinite drift, or what is no number, as text."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return show(value) if isinstance(value, float) and not math.isfinite(value) else value


def _report(folder: Path) -> dict[str, Any] | None:
    """What the folder's report.json says; None without a report."""
    try:
        value = checkpoint.read_json(folder / "report.json")
    except ArtefactError:
        return None
    return value if isinstance(value, dict) and value.get("format") == MARK else None


def _figures(folder: Path) -> list[str]:
    """Names of the folder's report's own figures."""
    names = (_report(folder) or {}).get("figures", [])
    return [n for n in names if isinstance(n, str) and n.endswith(".png") and Path(n).name == n] if isinstance(names, list) else []


def show(value: Cell) -> str:
    """Integers with thousands separators, floats with four significant digits, 0 as 0."""
    if isinstance(value, bool) or isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def size(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def bars(series: Mapping[str, Sequence[float]], labels: Sequence[str], ylabel: str, *, stacked: bool) -> Callable[[Any], None]:
    """A bar chart over `labels`; each series has its colour of COLOURS."""

    def draw(axes: Any) -> None:
        base = [0.0] * len(labels)
        for i, (name, values) in enumerate(series.items()):
            if stacked:
                axes.bar(labels, values, bottom=base, label=name, color=COLOURS.get(name, COLOURS["other"]))
                base = [b + v for b, v in zip(base, values, strict=True)]
            else:
                width = 0.8 / len(series)
                axes.bar([x - 0.4 + width * (i + 0.5) for x in range(len(labels))], values, width, label=name,
                         color=COLOURS.get(name, COLOURS["other"]), alpha=1.0 - 0.5 * i / max(1, len(series)))
                axes.set_xticks(range(len(labels)), labels)
        axes.set_ylabel(ylabel)
        axes.tick_params(axis="x", labelrotation=30)
        if len(series) > 1:
            axes.legend(frameon=False, ncols=len(series), loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return draw


def lines(series: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> Callable[[Any], None]:
    """One line a series over 0, 1, 2, ..."""

    def draw(axes: Any) -> None:
        for name, values in series.items():
            axes.plot(range(len(values)), values, marker=".", label=name, color=COLOURS.get(name))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.legend(frameon=False)

    return draw


TOTALS = ("demanded", "hit", "late", "miss", "hit rate", "wasted", "cancelled", "bytes read", "bytes wasted", "stall ms")


def totals_row(t: Totals) -> tuple[Cell, ...]:
    """The columns of TOTALS."""
    rate: Cell = t.hit_rate if t.demanded else "-"
    return (t.demanded, t.hit, t.late, t.miss, rate, t.wasted, t.cancelled, size(t.bytes_moved), size(t.bytes_wasted),
            1e3 * t.stall_s)


def session_report(session: Any) -> Report:
    """What one session did: by phase, by layer, in bytes."""
    held, ledger = session.held_bytes(), session.ledger
    intro = (f"Plan `{session.policy.name}`, {session.num_slots} of {session.num_experts} experts per layer in slots; "
             f"experts hold {size(held['resident'])} of {size(held['total'])}.")
    report = Report("moe_prefetch: what was asked for, and what moved", intro)
    report.tables.append(Table("Experts by phase", ("phase", *TOTALS), [(kind, *totals_row(t)) for kind, t in ledger.kinds.items()],
                               "Experts are counted per layer and forward pass, each distinct one once. late: on its way when needed; "
                               "wasted: fetched ahead, thrown out unread."))
    report.tables.append(Table("Experts by layer", ("layer", *TOTALS), [(i, *totals_row(t)) for i, t in enumerate(ledger.layers)]))
    shares = {k: [getattr(t, k) / max(1, t.demanded) for t in ledger.layers] for k in ("hit", "late", "miss")}
    report.figures.append(Figure("layers", "Share of demanded experts that were there, late or missing, by MoE layer",
                                 bars(shares, [str(i) for i in range(len(ledger.layers))], "share of demand", stacked=True)))
    report.data = {"config": session.config.model_dump(mode="json"), "policy": session.policy.name, "held_bytes": held,
                   "kinds": {k: t.as_dict() for k, t in ledger.kinds.items()}, "layers": [t.as_dict() for t in ledger.layers]}
    return report
