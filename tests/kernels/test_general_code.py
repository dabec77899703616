"""Machine code of the general kernels for sm_90: tensor instructions, no spills in the loop, a budget for its length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
# instructions of the loop a tile (per code: times 128 threads, over tokens of the tile and channels of K and V), tensor instructions
BUDGET = {
    "fp16_d128": (330, 32),
    "fp8_d128": (840, 32),
    "fp4_d80": (1180, 52),
    "fp4_d96": (1200, 52),
    "fp4_d112": (1370, 68),
    "fp4_d80_o6": (1120, 52),
    "fp4_d256_o16": (2170, 132),
    "fp4_d192": (1790, 100),
    "fp4_d256": (2170, 132),
    "c64_d128": (1470, 68),
    "nvfp4_d128": (1010, 32),
    "mxfp4_d128": (1430, 64),
    "fp16_d256": (300, 32),
    "fp16_d128_r32": (450, 64),
    "fp8_f72_d64": (680, 32),
    "fp8_f72_d128": (1050, 64),
    "fp8_f72_d256": (1740, 128),
    "quality_fp8_d128": (1470, 68),
    "fp16_f72_d128": (890, 64),
    "fp16_f72_d256": (1400, 128),
    "nvfp4_fp8_d128": (1140, 32),
    "mla_fp4": (1290, 100),
    "mla_fp8": (1290, 100),
}


def run(script: str, *names: str) -> list[dict[str, object]]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, HERE / script, *names], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [["fp4_d96", "mla_fp4"], pytest.param(list(BUDGET), marks=pytest.mark.nightly)])
def test_within_budget(names: list[str]) -> None:
    found = run("general_code.py", *names)
    assert sorted(str(fact["name"]) for fact in found) == sorted(names)
    for fact in found:
        loop, mma = BUDGET[str(fact["name"])]
        assert fact["spills"] == 0, fact
        assert fact["reloads"] <= 32, fact
        assert fact["mma"] == mma, fact
        assert fact["loop"] <= loop, fact


def test_blackwell_reads_mxfp4_keys_as_they_are_stored() -> None:
    (fact,) = run("general_code.py", "native")
    assert fact["scaled"] == 4, "128 channels are four steps of 32"


@pytest.mark.nightly
def test_the_encoder_keeps_to_registers() -> None:
    facts = run("general_code.py", "encoder")
    assert len(facts) == 10
    assert [fact for fact in facts if fact["stack"]] == []
