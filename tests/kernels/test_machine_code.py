"""Budgets of the machine code: what `machine_code.py` says, for sm_90, against `machine_code.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .listing import unset_uniform

pytest.importorskip("triton")

HERE = Path(__file__).parent
BUDGET: dict[str, dict[str, int]] = json.loads((HERE / "machine_code.json").read_text())


def run(script: str, *names: str) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, HERE / script, *names], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "names", [["decode_g4_d128_o8", "decode_g8_d128_o8", "g8_d128_o8"], pytest.param(list(BUDGET), marks=pytest.mark.nightly)]
)
def test_within_budget(names: list[str]) -> None:
    found = [json.loads(line) for line in run("machine_code.py", *names)]
    assert sorted(str(fact["name"]) for fact in found) == sorted(names)
    for fact in found:
        limit = BUDGET[str(fact["name"])]
        assert fact["fp8"] == limit["fp8"], f"{fact['name']}: scores and values go through {fact['fp8']} FP8 tensor instructions a page"
        assert fact["spills"] == 0
        assert fact["unset"] == [], "the assembler read a uniform register that nothing wrote"
        for what in ("loop", "registers", "shared", "barriers"):
            assert fact[what] <= limit[what], f"{fact['name']}: {what} {fact[what]}, at most {limit[what]}"


@pytest.mark.parametrize("shapes", [["capped"], pytest.param(["long", "alone", "short", "wide"], marks=pytest.mark.nightly)])
def test_every_launch_of_a_call_compiles(shapes: list[str]) -> None:
    """The interpreter takes what the compiler refuses: an `if` on a float constant, say."""
    pages = {shape: "prepare attend_pages" if shape in ("capped", "wide") else "attend_decode" for shape in shapes}
    assert run("ahead.py", *shapes) == [f"{shape} {kernels} attend_recent combine" for shape, kernels in pages.items()]


def test_an_unset_uniform_register_is_seen() -> None:
    """As the assembler wrote it once: the descriptor's base is added to before it exists."""
    good = """
        /*0010*/                   UMOV UR26, 0x400 ;
        /*0020*/                   UIADD3 UR26, UP0, UR26, 0x20, URZ ;
        /*0030*/                   UIADD3.64 UR28, UR26, 0x80, URZ ;
    """
    assert unset_uniform(good) == []
    assert unset_uniform(good.replace("UMOV UR26", "UMOV UR25"))[0].startswith("UR26: UIADD3 ")
