"""What ptxas makes of the Gluon kernels for sm_90: tensor instructions where they belong, few instructions, hardly a spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from moe_prefetch.kernels.kv_encode import fused

if not fused.GLUON:
    pytest.skip("this version of Triton takes the kernels in Triton", allow_module_level=True)

# instructions at most; the others exactly, spills at most
BUDGET = {
    # half of the products and lookups again for pages that are coded anew, both halves by one text
    "encode_d64": {"instructions": 4800, "products": 96, "lookups": 202, "spills": 0},
    "encode_d128": {"instructions": 5300, "products": 96, "lookups": 202, "spills": 0},
    # both halves of a page; more waits would mean that products no longer run on
    "latent": {"instructions": 2450, "products": 136, "waits": 10, "matrices": 68, "barriers": 8, "spills": 0},
    # a step of one group of warps: 64 columns
    "experts_gate_up": {"instructions": 100, "products": 4, "wide": 4, "copies": 7, "spills": 0},
    "experts_down": {"instructions": 100, "products": 4, "wide": 4, "copies": 7, "spills": 0},
    # two tiles of 16 rows, and of 24; each product 256 weights of a warp
    "token_gate_up": {"instructions": 280, "products": 16, "spills": 0},
    "token_down": {"instructions": 385, "products": 24, "spills": 0},
}


@pytest.mark.parametrize("name", BUDGET)
def test_machine_code(name: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, here / "gluon_code.py", name], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for what, limit in BUDGET[name].items():
        assert found[what] <= limit if what in ("instructions", "spills") else found[what] == limit, found
