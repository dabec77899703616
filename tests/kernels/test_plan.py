"""The plan on the device against its law, and the law against the pure planner."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.plan import fused
from moe_prefetch.kernels.plan.naive import plan_naive
from moe_prefetch.kernels.plan.op import _plan, plan

from .plan_cases import COSTS, check_law, copy, same, states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (5, 3, 1), (8, 8, 2), (60, 7, 1), (64, 32, 1), (64, 13, 3), (128, 40, 2), (256, 64, 1), (63, 63, 8)]


@pytest.mark.parametrize(("experts", "slots", "links"), SHAPES)
@pytest.mark.parametrize("with_keep", [False, True])
def test_the_law_is_the_planner(experts: int, slots: int, links: int, with_keep: bool) -> None:
    layers = 200
    before, prob, keep = states(layers, experts, slots, links, experts + slots)
    after = copy(before)
    rows = torch.arange(layers, dtype=torch.int32)
    plan_naive(after, rows, prob, keep if with_keep else None, COSTS, 1, links - 1)
    moves = [check_law(before, after, layer, prob, keep if with_keep else None, links - 1, 1) for layer in range(layers)]
    assert max(moves) >= min(2, slots)
    assert min(moves) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_states(seed: int) -> None:
    for experts, slots, links in SHAPES:
        layers = 1200
        before, prob, keep = states(layers, experts, slots, links, 100 + seed)
        after = copy(before)
        plan_naive(after, torch.arange(layers, dtype=torch.int32), prob, keep, COSTS, 0, 0)
        for layer in range(layers):
            check_law(before, after, layer, prob, keep, 0, 0)


@pytest.mark.parametrize(("experts", "slots", "links"), SHAPES)
@pytest.mark.parametrize("with_keep", [False, True])
def test_fused_is_the_law(experts: int, slots: int, links: int, with_keep: bool) -> None:
    layers = 10_000 if DEVICE == "cuda" else 12
    before, prob, keep = states(layers, experts, slots, links, experts, DEVICE)
    rows = torch.randperm(layers, device=DEVICE).int()[: layers - layers // 4]
    a, b = copy(before), copy(before)
    more = (rows, prob[rows.long()].contiguous(), keep[rows.long()].contiguous() if with_keep else None, COSTS, 1, links - 1)
    plan_naive(a, *more)
    fused.launch(b, *more)
    assert same(a, b) == []
    assert same(before, b) != []


def test_op_is_honest_about_what_it_changes() -> None:
    t, prob, _ = states(6, 16, 4, 2, 0, DEVICE)
    rows = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    args = [getattr(t, n) for n in t.__slots__]
    torch.library.opcheck(_plan, (*args, rows, prob[:2].contiguous(), None, 10, 12, 4096, 0, 0))
    want, got = copy(t), copy(t)
    plan_naive(want, rows, prob[:2].contiguous(), None, COSTS, 0, 0)
    plan(got, rows, prob[:2].contiguous(), COSTS)
    assert same(want, got) == []
    plan(got, rows[:0], prob[:0], COSTS)
    assert same(want, got) == []
    for bad in (prob, prob[:2].long(), prob[:2, :15].contiguous()):
        with pytest.raises(ShapeError):
            plan(got, rows, bad, COSTS)
    with pytest.raises(ShapeError, match="first"):
        plan(got, rows, prob[:2].contiguous(), COSTS, first=2)


COMPILE = """
import os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_prefetch.kernels.plan import fused
from moe_prefetch.kernels.plan.naive import Costs
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
for experts, slots, links in ((64, 32, 1), (256, 64, 2)):
    const = fused.constants(experts, slots, links, False, Costs(10, 12, 4096))
    names = fused.plan_rows.arg_names
    wide = ("where_ptr", "home_ptr", "slot_ptr", "queue_ptr")
    sig = {n: "constexpr" if n in const else "*i64" if n in wide else "*i32" if n.endswith("_ptr") else "i32" for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
    k = triton.compile(ASTSource(fn=fused.plan_rows, signature=sig, constexprs=const, attrs=attrs), target=GPUTarget("cuda", 90, 32),
                       options={"num_warps": 1})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        use = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True)
        code = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True).stdout
    spills = len(re.findall(r"\\b(LDL|STL)\\b", code))
    print(experts, "spills", spills, "instructions", len(re.findall(r"^\\s+/\\*[0-9a-f]{4}\\*/", code, re.M)),
          "registers", re.search(r"REG:(\\d+)", use.stdout + use.stderr)[1], "shared", k.metadata.shared)
"""


def test_compiles_for_hopper_without_spills() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" spills 0 ") == 2, done.stdout
