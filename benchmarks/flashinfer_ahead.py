"""Build the FlashInfer modules that our benchmarks time, for sm_90a, on a machine without a GPU; they are then loaded as they are.

usage: python benchmarks/flashinfer_ahead.py [--jobs N]

Needs FlashInfer (0.6.11, with its sources), ninja, nvcc (CUDA_HOME) and a host compiler. BF16 and FP8 paged decode on tensor cores at head
dim 128, MLA decode (fa2, fa3) in BF16: of the first two only the kernel without a mask is compiled, the others are symbols that stop a
program that calls one. A file takes 15 seconds to 8 minutes. The libraries go to `flashinfer/data/aot`, where FlashInfer looks before it
compiles: carry the package with them (and all of `tvm_ffi/lib`), without `data/cutlass` and `data/include`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
os.environ.setdefault("FLASHINFER_NVCC_THREADS", "1")

import torch
import tvm_ffi
from flashinfer.jit.attention.modules import gen_batch_mla_module, gen_batch_prefill_module

NEEDED = ("batch_prefill.cu", "batch_prefill_jit_binding.cu", "batch_prefill_paged_kernel_mask_0.cu")


def symbols(flag: str, objects: list[Path]) -> set[str]:
    text = subprocess.run(["nm", flag, *objects], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in text.splitlines() if "_ZN10flashinfer" in line}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--jobs", type=int, default=1)
    a = ap.parse_args()
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    bf16, fp8, i32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
    decode = [gen_batch_prefill_module("fa2", bf16, kv, bf16, i32, 128, 128, 0, False, False, False) for kv in (bf16, fp8)]
    mla = [gen_batch_mla_module(backend, bf16, bf16, bf16, i32, 512, 64, False) for backend in ("fa2", "fa3")]
    for spec in (*decode, *mla):
        spec.write_ninja()
        # "build OBJECT: RULE SOURCE"
        lines = [line.split() for line in spec.ninja_path.read_text().splitlines() if line.startswith("build ") and ".cuda.o:" in line]
        objects = [Path(line[1].rstrip(":")) for line in lines if Path(line[-1]).name in NEEDED or spec in mla]
        subprocess.run(["ninja", "-f", spec.ninja_path, f"-j{a.jobs}", *objects], cwd=spec.build_dir, check=True)
        stub = spec.build_dir / "absent.s"
        absent = sorted(symbols("--undefined-only", objects) - symbols("--defined-only", objects))
        stub.write_text("".join(f".globl {name}\n{name}:\n ud2\n" for name in absent) + '.section .note.GNU-stack,"",@progbits\n')
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        libraries = [f"-L{cuda}/lib64", "-lcudart", f"-L{Path(tvm_ffi.__file__).parent / 'lib'}", "-ltvm_ffi"]
        subprocess.run(["c++", "-shared", "-s", "-o", spec.aot_path, *objects, stub, *libraries], check=True)
        tvm_ffi.load_module(str(spec.aot_path))
        print(spec.aot_path, spec.aot_path.stat().st_size, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
