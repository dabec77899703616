"""compute-sanitizer's memcheck over every GPU kernel that writes or reads a KV cache.

usage: python benchmarks/kv_memcheck.py [--jobs N] [--cases REGEX] [--seconds S] [--log FOLDER] [--only warm | check]

Every tensor is an allocation of its own, exactly as large as it is; shapes are small and odd, rows ragged, some of them empty; block tables
name no page behind a row's last one, numbers include NaN and some beyond FP16. Cases run once without the sanitizer, which compiles them
(`--only warm` stops there), then under it, in `--jobs` processes side by side (to start one takes 10 to 15 s), which begin no case after
three quarters of `--seconds` and are ended after them. A process of its own writes out of bounds and must be told so. The table at the end
says how many cases without an error launched a kernel; 0 is returned if no kernel is missing, that one error was found and no other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import moe_prefetch.kernels as kernels
from moe_prefetch.kernels.kv_attend.op import path_of
from moe_prefetch.kernels.kv_encode import fused
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.op import fused_for
from moe_prefetch.kernels.kv_encode.records import Book, arranged, book_shares, encode_naive, runs_for
from moe_prefetch.kernels.kv_slide.fused import slide
from moe_prefetch.kernels.kv_slide.naive import Slide
from moe_prefetch.kernels.kv_take.fused import take
from moe_prefetch.kernels.kv_turn.fused import turn
from moe_prefetch.kv.format import PAGE, PageLayout, format_of

DEVICE = "cuda"
HEADS, SINKS, WINDOW, NOWHERE = 3, 4, 37, 1 << 30
BOUNDS = "wrong"
Layout = tuple[str, int, int, int, int]  # format, K and V head dim, outliers, rope

ENCODED: dict[str, list[Layout]] = {
    "fused": [("fp4-72", 64, 64, 1, 0), ("fp4-72", 128, 128, 3, 0), ("fp4-quality", 128, 128, 8, 0)],
    "general": [("fp16", 80, 80, 0, 0), ("fp8", 128, 64, 0, 0), ("nvfp4", 64, 64, 0, 0), ("mxfp4", 256, 256, 0, 0), ("fp8", 512, 0, 0, 64)],
    "general_planes": [("fp4-72", 80, 80, 2, 0), ("fp4-quality", 256, 256, 8, 0), ("fp4-quality", 80, 80, 6, 0), ("fp4-72", 512, 0, 0, 64)],
    "pairs": [("fp8+fp4-72", 64, 64, 0, 0), ("fp4-quality+fp8", 128, 128, 4, 0)],
}
# layout, query heads per KV head, options
ATTENDED: list[tuple[Layout, int, dict[str, Any]]] = [
    *((("fp4-quality", 128, 128, out, 0), group, {}) for out, group in ((8, 4), (8, 8), (3, 4), (0, 5), (1, 1))),
    *((("fp4-72", 64, 64, 1, 0), group, {}) for group in (3, 8)),
    (("fp4-quality", 128, 128, 4, 0), 4, {}),
    (("fp4-quality", 128, 128, 8, 0), 4, {"draft": 3, "softcap": 20.0, "logits": True}),
    (("fp4-72", 64, 64, 1, 0), 5, {"draft": 8, "sliding": 150}),
    *(((kind, 128, 128, 0, 0), 4, {}) for kind in ("fp16", "fp8", "nvfp4", "mxfp4")),
    (("fp4-72-c64", 128, 128, 3, 0), 4, {}),
    (("fp4-72", 80, 80, 2, 0), 5, {"draft": 2, "logits": True}),
    (("fp4-quality", 256, 256, 8, 0), 8, {"sliding": 90}),
    (("fp8", 192, 128, 0, 0), 1, {"softcap": 15.0}),
    (("fp8+fp4-72", 64, 64, 0, 0), 4, {}),
    (("fp4-72", 512, 0, 0, 64), 16, {}),
    (("fp4-72", 512, 0, 0, 64), 40, {"logits": True}),
    (("fp4-72", 512, 0, 0, 64), 16, {"draft": 2}),
    (("fp16", 512, 0, 0, 64), 16, {}),
    (("fp8", 512, 0, 0, 64), 5, {"sliding": 150}),
    # scales among codes
    (("fp4-quality", 64, 64, 4, 0), 4, {}),
    (("fp4-quality", 80, 80, 6, 0), 5, {}),
    (("fp4-quality", 256, 256, 16, 0), 4, {"draft": 2}),
    (("fp4-quality+fp8", 64, 64, 4, 0), 4, {}),
]


def of(shape: Layout) -> PageLayout:
    kind, k_dim, v_dim, outliers, rope = shape
    return PageLayout(format_of(kind), k_dim, v_dim, outliers, rope)


def there(x: torch.Tensor) -> torch.Tensor:
    """Made on the host: no kernel but those that are checked is launched."""
    return x.contiguous().to(DEVICE)


def ints(x: Any) -> torch.Tensor:
    return there(torch.tensor(x, dtype=torch.int32))


def heads_of(layout: PageLayout) -> int:
    return 1 if layout.rope else HEADS


def book_of(layout: PageLayout) -> Book:
    heads, rand = heads_of(layout), lambda d: torch.rand(heads_of(layout), d) + 0.5
    channels = torch.stack([torch.randperm(layout.k_dim)[: layout.outliers].sort().values for _ in range(heads)]).to(torch.int32)
    if layout.outliers > 1:
        channels[0, -1] = -1
    channels = arranged(channels, layout)
    mean = torch.randn(heads, layout.k_dim) * (layout.rope == 0)
    k_weight, v_weight = book_shares(channels, rand(layout.k_dim), rand(layout.v_dim), layout)
    return channels, mean, rand(layout.k_dim), k_weight, rand(layout.v_dim), v_weight


def tokens(count: int, layout: PageLayout, *, odd: bool) -> list[torch.Tensor]:
    x = [torch.randn(count, heads_of(layout), d) for d in (layout.k_dim + layout.rope, layout.v_dim)]
    for y in x if odd else ():
        y.flatten()[::977] = float("nan")
        y.flatten()[5::991] = 1e30
    return x


# cases -----------------------------------------------------------------------------------------------------------------
def encode(shape: Layout, dtype: torch.dtype) -> None:
    layout = of(shape)
    book = tuple(there(x) for x in book_of(layout))
    write = fused_for(torch.device("cuda"), layout)
    assert write
    pool = there(empty_pages(4, heads_of(layout), layout))
    k, v = (there(x.to(dtype)) for x in tokens(431, layout, odd=True))
    for at, count in ((0, 150), (150, 1), (151, 72), (223, 208)):
        counts = write(pool, k, v, ints(runs_for([2, 0, 3, 1], at, count, at)), book, layout, most=min(count, PAGE))
    # an empty run between others touches no page
    counts = write(pool, k, v, ints([[NOWHERE, 0, 0, 0], [1, 40, 3, 88], [NOWHERE, 9, 7, 0]]), book, layout, most=PAGE)
    assert (counts.cpu() > 0).all(), "NaN and numbers beyond FP16 were not counted"


def attend(shape: Layout, group: int, options: dict[str, Any]) -> None:
    layout, (draft, logits) = of(shape), (options.get("draft", 1), options.get("logits", False))
    book, heads = book_of(layout), heads_of(layout)
    step = layout.format.append_group
    lengths = [391 + WINDOW, 0, 5, SINKS + WINDOW + PAGE, 1 + WINDOW]
    stored = [max(0, n - SINKS - WINDOW) // step * step for n in lengths]
    pages = [-(-n // PAGE) for n in stored]
    pool = empty_pages(sum(pages), heads, layout)
    table = torch.full((len(lengths), max(pages)), NOWHERE, dtype=torch.int32)
    ids = torch.randperm(sum(pages)).tolist()
    for b, n in enumerate(stored):
        mine = [ids.pop() for _ in range(pages[b])]
        table[b, : pages[b]] = torch.tensor(mine, dtype=torch.int32)
        if n:
            k, v = tokens(n, layout, odd=False)
            encode_naive(pool, k, v, torch.tensor(runs_for(mine, 0, n, 0), dtype=torch.int32), book, layout)
    ring = WINDOW + step + 3
    half = lambda n, d: there(torch.randn(len(lengths), heads, n, d).half())  # noqa: E731
    widths = layout.k_dim + layout.rope, layout.v_dim
    run = path_of(torch.device("cuda"), layout, group)
    out, _ = run(
        there(torch.randn(len(lengths), heads * group, draft, widths[0])), ints([min(draft, n) for n in lengths]), there(pool),
        there(table), ints(stored), ints(lengths), *(half(n, d) for n in (SINKS, ring) for d in widths),
        ints([1, 0, 2, ring - 1, 3]), tuple(there(x) for x in book), layout, scale=widths[0] ** -0.5,
        sliding=options.get("sliding", 0), softcap=options.get("softcap", 0.0),
        sink_H=there(torch.randn(heads * group)) if logits else None)  # fmt: skip
    assert out.cpu().isfinite().all(), "an output is not finite"


def step_of_a_static_cache(dims: tuple[int, int], new: int) -> None:
    rows, slots, layout = 5, WINDOW + 2 * new, PageLayout(format_of("fp4-72"), 64, 64, 1, 0)
    length = torch.tensor([WINDOW + SINKS + 128, WINDOW + SINKS, 2, 0, WINDOW + 200])
    stored, want = (length - WINDOW - SINKS).clamp(min=0), length + new
    half = lambda *shape: there(torch.randn(*shape).half())  # noqa: E731
    cache = Slide(
        *(half(rows, HEADS, slots, d) for d in dims), *(half(rows * HEADS * SINKS + 1, d) for d in dims),
        there(empty_pages(3 * rows, HEADS, layout)), there(empty_pages(1, HEADS, layout)),
        there(torch.randperm(2 * rows).view(rows, 2).to(torch.int32)), there(torch.arange(2 * rows, 3 * rows)), there(length),
        there(stored), there(torch.zeros(3, rows, dtype=torch.int32)))  # fmt: skip
    out = [there(torch.zeros(new, rows, HEADS, d).half()) for d in dims]
    k, v = (there(torch.randn(rows, new, HEADS, d)).transpose(1, 2) for d in dims)
    slide(cache, *out, ints([[[0] * 4] * rows] * new), k, v, WINDOW)
    assert torch.equal(cache.length_B.cpu(), want)


def into_a_window(dims: tuple[int, int], new: int) -> None:
    buffers = [there(torch.zeros(3, HEADS, new + 7, d).half()) for d in dims]
    counts = there(torch.zeros(2, dtype=torch.int64))
    k, v = (torch.randn(3, new, HEADS, d) for d in dims)
    k.flatten()[3], k.flatten()[1] = float("nan"), 1e30
    take(*buffers, counts, *(there(x).transpose(1, 2) for x in (k, v)), 7)
    assert counts.tolist() == [1, 1]


def rows_turned(dim: int, queries: int, wide: bool) -> None:
    x = there(torch.randn(3, queries, 2 * HEADS, dim)).transpose(1, 2)
    assert turn(x, there(torch.randn(HEADS, dim, dim)).transpose(1, 2), wide).cpu().isfinite().all()


@triton.jit
def out_of_bounds(x_ptr):
    tl.store(x_ptr + tl.arange(0, 32), 1.0)


def wrong() -> None:
    out_of_bounds[(1,)](there(torch.zeros(31)))
    torch.cuda.synchronize()


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for i, (shape, group, options) in enumerate(ATTENDED):
        named = " ".join(f"{k}={v}" for k, v in options.items())
        found[f"attend {i} {shape[0]} d{shape[1]} o{shape[3]} g{group} {named}".strip()] = partial(attend, shape, group, options)
    for kind, shapes in ENCODED.items():
        for shape in shapes:
            # FP32 tokens of `fused` take a kernel that compiles for minutes at the larger head dim
            more = (torch.float32,) if shape[1] == 64 else ()
            for dtype in (torch.bfloat16, torch.float16, *more) if kind == "fused" else (torch.bfloat16,):
                found[f"encode {kind} {shape[0]} d{shape[1]} {dtype}"] = partial(encode, shape, dtype)
    for new in (1, 3):
        found[f"slide {new}"] = partial(step_of_a_static_cache, (80, 64) if new > 1 else (64, 64), new)
    found["slide mla"] = partial(step_of_a_static_cache, (576, 0), 1)
    for new in (1, 21):
        found[f"take {new}"] = partial(into_a_window, (80, 96), new)
    for wide in (False, True):
        found[f"turn wide={wide}"] = partial(rows_turned, 80 if wide else 64, 3, wide)
    return found


# what is launched ------------------------------------------------------------------------------------------------------
def name_of(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__.removeprefix(kernels.__name__ + '.')}.{kernel.fn.__name__}"


def expected() -> set[str]:
    """Kernels that the host launches in the packages of the KV cache, by module."""
    found = set()
    root = Path(kernels.__path__[0])
    for path in sorted(root.glob("kv_*/*.py")):
        for dotted in re.findall(r"([\w.]+)\[\(.*\)\]\(", path.read_text()):
            at: Any = importlib.import_module(f"{kernels.__name__}.{path.parent.name}.{path.stem}")
            for part in dotted.split("."):
                at = getattr(at, part)
            found.add(name_of(at))
    return found


def run_here(names: list[str], until: float, out: Path) -> int:
    """Run cases one by one; a line for each that has ended: its name, error and kernels."""
    launched: set[str] = set()
    launch = JITFunction.run

    def noted(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        launched.add(name_of(self))
        return launch(self, *args, **kwargs)

    JITFunction.run = noted  # type: ignore[method-assign]
    # FP16 tokens and other outliers, too, which the op leaves to others until their bytes have been compared
    fused.fused_pages.PROVEN = None
    bad = 0
    for name in names:
        if time.time() > until:
            break
        launched.clear()
        began = time.time()
        torch.manual_seed(0)
        error = ""
        try:
            wrong() if name == BOUNDS else cases()[name]()
            torch.cuda.synchronize()
        except Exception as e:  # noqa: BLE001  one case must not hide the others
            error = f"{type(e).__name__}: {str(e)[-300:]}"
        bad += bool(error)
        with out.open("a") as f:
            f.write(json.dumps({"case": name, "error": error, "kernels": sorted(launched), "seconds": time.time() - began}) + "\n")
    return bad


def side_by_side(names: list[str], jobs: int, seconds: float, log: Path, *, checked: bool) -> list[dict[str, Any]]:
    """What `run_here` found in processes of their own; with `checked` also what the sanitizer said in each."""
    shares = [names[i::jobs] for i in range(jobs)]
    shares = [s for s in shares if s] + ([[BOUNDS]] if checked else [])
    kind, began, running = "check" if checked else "warm", time.time(), []
    for i, share in enumerate(shares):
        out = log / f"{kind}_{i}.jsonl"
        out.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--run", json.dumps(share), "--until", str(began + 0.75 * seconds), "--log", str(out)]
        if checked:
            names_of = "|".join(sorted({n.rpartition(".")[2] for n in expected()} | {"out_of_bounds"}))
            command = ["compute-sanitizer", "--tool", "memcheck", "--launch-timeout", "60", "--error-exitcode", "9",
                       "--kernel-name", f"regex={names_of}", *command]  # fmt: skip
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        with out.with_suffix(".log").open("w") as f:
            job = subprocess.Popen(command, env=env, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
        running.append((share, out, job))
    found = []
    for share, out, job in running:
        try:
            job.wait(max(0.0, began + seconds - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        text = out.with_suffix(".log").read_text()
        lines = [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else []
        summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
        said = int(summary[1]) if summary else None
        for name in share:
            line = next((x for x in lines if x["case"] == name), {"case": name, "error": "not run", "kernels": []})
            # errors of a process count against all of its cases
            found.append({**line, "errors": said, "log": out.with_suffix(".log").name})
    return found


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--jobs", type=int, default=12)
    ap.add_argument("--cases", default=".")
    ap.add_argument("--seconds", type=float, default=300)
    ap.add_argument("--log", type=Path, default=Path("kv-memcheck"))
    ap.add_argument("--only", choices=("warm", "check"))
    ap.add_argument("--run", help=argparse.SUPPRESS)
    ap.add_argument("--until", type=float, help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.run:
        return bool(run_here(json.loads(a.run), a.until, a.log))
    if a.only != "warm" and not shutil.which("compute-sanitizer"):
        ap.error("compute-sanitizer, part of the CUDA toolkit, is not on PATH")
    a.log.mkdir(parents=True, exist_ok=True)
    names = [n for n in cases() if re.search(a.cases, n)]
    if a.only != "check":
        broken = [x for x in side_by_side(names, a.jobs, a.seconds, a.log, checked=False) if x["error"]]
        for x in broken:
            print(f"without the sanitizer: {x['case']}: {x['error']}", flush=True)
        print(f"compiled: {len(names) - len(broken)} of {len(names)} cases", flush=True)
        if a.only == "warm":
            return bool(broken)
    found = side_by_side(names, a.jobs, a.seconds, a.log, checked=True)
    told = any(x["case"] == BOUNDS and x["errors"] for x in found)
    clean = [x for x in found if x["errors"] == 0 and not x["error"] and x["case"] != BOUNDS]
    for x in found:
        if x["case"] != BOUNDS and x not in clean:
            print(f"{x['case']}: {x['error'] or 'ran'}; the sanitizer: {x['errors']} errors ({x['log']})")
    seen = {k: sum(k in x["kernels"] for x in clean) for k in sorted(expected())}
    for kernel, count in seen.items():
        print(f"{kernel}: {count} cases without an error")
    print(f"{len(clean)} of {len(names)} cases clean, {sum(map(bool, seen.values()))} of {len(seen)} kernels seen; "
          f"the write out of bounds that was planted was {'found' if told else 'NOT FOUND'}")  # fmt: skip
    return not (told and len(clean) == len(names) and all(seen.values()))


if __name__ == "__main__":
    sys.exit(main())
