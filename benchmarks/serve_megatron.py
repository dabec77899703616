#!/usr/bin/env python3
"""Forward passes of a Megatron-core GPTModel with expert parallelism: as it is, and with `serve_experts` (written for 0.19.2, eager).

Random weights. For each number of tokens a rank: every MoE layer is given what it had in Megatron's pass, and its outputs are compared.
(Over the whole model rounding moves later routers, and where two experts are all but equal a token gets the other one: the logits' distance
is shown, not judged.) Then passes are timed in turns; microseconds are medians over passes, of the slowest rank. Rows of `serve-megatron`:
`qwen3-30b-a3b_x<layers>_ep<ranks>_t<tokens>`, `error`, `logits`, `us`, `megatron_us`, `gain`.

usage: python benchmarks/serve_megatron.py [--ranks 2] [--layers 4] [--tokens 1,4,64,1024] [--dispatcher alltoall] [--out ROWS.csv]
       [--check] [--cpu]
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch._dynamo
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_prefetch.bench.kv_attend import relative
from moe_prefetch.bench.rows import Row, append_rows, check_rows

VOCABULARY, PASSES = 1024, 30
# Of BF16: Megatron rounds what is between its products, ours does so once less, and sums go in another order.
BOUND = 1.5e-2
QWEN3 = {"hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128, "num_moe_experts": 128,
         "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "ffn_hidden_size": 768}
TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "num_moe_experts": 8, "moe_router_topk": 3,
        "moe_ffn_hidden_size": 16, "ffn_hidden_size": 16}


def model_of(sizes: dict[str, int], layers: int, ranks: int, dispatcher: str, dtype: torch.dtype, device: torch.device) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=layers, moe_router_load_balancing_type="none", moe_token_dispatcher_type=dispatcher, expert_model_parallel_size=ranks,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, bf16=dtype == torch.bfloat16, gradient_accumulation_fusion=False,
        persist_layer_norm=False, masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        perform_initialization=False, use_cpu_initialization=device.type == "cpu", **sizes)
    spec = get_gpt_layer_local_spec(num_experts=sizes["num_moe_experts"], moe_grouped_gemm=False, normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, 1024, position_embedding_type="rope", share_embeddings_and_output_weights=False).eval()
    model.to(device)
    with torch.no_grad():
        # What every rank has is alike on all ranks; its experts are its own.
        for name, p in model.named_parameters():
            torch.manual_seed(hash_of(name) + (dist.get_rank() + 1) * (".experts." in name))
            p.copy_(torch.ones_like(p) if p.dim() < 2 else torch.randn_like(p) * p.shape[-1] ** -0.5)
    return model


def hash_of(name: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(name))


def slowest(seconds: list[float]) -> float:
    """Median of this rank's passes; the largest of all ranks, in microseconds."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, sorted(seconds)[len(seconds) // 2] * 1e6)
    return max(said)


def compare(sizes: dict[str, int], layers: int, tokens: list[int], dispatcher: str, dtype: torch.dtype, device: torch.device,
            passes: int) -> list[tuple[int, dict[str, float]]]:
    """On every rank, for each number of tokens: error of the logits, us and megatron_us of a pass."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moe_prefetch.integrations.megatron_dispatch import serve_experts

    model = model_of(sizes, layers, dist.get_world_size(), dispatcher, dtype, device)
    moe = [m for m in model.modules() if isinstance(m, MoELayer)]
    seen: list[tuple[torch.Tensor, Any, Any, torch.Tensor]] = []
    found = []
    for T in tokens:
        g = torch.Generator().manual_seed(dist.get_rank())
        given = torch.randint(0, VOCABULARY, (1, T), generator=g).to(device)
        place = torch.arange(T, device=device)[None]
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=device), 1)[None, None]

        def once() -> tuple[float, torch.Tensor]:
            dist.barrier()
            start = time.perf_counter()
            with torch.no_grad():
                out = model(given, place, mask)  # noqa: B023
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start, out

        took: dict[str, list[float]] = {"us": [], "megatron_us": []}
        seen.clear()
        # What is given may be written over later in the pass.
        keep = lambda _m, given, kw, said: seen.append((given[0].clone(), given[1:], kw, said[0].clone()))  # noqa: E731
        hooks = [m.register_forward_hook(keep, with_kwargs=True) for m in moe]
        want, error = once()[1], 0.0
        for hook in hooks:
            hook.remove()
        for _ in range(3 if device.type == "cuda" else 1):
            # In turns, so that what else the machine does falls on both.
            took["megatron_us"] += [once()[0] for _ in range(passes // 3 + 1)]
            with serve_experts(model, {T: "gather"}) as served:
                logits = relative(once()[1], want)
                for m, (hidden, others, named, said) in zip(moe, seen, strict=True):
                    with torch.no_grad():
                        error = max(error, relative(m(hidden, *others, **named)[0], said))
                served.check()
                took["us"] += [once()[0] for _ in range(passes // 3 + 1)]
                served.check()
        worst = {"error": slowest([error]) / 1e6, "logits": slowest([logits]) / 1e6}
        found.append((T, {**worst, **{k: slowest(v) for k, v in took.items()}}))
    return found


def _rank(rank: int, folder: str, a: argparse.Namespace) -> None:
    try:
        torch.set_num_threads(1)
        device = torch.device("cpu" if a.cpu else f"cuda:{rank}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if a.cpu else "nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=a.ranks,
                                timeout=timedelta(seconds=120))
        if a.cpu:
            from moe_prefetch.integrations import megatron_cpu

            megatron_cpu.install()
            megatron_cpu.seed(1)
        else:
            from megatron.core.tensor_parallel.random import initialize_rng_tracker

            initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        sizes, dtype = (TINY, torch.float32) if a.cpu else (QWEN3, torch.bfloat16)
        for T, said in compare(sizes, a.layers, [int(t) for t in a.tokens.split(",")], a.dispatcher, dtype, device, a.passes):
            if rank:
                continue
            case = f"qwen3-30b-a3b_x{a.layers}_ep{a.ranks}_t{T}"
            good = said["error"] <= (1e-5 if a.cpu else BOUND)
            print(f"{case}: {'right' if good else 'WRONG'}, layers off by {said['error']:.1e}, logits by {said['logits']:.1e}" +
                  ("" if a.cpu or a.check else f"; {said['us']:.0f} us a pass, {said['megatron_us']:.0f} by Megatron's own"), flush=True)
            if a.out and good and not a.cpu:
                rows = [Row(case, "error", said["error"], ""), Row(case, "logits", said["logits"], ""),
                        Row(case, "us", said["us"], "us"), Row(case, "megatron_us", said["megatron_us"], "us"),
                        Row(case, "gain", said["megatron_us"] / said["us"], "x")]
                append_rows(a.out, "serve-megatron", rows[: 2 if a.check else 5], commit=a.commit,
                            machine=f"{a.ranks}x {torch.cuda.get_device_name(0)}",
                            checked=f"error {said['error']:.2e}")
    except BaseException:  # noqa: BLE001 (whatever it is, it is shown)
        print(f"rank {rank}: WRONG {traceback.format_exc()[-1500:]}", flush=True)
        os._exit(1)
    os._exit(0)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ranks", type=int, default=2)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--tokens", default="1,4,64,1024")
    ap.add_argument("--passes", type=int, default=PASSES)
    ap.add_argument("--dispatcher", default="alltoall", choices=("alltoall", "allgather"))
    ap.add_argument("--check", action="store_true", help="whether it is right, and no figures")
    ap.add_argument("--cpu", action="store_true", help="a tiny model over gloo: whether it is right, and no figures")
    ap.add_argument("--out", type=Path)
    ap.add_argument("--commit", default="")
    a = ap.parse_args()
    if a.out:
        check_rows(a.out)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("spawn").Process(target=_rank, args=(r, folder, a)) for r in range(a.ranks)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join()
    return max(p.exitcode or 0 for p in ranks)


if __name__ == "__main__":
    sys.exit(main())
