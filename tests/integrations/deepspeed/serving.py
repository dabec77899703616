"""Cases that run on every rank of a group: DeepSpeed alone, with us and everything resident, and with most experts on a drive."""
from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralSparseMoeBlock

import moe_prefetch
from moe_prefetch.errors import SessionError
from moe_prefetch.integrations import deepspeed as mpd
from moe_prefetch.integrations.transformers import gates
from moe_prefetch.probes import RoutingProbe
from tests.models import logits_of, prompt
from tests.tiny import tiny

DISK = {"experts": {"home": "disk", "resident": "25%", "threads": 2}}
HALF = {"experts": {"home": "disk", "resident": "50%", "threads": 2}}
KV = {"kv": {"format": "fp4-quality", "window": 4, "sinks": 2}}


def greedy(engine: Any, ids_BS: torch.Tensor, steps: int = 32) -> list[list[int]]:
    module = engine.module if hasattr(engine, "module") else engine
    with torch.no_grad():
        return module.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=steps, do_sample=False).tolist()


def kl(want: torch.Tensor, got: torch.Tensor) -> float:
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@dataclass
class Plain:
    """What the model says without DeepSpeed and without us, and what our cache does to it then."""

    ids_BS: torch.Tensor
    logits: torch.Tensor
    tokens: list[list[int]]
    kl: float
    steps: int

    @classmethod
    def of(cls, model: Any, ids_BS: torch.Tensor, steps: int) -> Plain:
        logits, tokens = logits_of(model, ids_BS, steps), greedy(model, ids_BS)
        with moe_prefetch.attach(model, KV):
            return cls(ids_BS, logits, tokens, kl(logits, logits_of(model, ids_BS, steps)), steps)


def compare(engine: Any, plain: Plain) -> dict[str, Any]:
    """`engine` carries a session with DISK; it is left without one."""
    out: dict[str, Any] = {}
    ids_BS, steps = plain.ids_BS, plain.steps
    session = engine.moe_prefetch
    disk, disk_tokens = logits_of(engine, ids_BS, steps), greedy(engine, ids_BS)
    session.wait_idle()
    total = session.ledger.total
    out["moved"], out["absent"] = total.bytes_moved, total.late + total.miss
    session.detach()
    stock, stock_tokens = logits_of(engine, ids_BS, steps), greedy(engine, ids_BS)
    with moe_prefetch.attach(engine):
        resident = logits_of(engine, ids_BS, steps)
    with moe_prefetch.attach(engine, KV):
        kept = logits_of(engine, ids_BS, steps)
    out["bitwise"] = torch.equal(disk, resident)
    out["stock"] = float((disk - stock).abs().max() / stock.abs().max())
    out["plain"] = float((stock - plain.logits).abs().max() / stock.abs().max())
    out["tokens"] = disk_tokens == stock_tokens == plain.tokens
    out["kl"], out["kl_plain"] = kl(stock, kept), plain.kl
    return out


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def in_folder(folder: str) -> dict[str, Any]:
    return {"experts": {**DISK["experts"], "path": f"{folder}/records"}}


def records(folder: str) -> list[str]:
    return sorted(str(p.parent.relative_to(folder)) for p in Path(folder).rglob("records-*.bin"))


def autotp(rank: int, world: int, family: str) -> dict[str, Any]:
    model = tiny(family)
    plain = Plain.of(model, prompt(2, 9), 6)
    folder = shared_folder()
    section = {"dtype": "fp32", "tensor_parallel": {"tp_size": world}, "moe_prefetch": in_folder(folder)}
    # The older style, ours beside DeepSpeed's; the other families are split by AutoTP's own search.
    older = {MixtralSparseMoeBlock: mpd.MoEPrefetchPolicy, MixtralDecoderLayer: ("self_attn.o_proj",)} if family == "mixtral" else None
    engine = mpd.init_inference(model, section, **({"injection_policy": older} if older else {}))
    split = model.model.layers[0].self_attn.o_proj.weight.shape[1] * world == model.config.hidden_size
    return compare(engine, plain) | {"files": records(folder), "split": split}


def autoep(rank: int, world: int, family: str) -> dict[str, Any]:
    model = tiny(family)
    plain = Plain.of(model, prompt(2, 9), 6)
    where = shared_folder()
    section = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": True, "autoep_size": world},
               "moe_prefetch": in_folder(where)}
    if family != "qwen2_moe":
        # A probe made for the model as transformers holds it. (AutoEP computes a shared expert last, so such a probe has nothing to read.)
        folder = tempfile.mkdtemp()
        RoutingProbe(gates(model)).save_pretrained(folder)
        section["moe_prefetch"] = {**in_folder(where), "probe": {"path": folder}}
    engine, *_ = mpd.initialize(model=model, config=section)
    engine.eval()
    found = compare(engine, plain)
    dist.barrier()
    return found | {"held": engine.moe_prefetch.held_bytes(), "files": records(where)}


def smolmoe(rank: int, world: int) -> list[dict[str, Any]]:
    """SmolMoE under AutoTP, then (over two ranks) under AutoEP."""
    from moe_prefetch.integrations import smolmoe as build

    model, tokenizer = build.load(progress=False)
    ids = tokenizer("The old bridge over the river was built", return_tensors="pt").input_ids
    plain = Plain.of(model, ids, 2)
    if world == 1:
        return [compare(mpd.init_inference(model, {"dtype": "fp32", "moe_prefetch": DISK}), plain)]
    sharded = copy.deepcopy(model)
    settings = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": True, "autoep_size": world}, "moe_prefetch": DISK}
    engine, *_ = mpd.initialize(model=model, config=settings)
    engine.eval()
    found = [compare(engine, plain)]
    tp = mpd.init_inference(sharded, {"dtype": "fp32", "tp": {"tp_size": world}, "moe_prefetch": DISK})
    return [*found, compare(tp, plain)]


class Expert(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Net(nn.Module):
    """A small language model on `deepspeed.moe.layer.MoE`; its routers are decided from the start, so there is something to forecast."""

    def __init__(self, ep_size: int, layers: int = 3, hidden: int = 16, experts: int = 4, expert: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, hidden), nn.Linear(hidden, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(layers)])
        self.moes = nn.ModuleList([MoE(hidden, expert or Expert(hidden, 16), num_experts=experts, ep_size=ep_size, k=2,
                                       top2_2nd_expert_sampling=False) for _ in range(layers)])
        for m in self.moes:
            nn.init.normal_(m.deepspeed_moe.gate.wg.weight, std=0.5)
            for p in m.deepspeed_moe.experts.parameters():
                nn.init.normal_(p, std=0.25)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x, aux = self.embed(ids), 0.0
        for norm, moe in zip(self.norms, self.moes):
            y, l_aux, _ = moe(norm(x))
            x, aux = x + y, aux + l_aux
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * aux


def own_layer(rank: int, world: int) -> dict[str, Any]:
    """`deepspeed.moe.layer.MoE` in evaluation, its experts over a group of `world` ranks."""
    net = Net(world)
    engine, *_ = deepspeed.initialize(model=net, config={"train_micro_batch_size_per_gpu": 1, "moe_prefetch": HALF})
    engine.eval()
    ids = torch.randint(0, 32, (2, 24), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        stock = engine(ids)
        before = picture_of(net)
        session = mpd.attach_engine(engine)
        disk = [engine(ids) for _ in range(3)]
        out = {"absent": session.ledger.total.late + session.ledger.total.miss, "held": session.held_bytes()}
        session.detach()
        with moe_prefetch.attach(engine):
            resident = engine(ids)
    out["bitwise"] = all(torch.equal(d, resident) for d in disk)
    out["stock"] = float((resident - stock).abs().max() / stock.abs().max())
    out["restored"] = picture_of(net) == before
    return out


def own_inference(rank: int, world: int) -> dict[str, Any]:
    """The same layer through `init_inference`."""
    net = Net(1).eval()
    ids = torch.randint(0, 32, (2, 24))
    with torch.no_grad():
        stock = net(ids)
        before = picture_of(net)
        engine = mpd.init_inference(net, {"dtype": "fp32", "moe_prefetch": HALF})
        session = engine.moe_prefetch
        disk = engine(ids)
        refused = []
        net.to("cpu")
        for act in (net.state_dict, lambda: net.to_empty(device="cpu")):
            try:
                act()
            except SessionError:
                refused.append(act)
        # DeepSpeed pads each expert's rows to its capacity; one token asks for no more than its own two.
        demands = session.record_demands()
        engine(torch.zeros(1, 1, dtype=torch.int64))
        one = [(len(d.experts), sum(d.tokens)) for d in demands]
        out = {"absent": session.ledger.total.late + session.ledger.total.miss, "refused": len(refused) == 2, "one": one}
        session.detach()
        out["restored"] = picture_of(net) == before and torch.equal(net(ids), stock)
        with moe_prefetch.attach(engine):
            out["bitwise"] = torch.equal(engine(ids), disk)
    out["stock"] = float((disk - stock).abs().max() / stock.abs().max())
    return out


def picture_of(model: nn.Module) -> Any:
    """What a session must leave as it was, of a model that is none of transformers'."""
    parameters = [(n, id(p), p.shape, p.detach().contiguous().view(torch.uint8).numpy().tobytes()) for n, p in model.named_parameters()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks")
    modules = [(n, id(m), sorted(m.__dict__), [len(getattr(m, h)) for h in hooks]) for n, m in model.named_modules()]
    return parameters, modules


