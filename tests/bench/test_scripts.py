"""The scripts that made rows run as they are."""
from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
