"""Train a tiny GPTModel under a parallel layout on gloo, as a Megatron training script does: schedule, DDP, optimiser, clipping."""
from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_prefetch.integrations import megatron_cpu

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 64, 32, 2, 2


class Norm(torch.nn.RMSNorm):
    """RMSNorm that says whether its input is a shard of the sequence: the local spec's own norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def config(**change: Any) -> TransformerConfig:
    values: dict[str, Any] = dict(
        num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, num_moe_experts=8,
        moe_router_topk=2, moe_ffn_hidden_size=16, add_qkv_bias=False, init_method_std=0.2,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, moe_token_dispatcher_type="allgather",
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.1, attention_dropout=0.0, use_cpu_initialization=True, persist_layer_norm=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)
    values.update(change)
    return TransformerConfig(**values)


def sizes(tp: int = 1, ep: int = 1, pp: int = 1, etp: int = 1, **change: Any) -> dict[str, Any]:
    """The configuration's part of a layout; MoE training asks for sequence parallelism where there is tensor parallelism."""
    return dict(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, pipeline_model_parallel_size=pp, sequence_parallel=tp > 1,
                expert_tensor_parallel_size=etp) | change


def forget_metrics() -> None:
    """Megatron keeps a table of auxiliary losses for the process, as long as its first model has layers."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    with contextlib.suppress(ImportError):
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


def groups(tp: int = 1, ep: int = 1, pp: int = 1, vp: int | None = None, etp: int = 1) -> None:
    forget_metrics()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                                             virtual_pipeline_model_parallel_size=vp, expert_model_parallel_size=ep,
                                             expert_tensor_parallel_size=etp)


def spec(cfg: TransformerConfig) -> Any:
    made = get_gpt_layer_local_spec(num_experts=cfg.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    if cfg.sequence_parallel:
        made.submodules.input_layernorm = made.submodules.pre_mlp_layernorm = Norm
    return made


@dataclasses.dataclass
class Run:
    """What a training run left behind, to be compared bit by bit."""

    chunks: list[Any]
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)
    random_state: torch.Tensor | None = None

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in self.chunks for p in chunk.parameters()]

    def pictures(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "gradients": self.gradients, "parameters": self.parameters(),
                "random": [self.random_state]}


def block(cfg: TransformerConfig, layer: Any) -> Any:
    """The layer spec for every layer of this stage, with a final norm that can take sequence shards and is not apex's."""
    if not cfg.sequence_parallel and "apex" not in sys.modules:
        return layer
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    count = get_num_layers_to_build(cfg, pp_rank=parallel_state.get_pipeline_model_parallel_rank())
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def build(cfg: TransformerConfig, convert: Callable[[Any], Any] = lambda s: s, vp: int | None = None) -> list[Any]:
    """The chunks of this rank, wrapped as a training script wraps them."""
    chunks = []
    for stage in range(vp or 1):
        chunk = None if vp is None else stage
        layer = spec(cfg)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
        mtp = convert(get_gpt_mtp_block_spec(cfg, layer, False, vp_stage=chunk)) if cfg.mtp_num_layers and last else None
        model = GPTModel(cfg, convert(block(cfg, layer)), VOCABULARY, SEQUENCE, pre_process=first, post_process=last,
                         position_embedding_type="rope", share_embeddings_and_output_weights=False, mtp_block_spec=mtp, vp_stage=chunk)
        chunks.append(Float16Module(cfg, model) if cfg.bf16 else model)
    return chunks


def batches(steps: int) -> list[torch.Tensor]:
    """Tokens of every data-parallel rank, alike whatever the layout: [steps, micro-batches, B, S + 1]."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(7 + rank)
    # Text with structure: a token follows from the one before, most of the time.
    out = torch.randint(0, VOCABULARY, (steps, MICRO_BATCHES, MICRO_BATCH, SEQUENCE + 1), generator=generator)
    follow = torch.rand(out.shape, generator=generator) < 0.8
    for i in range(1, out.shape[-1]):
        out[..., i] = torch.where(follow[..., i], (out[..., i - 1] * 5 + 3) % VOCABULARY, out[..., i])
    return list(out)


def _loss(tokens_BS: torch.Tensor, output_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output_BS.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    tokens = next(iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    position = torch.arange(inputs.shape[1]).expand_as(inputs)
    length = inputs.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(inputs, position, mask, labels=labels), partial(_loss, labels)


def train(cfg: TransformerConfig, *, steps: int = 5, convert: Callable[[Any], Any] = lambda s: s, vp: int | None = None,
          attach: Callable[[list[Any]], Any] = lambda chunks: None, clip: float = 1.0, lr: float = 1e-3,
          after_step: Callable[[], None] = lambda: None, prepare: Callable[[list[Any]], None] = lambda chunks: None) -> tuple[Run, Any]:
    """Build and train; `attach` sees the chunks before they are wrapped for data parallelism, and what it returned comes back."""
    megatron_cpu.seed(123)
    chunks = build(cfg, convert, vp)
    prepare(chunks)
    attached = attach(chunks)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(cfg, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=lr, weight_decay=0.01, clip_grad=clip, bf16=cfg.bf16, params_dtype=cfg.params_dtype), wrapped)
    cfg.finalize_model_grads_func = finalize_model_grads
    cfg.grad_scale_func = optimizer.scale_loss
    cfg.no_sync_func = [c.no_sync for c in wrapped] if vp else wrapped[0].no_sync
    run = Run(chunks)
    schedule = get_forward_backward_func()
    torch.manual_seed(99)
    for tokens in batches(steps):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
            chunk.train()
        optimizer.zero_grad()
        iterators = [iter(list(tokens)) for _ in wrapped]
        out = schedule(forward_step_func=_forward_step, data_iterator=iterators if vp else iterators[0],
                       model=wrapped if vp else wrapped[0], num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE,
                       micro_batch_size=MICRO_BATCH, forward_only=False)
        run.losses += [part["loss"] for part in out]
        run.gradients = [p.main_grad.detach().clone() for c in chunks for p in c.parameters()]
        _, norm, _ = optimizer.step()
        run.norms.append(float(norm or 0.0))
        after_step()
    run.random_state = torch.get_rng_state()
    return run, attached
