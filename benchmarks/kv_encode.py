"""Compare every encoder of pages with the naive law on one GPU, byte by byte, and time those of FP4 pages; rows for
`benchmarks/results/kv-attend.csv`.

usage: python benchmarks/kv_encode.py --out ROWS.csv [--commit ID] [--blocks N] [--layouts REGEX] [--jobs N] [--all] [--tokens float16]

`--blocks` random scale blocks for `fp4-72` and `fp4-quality` at head dims 64 and 128 (whose times are taken, of bf16 tokens), a hundredth
of them for every other layout; each with every bf16 (or fp16) value in every lane, and appends of 1 to 128 tokens. Every difference is
named, and the last line says which encoders `PROVEN` in `kernels/kv_encode/op.py` may name. Medians over replays of a CUDA graph.
`copy_share` = (bytes read + bytes written) / time over the rate of the fastest device-to-device copy of the same run. `--jobs` processes
compile beforehand. `--all` lets the Gluon encoder (`fused_pages.py`) write every layout it can, not only those of its PROVEN.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
from kv_attend import timed

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.kernels.kv_encode import fused, general, general_planes
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import Book, arranged, encode_naive, neutral_book, runs_for
from moe_prefetch.kv.format import PAGE, PageLayout, format_of, layout_for

HEADS, STRIDE = 8, 16
TOKENS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TIMED = [(kind, dim) for kind in ("fp4-72", "fp4-quality") for dim in (64, 128)]


def cases() -> dict[str, tuple[ModuleType, PageLayout]]:
    """Layouts by name, and the encoder that writes each."""
    kinds = ("fp4-72", "fp4-quality", "fp16", "fp8", "nvfp4", "mxfp4")
    shapes = [(kind, d, d, 0) for kind in kinds for d in (64, 80, 96, 112, 128, 192, 256)]
    shapes += [(kind, 512, 0, 64) for kind in kinds] + [("fp8", 192, 128, 0)]
    found = {}
    for kind, k_dim, v_dim, rope in shapes:
        layout = layout_for(format_of(kind), k_dim, v_dim, rope=rope)
        module = next((m for m in (fused, general, general_planes) if m.serves(layout)), None)
        name = f"{kind}_mla{k_dim}" if rope else f"{kind}_d{k_dim}" + (f"_v{v_dim}" if v_dim != k_dim else "")
        if module:
            found[name] = (module, layout)
    # other numbers of outliers than a format's own
    for dim, outliers in ((64, 0), (64, 2), (64, 4), (64, 8), (64, 16), (80, 6), (128, 0), (128, 2), (128, 8), (128, 16), (256, 16)):
        module = fused if dim in (64, 128) else general_planes
        found[f"fp4-quality_d{dim}_o{outliers}"] = (module, PageLayout(format_of("fp4-quality"), dim, dim, outliers))
    return found


def heads_of(layout: PageLayout) -> int:
    return 1 if layout.rope else HEADS


def book_of(layout: PageLayout) -> Book:
    book, heads = neutral_book(layout, heads_of(layout), "cuda"), heads_of(layout)
    channels = torch.stack([torch.randperm(layout.k_dim, device="cuda")[: layout.outliers] for _ in range(heads)])
    return (arranged(channels, layout), *book[1:])


def runs_of(pages: list[int], start: int, count: int, source: int = 0) -> torch.Tensor:
    return torch.tensor(runs_for(pages, start, count, source), dtype=torch.int32, device="cuda")


def differs(
    module: ModuleType, layout: PageLayout, book: Book, blocks: int, slots: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[int, list[str]]:
    """Blocks of tokens in `dtype` compared, and what is not as the law has it; `slots` of a page are filled one by one."""
    done, faults, heads = 0, [], heads_of(layout)
    widths = layout.k_dim + layout.rope, layout.v_dim
    a_token = max(1, layout.k_dim // 32 + layout.v_dim // 64)
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    pages = 64 if not layout.rope else 512
    step = pages * PAGE

    def tokens(count: int) -> list[torch.Tensor]:
        loud = torch.exp2(torch.randint(-20, 15, (count, 1, 1), device="cuda"))
        return [torch.randn(count, heads, w, device="cuda").mul_(loud).to(dtype) for w in widths]

    def compare(what: str, x: list[torch.Tensor], calls: list[tuple[torch.Tensor, int]], size: int) -> None:
        law = empty_pages(size, heads, layout, "cuda")
        ours = law.clone()
        for runs, most in calls:
            counts = encode_naive(law, *x, runs, book, layout), module.encode(ours, *x, runs, book, layout, most=most)
            if not torch.equal(*counts):
                faults.append(f"{what}: counts {counts[1].tolist()}, the law's {counts[0].tolist()}")
        if not torch.equal(law, ours):
            at = (law != ours).nonzero()
            faults.append(f"{what}: {len(at)} bytes differ, the first at page, head, byte {at[0].tolist()}")

    parts = ((0, 150), (150, 1), (151, 1), (152, 32), (184, 72), (256, 128))
    compare("appends", tokens(384), [(runs_of([2, 0, 1], at, n, at), min(n, PAGE)) for at, n in parts], 3)
    # 64 sequences, a token each
    ones = [torch.tensor([[i, s, 64 * s + i, 1] for i in range(64)], dtype=torch.int32, device="cuda") for s in range(slots)]
    compare("token by token", tokens(64 * slots), [(runs, 1) for runs in ones], 64)
    for turn in range(max(STRIDE, -(-blocks // (step * heads * a_token)))):
        x = tokens(step)
        for y in x:
            # In every 16th lane all 65,536 values, over the tokens and heads of this turn, in another order each.
            for lane in range(turn, y.shape[2], STRIDE) if turn < STRIDE else ():
                y.view(-1, y.shape[2])[:, lane] = every.roll(977 * lane)
        compare(f"turn {turn}", x, [(runs_of(list(range(pages)), 0, step), PAGE)], pages)
        done += step * heads * a_token
        if faults:
            break
    return done, faults


def speed(name: str, layout: PageLayout, book: Book, copy_rate: float) -> list[tuple[str, str, float, str]]:
    (kind, shape), dim = name.split("_d"), layout.k_dim
    pool = empty_pages(256, HEADS, layout, "cuda")
    # three prompts in turn: none is in L2
    sets = [[torch.randn(32768, HEADS, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv"] for _ in range(3)]
    k, v = sets[0]
    one = torch.tensor([[i, 5, i, 1] for i in range(64)], dtype=torch.int32, device="cuda")
    whole = runs_of(list(range(256)), 0, 32768)
    append = timed([lambda: fused.encode(pool, k, v, one, book, layout, most=1)])
    prompt = timed([lambda k=k, v=v: fused.encode(pool, k, v, whole, book, layout) for k, v in sets])
    share = (2 * k.nbytes + 256 * HEADS * layout.page_bytes) / prompt / 1e3 / copy_rate
    print(f"{name}: append of 64 {append:.1f} us, prompt of 32k {prompt:.0f} us = {share:.2f} of the copy rate", flush=True)
    end = f"d{shape}_{kind}"
    whole_case = f"prompt_32k_{end}"
    return [(f"append_b64_{end}", "us", append, "us"), (whole_case, "us", prompt, "us"), (whole_case, "copy_share", share, "share")]


def warm(names: list[str], dtype: torch.dtype) -> None:
    for name in names:
        module, layout = cases()[name]
        widths = layout.k_dim + layout.rope, layout.v_dim
        x = [torch.zeros(PAGE, heads_of(layout), w, dtype=dtype, device="cuda") for w in widths]
        pool = empty_pages(1, heads_of(layout), layout, "cuda")
        for n in (1, 72, PAGE):
            module.encode(pool, *x, runs_of([0], 0, n), neutral_book(layout, heads_of(layout), "cuda"), layout, most=n)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--blocks", type=int, default=10**8)
    ap.add_argument("--layouts", default=".")
    ap.add_argument("--jobs", type=int, default=0)
    ap.add_argument("--all", action="store_true")
    ap.add_argument("--tokens", choices=TOKENS, default="bfloat16")
    ap.add_argument("--warm", nargs="*", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.all:
        fused.fused_pages.PROVEN = None
    if a.warm is not None:
        warm(a.warm, TOKENS[a.tokens])
        return 0
    check_rows(a.out)
    names = [n for n in cases() if re.search(a.layouts, n)]
    same = [sys.executable, __file__, "--out", str(a.out), "--tokens", a.tokens, *["--all"] * a.all]
    jobs = [subprocess.Popen([*same, "--warm", *names[i :: a.jobs]]) for i in range(a.jobs)]
    for job in jobs:
        job.wait()
    torch.manual_seed(0)
    source, target = torch.randn(1 << 29, device="cuda").chunk(2)
    # in a graph a copy is one of the copy engine's, which is slower than a kernel's
    copies = (lambda x=source, y=target: y.copy_(x), lambda x=source, y=target: torch.mul(x, 1.0, out=y))
    copy_rate = 2 * source.nbytes / min(timed([f]) for f in copies) / 1e3
    print(f"copy: {copy_rate:.0f} GB/s", flush=True)
    del source, target
    right: dict[str, bool] = {}
    for name in names:
        module, layout = cases()[name]
        book, encoder = book_of(layout), module.__name__.rpartition(".")[2]
        fast = tuple(name.split("_d")) in {(k, str(d)) for k, d in TIMED}
        try:
            size, slots = (a.blocks, PAGE) if fast else (a.blocks // 100, 12)
            blocks, faults = differs(module, layout, book, size, slots, TOKENS[a.tokens])
        except Exception as error:  # noqa: BLE001  one layout must not hide the others
            blocks, faults = 0, [f"{type(error).__name__}: {str(error)[-300:]}"]
        right[encoder] = right.get(encoder, True) and not faults
        print(f"{name}: {encoder}, {blocks:,} blocks", "; ".join(faults) or "equal", flush=True)
        figures = speed(name, layout, book, copy_rate) if module is fused and a.tokens == "bfloat16" else []
        if not faults:
            append_rows(a.out, "kv-encode", [Row(*figure) for figure in figures], machine=machine_name("cuda"), commit=a.commit,
                        checked=f"{blocks} blocks equal")
    print("PROVEN =", tuple(sorted(k for k, v in right.items() if v)))
    return not all(right.values())


if __name__ == "__main__":
    sys.exit(main())
