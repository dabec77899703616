"""The kernels of dispatch compile for sm_90: rows move 16 bytes at a time, flags have system scope. And the operators are what they say."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.distributed.groups import Group
from moe_prefetch.experts.dispatch import DispatchSpec
from moe_prefetch.experts.gather import Gather
from moe_prefetch.experts.placement import Placement
from moe_prefetch.kernels.dispatch import op

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
def test_the_machine_code():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, HERE / "dispatch_code.py"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 10
    for fact in found:
        assert fact["spills"] == 0, fact
        if fact["kernel"] in ("put", "give"):
            assert fact["wide"] > 0 and fact["system"] >= 4, fact


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's twin")
@pytest.mark.parametrize("unreduced", [False, True])
def test_the_operators(unreduced):
    spec = DispatchSpec(16, 2, torch.float32, 4, unreduced)
    gather = Gather(Group.of(), spec, Placement.even(4, 1), lambda layer, x, i, w: x, tokens=4, device="cpu")
    g = torch.Generator().manual_seed(0)
    hidden, ids, weights = torch.randn(3, 16, generator=g), torch.randint(-1, 4, (3, 2), generator=g), torch.rand(3, 2, generator=g)
    same = (gather._bases_R, gather.block.mine, gather._state, gather._failed, 4)
    # The block's address is in a table, so a clone of it can't stand in for it: the schema and the fake kernel are checked.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.collect, (ids, gather._serve_E, gather.block.mine, gather._state, 1, 4, 16, torch.float32, unreduced, 0),
                          test_utils=checks)
    torch.library.opcheck(op.put, (hidden, ids, weights, gather._serve_E, gather._number_RE, *same, unreduced, 0, 0, 10_000, True),
                          test_utils=("test_faketensor",))
    torch.library.opcheck(op.wait, (*same[:-1], 0, 10_000), test_utils=("test_faketensor",))
    result = torch.randn(8 if unreduced else 4, 16, generator=g)
    torch.library.opcheck(op.give, (result, *same, 2, unreduced, 0, 0, 10_000), test_utils=("test_faketensor",))
