"""The scripts that made rows run as they are."""
from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.megatron.checks import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]), ids=lambda p: p.stem)
def test_rows_are_added_to_what_is_there(path):
    """A file of rows only grows, and is looked at before anything is measured."""
    text = path.read_text()
    assert not re.search(r"open\((a|args)\.out\b|DictWriter", text)
    assert ("append_rows(" in text) == ("check_rows(" in text)


@pytest.mark.model
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mixed", "cross"])
def test_every_predictor_is_judged_on_any_text(smolmoe, tmp_path, name):
    text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("probes", "kv"))
    for part, characters in (("a", text[:6000]), ("b", text[6000:12000])):
        (tmp_path / part).write_text(characters)
    out = tmp_path / "rows.csv"
    sizes = ["--tokens", "256", "--train-tokens", "256", "--window", "128"]
    probe = ROOT / "examples" / "smolmoe" / "probes" / name
    subprocess.run([sys.executable, ROOT / "benchmarks" / "probe.py", "--text", tmp_path / "a", "--train", tmp_path / "b", *sizes,
                    "--probe", probe, "--out", out], check=True, capture_output=True)
    got = {(r["case"], r["metric"]): float(r["value"]) for r in csv.DictReader(out.open())}
    for h in range(3):
        case = f"smolmoe_{name}_h{h}"
        assert got[case, "recall_at_k"] > got[case, "stale-gate_recall_at_k"] > got[case, "popularity_recall_at_k"]
        assert got[case, "oracle_recall_at_k"] == 1.0


@pytest.mark.framework
@pytest.mark.timeout(300)
def test_a_served_megatron_model_is_the_model():
    what = [ROOT / "benchmarks" / "serve_megatron.py", "--cpu", "--tokens", "1,5", "--layers", "2", "--passes", "1"]
    done = subprocess.run([sys.executable, "-W", "ignore", *what], env=environment("0.19.2"), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count("right") == 2 and "WRONG" not in done.stdout, done.stdout + done.stderr[-2000:]
