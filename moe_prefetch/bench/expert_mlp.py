"""Time a MoE layer from records on one GPU, and write rows for `benchmarks/results/expert-mlp.csv`.

usage: moe-prefetch bench expert-mlp --out ROWS.csv [--cases REGEX] [--commit ID] [--set NAME=INT ...]

A case is a model's layer and a number of tokens, `<model>_t<tokens>`; each call in the timed CUDA graph has other random ids, so that
weights are not in L2. `us` is everything from ids to the output. Beside it stand, in the same run: torch._grouped_mm (tokens sorted on the
device), a loop over experts whose token lists are known beforehand (which flatters it), and a copy within HBM. `hbm_fraction` counts each
distinct expert's bytes once, over the rate of that copy (read + write). Baselines of quantised models multiply BF16 copies of the weights:
PyTorch has nothing closer. `host` and `peer` read all experts in place.

A case gets rows only when its output is right: `checked` is the error of up to 64 tokens against the law in FP64 and must stay within the
rounding of BF16; a token alone must have the same bits as among the others (`batch_invariant`, a row of its own).
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

from ..kernels.expert_mlp import fused, grouped
from ..kernels.expert_mlp.naive import gated, moe_records, weights_of
from ..kernels.expert_mlp.record import LINE, Form, tiled_bytes
from .kv_attend import relative, set_constants, stamp_of, timed
from .rows import add_rows, check_rows, choice

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BOUND = 6e-3
DRAWS = 6
DEVICE = "cuda"


@dataclass(frozen=True)
class Model:
    """`shared`: records that every token uses, beside `top_k` of `experts`."""

    form: Form
    experts: int
    top_k: int
    shared: int = 0
    limit: float = 0.0


MODELS = {
    "qwen3-30b-a3b": Model(Form("bfloat16", 2048, 768), 128, 8),
    "deepseek-v2-lite": Model(Form("bfloat16", 2048, 1408), 64, 6, shared=2),
    "mixtral-8x7b": Model(Form("bfloat16", 4096, 14336), 8, 2),
    "gpt-oss-120b": Model(Form("mxfp4", 2880, 2880, "bfloat16"), 128, 4, limit=7.0),
    "qwen3-30b-a3b-fp8": Model(Form("fp8", 2048, 768, "", "bfloat16", 128), 128, 8),
    "deepseek-v3-fp8": Model(Form("fp8", 7168, 2048, "", "float32", 128), 256, 8),
}


def random_block(form: Form, experts: int, device: torch.device | str) -> torch.Tensor:
    """Records one after another, uint8 [E, record]."""
    layout = form.layout()
    raw = torch.zeros(experts * layout.nbytes + LINE, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % LINE
    block_EB = raw[start : start + experts * layout.nbytes].view(experts, layout.nbytes)
    for record in block_EB:
        for name, v in layout.views(record).items():
            if v.dtype == torch.uint8:
                v.copy_(torch.randint(118, 123, v.shape, dtype=torch.uint8) if name.endswith("scale") else
                        torch.randint(0, 256, v.shape, dtype=torch.uint8, device=device))
            elif v.dtype == torch.float8_e4m3fn:
                rows, columns = v.shape[1], form.hidden if name == "gate_up" else form.width
                codes = (torch.randn(rows, columns, device=device) * 4).to(v.dtype).view(torch.uint8)
                v.view(torch.uint8).copy_(tiled_bytes(codes))
            elif name.endswith("scale"):
                v.copy_(torch.rand(v.shape, device=device) * 0.01)
            else:
                v.copy_((torch.randn(v.shape, device=device) * v.shape[-1] ** -0.5).to(v.dtype))
    return block_EB


def draw(model: Model, tokens: int, seed: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids without repetition, shared records appended, and weights."""
    g = torch.Generator(device=device).manual_seed(seed)
    ids = torch.rand(tokens, model.experts, device=device, generator=g).topk(model.top_k).indices
    shared = torch.arange(model.experts, model.experts + model.shared, device=device).expand(tokens, model.shared)
    weights = torch.rand(tokens, model.top_k + model.shared, device=device, generator=g)
    return torch.cat([ids, shared], 1).contiguous(), weights


def copy_rate(device: torch.device | str, nbytes: int = 4 << 30) -> float:
    """Bytes a second, read and written, of a copy within the device's memory. Not in a graph, where a copy engine does it, more slowly."""
    a, b = (torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(i) for i in (0, 1))
    took = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a.copy_(b)
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    return 2 * nbytes / sorted(took)[len(took) // 2] * 1e3


def dense(form: Form, block_EB: torch.Tensor) -> dict[str, torch.Tensor]:
    """BF16 matrices [E, rows, columns] and biases, as a model keeps them."""
    if form.weights == "bfloat16":
        return {p.name: grouped.matrices(block_EB, form, p.name).contiguous() for p in form.layout().parts[:-1]}
    found = [{n: w.to(torch.bfloat16) for n, w in weights_of(r, form).items()} for r in block_EB]
    return {n: torch.stack([w[n] for w in found]) for n in found[0]}


def by_grouped_mm(x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, w: dict[str, torch.Tensor],
                  limit: float) -> torch.Tensor:
    """The usual way: sort, two grouped products, weigh, put back, add."""
    experts, (tokens, top_k) = len(w["gate_up"]), ids_TK.shape
    expert_P, order_P = ids_TK.reshape(-1).sort()
    ends_E = torch.searchsorted(expert_P, torch.arange(experts, device=x_TD.device), right=True).to(torch.int32)
    y = torch._grouped_mm(x_TD[order_P // top_k], w["gate_up"].mT, offs=ends_E)
    y = gated(y if "gate_up_bias" not in w else y + w["gate_up_bias"][expert_P], limit, 1.702)
    y = torch._grouped_mm(y, w["down"].mT, offs=ends_E)
    y = y if "down_bias" not in w else y + w["down_bias"][expert_P]
    back = torch.empty_like(y)
    back[order_P] = y
    return (back.view(tokens, top_k, -1) * weights_TK[..., None]).sum(1).to(x_TD.dtype)


def by_loop(ids_TK: torch.Tensor, w: dict[str, torch.Tensor], limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """One expert after another; who goes where is worked out now."""
    places = [(e, *(ids_TK == e).nonzero(as_tuple=True)) for e in ids_TK.unique().tolist()]

    def run(x_TD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x_TD)
        for e, t, k in places:
            h = gated(linear(x_TD[t], w["gate_up"][e], w["gate_up_bias"][e] if "gate_up_bias" in w else None), limit, 1.702)
            y = linear(h, w["down"][e], w["down_bias"][e] if "down_bias" in w else None)
            out.index_add_(0, t, (y * weights_TK[t, k, None]).to(out.dtype))
        return out

    return run


def in_place(home: str, tokens: int, say: Callable[..., None]) -> tuple[float, float, bool]:
    """(us, GB/s, same bits as from local memory) of 16 experts of 6.3 MB read where they are: pinned host memory or the other GPU."""
    form, experts = Form("bfloat16", 2048, 512), 16
    local = random_block(form, experts, "cuda:0")
    if home == "host":
        raw = torch.empty(local.numel() + LINE, dtype=torch.uint8, pin_memory=True)
    else:
        raw = torch.empty(local.numel() + LINE, dtype=torch.uint8, device="cuda:1")
        # A copy in each direction switches peer access on.
        torch.ones(1, device="cuda:0").copy_(raw[:1].float())
        raw[:1].float().copy_(torch.ones(1, device="cuda:0"))
    start = -raw.data_ptr() % LINE
    far = raw[start : start + local.numel()].view(local.shape)
    far.copy_(local)
    torch.cuda.synchronize()
    x = torch.randn(tokens, form.hidden, device="cuda:0").to(torch.bfloat16)
    ids = torch.arange(tokens * 8, device="cuda:0").view(tokens, 8) % experts
    weights = torch.rand(tokens, 8, device="cuda:0")
    at = lambda block: torch.tensor([r.data_ptr() for r in block], dtype=torch.int64, device="cuda:0")  # noqa: E731
    call = lambda table: fused.launch(x, ids, weights, table, form, 0.0, 1.0)  # noqa: E731
    same = torch.equal(call(at(far)), call(at(local)))
    table = at(far)
    us = timed([lambda: call(table)])
    say(f"in place from {home}: {us:.0f} us, same bits {same}")
    return us, len(ids.unique()) * form.bytes_read / us / 1e3, same


def measure(model: Model, block_EB: torch.Tensor, plain: dict[str, torch.Tensor], tokens: int,
            rate: float) -> tuple[float, float, list[tuple[str, float, str]]]:
    """One case: (error, error of torch._grouped_mm, figures). Nothing is timed when the error is beyond the bound."""
    form, limit = model.form, model.limit
    table = torch.tensor([r.data_ptr() for r in block_EB], dtype=torch.int64, device=DEVICE)
    x = torch.randn(tokens, form.hidden, device=DEVICE).to(torch.bfloat16)
    draws = [draw(model, tokens, seed, DEVICE) for seed in range(DRAWS)]
    ids, weights = draws[0]
    out, some = fused.launch(x, ids, weights, table, form, limit, 1.702), min(64, tokens)
    want = moe_records(x[:some], ids[:some], weights[:some], list(block_EB), form, limit, 1.702, torch.float64)
    err = relative(out[:some], want)
    if not err <= BOUND:
        return err, 0.0, []
    theirs = relative(by_grouped_mm(x, ids, weights, plain, limit)[:some], want)
    alone = all(torch.equal(fused.launch(x[i], ids[i], weights[i], table, form, limit, 1.702), out[i])
                for i in (slice(t, t + 1) for t in {0, tokens // 2, tokens - 1}))
    us = timed([lambda d=d: fused.launch(x, *d, table, form, limit, 1.702) for d in draws])
    grouped_us = timed([lambda d=d: by_grouped_mm(x, *d, plain, limit) for d in draws], 5)
    loops = [(by_loop(ids, plain, limit), weights) for ids, weights in draws]
    loop_us = timed([lambda f=f, w=w: f(x, w) for f, w in loops], 5)
    distinct = sum(len(ids.unique()) for ids, _ in draws) / len(draws)
    fraction = distinct * form.bytes_read / us * 1e6 / rate
    return err, theirs, [("us", us, "us"), ("hbm_fraction", fraction, "share"), ("ratio_vs_best", us / min(grouped_us, loop_us), "x"),
                         ("grouped_mm_us", grouped_us, "us"), ("loop_us", loop_us, "us"), ("batch_invariant", float(alone), "bool")]


def main(argv: list[str] | None = None, say: Callable[..., None] = print) -> int:
    ap = argparse.ArgumentParser(prog="expert-mlp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    ap.add_argument("--cases", default=".")
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--set", nargs="*", default=[], help="constants of the fused module, NAME=INT")
    a = ap.parse_args(argv)
    if not torch.cuda.is_available():
        ap.error("these figures need a GPU")
    set_constants(fused, a.set, ap.error)
    wanted = choice(a.cases, "bench expert-mlp --cases")
    torch.manual_seed(0)
    stamp = stamp_of(a.commit)
    check_rows(Path(a.out))
    rate = copy_rate(DEVICE)
    say(f"copy within HBM: {rate / 1e12:.2f} TB/s read + write")

    def write(case: str, checked: str, figures: list[tuple[str, float, str]]) -> None:
        # Written as it grows: a run that is cut off has not been for nothing.
        add_rows(Path(a.out), [{"bench": "expert-mlp", "case": case, "metric": m, "value": f"{v:.4g}", "unit": u, **stamp,
                                "checked": checked} for m, v, u in figures])

    write("hbm_copy", "a copy", [("gbps", rate / 1e9, "GB/s")])
    say(f"{'case':28s} {'us':>8s} {'of HBM':>7s} {'grouped':>8s} {'loop':>8s} {'ratio':>6s}  error (grouped_mm's)  alone")
    for name, model in MODELS.items():
        todo = [t for t in TOKENS if wanted.search(f"{name}_t{t}")]
        if not todo:
            continue
        block_EB = random_block(model.form, model.experts + model.shared, DEVICE)
        plain = dense(model.form, block_EB)
        for tokens in todo:
            case = f"{name}_t{tokens}"
            err, theirs, figures = measure(model, block_EB, plain, tokens, rate)
            if not err <= BOUND:
                say(f"{case}: wrong by {err:.2e}, no row")
                continue
            f = {m: v for m, v, _ in figures}
            say(f"{case:28s} {f['us']:8.1f} {f['hbm_fraction']:7.3f} {f['grouped_mm_us']:8.1f} {f['loop_us']:8.1f}",
                f"{f['ratio_vs_best']:6.2f}  {err:.1e} ({theirs:.1e})  {bool(f['batch_invariant'])}")
            write(case, f"error {err:.2e}", figures)
        del block_EB, plain
        torch.cuda.empty_cache()
    for home in ("host", "peer"):
        if not wanted.search(home) or (home == "peer" and torch.cuda.device_count() < 2):
            continue
        us, gbps, same = in_place(home, 16, say)
        if same:
            write(f"in_place_{home}", "same bits as local", [("us", us, "us"), ("gbps", gbps, "GB/s")])
    return 0
