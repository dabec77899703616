"""Compile the kernels of dispatch for sm_90; one JSON object each: kernel, spills, wide (16-byte stores), system (scoped accesses)."""
from __future__ import annotations

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_prefetch.kernels.dispatch import fused
from moe_prefetch.kernels.dispatch.planes import Planes

WORDS = {"put": ("hidden_ptr",), "give": ("result_ptr",)}
INTS = ("T", "C", "me", "ids_at", "weights_at", "rows_at", "results_at")


def main() -> None:
    for unreduced in (False, True):
        planes = Planes(2, 64, 2048, 8, torch.bfloat16, unreduced)
        same = fused.shape_constants(planes)
        constants = {"put": {"E": 128, "WAIT": True}, "wait": {}, "give": {"BACK_ROWS": planes.back_rows},
                     "gather_sums": {"E": 128, "BD": 512}, "gather_rows": {"E": 128, "BD": 512}}
        for name, more in constants.items():
            fn = getattr(fused, name)
            fixed = {k: v for k, v in (same | more).items() if k in fn.arg_names}
            types = {}
            for arg in fn.arg_names:
                if arg in fixed:
                    types[arg] = "constexpr"
                elif arg in WORDS.get(name, ()):
                    types[arg] = "*i16"
                else:
                    fp32 = arg == "weights_ptr" or (arg, name) == ("out_ptr", "gather_rows")
                    types[arg] = ("i32" if arg in INTS else "i64" if arg == "limit" else "*fp32" if fp32 else
                                  "*bf16" if arg in ("out_ptr", "results_ptr") else "*i64")
            attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
            kernel = triton.compile(ASTSource(fn=fn, signature=types, constexprs=fixed, attrs=attrs), target=GPUTarget("cuda", 90, 32),
                                    options={"num_warps": 4})
            ptx = kernel.asm["ptx"]
            print(json.dumps({"kernel": name, "unreduced": unreduced, "spills": kernel.asm["ptx"].count("st.local"),
                              "wide": ptx.count("st.global.v4.b32"), "system": ptx.count(".sys.")}))


if __name__ == "__main__":
    main()
