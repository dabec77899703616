"""Cases that run on every rank of a group: training on `deepspeed.moe.layer.MoE` and on AutoEP, with our section and without."""
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

import moe_prefetch
from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.integrations import deepspeed as mpd
from moe_prefetch.integrations.deepspeed_training import HELD_OUT_EVERY
from moe_prefetch.probes import RoutingProbe
from tests.integrations.deepspeed.serving import HALF, Net
from tests.tiny import tiny

FIT = {"rank": 8, "linear": 4, "steps": 30, "batch": 64, "lr": 3e-2, "moment_tokens": 128, "held_out_tokens": 128}
STEPS = 40


def config(stage: int, lr: float = 1e-4) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "optimizer": optimizer,
            "zero_optimization": {"stage": stage}}


def train(engine: Any, rank: int, steps: int = STEPS, length: int = 32) -> list[float]:
    generator, losses = torch.Generator().manual_seed(100 + rank), []
    for _ in range(steps):
        ids = torch.randint(0, 32, (2, length), generator=generator)
        loss = engine(ids, ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def started(net: Any, settings: dict[str, Any], ours: dict[str, Any] | None) -> Any:
    torch.manual_seed(1)
    parameters = split_params_into_different_moe_groups_for_optimizer([{"params": list(net.parameters()), "name": "all"}])
    if ours is None:
        return deepspeed.initialize(model=net, model_parameters=parameters, config=settings)[0]
    return mpd.initialize(model=net, model_parameters=parameters, config=settings | {"moe_prefetch": {"fit": ours}})[0]


def fitted(rank: int, world: int, stage: str) -> dict[str, Any]:
    """The same training twice; gates with noise draw random numbers, so a number drawn by us would show."""
    def net() -> Net:
        torch.manual_seed(0)
        made = Net(min(world, 2))
        for m in made.moes:
            m.deepspeed_moe.gate.noisy_gate_policy = "Jitter"
            m.deepspeed_moe.gate.top2_2nd_expert_sampling = True
        return made

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    settings = config(int(stage)) | ({"bf16": {"enabled": True}} if stage == "1" else {})
    stock_net, net_ = net(), net()
    stock = train(started(stock_net, settings, None), rank)
    engine = started(net_, settings, {**FIT, "out": f"{folder[0]}/probe"})
    ours = train(engine, rank)
    fit = engine.moe_prefetch
    out = {"losses": stock == ours, "parameters": all(torch.equal(a, b) for a, b in zip(stock_net.parameters(), net_.parameters())),
           "probe": fit.losses, "again": engine.config["moe_prefetch"]["fit"]["steps"]}
    probe = fit.finish()
    out["written"] = (probe is not None) == (rank == 0)
    dist.barrier()
    # It belongs to the routers as they are now.
    loaded = RoutingProbe.from_pretrained(Path(folder[0]) / "probe", mpd.open_module(engine.module).gates)
    out["read"] = loaded.layers == 3
    out["hooks"] = hooks(net_) - hooks(stock_net)
    return out


def hooks(net: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def uneven(rank: int, world: int) -> dict[str, Any]:
    """Ranks with different numbers of tokens, one of them with an evaluation in between: no collective is missed."""
    engine = started(Net(1), config(0), {**FIT, "out": tempfile.mkdtemp()})
    train(engine, rank, 16, length=32 + 8 * rank)
    if rank == 0:
        engine.eval()
        with torch.no_grad():
            engine(torch.zeros(1, 8, dtype=torch.int64))
        engine.train()
    train(engine, rank, 8, length=32)
    return {"steps": len(engine.moe_prefetch.losses), "held": len(engine.moe_prefetch._held), "every": HELD_OUT_EVERY}


def too_short(rank: int, world: int) -> dict[str, Any]:
    engine = started(Net(1), config(0), {**FIT, "out": tempfile.mkdtemp()})
    train(engine, rank, 2)
    # As if passes had held values that are not finite.
    engine.moe_prefetch._online.trainer.unsound += 3
    try:
        engine.moe_prefetch.finish()
    except MoEPrefetchError as e:
        return {"error": type(e).__name__, "left_out": "3 batches held values that are not finite" in str(e)}
    return {"error": ""}


def unwritable(rank: int, world: int) -> dict[str, Any]:
    """A drive that went away while the model learnt: told to every rank, and nothing is lost."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine = started(Net(1), config(0), {**FIT, "out": f"{folder[0]}/probe"})
    train(engine, rank)
    if rank == 0:
        Path(folder[0], "probe").write_text("no folder")
    errors = []
    for case in ("a file", "a defect"):
        judge = engine.moe_prefetch._judge
        if case == "a defect":
            engine.moe_prefetch._judge = None
        try:
            engine.moe_prefetch.finish()
        except MoEPrefetchError as e:
            errors.append((type(e).__name__, all((e.what, e.where, e.expected, e.do))))
        engine.moe_prefetch._judge = judge
    return {"errors": errors, "written": engine.moe_prefetch.finish(f"{folder[0]}/other") is not None}


def running(rank: int, world: int) -> dict[str, Any]:
    """While a fit runs nothing else gets hold of the model, by whatever door; afterwards everything does."""
    net = Net(1)
    engine = started(net, config(0), {**FIT, "out": tempfile.mkdtemp()})
    doors = {"attach": lambda: moe_prefetch.attach(engine, HALF), "attach_engine": lambda: mpd.attach_engine(engine),
             "init_inference": lambda: mpd.init_inference(net, {"dtype": "fp32", "moe_prefetch": HALF}),
             "initialize": lambda: started(net, config(0), {**FIT, "out": tempfile.mkdtemp()})}
    before, refused = hooks(net), {}
    for name, door in doors.items():
        try:
            door()
            refused[name] = ""
        except MoEPrefetchError as e:
            refused[name] = f"{type(e).__name__}: {e}"
    out = {"refused": refused, "hooks": hooks(net) == before}
    train(engine, rank, 20)
    out["learnt"] = len(engine.moe_prefetch.losses) > 5
    engine.moe_prefetch.stop()
    moe_prefetch.attach(engine, HALF).detach()
    model = tiny("mixtral", layers=2)
    fit = mpd.initialize(model=model, config=config(0) | {"moe_prefetch": {"fit": {**FIT, "out": tempfile.mkdtemp()}}})[0].moe_prefetch
    try:
        moe_prefetch.attach(model, HALF)
        refused["the model itself"] = ""
    except MoEPrefetchError as e:
        refused["the model itself"] = f"{type(e).__name__}: {e}"
    fit.stop()
    moe_prefetch.attach(model, HALF).detach()
    return out


def after(rank: int, world: int) -> dict[str, Any]:
    engine = started(Net(1), config(0), {**FIT, "out": tempfile.mkdtemp(), "after": 10})
    train(engine, rank, 10)
    early = engine.moe_prefetch._online.seen
    train(engine, rank, 6)
    return {"early": early, "late": engine.moe_prefetch._online.seen}


def autoep(rank: int, world: int) -> dict[str, Any]:
    """A transformers model trained under AutoEP, its probe beside it; activation checkpointing runs every block twice."""
    torch.manual_seed(0)
    losses = []
    for ours in (False, True):
        model = tiny("qwen3_moe", layers=3, hidden=32, expert_width=16, vocabulary=32)
        model.gradient_checkpointing_enable()
        model.train()
        settings = config(0) | {"expert_parallel": {"enabled": True, "autoep_size": world}}
        if ours:
            settings["moe_prefetch"] = {"fit": {**FIT, "out": tempfile.mkdtemp()}}
            engine, *_ = mpd.initialize(model=model, model_parameters=model.parameters(), config=settings)
        else:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        generator, found = torch.Generator().manual_seed(rank), []
        for _ in range(20):
            ids = torch.randint(0, 32, (2, 32), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found.append(float(loss))
        losses.append(found)
    return {"losses": losses[0] == losses[1], "probe": engine.moe_prefetch.losses, "seen": engine.moe_prefetch._passes}
