"""Train a small language model on `deepspeed.moe` with a routing probe beside it, then serve it with half of its experts on a drive.

    python examples/deepspeed_train_moe.py                          one process
    deepspeed --num_gpus 2 examples/deepspeed_train_moe.py          experts spread over two; torchrun --nproc-per-node 2 works too

The text is Python's own documentation, byte by byte. On a CPU DeepSpeed compiles its collectives at the first start (a minute, needs g++).
"""
# ruff: noqa: E402 (DeepSpeed reads the environment when it is imported)
from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
    os.environ.setdefault(key, value)

import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

import moe_prefetch
from moe_prefetch.errors import ReleaseError
from moe_prefetch.integrations import deepspeed as mpd

HIDDEN, WIDTH, EXPERTS, LAYERS, LENGTH = 64, 64, 8, 4, 128


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, Expert(), num_experts=EXPERTS, ep_size=ranks, k=2, capacity_factor=2.0, eval_capacity_factor=4.0,
                       top2_2nd_expert_sampling=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y, balance, _ = self.moe(self.norm2(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList([Layer(ranks) for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, ids_BS: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        x, balance = self.embed(ids_BS) + self.place.weight[: ids_BS.shape[1]], 0.0
        for layer in self.layers:
            x, extra = layer(x)
            balance = balance + extra
        logits = self.head(x)
        return logits if labels_BS is None else F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten()) + 0.01 * balance


def batch(text: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.randint(0, len(text) - LENGTH - 1, (size,), generator=generator)
    rows = torch.stack([text[s : s + LENGTH + 1] for s in start.tolist()])
    return rows[:, :-1], rows[:, 1:]


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--out", type=Path, default=Path("probes-out/deepspeed"))
    ap.add_argument("--zero", type=int, default=1, choices=(0, 1, 2))
    ap.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    a = ap.parse_args()

    deepspeed.init_distributed()
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(0)
    model = Model(ranks=world)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": a.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "moe_prefetch": {"fit": {"out": str(a.out), "after": a.steps // 3, "rank": 16, "linear": 8, "steps": a.steps // 2, "batch": 1024,
                                 "moment_tokens": 8192, "lr": 5e-3}}}
    parameters = split_params_into_different_moe_groups_for_optimizer([{"params": list(model.parameters()), "name": "all"}])
    engine, *_ = mpd.initialize(model=model, model_parameters=parameters, config=config)

    text = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    generator = torch.Generator().manual_seed(rank)
    for step in range(a.steps):
        ids, labels = (t.to(engine.device) for t in batch(text, 8, generator))
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 50 == 49:
            fit = engine.moe_prefetch.losses
            beside = f", probe {sum(fit[-20:]) / len(fit[-20:]):.3f} after {len(fit)} steps" if fit else ""
            print(f"step {step + 1}: model {loss:.3f}{beside}")
    try:
        engine.moe_prefetch.finish()
    except ReleaseError as e:
        print(f"rank {rank}: the probe was not written: {e}")
        return 1

    if engine.device.type == "cpu":
        engine.eval()
        ids = batch(text, 4, generator)[0]
        with torch.no_grad():
            stock = engine(ids)
            for plan in ("lru", "probe"):
                section: dict[str, Any] = {"experts": {"home": "disk", "resident": "50%", "plan": plan}}
                if plan == "probe":
                    section["probe"] = {"path": str(a.out)}
                with moe_prefetch.attach(engine, section) as session:
                    for position in range(LENGTH):
                        engine(ids[:1, position : position + 1])
                    served = engine(ids)
                    total = session.ledger.total
                if rank == 0:
                    print(f"{plan}: {total.hit} experts there, {total.late + total.miss} late or missing, largest difference in the logits "
                          f"{float((served - stock).abs().max()):.1e}")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
