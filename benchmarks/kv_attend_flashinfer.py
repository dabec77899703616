"""FlashInfer's paged decode beside ours, on one GPU; rows for `benchmarks/results/kv-attend.csv`.

usage: python benchmarks/kv_attend_flashinfer.py --out ROWS.csv [--ours ROWS.csv] [--cases REGEX] [--build]

`--ours`: the rows that `benchmarks/kv_attend.py` wrote just before on the same machine, for speed-ups. FlashInfer reads BF16 or FP8 pages
of 16 and of 64 tokens, on tensor cores, captured in a graph over caches rotated out of L2; the faster counts. Its kernels are built by its
own just-in-time compiler, which `--build` does alone. `checked` is its error against FP32 attention over what its cache holds.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

import flashinfer
import torch
from kv_attend import CASES, Case, relative, timed

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.kernels.kv_attend.naive import softmax_attention

NAMES = ("b8_g4_d128_t32768", "b32_g4_d128_t8192", "b8_g8_d128_t32768", "b64_g8_d128_t4096", "b1_g8_d128_t131072", "b8_g4_d128_t2048")


def measure(case: Case, dtype: torch.dtype, page: int) -> tuple[float, float]:
    """(microseconds, error); pages lie in random order."""
    i32 = {"dtype": torch.int32, "device": "cuda"}
    each = -(-case.tokens // page)
    total = each * case.batch
    work = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "HND", use_tensor_cores=True)
    indices = torch.randperm(total, device="cuda").to(torch.int32)
    starts = torch.arange(case.batch + 1, **i32) * each
    last = torch.full((case.batch,), case.tokens - (each - 1) * page, **i32)
    heads = case.heads * case.group
    decode.plan(starts, indices, last, heads, case.heads, case.dim, page, q_data_type=torch.bfloat16, kv_data_type=dtype)
    size = 2 * total * case.heads * page * case.dim * dtype.itemsize
    shape = (total, 2, case.heads, page, case.dim)
    copies = min(24, max(2, -(-400_000_000 // size)))
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in range(copies)]
    q = torch.randn(case.batch, heads, case.dim, dtype=torch.bfloat16, device="cuda")
    out = decode.run(q, caches[0])
    worst = 0.0
    for b in range(min(case.batch, 4)):
        own = caches[0][indices[b * each : (b + 1) * each].long()].float()
        k, v = (own[:, i].transpose(0, 1).reshape(1, case.heads, -1, case.dim)[:, :, : case.tokens] for i in (0, 1))
        at = torch.arange(case.tokens, device="cuda")[None]
        want, _ = softmax_attention(q[b][None, :, None], k, v, at[:, -1:], at, scale=case.dim**-0.5)
        worst = max(worst, relative(out[b], want[0, :, 0]))
    return timed([lambda c=c: decode.run(q, c) for c in caches]), worst


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ours", type=Path)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--cases", default=".")
    ap.add_argument("--build", action="store_true")
    a = ap.parse_args()
    torch.manual_seed(0)
    cases = {c.name: c for c in CASES}
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    if a.build:
        for dtype in dtypes.values():
            print(measure(Case(1, 1, 4, 128, 256), dtype, 16), flush=True)
        return 0
    ours = {r["case"]: float(r["value"]) for r in csv.DictReader(a.ours.open()) if r["metric"] == "us"} if a.ours else {}
    if a.out is None:
        ap.error("--out ROWS.csv is missing")
    check_rows(a.out)
    for name in (n for n in NAMES if re.search(a.cases, n)):
        for kind, dtype in dtypes.items():
            us, error = min(measure(cases[name], dtype, page) for page in (16, 64))
            print(f"{name}: FlashInfer {kind} {us:.1f} us, error {error:.1e}", flush=True)
            if error > 2e-2:
                print(f"{name}: wrong, no row", flush=True)
                continue
            rows = [Row(name, f"flashinfer_{kind}_us", us, "us")]
            for ending in ("o8", "f72", "o0"):
                if f"{name}_{ending}" in ours:
                    suffix = "" if kind == "bf16" else "_fp8"
                    rows.append(Row(f"{name}_{ending}", f"speedup_vs_flashinfer{suffix}", us / ours[f"{name}_{ending}"], "x"))
            append_rows(a.out, "kv-attend", rows, machine=machine_name("cuda"), commit=a.commit, checked=f"error {error:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
