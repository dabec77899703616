"""Time greedy `generate` of transformers models over our KV cache and over transformers' own, step by step and captured; compare first.

usage: python benchmarks/generate.py --out ROWS.csv [--models smolmoe,qwen3moe] [--contexts 2048,8192,32768] [--batch 1,8]
           [--formats fp8,fp4-72,fp4-quality] [--kinds dynamic,pages,graph] [--layers 12] [--tokens 96] [--repeats 3] [--commit ID]

Models: `smolmoe` (its real weights), `smolsize` (random weights in its place), `qwen3moe` (random weights, the widths of Qwen3-30B-A3B,
`--layers` of its 48), `v2lite` (DeepSeek-V2-Lite, of 27 layers; MLA), `tiny` (for a run without a GPU, which writes no rows). Kinds:

dynamic    DynamicCache with SDPA, which all others are compared with
pages      our cache, which grows, attention over pages
tensors    the same over decoded tensors, which is what other attention implementations get
static     transformers' StaticCache under our captured loop: FP16, SDPA
compiled   transformers' StaticCache as `generate` runs it by itself (torch.compile)
graph      our cache of fixed size under our captured loop
FORMAT_KIND  one of the last kinds for one format alone

Before a case is timed, `STEPS` steps are run teacher-forced. Over pages, growing or fixed, they may be no farther (KL) from the same bytes
decoded than these are from exact keys; where decoding takes too long (beyond `DECODED` tokens) no farther from exact keys than three times
what the format was where it was decoded. Captured steps must give the bits of the same steps run plainly, across the end of a page. A case
that is wrong writes no row. Times are between the ends of successive steps of `generate`, by events on the device: median, mean, and the
prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DynamicCache,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.config import KVConfig
from moe_prefetch.integrations.transformers_cache import PagedLayer, calibrate, make_cache
from moe_prefetch.integrations.transformers_graph import Decode, captured, step_of
from moe_prefetch.kv.format import PAGE

STEPS = 16  # compared
SKIP = 8  # first steps of a run that are not timed
LAW_STEPS = 4  # of them with decoded tensors, which take long
DECODED = 16384  # tokens of all rows up to which a case is also compared with decoded tensors
CAPTURED = ("static", "graph")
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
    elif name == "smolsize":
        from moe_prefetch.integrations import smolmoe

        config = Qwen2MoeConfig(
            vocab_size=49152, hidden_size=smolmoe.HIDDEN, num_hidden_layers=smolmoe.NUM_LAYERS, num_attention_heads=9,
            num_key_value_heads=3, intermediate_size=smolmoe.DENSE_WIDTH, moe_intermediate_size=smolmoe.EXPERT_WIDTH,
            shared_expert_intermediate_size=smolmoe.SHARED_WIDTH, num_experts=smolmoe.NUM_EXPERTS, num_experts_per_tok=smolmoe.TOP_K,
            norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True, max_position_embeddings=8192, initializer_range=0.05,
            dtype=dtype,
        )  # fmt: skip
        with torch.device(device):
            model = Qwen2MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    elif name == "v2lite":
        config = DeepseekV2Config(
            vocab_size=102400, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
            intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
            first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
            max_position_embeddings=40960, initializer_range=0.02, dtype=dtype,
        )  # fmt: skip
        with torch.device(device):
            model = DeepseekV2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
        for layer in model.model.layers[1:]:
            # Made without an initial value.
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.02)
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


def make(model: Any, kind: str, stats: Any, room: int) -> Any:
    """The cache of a kind (`dynamic`, `static`, `compiled`, or FORMAT_KIND) for `room` tokens, and the attention that goes with it.
    `decoded` is `graph` over decoded tensors."""
    format, _, way = kind.rpartition("_")
    if way in ("dynamic", "static", "compiled", "tensors", "decoded"):
        model.set_attn_implementation("sdpa")
    if not format:
        return DynamicCache(config=model.config) if way == "dynamic" else StaticCache(config=model.config, max_cache_len=room)
    # Format fp16 is configured like any other here.
    kv = KVConfig(format=format, attention="tensors" if way in ("tensors", "decoded") else "pages")
    return make_cache(model, kv, stats, max_length=room if way in ("graph", "decoded") else None)


def forced(model: Any, cache: Any, ids: torch.Tensor, prompt: int, *, plain: bool = False, steps: int = STEPS) -> torch.Tensor:
    """Log-probabilities [B, steps, V] of steps that are fed the given tokens; those of a cache of fixed size are captured, or `plain`."""
    out, step = [], None
    at = torch.full((len(ids), 1), prompt, device=ids.device)
    with torch.no_grad():
        model(input_ids=ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
        # As `generate` does: experts one token at a time.
        with model._optimize_model_for_decode():
            if cache.get_max_length() > 0:
                inputs = {"input_ids": ids[:, :1], "position_ids": at, "past_key_values": cache, "logits_to_keep": 1}
                step = Decode(model, inputs, None, ())
                step.begin(inputs, None)
                step.why = "to be compared with" if plain else step.why
            for t in range(prompt, prompt + steps):
                if step is not None:
                    logits = step.run(model, cache, ids[:, t])
                else:
                    logits = model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits[:, -1].float()
                out.append(logits.log_softmax(-1))
    if step is not None and not plain and ids.is_cuda:
        assert step.replays == steps - 2, step.why
    return torch.stack(out, 1)


def over(cache: Any) -> str:
    """What attention read of a cache of ours."""
    return ", ".join(sorted({x.attention for x in cache.layers if isinstance(x, PagedLayer)}))


def check(
    model: Any, kind: str, stats: Any, ids: torch.Tensor, context: int, exact: torch.Tensor, known: dict[str, float]
) -> tuple[bool, str]:
    """Whether a case may be timed, and what was compared. `known`: KL of each kind to exact keys where it was decoded."""
    format, _, way = kind.rpartition("_")
    if way in ("dynamic", "compiled"):
        return True, "baseline"
    decoded, said, fine, room = None, [], True, context + STEPS
    if way in ("pages", "graph") and len(ids) * context <= DECODED:
        same_bytes = make(model, f"{format}_{'tensors' if way == 'pages' else 'decoded'}", stats, room)
        decoded = forced(model, same_bytes, ids, context, plain=True, steps=LAW_STEPS)
    cache = make(model, kind, stats, room)
    got = forced(model, cache, ids, context)
    if format:
        assert over(cache) == ("tensors" if way == "tensors" else "pages"), over(cache)
    far = kl(exact, got)
    if way == "static":
        said.append(f"kl {far:.2e} of another kernel of SDPA")
    elif decoded is not None:
        off, known[kind] = kl(decoded, got[:, :LAW_STEPS]), kl(exact[:, :LAW_STEPS], decoded)
        fine = off <= max(FLOOR, known[kind])
        said.append(f"kl {off:.2e} of pages, {known[kind]:.2e} of the format")
    else:
        fine = way == "tensors" or far <= max(FLOOR, 3 * known.get(kind, 0.0))
        said.append(f"kl {far:.2e} of the format")
    if way in CAPTURED:
        layer, both = cache.layers[0], []
        # A page is full after half of the steps.
        stored = int(layer.static.stored[0]) - STEPS if isinstance(layer, PagedLayer) else 0
        start = context - (stored + STEPS // 2) % PAGE
        for plain in (True, False):
            cache.reset()
            both.append(forced(model, cache, ids, start, plain=plain))
        same, apart = torch.equal(*both), kl(*both)
        # StaticCache's attention is torch's: what it picks, and whether that repeats its bits, is not ours.
        fine &= same or (way == "static" and apart <= FLOOR)
        said.append("captured steps have the bits of plain ones" if same else f"captured steps are {apart:.1e} from plain ones")
    return fine, "; ".join(said)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


def run(
    model: Any, kind: str, cache: Any, ids: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, list[float], dict[str, float]]:
    """Tokens, milliseconds of prompt and steps, and memory of one greedy run over an empty cache."""
    cuda, way = ids.device.type == "cuda", kind.rpartition("_")[2]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ticks = Ticks(ids.device)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([ticks]),
            **({"custom_generate": captured} if way in CAPTURED else {}),
        )
    theirs = kind in ("dynamic", "static", "compiled")
    held = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers) if theirs else cache.held_bytes()
    memory = {"kv_mib": held / 2**20}
    if cuda:
        memory["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        step = step_of(cache)
        assert way not in CAPTURED or (step is not None and step.replays), "steps were not captured"
    return out[:, ids.shape[1] :], ticks.ms(), memory


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--models", default="smolmoe,qwen3moe")
    ap.add_argument("--contexts", default="2048,8192,32768")
    ap.add_argument("--formats", default="fp8,fp4-72,fp4-quality")
    ap.add_argument("--batch", default="1,8")
    ap.add_argument("--kinds", default="dynamic,pages,graph")
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--tokens", type=int, default=96)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--commit", default="unknown")
    a = ap.parse_args()
    if a.out:
        check_rows(a.out)
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
        known: dict[str, float] = {}
        ways = a.kinds.split(",")
        kinds = [w for w in ("dynamic", "static", "compiled") if w in ways]
        kinds += [f"{f}_{w}" for f in a.formats.split(",") for w in ("tensors", "pages", "graph") if w in ways]
        kinds += [w for w in ways if "_" in w]
        for context in map(int, a.contexts.split(",")):
            for batch in map(int, a.batch.split(",")):
                ids = ids_of(batch, context + STEPS)
                exact = forced(model, make(model, "dynamic", stats, 0), ids, context)
                base: tuple[torch.Tensor, float] | None = None
                for kind in kinds:
                    torch.cuda.empty_cache()
                    fine, checked = check(model, kind, stats, ids, context, exact, known)
                    if not fine:
                        print(f"{name} t{context} b{batch} {kind}: {checked}: wrong, no row", flush=True)
                        continue
                    # The first run compiles and captures (alone, it is timed all the same); what has a fixed size is used again.
                    cache, runs = None, []
                    for _ in range(a.repeats + 1):
                        cache = cache if cache is not None and cache.get_max_length() > 0 else make(model, kind, stats, context + a.tokens)
                        cache.reset() if cache.get_max_length() > 0 else None
                        runs.append(run(model, kind, cache, ids[:, :context], a.tokens))
                    timed = runs[1:] or runs
                    steps = [ms for _, times, _ in timed for ms in times[1 + SKIP :]]
                    p50, mean = statistics.median(steps), statistics.mean(steps)
                    prompt, memory = statistics.median(times[0] for _, times, _ in timed), runs[-1][2]
                    base = base or (runs[-1][0], p50)
                    same = float((runs[-1][0] == base[0]).float().mean())
                    case = f"{name}{a.layers if name in ('qwen3moe', 'v2lite') else ''}_t{context}_b{batch}_{kind}"
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
