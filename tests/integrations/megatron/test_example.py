"""The example runs as its first lines say, and the long fit beside SmolMoE's training holds what it promises."""
from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.megatron.checks import ROOT, environment, work

EXAMPLE = "examples/megatron_fit_probes.py"


@pytest.mark.timeout(900)
def test_two_processes_train_and_write_a_probe_and_a_row(tmp_path: Path) -> None:
    table = tmp_path / "megatron.csv"
    port = str(29600 + os.getpid() % 300)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, EXAMPLE, "--steps",
               "30", "--layers", "3", "--hidden", "64", "--sequence", "64", "--moment-tokens", "1024", "--out", str(tmp_path / "probe"),
               "--overhead", "--blocks", "2", "--block-steps", "1", "--csv", str(table)]
    done = subprocess.run(command, cwd=ROOT, env=environment("0.16.1"), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 30/30  loss" in done.stdout
    assert (tmp_path / "probe" / "config.json").exists()
    rows = list(csv.DictReader(table.open()))
    assert [r["metric"] for r in rows] == ["step_without_ms", "step_with_ms", "overhead", "overhead_q25", "overhead_q75"]
    assert all(r["bench"] == "megatron" and "megatron-core 0.16.1" in r["machine"] for r in rows)
    assert float(rows[0]["value"]) > 0


def test_it_explains_itself() -> None:
    done = subprocess.run([sys.executable, EXAMPLE, "--help"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0
    assert "torchrun --nproc-per-node 2" in done.stdout


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.timeout(14400)
def test_200_steps_beside_training_are_worth_a_fit_on_the_same_tokens(tmp_path: Path) -> None:
    (found,) = work("0.19.2", tmp_path, "smolmoe_200_steps", timeout=14000)("smolmoe_200_steps")
    assert found["losses"][1] < found["losses"][0]
    for beside, trace in zip(found["beside"], found["trace"], strict=True):
        assert beside > trace - 0.01, found
