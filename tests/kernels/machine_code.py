"""Compile the FP4 attention for sm_90 and say what its machine code is like. No GPU is needed.

usage: python tests/kernels/machine_code.py [NAME ...]

One JSON object a line: name, loop (instructions of the loop over pages, without what a branch in it skips: a new reference of the softmax),
registers, shared, fp8 (FP8 tensor instructions in the loop), spills (local accesses in the loop), barriers, unset (uniform registers read
before any write).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from ahead import call, compile_only
from listing import common, loops_at, unset_uniform
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_prefetch.kernels.kv_attend import fused
from moe_prefetch.kv.format import FORMATS, PageLayout

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    "q8_ptr": "*fp8e4nv",
    "qo_ptr": "*fp16",
    "qf_ptr": "*fp32",
    "q_len_ptr": "*i32",
    "pool_ptr": "*u8",
    "table_ptr": "*i32",
    "stored_ptr": "*i32",
    "length_ptr": "*i32",
    "part_ptr": "*fp32",
    "ml_ptr": "*fp32",
    "span_ptr": "*i32",
    "B": "i32",
    "table_width": "i32",
    "t_at": "i32",
}
# name: format, head dim, query rows, outlier channels
CASES = {
    "g4_d128_o8": ("fp4-quality", 128, 4, 8),
    "g8_d128_o8": ("fp4-quality", 128, 8, 8),
    "g4_d128_o4": ("fp4-quality", 128, 4, 4),
    "g4_d128_o3": ("fp4-72", 128, 4, 3),
    "g8_d128_o3": ("fp4-72", 128, 8, 3),
    "g4_d128_o0": ("fp4-72", 128, 4, 0),
    "g8_d128_o0": ("fp4-72", 128, 8, 0),
    "g8_d128_o4": ("fp4-quality", 128, 8, 4),
    "g4_d64_o4": ("fp4-quality", 64, 4, 4),
    "g8_d64_o4": ("fp4-quality", 64, 8, 4),
    "g4_d64_o1": ("fp4-72", 64, 4, 1),
    "g8_d64_o1": ("fp4-72", 64, 8, 1),
}


def machine_code(name: str) -> str:
    if name.startswith("decode_"):
        _, dim, rows, outliers = CASES[name.removeprefix("decode_")]
        kernels = compile_only()
        call(8, 8, rows, dim, 32768, outliers, 0.0)
        return listing_of(next(k for k in kernels if k.metadata.name == "attend_decode"))
    fmt, dim, rows, outliers = CASES[name]
    layout = PageLayout(FORMATS[fmt], dim, dim, outliers)
    at = {k: v[0] for k, v in layout.offsets.items()}
    constants = {
        "BP": 16,
        "N": 8,
        "R": rows,
        "RP": rows,
        "T": 1,
        "D": dim,
        "OUT": outliers,
        "KC": 2 if rows == 4 else dim // 64,
        "HL": 2 if dim // 64 * rows * 2 <= 16 else 1,
        "XC": max(16, rows),
        "SWAPS": len(layout.reserved),
        "SINKS": 4,
        "SLIDING": 0,
        "SOFTCAP": 0.0,
        "PAGE_BYTES": layout.page_bytes,
        "V_AT": at["v_codes"],
        "KS_AT": at["k_scales"],
        "VS_AT": at["v_scales"],
        "KO_AT": at["k_outliers"],
        "TRAILER_AT": at["trailer"],
        "STAGES": fused.STAGES,
        "PDL": True,
    }
    attrs = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(TYPES.values()) if t.startswith("*")}
    types = {**TYPES, "qo_ptr": "*fp16" if outliers > 3 else "*fp32"}
    source = ASTSource(
        fn=fused.attend_pages, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=attrs
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": fused.FIT[rows][1]})
    return listing_of(kernel)


def listing_of(kernel: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        run = lambda flag: subprocess.run([TOOL, flag, path], capture_output=True, text=True, check=True)  # noqa: E731
        usage = run("-res-usage")
        return f"shared {kernel.metadata.shared}\n{usage.stdout}{usage.stderr}\n{run('-sass').stdout}"


def facts(name: str) -> dict[str, object]:
    code = machine_code(name)
    of = lambda body: sum("QGMMA" in t for _, t in body)  # noqa: E731
    # waits for a barrier jump back too
    whole = next(body for body in loops_at(code) if of(body) == max(map(of, loops_at(code))))
    loop = common(whole)
    count = lambda pattern: sum(bool(re.search(pattern, t)) for t in loop)  # noqa: E731
    return {
        "name": name,
        "loop": len(loop),
        "registers": int(re.search(r"REG:(\d+)", code)[1]),
        "shared": int(re.search(r"shared (\d+)", code)[1]),
        "fp8": count(r"\bQGMMA"),
        "spills": sum(bool(re.search(r"\b(LDL|STL)", t)) for _, t in whole),
        "barriers": count(r"\bBAR\.SYNC"),
        "unset": unset_uniform(code),
    }


if __name__ == "__main__":
    for case in sys.argv[1:] or [*CASES, *(f"decode_{name}" for name in CASES)]:
        print(json.dumps(facts(case)), flush=True)
