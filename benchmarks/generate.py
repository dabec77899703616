"""Time greedy `generate` of transformers models over our KV cache and over DynamicCache with SDPA; compare logits and tokens first.

usage: python benchmarks/generate.py --out ROWS.csv [--models smolmoe,qwen3moe] [--contexts 2048,8192,32768]
           [--formats fp8,fp4-72,fp4-quality] [--batch 1,8] [--layers 12] [--tokens 96] [--repeats 3] [--prove] [--tensors] [--commit ID]

Models: `smolmoe` (its real weights), `qwen3moe` (random weights, the widths of Qwen3-30B-A3B, `--layers` of its 48), `tiny` (for a run
without a GPU, which writes no rows). Before a case is timed, `STEPS` steps are run teacher-forced over DynamicCache, over decoded pages
and over pages: attention over pages may be no farther (KL) from the same bytes decoded than these are from exact keys. A case that is
writes no row. Times are between the ends of successive steps of `generate`, by events on the device: median, mean (pages are written
once in `kv.settle` steps), and the prompt.

--prove    compare the fused encoder and `kv_take` with their laws here, byte by byte, and use those that are equal
--tensors  also time the cache over decoded tensors, which is what other attention implementations get
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM, StoppingCriteria, StoppingCriteriaList

from moe_prefetch.bench.rows import Row, append_rows, machine_name
from moe_prefetch.config import KVConfig
from moe_prefetch.integrations.transformers_cache import PagedLayer, calibrate, make_cache
from moe_prefetch.kernels.kv_encode import op as encode_op
from moe_prefetch.kernels.kv_encode.naive import empty_pages
from moe_prefetch.kernels.kv_encode.records import encode_naive, neutral_book, runs_for
from moe_prefetch.kernels.kv_take import op as take_op
from moe_prefetch.kernels.kv_take.naive import take_naive
from moe_prefetch.kv.format import PAGE, PageLayout

STEPS = 16  # compared
SKIP = 8  # first steps of a run that are not timed
FLOOR = 1e-3  # KL: what another order of sums in BF16 does, through a router's near-ties


class Ticks(StoppingCriteria):
    """Notes when each step ends."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.at = device, [self.now(device)]

    @staticmethod
    def now(device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at.append(self.now(self.device))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def ms(self) -> list[float]:
        if self.device.type != "cuda":
            return [(b - a) * 1e3 for a, b in zip(self.at, self.at[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.at, self.at[1:], strict=False)]


def model_of(name: str, layers: int, device: str) -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    if name == "smolmoe":
        from moe_prefetch.integrations import smolmoe

        model = smolmoe.load(dtype)[0]
    else:
        real = name == "qwen3moe"
        config = Qwen3MoeConfig(
            vocab_size=151936 if real else 512,
            hidden_size=2048 if real else 128,
            num_hidden_layers=layers if real else 2,
            num_attention_heads=32 if real else 4,
            num_key_value_heads=4 if real else 2,
            head_dim=128 if real else 64,
            intermediate_size=6144 if real else 256,
            moe_intermediate_size=768 if real else 64,
            num_experts=128 if real else 4,
            num_experts_per_tok=8 if real else 2,
            norm_topk_prob=True,
            max_position_embeddings=40960,
            initializer_range=0.02 if real else 0.2,
            dtype=dtype,
        )
        with torch.device(device):
            model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def make(model: Any, kind: str, stats: Any) -> Any:
    """The cache of a kind (`dynamic`, a format, or a format and `_tensors`), and the attention that goes with it."""
    if kind == "dynamic":
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config)
    format, _, tensors = kind.partition("_")
    if tensors:
        model.set_attn_implementation("sdpa")
    kv = KVConfig(format=format, attention="tensors" if tensors else "pages")
    # Format fp16 is configured like any other here.
    return make_cache(model, kv, stats)


def forced(model: Any, kind: str, stats: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Log-probabilities [B, STEPS, V] of steps that are fed the given tokens."""
    cache, out = make(model, kind, stats), []
    with torch.no_grad():
        model(input_ids=ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
        for at in range(prompt, prompt + STEPS):
            out.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[:, -1].float().log_softmax(-1))
    if kind != "dynamic":
        want = "tensors" if kind.endswith("_tensors") else "pages"
        assert all(x.attention == want for x in cache.layers if isinstance(x, PagedLayer)), [x.attention for x in cache.layers]
    return torch.stack(out, 1)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


def run(model: Any, kind: str, stats: Any, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[float], dict[str, float]]:
    """Tokens, milliseconds of prompt and steps, and memory of one greedy run."""
    cuda = ids.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    cache, ticks = make(model, kind, stats), Ticks(ids.device)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([ticks]),
        )
    held = cache.held_bytes() if kind != "dynamic" else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    memory = {"kv_mib": held / 2**20}
    if cuda:
        memory["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return out[:, ids.shape[1] :], ticks.ms(), memory


def prove(layout: PageLayout, heads: int, device: torch.device) -> str:
    """Let the ops use what writes the law's bytes on this device; says what does."""
    from moe_prefetch.kernels.kv_encode import fused, general, general_planes
    from moe_prefetch.kernels.kv_take import fused as take_fused

    said = []
    book = neutral_book(layout, heads, device)
    x = [torch.randn(3 * PAGE, heads, d, device=device).mul_(4).bfloat16() for d in (layout.k_dim, layout.v_dim)]
    for module in (fused, general, general_planes):
        if not module.serves(layout):
            continue
        name = module.__name__.rpartition(".")[2]
        law, ours = empty_pages(3, heads, layout, device), empty_pages(3, heads, layout, device)
        # a page and a bit, the rest of it one by one and in groups, a last whole page
        for start, count in ((0, 150), (150, 1), (151, 1), (152, 32), (184, 72), (256, 128)):
            runs = torch.tensor(runs_for([2, 0, 1], start, count, start), dtype=torch.int32, device=device)
            encode_naive(law, *x, runs, book, layout)
            module.encode(ours, *x, runs, book, layout, most=min(count, PAGE))
        if torch.equal(law, ours):
            encode_op.PROVEN = tuple({*encode_op.PROVEN, name})
        said.append(f"kv_encode.{name} {'writes' if torch.equal(law, ours) else 'DOES NOT WRITE'} the law's bytes")
        break
    same = True
    for tokens in (1, 8, 500):
        k, v = (torch.randn(2, tokens, heads, d, device=device).mul_(1e5).bfloat16().transpose(1, 2) for d in (layout.k_dim, layout.v_dim))
        k[0, 0, 0, :2] = torch.tensor([torch.nan, torch.inf])
        sides = []
        for take in (take_naive, take_fused.take):
            buffers = [torch.zeros(2, heads, tokens + 5, y.shape[3], dtype=torch.float16, device=device) for y in (k, v)]
            counts = torch.zeros(2, dtype=torch.int64, device=device)
            take(*buffers, counts, k, v, 3)
            sides.append((*buffers, counts))
        same &= all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
    take_op.PROVEN = same
    return "; ".join([*said, f"kv_take.fused {'writes' if same else 'DOES NOT WRITE'} the law's bytes"])


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--models", default="smolmoe,qwen3moe")
    ap.add_argument("--contexts", default="2048,8192,32768")
    ap.add_argument("--formats", default="fp8,fp4-72,fp4-quality")
    ap.add_argument("--batch", default="1,8")
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--tokens", type=int, default=96)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--prove", action="store_true")
    ap.add_argument("--tensors", action="store_true")
    ap.add_argument("--commit", default="unknown")
    a = ap.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and a.models != "tiny":
        ap.error("these figures need a GPU; --models tiny runs without one, and writes no rows")
    print(f"{'case':40s} {'ms/token':>9s} {'mean':>9s} {'x':>6s} {'prompt ms':>10s} {'KV MiB':>8s}  checked, same tokens")
    for name in a.models.split(","):
        model = model_of(name, a.layers, device)
        g = torch.Generator().manual_seed(0)
        ids_of = lambda b, n, model=model, g=g: torch.randint(10, model.config.vocab_size - 10, (b, n), generator=g).to(device)  # noqa: E731
        model.set_attn_implementation("sdpa")
        stats = calibrate(model, ids_of(4, 512))
        if a.prove and device == "cuda":
            for format in a.formats.split(","):
                layer = make(model, format, stats).layers[0]
                text = model.config.get_text_config()
                dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
                print(f"{format}: {prove(layer.layout(dim, dim), text.num_key_value_heads, torch.device(device))}", flush=True)
        for context in map(int, a.contexts.split(",")):
            for batch in map(int, a.batch.split(",")):
                ids = ids_of(batch, context + STEPS)
                exact = forced(model, "dynamic", stats, ids, context)
                base: tuple[torch.Tensor, float] | None = None
                kinds = ["dynamic", *(f + end for f in a.formats.split(",") for end in ("", "_tensors") if not end or a.tensors)]
                for kind in kinds:
                    format, checked = kind.removesuffix("_tensors"), "baseline"
                    if kind != "dynamic":
                        decoded = forced(model, f"{format}_tensors", stats, ids, context)
                        off, of_format = kl(decoded, forced(model, format, stats, ids, context)), kl(exact, decoded)
                        checked = f"kl {off:.2e} of pages, {of_format:.2e} of the format"
                        if not off <= max(FLOOR, of_format):
                            print(f"{name} t{context} b{batch} {kind}: {checked}: wrong, no row", flush=True)
                            continue
                    # The first run compiles.
                    runs = [run(model, kind, stats, ids[:, :context], a.tokens) for _ in range(a.repeats + 1)][1:]
                    steps = [ms for _, times, _ in runs for ms in times[1 + SKIP :]]
                    p50, mean = statistics.median(steps), statistics.mean(steps)
                    prompt, memory = statistics.median(times[0] for _, times, _ in runs), runs[-1][2]
                    base = base or (runs[-1][0], p50)
                    same = float((runs[-1][0] == base[0]).float().mean())
                    case = f"{name}{a.layers if name == 'qwen3moe' else ''}_t{context}_b{batch}_{kind}"
                    print(f"{case:40s} {p50:9.2f} {mean:9.2f} {base[1] / p50:6.2f} {prompt:10.1f} {memory['kv_mib']:8.1f}  {checked},",
                          f"{same:.0%}", flush=True)
                    rows = [Row(case, "ms_per_token_p50", p50, "ms"), Row(case, "ms_per_token_mean", mean, "ms"),
                            Row(case, "prompt_ms", prompt, "ms"), Row(case, "speedup_vs_dynamic", base[1] / p50, "x"),
                            Row(case, "same_tokens", same, "share"), *(Row(case, k, v, "MiB") for k, v in memory.items())]
                    if a.out and device == "cuda":
                        append_rows(a.out, "generate", rows, machine=machine_name(device), commit=a.commit, checked=checked)
        del model
    return 0


if __name__ == "__main__":
    sys.exit(main())
