"""Compile the general attention for sm_90 and say what its machine code is like. No GPU is needed.

usage: python tests/kernels/general_code.py [NAME ... | native | encoder]

One JSON object a line: name, loop (instructions of the loop over pages, a tile of tokens), registers, shared bytes, mma (tensor
instructions in the loop), spills (stores to local memory in the loop), reloads (loads from there: addresses that no register
holds), barriers.
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
from listing import loops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_prefetch.kernels.kv_attend import general, general_latent
from moe_prefetch.kernels.kv_encode import general as encoder
from moe_prefetch.kernels.kv_encode import general_planes
from moe_prefetch.kv.format import FORMATS, PageLayout, format_of

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INTS = ("q_len_ptr", "table_ptr", "stored_ptr", "length_ptr", "recent_first_ptr", "channels_ptr", "span_ptr")
HALVES = ("sink_k_ptr", "sink_v_ptr", "recent_k_ptr", "recent_v_ptr")
OTHERS = {
    "q_ptr": "*bf16",
    "k_ptr": "*bf16",
    "v_ptr": "*bf16",
    "runs_ptr": "*i32",
    "counts_ptr": "*i64",
    "pool_ptr": "*u8",
    "B": "i32",
    "table_width": "i32",
    "scale_log2": "fp32",
}
# name: format, head dim, query rows, outlier channels
CASES = {
    "fp16_d128": ("fp16", 128, 4, 0),
    "fp16_d256": ("fp16", 256, 8, 0),
    "fp8_d128": ("fp8", 128, 4, 0),
    "fp4_d80": ("fp4-quality", 80, 4, 3),
    "fp4_d96": ("fp4-quality", 96, 4, 4),
    "fp4_d112": ("fp4-quality", 112, 8, 4),
    "fp4_d192": ("fp4-quality", 192, 8, 8),
    "fp4_d256": ("fp4-quality", 256, 8, 12),
    "fp4_d80_o6": ("fp4-quality", 80, 4, 6),
    "fp4_d256_o16": ("fp4-quality", 256, 8, 16),
    "c64_d128": ("fp4-72-c64", 128, 8, 4),
    "nvfp4_d128": ("nvfp4", 128, 8, 0),
    "mxfp4_d128": ("mxfp4", 128, 8, 0),
    "fp16_d128_r32": ("fp16", 128, 32, 0),
    "fp4_d96_r32": ("fp4-quality", 96, 32, 4),
    "fp8_f72_d64": ("fp8+fp4-72", 64, 4, 0),
    "fp8_f72_d128": ("fp8+fp4-72", 128, 4, 0),
    "fp8_f72_d256": ("fp8+fp4-72", 256, 4, 0),
    "quality_fp8_d128": ("fp4-quality+fp8", 128, 4, 4),
    "fp16_f72_d128": ("fp16+fp4-72", 128, 4, 0),
    "fp16_f72_d256": ("fp16+fp4-72", 256, 4, 0),
    "nvfp4_fp8_d128": ("nvfp4+fp8", 128, 4, 0),
    "mla_fp4": ("fp4-quality", 512, 16, 0),
    "mla_fp8": ("fp8", 512, 16, 0),
    "mla_fp16": ("fp16", 512, 16, 0),
}


def type_of(name: str) -> str:
    return OTHERS.get(name) or ("*i32" if name in INTS else "*fp16" if name in HALVES else "*fp32")


def compiled(fn: object, constants: dict[str, object], target: int = 90, **options: object) -> triton.compiler.CompiledKernel:
    names = [n for n in fn.arg_names if n not in constants]
    types = {n: type_of(n) for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": 4, **options})


def facts(name: str) -> dict[str, object]:
    fmt, dim, rows, outliers = CASES[name]
    rest = {"sinks": 4, "ring": 65, "sliding": 0, "softcap": 0.0}
    if name.startswith("mla"):
        constants = general_latent.constants(PageLayout(FORMATS[fmt], dim, 0, 0, 64), 1, rows, 1, 8, **rest)
        kernel = compiled(general_latent.attend_latent, constants)
    else:
        layout = PageLayout(format_of(fmt), dim, dim, outliers)
        constants = general.constants(layout, 8, rows, 1, 8, **rest)
        _, _, warps, registers, _, _ = general.tuning(layout, rows)
        kernel = compiled(general.attend_general, constants, num_warps=warps, maxnreg=registers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        run = lambda flag: subprocess.run([TOOL, flag, path], capture_output=True, text=True, check=True).stdout  # noqa: E731
        usage, code = run("-res-usage"), run("-sass")
    if keep := os.environ.get("KEEP_CODE"):
        Path(keep, f"{name}.sass").write_text(code)
        Path(keep, f"{name}.ttgir").write_text(kernel.asm["ttgir"])
    # the shortest loop that copies to shared memory, or decodes: the one over an item's pages lies in that over items
    mark = {"mla_fp4": "0x8e008e00"}.get(name, "LDGSTS")
    loop = next(body for body in loops(code) if any("HMMA" in t for t in body) and any(mark in t for t in body))
    count = lambda pattern, lines: sum(bool(re.search(pattern, t)) for t in lines)  # noqa: E731
    return {
        "name": name,
        "loop": len(loop),
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "shared": kernel.metadata.shared,
        "mma": count(r"\bHG?MMA", loop),
        "spills": count(r"\bSTL", loop),
        "reloads": count(r"\bLDL", loop),
        "barriers": count(r"\bBAR\.SYNC", loop),
    }


def encoder_facts(name: str, tokens: int) -> dict[str, object]:
    """The encoder for K and V of 96 channels: registers, bytes of stack."""
    layout = PageLayout(FORMATS[name], 96, 96)
    if general_planes.serves(layout):
        function, constants, warps = general_planes.encode_planes, general_planes.constants(layout, 8, tokens), 8
    else:
        function, constants, warps = encoder.encode_general, encoder.constants(layout, 8, tokens), 4
    kernel = compiled(function, constants, num_warps=1 if tokens <= 4 else warps, enable_fp_fusion=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([TOOL, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    numbers = {what: int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK")}
    return {"name": f"encode_{name}_{tokens}", "registers": numbers["REG"], "stack": numbers["STACK"]}


def native_facts() -> dict[str, object]:
    """The scores' product on sm_100: block-scaled tensor instructions that read E2M1 and E8M0 as stored."""
    layout = PageLayout(FORMATS["mxfp4"], 128, 128)
    constants = general.constants(layout, 8, 8, 1, 8, sinks=4, ring=65, sliding=0, softcap=0.0, natively=True)
    ptx = compiled(general.attend_general, constants, 100).asm["ptx"]
    return {"name": "native", "scaled": len(re.findall(r"tcgen05\.mma\S*mxf8f6f4\S*block_scale", ptx))}


if __name__ == "__main__":
    if sys.argv[1:] == ["native"]:
        print(json.dumps(native_facts()))
        sys.exit()
    if sys.argv[1:] == ["encoder"]:
        for fmt in ("fp16", "fp8", "nvfp4", "mxfp4", "fp4-72"):
            for tokens in (1, 128):
                print(json.dumps(encoder_facts(fmt, tokens)), flush=True)
        sys.exit()
    for case in sys.argv[1:] or CASES:
        print(json.dumps(facts(case)), flush=True)
