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
    assert len(found) == 4 * 9
    for fact in found:
        assert fact["spills"] == 0, fact
        if fact["kernel"] in ("put", "give") and fact["ranks"] == 2:
            assert fact["wide"] > 0 and fact["system"] >= 3, fact
        if fact["kernel"].endswith("words") and fact["ranks"] == 2:
            assert fact["words"] + fact["sent"] >= 4, fact


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's twin")
@pytest.mark.parametrize("unreduced", [False, True])
def test_the_operators(unreduced):
    spec = DispatchSpec(16, 2, torch.float32, 4, unreduced)
    gather = Gather(Group.of(), spec, Placement.even(4, 1), lambda layer, x, i, w: x, tokens=4, device="cpu")
    g = torch.Generator().manual_seed(0)
    hidden, ids, weights = torch.randn(3, 16, generator=g), torch.randint(-1, 4, (3, 2), generator=g), torch.rand(3, 2, generator=g)
    same = (gather._bases_R, gather.block.mine, gather._state, gather._failed, 4, unreduced)
    # The block's address is in a table, so a clone of it can't stand in for it: fake kernels are checked.
    rows = (hidden, ids, weights, gather._serve_E, gather._number_RE, *same)
    torch.library.opcheck(op.put, (*rows, 0, 0, 10_000, True), test_utils=("test_faketensor",))
    torch.library.opcheck(op.wait, (*rows, 0, 10_000), test_utils=("test_faketensor",))
    result = torch.randn(8 if unreduced else 4, 16, generator=g)
    torch.library.opcheck(op.give, (result, ids, gather._serve_E, *same, 0, 0, 10_000), test_utils=("test_faketensor",))
