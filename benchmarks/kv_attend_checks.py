"""What the attention kernel promises beside its speed, on one GPU; rows for `benchmarks/results/kv-attend.csv`.

usage: python benchmarks/kv_attend_checks.py --out ROWS.csv [--commit ID] [--steps N] [--one] [--ncu CSV]

Ragged lengths and random block tables against equal lengths in order; a captured graph against eager calls over `--steps` steps in which
sequences grow, shrink, end and swap places; bytes that nobody wrote; peak memory; bytes read. `--one` makes one call on a cold cache and no
row: run it under `ncu --metrics dram__bytes_read.sum --csv`, and give that output to `--ncu`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from statistics import median

import torch
from kv_attend import SINKS, WINDOW, Cache, Case, book_for, layout_of, pages_of, relative, timed

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.kernels.kv_attend.op import kv_attend
from moe_prefetch.kv.format import PAGE, PageLayout

LONG = Case(8, 8, 4, 128, 32768)
Found = tuple[str, str, float, str, str]


def query(case: Case) -> torch.Tensor:
    return torch.randn(case.batch, case.heads * case.group, 1, case.dim, dtype=torch.bfloat16, device="cuda")


def ragged_lengths(case: Case) -> list[int]:
    """Lengths between a tenth of the mean and three times it, with the sum of equal ones."""
    share = torch.rand(case.batch, generator=torch.Generator().manual_seed(3)) ** 2 + 0.05
    tokens = (share / share.sum() * case.batch * case.tokens).long()
    tokens[0] += case.batch * case.tokens - int(tokens.sum())
    return tokens.tolist()


def ragged(rows: list[Found]) -> None:
    """In turns, since clocks and heat drift by more than what is looked for; medians of five rounds."""
    for group in (4, 8):
        case = Case(LONG.batch, LONG.heads, group, LONG.dim, LONG.tokens)
        layout = layout_of("o8", case.dim)
        book = book_for(layout, case.heads)
        base = pages_of(layout, case.heads, book, 64)
        q, calls, errors = query(case), {}, {}
        for name, lengths, shuffled in (
            ("equal", [case.tokens] * case.batch, False),
            ("random", [case.tokens] * case.batch, True),
            ("ragged", ragged_lengths(case), True),
        ):
            caches = [Cache(base, layout, book, case, lengths, shuffled=shuffled) for _ in range(3)]
            errors[name] = relative(caches[0].attend(q)[0], caches[0].reference(q)[0])
            assert errors[name] <= 2e-3, (name, errors[name])
            calls[name] = [lambda c=c, q=q: c.attend(q) for c in caches]
        rounds = [{name: timed(c, replays=15) for name, c in calls.items()} for _ in range(5)]
        us = {name: median(r[name] for r in rounds) for name in calls}
        for name in ("random", "ragged"):
            rows.append((f"{case.name}_o8", f"{name}_over_equal", us[name] / us["equal"], "x", f"error {errors[name]:.2e}, in turns"))
            print(f"{case.name}: {name} {us[name]:.1f} us, equal and in order {us['equal']:.1f}", flush=True)


def replay(rows: list[Found], steps: int) -> None:
    """Bitwise: a graph captured once, replayed with whatever lengths and tables lie in its tensors, and eager calls."""
    case = Case(8, 2, 4, 128, 6 * PAGE)
    layout = layout_of("o8", case.dim)
    book = book_for(layout, case.heads)
    base = pages_of(layout, case.heads, book, 32)
    cache = Cache(base, layout, book, case, [case.tokens] * case.batch)
    q = query(case)
    rest = {"scale": cache.scale}
    for _ in range(2):
        kv_attend(*cache.args(q), **rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kv_attend(*cache.args(q), **rest)
    g = torch.Generator().manual_seed(1)
    width, pool = cache.table.shape[1], len(cache.pool)
    most = width * PAGE
    length = torch.full((case.batch,), 100)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(steps):
        length += 1
        i = int(torch.randint(case.batch, (), generator=g))
        kind = int(torch.randint(6, (), generator=g))
        if kind == 0:
            length[i] = int(torch.randint(0, most + SINKS + WINDOW + 1, (), generator=g))
        elif kind == 1:
            length[i] = max(0, int(length[i]) - int(torch.randint(1, 200, (), generator=g)))
        elif kind == 2:
            length = length[torch.randperm(case.batch, generator=g)]
        length.clamp_(max=most + SINKS + WINDOW)
        stored = (length - SINKS - WINDOW).clamp(min=0)
        if step % 16 == 0:
            cache.table.copy_(torch.randint(pool, cache.table.shape, generator=g))
            q.copy_(torch.randn(q.shape, generator=g))
        cache.length.copy_(length)
        cache.stored.copy_(stored)
        cache.q_len.copy_(length.clamp(max=1))
        graph.replay()
        eager_out, eager_lse = kv_attend(*cache.args(q), **rest)
        wrong += (eager_out.view(torch.int32) != out.view(torch.int32)).sum() + (eager_lse.view(torch.int32) != lse.view(torch.int32)).sum()
    assert int(wrong) == 0, f"{int(wrong)} values of replays differ from eager calls"
    error = relative(out, cache.reference(q)[0])
    assert error <= 2e-3, error
    rows.append(("graph_replay", "equal_steps", steps, "steps", f"bitwise, last error {error:.2e}"))
    print(f"{steps} replays equal eager calls", flush=True)


def unused_bytes(rows: list[Found]) -> None:
    for kind in ("o8", "f72"):
        case = Case(4, 2, 8, 128, 900)
        layout = layout_of(kind, case.dim)
        book = book_for(layout, case.heads)
        cache = Cache(pages_of(layout, case.heads, book, 32), layout, book, case, [900, 333, 68, 1])
        q, outs = query(case), []
        for fill in (0x00, 0xFF):
            poison(cache, layout, fill)
            outs.append(kv_attend(*cache.args(q), scale=cache.scale))
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*outs, strict=True))
        rows.append((f"unused_bytes_{kind}", "changed_values", 0, "values", "0x00 and 0xFF, bitwise"))
    print("bytes that nobody wrote change nothing", flush=True)


def poison(cache: Cache, layout: PageLayout, fill: int) -> None:
    """Every byte that belongs to no token."""
    owned = torch.zeros(len(cache.pool), dtype=torch.bool)
    width = {"k_codes": layout.k_dim // 2, "k_scales": layout.k_blocks, "v_scales": layout.v_dim // 64, "k_outliers": 2 * layout.outliers}
    for b, stored in enumerate(cache.stored.tolist()):
        pages = cache.table[b, : -(-stored // PAGE)].tolist()
        owned[pages] = True
        if used := stored % PAGE:
            record = cache.pool[pages[-1]]
            for part, row in width.items():
                at, size = layout.offsets[part]
                record[:, at + used * row : at + size] = fill
            # values lie by channel, two tokens a byte: byte 16 a + 2 lane + h has tokens 16 a + 8 h + lane and 64 more
            at, size = layout.offsets["v_codes"]
            i = torch.arange(64, device=record.device)
            tau = i // 16 * 16 + i % 2 * 8 + i % 16 // 2
            keep = torch.where(tau < used, 0x71, 0) | torch.where(tau + 64 < used, 0x8E, 0)
            codes = record[:, at : at + size].view(len(record), -1, 64)
            codes.copy_((codes.int() & keep | fill & ~keep & 0xFF).to(torch.uint8))
            record[:, sum(layout.offsets["trailer"]) :] = fill
    cache.pool[~owned.to(cache.pool.device)] = fill


def memory(rows: list[Found]) -> None:
    for kind in ("o8", "f72"):
        layout = layout_of(kind, LONG.dim)
        book = book_for(layout, LONG.heads)
        base = pages_of(layout, LONG.heads, book, 16)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        cache = Cache(base, layout, book, LONG, [LONG.tokens] * LONG.batch)
        q = query(LONG)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            out, _ = kv_attend(*cache.args(q), scale=cache.scale)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        fp16 = 4 * LONG.batch * LONG.heads * LONG.tokens * LONG.dim
        error = relative(out, cache.reference(q)[0])
        assert error <= 2e-3, error
        moved = cache.bytes_read
        name, checked = f"{LONG.name}_{kind}", f"error {error:.2e}"
        rows.append((name, "peak_bytes_over_fp16_cache", peak / fp16, "share", checked))
        rows.append((name, "bytes_read", moved, "bytes", checked))
        rows.append((name, "bytes_read_saved", 1 - moved / fp16, "share", checked))
        print(f"{name}: peak {peak / 2**20:.0f} MiB, an FP16 cache {fp16 / 2**20:.0f}; a step reads {moved / 2**20:.1f} MiB", flush=True)
        del cache, out


def counted(path: Path) -> float:
    """Bytes that the kernels of one call read from DRAM, summed from ncu's CSV."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    scale = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    table = list(csv.DictReader(lines))
    return sum(float(r["Metric Value"].replace(",", "")) * scale[r["Metric Unit"]] for r in table)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--steps", type=int, default=10_000)
    ap.add_argument("--one", metavar="KIND")
    ap.add_argument("--ncu", nargs="*", default=[], metavar="KIND=CSV")
    a = ap.parse_args()
    torch.manual_seed(0)
    if a.one:
        layout = layout_of(a.one, LONG.dim)
        book = book_for(layout, LONG.heads)
        cache = Cache(pages_of(layout, LONG.heads, book, 8), layout, book, LONG, [LONG.tokens] * LONG.batch)
        q = query(LONG)
        kv_attend(*cache.args(q), scale=cache.scale)
        torch.cuda.synchronize()
        return 0
    if a.out is None:
        ap.error("--out ROWS.csv is missing")
    check_rows(a.out)
    rows: list[Found] = []
    ragged(rows)
    replay(rows, a.steps)
    unused_bytes(rows)
    memory(rows)
    for item in a.ncu:
        kind, _, path = item.partition("=")
        read, fp16 = counted(Path(path)), 4 * LONG.batch * LONG.heads * LONG.tokens * LONG.dim
        rows.append(
            (f"{LONG.name}_{kind}", "dram_bytes_saved", 1 - read / fp16, "share", "ncu dram__bytes_read.sum, all its kernels")
        )
        print(f"{kind}: {read / 2**20:.1f} MiB read from DRAM by the counter = {1 - read / fp16:.4f} fewer than FP16", flush=True)
    for case, metric, value, unit, checked in rows:
        append_rows(a.out, "kv-attend", [Row(case, metric, value, unit)], machine=machine_name("cuda"), commit=a.commit, checked=checked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
