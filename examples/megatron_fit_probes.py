"""Train a small MoE with Megatron-core and fit routing probes beside it.

torchrun --nproc-per-node 2 examples/megatron_fit_probes.py                       two processes on CPUs (gloo) or two GPUs (NCCL)
torchrun --nproc-per-node 2 examples/megatron_fit_probes.py --overhead            and say what the fit costs, as a row of a CSV

Three lines of it are ours: `with_prefetch` around the spec, `ProbeFit` around the model, `save_pretrained` at the end. The loop, the
optimiser and the loss are what Megatron's own examples do. Without a GPU, a shim stands in for CUDA (`integrations/megatron_cpu.py`).
"""
from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    p.add_argument("--eager", action="store_true", help="do not compile Megatron's small functions")
    model = p.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--experts", type=int, default=16)
    model.add_argument("--topk", type=int, default=2)
    model.add_argument("--expert-width", type=int, default=64)
    model.add_argument("--bf16", action="store_true")
    batch = p.add_argument_group("batch")
    batch.add_argument("--sequence", type=int, default=128)
    batch.add_argument("--micro-batch", type=int, default=4)
    batch.add_argument("--micro-batches", type=int, default=1, help="per step (default 1)")
    batch.add_argument("--lr", type=float, default=1e-3)
    batch.add_argument("--text", type=Path, action="append", default=[], help="text to train on (default: Python's documentation)")
    layout = p.add_argument_group("layout")
    layout.add_argument("--ep", type=int, help="expert parallelism (default: all processes that are left)")
    layout.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    fit = p.add_argument_group("probes")
    fit.add_argument("--out", type=Path, default=Path("probes-out"), help="folder of the fitted probe (default probes-out)")
    fit.add_argument("--rank", type=int, default=32)
    fit.add_argument("--tokens", type=int, default=1024, help="rows of a micro-batch that a probe step takes (default 1024)")
    fit.add_argument("--every", type=int, default=1, help="a probe step at every so many micro-batches (default 1)")
    fit.add_argument("--moment-tokens", type=int, default=8192)
    fit.add_argument("--no-whiten", action="store_true", help="the cheap start, for wide models")
    cost = p.add_argument_group("cost")
    cost.add_argument("--overhead", action="store_true", help="afterwards, time blocks of steps with and without the fit, in turn")
    cost.add_argument("--blocks", type=int, default=8, help="pairs of blocks (default 8)")
    cost.add_argument("--block-steps", type=int, default=4)
    cost.add_argument("--measure-every", type=int, nargs="+", help="values of --every to measure, one after the other (default: it alone)")
    cost.add_argument("--csv", type=Path, default=Path("benchmarks/results/megatron.csv"))
    cost.add_argument("--case", default="", help="the rows' name, to which `_everyN` is added (default: made of the sizes)")
    return p.parse_args()


def start(a: argparse.Namespace) -> torch.device:
    """Process group, parallel groups and random streams."""
    from megatron.core import parallel_state, tensor_parallel

    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from moe_prefetch.integrations import megatron_cpu

        megatron_cpu.install()
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=a.pp, expert_tensor_parallel_size=1,
                                             expert_model_parallel_size=a.ep or dist.get_world_size() // a.pp)
    if gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        megatron_cpu.seed(1)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def make_model(a: argparse.Namespace) -> Any:
    """A GPTModel whose spec went through `with_prefetch`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_prefetch.integrations.megatron import with_prefetch

    dtype = torch.bfloat16 if a.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, num_moe_experts=a.experts, moe_router_topk=a.topk,
        moe_ffn_hidden_size=a.expert_width, ffn_hidden_size=a.expert_width, moe_aux_loss_coeff=1e-2,
        moe_router_load_balancing_type="aux_loss", moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32", normalization="RMSNorm",  # noqa: S106
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        persist_layer_norm=False, bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bf16=a.bf16, params_dtype=dtype, pipeline_dtype=dtype, use_cpu_initialization=not torch.cuda.is_available(),
        pipeline_model_parallel_size=a.pp, expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size())
    spec = with_prefetch(get_gpt_layer_local_spec(num_experts=a.experts, normalization="RMSNorm"))
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=a.sequence, position_embedding_type="rope",
                     pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
                     share_embeddings_and_output_weights=False)
    if torch.cuda.is_available():
        model.cuda()
    return Float16Module(config, model) if a.bf16 else model


def texts(a: argparse.Namespace, device: torch.device) -> Iterator[torch.Tensor]:
    """Windows of bytes, other ones for every data-parallel rank: int64 [micro-batch, sequence + 1]."""
    from megatron.core import parallel_state

    from moe_prefetch.probes.jobs import builtin_texts, read_texts

    raw = "\n".join(read_texts(a.text) if a.text else builtin_texts()).encode()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    while True:
        at = torch.randint(0, len(data) - a.sequence - 1, (a.micro_batch,), generator=generator)
        yield torch.stack([data[i : i + a.sequence + 1] for i in at.tolist()]).to(device)


def forward_step(mask: torch.Tensor, iterator: Iterator[torch.Tensor], model: Any) -> Any:
    tokens_BS = next(iterator)
    inputs, labels = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
    position = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return model(inputs, position, mask, labels=labels), loss


def training_step(a: argparse.Namespace, model: Any, device: torch.device) -> Callable[[], float | None]:
    """A function that makes one step and returns the loss, where this rank knows it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = model.config
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=a.lr, weight_decay=0.01, clip_grad=1.0, bf16=a.bf16,
                                                       params_dtype=config.params_dtype), [ddp])
    config.finalize_model_grads_func, config.grad_scale_func, config.no_sync_func = finalize_model_grads, optimizer.scale_loss, ddp.no_sync
    schedule, iterator = get_forward_backward_func(), texts(a, device)
    mask = torch.triu(torch.ones(a.sequence, a.sequence, dtype=torch.bool, device=device), 1)[None, None]

    def step() -> float | None:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        out = schedule(forward_step_func=partial(forward_step, mask), data_iterator=iterator, model=ddp, num_microbatches=a.micro_batches,
                       seq_length=a.sequence, micro_batch_size=a.micro_batch, forward_only=False)
        optimizer.step()
        return float(out[-1]["loss"]) if out else None

    ddp.train()
    return step


def overhead(a: argparse.Namespace, step: Callable[[], Any], fit: Any, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with the fit, per pair of blocks. Blocks take turns, so that a drift of the machine meets both."""

    def block() -> float:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(a.block_steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / a.block_steps

    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * a.blocks + 2):
        on = i % 2 == 1
        if on:
            fit.open()
        else:
            fit.close()
        seconds = block()
        if i >= 2:
            times[on].append(seconds)
    fit.open()
    return times[False], times[True]


def record(a: argparse.Namespace, every: int, off: list[float], on: list[float], device: torch.device) -> None:
    """Print and append what was found: medians, and the quartiles of the pairs' ratios, without which a small share means nothing."""
    from moe_prefetch.bench.rows import Row, append_rows, machine_name

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()  # noqa: S607
    version = importlib.metadata.version("megatron-core")
    case = a.case or f"{a.layers}x{a.hidden}_e{a.experts}_ranks{dist.get_world_size()}_pp{a.pp}_tokens{a.tokens}"
    case += f"_every{every}"
    without, with_fit = statistics.median(off), statistics.median(on)
    ratios = [y / x - 1 for x, y in zip(off, on)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    rows = [Row(case, "step_without_ms", without * 1e3, "ms"), Row(case, "step_with_ms", with_fit * 1e3, "ms"),
            Row(case, "overhead", middle, "share"), Row(case, "overhead_q25", low, "share"), Row(case, "overhead_q75", high, "share")]
    append_rows(a.csv, "megatron", rows, machine=f"{dist.get_world_size()}x {machine_name(device.type)}, megatron-core {version}",
                commit=os.environ.get("COMMIT", commit), checked="tests/integrations/megatron")
    print(f"a step takes {without * 1e3:.2f} ms without the fit, {with_fit * 1e3:.2f} ms with it: {100 * middle:+.2f} % "
          f"(half of the pairs between {100 * low:+.2f} and {100 * high:+.2f} %; {case})")


def main() -> None:
    a = arguments()
    warnings.filterwarnings("ignore")
    if a.eager:
        torch.compiler.set_stance("force_eager")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from moe_prefetch.bench.rows import check_rows
    from moe_prefetch.integrations.megatron_fit import ProbeFit
    from moe_prefetch.probes.probe import check_folder
    from moe_prefetch.probes.trainer import FitConfig

    # What is written at the end: looked at before anything is trained.
    check_folder(a.out)
    if a.overhead:
        check_rows(a.csv)
    device = start(a)
    first = dist.get_rank() == 0
    model = make_model(a)
    fit = ProbeFit(model, FitConfig(rank=a.rank, linear=a.rank // 2, steps=max(1, a.steps * a.micro_batches // a.every), warmup=5,
                                    whiten=not a.no_whiten), tokens=a.tokens, every=a.every, moment_tokens=a.moment_tokens,
                   held_out_every=8, held_out_tokens=2 * a.tokens)
    step = training_step(a, model, device)
    begin = time.perf_counter()
    for i in range(a.steps):
        loss = step()
        if (i + 1) % max(1, a.steps // 10) == 0:
            recall = fit.recall()
            # The loss is known on the last stage.
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, (loss, recall))
            if first:
                losses = [x for x, _ in said if x is not None]
                shown = "  ".join(f"h{h} {v:.3f}" for h, v in sorted(said[-1][1].items())) or "starting"
                print(f"step {i + 1}/{a.steps}  loss {sum(losses) / len(losses):.3f}  recall of the probes: {shown}  "
                      f"{time.perf_counter() - begin:.0f} s", flush=True)
    probe = fit.save_pretrained(a.out, force=True)
    if first:
        used = [sum(r.used_L) if r else 0 for r in probe.residuals]
        print(f"written to {a.out}: {probe.layers} layers; fitted at horizons 0, 1, 2: {used}; see its README.md")
    if a.overhead:
        for every in a.measure_every or [a.every]:
            fit.every = every
            off, on = overhead(a, step, fit, device)
            if first:
                record(a, every, off, on, device)
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
