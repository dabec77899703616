"""The mover against its law: bytes, words, cancelled and stale moves; the laws' words against the protocol's own steps."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.move import fused
from moe_prefetch.kernels.move.naive import move_naive
from moe_prefetch.kernels.move.op import _move, move
from moe_prefetch.kernels.plan.naive import Tables, plan_naive
from moe_prefetch.kernels.protocol import slot_word
from moe_prefetch.types import PROB_ONE, SlotState

from .plan_cases import COSTS, copy, same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, S, STEP = 8, 4, 41


def aligned(rows: int, stride: int, seed: int | None) -> torch.Tensor:
    raw = torch.full((rows * stride + 128,), 0xCD, dtype=torch.uint8, device=DEVICE)
    out = raw[-raw.data_ptr() % 128 :][: rows * stride].view(rows, stride)
    if seed is not None:
        out.copy_(torch.randint(0, 256, out.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8))
    return out


def planned(nbytes: int, want: tuple[int, ...] = (2, 5, 7), layers: int = 2) -> tuple[Tables, torch.Tensor, torch.Tensor]:
    """(tables with a plan for layer 1, homes [E, nbytes], slots [S, stride])."""
    homes, slots = aligned(E, -(-nbytes // 128) * 128, 3), aligned(S, -(-nbytes // 128) * 128 + 256, None)
    home = torch.tensor([[homes[e].data_ptr() for e in range(E)]] * layers, device=DEVICE)

    def i32(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

    t = Tables(home.clone(), home, torch.zeros(layers, S, dtype=torch.int64, device=DEVICE),
               torch.full((layers, S), -1, device=DEVICE), i32(layers, value=0), i32(layers, E), i32(layers, S, value=9),
               i32(layers, S, value=9), i32(layers, E), i32(layers, E), torch.tensor([[0, 0, 16]], dtype=torch.int32, device=DEVICE),
               torch.tensor([[S, 0, -1]] * layers, dtype=torch.int32, device=DEVICE), i32(1, value=STEP))
    prob = i32(1, E)
    prob[0, list(want)] = PROB_ONE
    plan_naive(t, torch.tensor([layers - 1], device=DEVICE), prob, None, COSTS, 0, 0)
    assert int(t.count_L[1]) == len(want)
    return t, homes, slots


def law(t: Tables, homes: torch.Tensor, slots: torch.Tensor, nbytes: int) -> tuple[Tables, torch.Tensor]:
    want, out = copy(t), slots.clone()
    move_naive(want, 1, out, nbytes, list(homes), 0)
    shift = torch.where((want.where_LE != t.where_LE), slots.data_ptr() - out.data_ptr(), 0)
    want.where_LE.add_(shift)
    return want, out


def compare(got: Tables, want: Tables) -> None:
    """All words but the copiers' counters, whose ends depend on who came when."""
    assert set(same(got, want)) <= {"taken_LS", "done_LS"}


@pytest.mark.parametrize("nbytes", [16, 128, 1008, 4096, 70_000])
@pytest.mark.parametrize("programs", [1, 3, 24])
def test_fused_is_the_law(nbytes: int, programs: int) -> None:
    t, homes, slots = planned(nbytes)
    want, out = law(t, homes, slots, nbytes)
    fused.launch_move(t, 1, slots, nbytes, 0, programs, piece=2048, tile=1024, warps=4)
    compare(t, want)
    assert torch.equal(slots, out), "the bytes, and nothing beside them"
    assert not torch.equal(slots[0, :nbytes], slots[3, :nbytes])
    # Another launch finds nothing to do.
    slots.fill_(1)
    fused.launch_move(t, 1, slots, nbytes, 0, programs, piece=2048, tile=1024, warps=4)
    compare(t, want)
    assert bool((slots == 1).all())


@pytest.mark.parametrize("run", ["law", "fused"])
def test_a_claim_of_another_step_and_a_slot_of_another_generation(run: str) -> None:
    def bring(t: Tables, slots: torch.Tensor, homes: torch.Tensor) -> None:
        if run == "law":
            move_naive(t, 1, slots, 512, list(homes), 0)
        else:
            fused.launch_move(t, 1, slots, 512, 0, 2)

    t, homes, slots = planned(512)
    t.step.add_(1)
    before = copy(t)
    bring(t, slots, homes)
    compare(t, before)
    t, homes, slots = planned(512)
    t.slot_LS[1, 0] = slot_word(2, SlotState.FILLING, 2)
    bring(t, slots, homes)
    assert int(t.slot_LS[1, 0]) == slot_word(2, SlotState.FILLING, 2)
    assert int(t.where_LE[1, 2]) == int(t.home_LE[1, 2])
    assert int(t.where_LE[1, 5]) == slots[1].data_ptr()


def test_ops_are_honest_about_what_they_change() -> None:
    t, homes, slots = planned(512)
    words = (t.where_LE, t.home_LE, t.slot_LS, t.queue_LS, t.count_L, t.claim_LE, t.taken_LS, t.done_LS, t.step)
    torch.library.opcheck(_move, (*words, slots, list(homes), 1, 512, 0, 2), test_utils=("test_schema", "test_faketensor"))
    t, homes, slots = planned(512)
    want, out = law(t, homes, slots, 512)
    move(t, 1, slots, 512, records=list(homes))
    compare(t, want)
    assert torch.equal(slots, out)
    for bad in ({"nbytes": 500}, {"nbytes": 0}, {"nbytes": 1024}, {"layer": 2}, {"buffers_SB": slots[:2]}, {"buffers_SB": slots[:, 16:]},
                {"buffers_SB": slots.int()}, {"programs": 25}):
        with pytest.raises(ShapeError):
            move(t, **{"layer": 1, "buffers_SB": slots, "nbytes": 512, "records": list(homes), **bad})


COMPILE = """
import os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_prefetch.kernels.move import fused
from moe_prefetch.kernels.settle import fused as settle
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
shape = dict(E=128, S=64)
take = dict(shape, SP=64)
for fn, warps, const in ((fused.move_pieces, fused.WARPS, dict(shape, NBYTES=9437440, STRIDE=9437440, PIECE=fused.PIECE, TILE=fused.TILE)),
                         (settle.settle_layer, 1, dict(take, K=2, EP=128, KP=32, CHUNK=settle.CHUNK)),
                         (settle.withdraw_moves, 1, dict(take, WASTE=10))):
    names = fn.arg_names
    kinds = {n + "_ptr": "*i64" for n in ("where", "home", "slot", "queue", "ids", "ledger")} | {"buffers_ptr": "*u8"}
    sig = {n: "constexpr" if n in const else kinds.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
    k = triton.compile(ASTSource(fn=fn, signature=sig, constexprs=const, attrs=attrs), target=GPUTarget("cuda", 90, 32),
                       options={"num_warps": warps})
    ptx = k.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        use = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True)
        code = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True).stdout
    found = dict(spills=len(re.findall(r"\\b(LDL|STL)\\b", code)), loads=ptx.count("ld.global.cg.v4.b32"),
                 stores=ptx.count("st.global.cg.v4.b32"),
                 narrow=len(re.findall(r"(ld|st).global.cg(.v2)?.b32", ptx)), fences=ptx.count("fence.acq_rel.sys"),
                 release=len(re.findall(r"atom[^ ]*release[^ ]*sys|atom[^ ]*sys[^ ]*release", ptx)),
                 registers=re.search(r"REG:(\\d+)", use.stdout + use.stderr)[1])
    print(k.metadata.name, *(f"{n} {v}" for n, v in found.items()))
"""


def test_compiles_for_hopper_without_spills() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" spills 0 ") == 3, done.stdout
    mover = done.stdout.splitlines()[0]
    assert " loads 8 stores 8 narrow 0 fences 1 release 1 " in mover, mover
