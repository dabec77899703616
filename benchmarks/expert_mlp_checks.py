"""What only a GPU can show of the kernels over expert records; each line says ok, or what is wrong. Exit code 1 when anything is.

usage: python benchmarks/expert_mlp_checks.py [--replays N] [--cases REGEX]      REGEX: of forms, `replays <form>`, `host`, `peer`

1. error against the law in FP64 for every model's form and 1 to 300 tokens;
2. a token's bits do not depend on its neighbours, whatever the number of tokens (and so the width of tiles);
3. captured graphs, of bf16 at few and at many tokens and of MXFP4 and FP8 at one, a few and more, replayed with other ids (masked and
   repeated ones among them), weights, hidden states and table entries (homes and copies), give eager's bits, and the allocator is not
   asked for anything;
4. local memory, page-locked host memory and, with two GPUs, the other GPU's memory give the same bits;
5. bytes between records stay as they were.
`compute-sanitizer --tool memcheck python benchmarks/expert_mlp_checks.py --replays 3 --cases 'mxfp4|bf16 bias|replays'` is the sixth.
"""

from __future__ import annotations

import argparse
import re
import sys

import torch

from moe_prefetch.bench.expert_mlp import BOUND, MODELS, Model, draw, in_place, random_block
from moe_prefetch.bench.kv_attend import relative
from moe_prefetch.kernels.expert_mlp import fused, grouped
from moe_prefetch.kernels.expert_mlp.naive import moe_records
from moe_prefetch.kernels.expert_mlp.record import Form

DEVICE = "cuda"
SMALL = {
    "bf16 bias": Model(Form("bfloat16", 200, 72, "bfloat16"), 20, 3),
    "fp16": Model(Form("float16", 264, 136, "float32"), 9, 2),
    "fp16 wide": Model(Form("float16", 520, 1032), 6, 3),
    "fp8 e8m0": Model(Form("fp8", 160, 144, "", "float8_e8m0fnu", 64), 12, 4),
    "mxfp4": Model(Form("mxfp4", 160, 96, "bfloat16"), 16, 4, limit=7.0),
}
MXFP4 = Model(Form("mxfp4", 672, 480, "bfloat16"), 24, 4, limit=7.0)
FP8 = Model(Form("fp8", 656, 480, "", "bfloat16", 128), 24, 4)
MANY = Model(Form("bfloat16", 512, 1032), 6, 3)
# One token: rows wide enough for the kernels of its own (`fused_token.py`), and not.
ONE = Model(Form("mxfp4", 672, 1568, "bfloat16"), 24, 4, limit=7.0)
REPLAYED = (("bf16", Model(Form("bfloat16", 512, 384), 24, 4), 9), ("bf16", MANY, 700), ("mxfp4 wide", ONE, 1), ("mxfp4", MXFP4, 1),
            ("mxfp4", MXFP4, 5), ("mxfp4", MXFP4, 40), ("fp8", FP8, 1), ("fp8", FP8, 5), ("fp8", FP8, 40))
FAULTS: list[str] = []


def told(what: str, right: bool, more: str = "") -> None:
    print(f"{'ok   ' if right else 'WRONG'} {what} {more}", flush=True)
    if not right:
        FAULTS.append(what)


def table_of(block: torch.Tensor) -> torch.Tensor:
    return torch.tensor([r.data_ptr() for r in block], dtype=torch.int64, device=DEVICE)


def errors_and_neighbours(name: str, model: Model) -> None:
    form = model.form
    dtype = torch.float16 if form.weights == "float16" else torch.bfloat16
    block = random_block(form, model.experts + model.shared, DEVICE)
    table, longest = table_of(block), 4096
    x = torch.randn(longest, form.hidden, device=DEVICE).to(dtype)
    ids, weights = draw(model, longest, 0, DEVICE)
    call = lambda n: fused.launch(x[:n], ids[:n], weights[:n], table, form, model.limit, 1.702)  # noqa: E731
    want = moe_records(x[:64], ids[:64], weights[:64], list(block), form, model.limit, 1.702, torch.float64)
    alone = torch.cat([fused.launch(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], table, form, model.limit, 1.702) for t in range(64)])
    for n in (1, 2, 7, 16, 63, 64, 128, 300, 1000, longest):
        out, some = call(n), min(n, 64)
        told(f"{name}, {n} tokens", relative(out[:some], want[:some]) <= BOUND, f"error {relative(out[:some], want[:some]):.1e}")
        far = (out[:some] != alone[:some]).any(-1)
        told(f"{name}, {n} tokens: bits as alone", not far.any(), f"{int(far.sum())} of {some} differ")
    if grouped.serves(form, dtype, list(block)):
        out = grouped.launch(x, ids, weights, list(block), form, model.limit, 1.702)
        told(f"{name}: grouped", relative(out[:64], want) <= 3 * BOUND, f"error {relative(out[:64], want):.1e}")


def replays(count: int, name: str, model: Model, tokens: int) -> None:
    form, what = model.form, f"{count} replays, {name}, {tokens} tokens"
    homes, copies = (random_block(form, model.experts, DEVICE) for _ in range(2))
    copies.copy_(homes)
    home_E, copy_E = table_of(homes), table_of(copies)
    table, x = home_E.clone(), torch.zeros(tokens, form.hidden, dtype=torch.bfloat16, device=DEVICE)
    ids, weights = draw(model, tokens, 0, DEVICE)
    run = lambda where: fused.launch(x, ids, weights, where, form, model.limit, 1.702)  # noqa: E731

    def feed(i: int) -> None:
        g = torch.Generator(DEVICE).manual_seed(i)
        # Every third time with repeated and masked ids.
        odd = torch.randint(-1, model.experts + 1, ids.shape, device=DEVICE, generator=g)
        ids.copy_(odd if i % 3 == 0 else draw(model, tokens, i, DEVICE)[0])
        weights.copy_(torch.rand(weights.shape, device=DEVICE, generator=g))
        x.copy_(torch.randn(x.shape, device=DEVICE, generator=g).to(x.dtype))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(table)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(table)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(count):
        feed(i)
        torch.where(torch.rand(model.experts, device=DEVICE) < 0.5, home_E, copy_E, out=table)
        graph.replay()
        # Eager, from the homes.
        wrong += (out != run(home_E)).any()
    told(f"{what}: ids, weights and addresses changed", int(wrong) == 0, f"{int(wrong)} differ from eager")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    told(f"{what}: no allocation", torch.cuda.memory_stats()["allocation.all.allocated"] == before)


def guards() -> None:
    form = Form("mxfp4", 160, 96, "bfloat16")
    size = form.layout().nbytes
    whole = torch.full((8 * (size + 4096) + 4096,), 0xA5, dtype=torch.uint8, device=DEVICE)
    block = random_block(form, 8, DEVICE)
    spread = [whole[4096 + e * (size + 4096) : 4096 + e * (size + 4096) + size] for e in range(8)]
    for mine, record in zip(spread, block, strict=True):
        mine.copy_(record)
    before = whole.clone()
    x = torch.randn(33, 160, device=DEVICE).to(torch.bfloat16)
    ids, weights = draw(Model(form, 8, 3), 33, 0, DEVICE)
    table = torch.tensor([r.data_ptr() for r in spread], dtype=torch.int64, device=DEVICE)
    fused.launch(x, ids, weights, table, form, 7.0, 1.702)
    told("bytes of records and between them", torch.equal(whole, before))


def main() -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("--replays", type=int, default=10_000)
    ap.add_argument("--cases", default=".")
    a = ap.parse_args()
    torch.manual_seed(0)
    if fused.GLUON:
        # Whatever they can serve is compared here, not only what was before.
        fused.fused_token.PROVEN, fused.fused_prefill.PROVEN = None, ("bfloat16", "float16")
    guards()
    for name, model in {**SMALL, **MODELS}.items():
        if re.search(a.cases, name):
            errors_and_neighbours(name, model)
            torch.cuda.empty_cache()
    for name, model, tokens in REPLAYED:
        if re.search(a.cases, f"replays {name}"):
            replays(a.replays, name, model, tokens)
    for home in ["host"] + ["peer"] * (torch.cuda.device_count() > 1):
        if re.search(a.cases, home):
            _, gbps, same = in_place(home, 16, print)
            told(f"in place from {home}: same bits", same, f"{gbps:.0f} GB/s")
    print(f"{len(FAULTS)} faults", *FAULTS, sep="\n  ")
    return bool(FAULTS)


if __name__ == "__main__":
    sys.exit(main())
