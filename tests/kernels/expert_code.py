"""Compile the kernels over expert records for sm_90 and say what their machine code is like. No GPU is needed.

usage: python tests/kernels/expert_code.py [NAME ...]      NAME: <model>_t<tokens> of MODELS and TOKENS

One JSON object a line and kernel: name, kernel, registers, shared bytes, spills (accesses to local memory), unset (uniform registers that
are read before any write: an assembler's mistake seen before). For gate_up and down also, in the loop over columns (a short one may be
unrolled: then of the whole kernel): per_weight (instructions that a thread issues for each element of the matrix), mma (tensor
instructions a step), warp (those of one warp), other (emulated ones, and conversions an eighth as fast: none is expected), copies
(asynchronous 16-byte copies past L1), weight_copies (those that weights need), copies_all (all asynchronous copies), loads (others from
global memory), barriers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from listing import LINE, loops, unset_uniform
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_prefetch.kernels.expert_mlp import fused
from moe_prefetch.kernels.expert_mlp.record import Form

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# name: form, experts (shared ones among them), experts a token
MODELS = {
    "qwen3-30b-a3b": (Form("bfloat16", 2048, 768), 128, 8),
    "qwen3-30b-a3b-fp8": (Form("fp8", 2048, 768, "", "bfloat16", 128), 128, 8),
    "deepseek-v2-lite": (Form("bfloat16", 2048, 1408), 66, 8),
    "mixtral-8x7b": (Form("bfloat16", 4096, 14336), 8, 2),
    "gpt-oss-120b": (Form("mxfp4", 2880, 2880, "bfloat16"), 128, 4),
}
TOKENS = (1, 64, 256, 4096)
TYPES = {"where_ptr": "*i64", "pair_ptr": "*i32", "count_ptr": "*i32", "y_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32",
         "T": "i32", "limit": "fp32", "alpha": "fp32"}


def compiled(fn: object, constants: dict[str, object], warps: int) -> triton.compiler.CompiledKernel:
    names = [n for n in fn.arg_names if n not in constants]
    types = {n: TYPES.get(n, "*bf16") for n in names}
    attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    order = {n: types.get(n, "constexpr") for n in fn.arg_names}
    source = ASTSource(fn=fn, signature=order, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def kernels(name: str) -> dict[str, tuple[object, dict[str, object], int]]:
    """(function, constants, warps) of every launch of a case."""
    model, tokens = name.rsplit("_t", 1)
    form, experts, top_k = MODELS[model]
    out = {}
    for which in ("gate_up", "down"):
        same, warps, _ = fused.constants(form, which, experts, int(tokens), top_k)
        own = {"CLAMPED": bool(form.bias)} if which == "gate_up" else {}
        out[which] = (getattr(fused, which), {**same, **own, "PDL": True}, warps)
    if tokens == "1":
        wide = triton.next_power_of_2(top_k)
        out["plan"] = (fused.plan, {"K": top_k, "KP": wide, "CT": fused.CHUNK, "PDL": True}, 4)
        sizes = {"E": experts, "K": top_k, "KP": wide, "D": form.hidden, "BD": 256}
        out["combine"] = (fused.combine, {"place_ptr": None, **sizes, "PDL": True}, 4)
    return out


def facts(name: str) -> list[dict[str, object]]:
    found = []
    for what, (fn, constants, warps) in kernels(name).items():
        kernel = compiled(fn, constants, warps)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(kernel.asm["cubin"])
            run = lambda flag: subprocess.run([TOOL, flag, path], capture_output=True, text=True, check=True)  # noqa: E731,B023
            usage, code = run("-res-usage"), run("-sass").stdout
        fact: dict[str, object] = {
            "name": name, "kernel": what, "registers": int(re.search(r"REG:(\d+)", usage.stdout + usage.stderr)[1]),
            "shared": kernel.metadata.shared, "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
            "unset": unset_uniform(code)}
        if what in ("gate_up", "down"):
            # ptxas unrolls short loops: then the whole kernel stands for all its steps.
            loop = next((body for body in loops(code) if any("MMA" in t for t in body)), None)
            lines = [t for _, t in LINE.findall(code)] if loop is None else loop
            count = lambda pattern: sum(bool(re.search(pattern, t)) for t in lines)  # noqa: E731,B023
            steps = -(-(constants["D"] if what == "gate_up" else constants["F"]) // constants["BK"]) if loop is None else 1
            each = constants["BR"] * constants["BK"] // (32 * warps)
            bits = {"mxfp4": 4, "fp8": 8}.get(MODELS[name.rsplit("_t", 1)[0]][0].weights, 16)
            fact |= {"weight_copies": each * bits // 128}
            fact |= {"unrolled": loop is None, "per_weight": round(len(lines) / steps / each, 2),
                     "mma": count(r"\bHGMMA|\bHMMA") / steps, "warp": count(r"\bHMMA"),
                     "other": count(r"\bIMMA|\bQGMMA|\bF2F\b"), "copies": count(r"\bLDGSTS\S*BYPASS\S*128"),
                     "copies_all": count(r"\bLDGSTS"), "loads": count(r"\bLDG\b"), "barriers": count(r"\bBAR\.SYNC") / steps}
        found.append(fact)
    return found


if __name__ == "__main__":
    for case in sys.argv[1:] or [f"{m}_t{t}" for m in MODELS for t in TOKENS]:
        for line in facts(case):
            print(json.dumps(line), flush=True)
