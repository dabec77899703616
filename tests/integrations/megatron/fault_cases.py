"""Mistakes and damage: what is refused, in which words, and that nothing was taken over by then. And whether probes learn on every rank."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import Float16Module

from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.integrations import megatron, megatron_cpu, megatron_stage
from moe_prefetch.integrations.megatron import with_prefetch
from moe_prefetch.integrations.megatron_fit import ProbeFit
from moe_prefetch.probes.trainer import FitConfig
from tests.integrations.megatron import harness
from tests.integrations.megatron.cases import SMALL, case, fitter

ROOT = Path(__file__).resolve().parents[3]


def refusal(call: Callable[[], Any]) -> list[str]:
    """(class, message) of what it raises; the class is empty where it raised nothing."""
    try:
        call()
    except MoEPrefetchError as error:
        return [type(error).__name__, str(error)]
    except Exception as error:  # noqa: BLE001 a raw error is what the tests are after
        return ["raw " + type(error).__name__, str(error)]
    return ["", ""]


def everything(model: Any, fit: ProbeFit) -> list[torch.Tensor]:
    """Weights of a model and all that a checkpoint holds of its probes."""
    states = [c.trainer.layer_state(i) for c in fit.chunks for i in range(len(c.layers))]
    return [p.detach().clone() for p in model.parameters()] + [v for s in states for v in s.values()]


# checkpoints ----------------------------------------------------------------------------------------------------------------
LAYER = "decoder.layers.{}.mlp.probes."
State = dict[str, Any]


def _value(layer: int, key: str, change: Callable[[torch.Tensor], Any]) -> Callable[[State], str]:
    def damage(state: State) -> str:
        name = LAYER.format(layer) + key
        state[name] = change(state[name].clone())
        return name

    return damage


def _at(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.index_fill_(-1, torch.tensor([t.shape[-1] - 1]), value)


def _missing(key: str) -> Callable[[State], str]:
    def damage(state: State) -> str:
        for k in [k for k in state if k.startswith(LAYER.format(2) + key)]:
            del state[k]
        return LAYER.format(2)

    return damage


def _unknown(state: State) -> str:
    state[LAYER.format(1) + "extra"] = torch.zeros(1)
    return LAYER.format(1) + "extra"


def _every(key: str, change: Callable[[torch.Tensor], Any]) -> Callable[[State], str]:
    def damage(state: State) -> str:
        names = [_value(i, key, change)(state) for i in range(4)]
        return names[0]

    return damage


DAMAGE: dict[str, Callable[[State], str]] = {
    "a key is missing": _missing("average.up_nER"), "a layer is missing": _missing(""), "a key of no probe": _unknown,
    "no number in a weight": _value(3, "up_nER", _at(float("nan"))), "no number in a constant": _value(1, "white", _at(float("nan"))),
    "an infinite average": _value(3, "average.out_nE", _at(float("inf"))),
    "an infinite moment": _value(0, "exp_avg.out_nE", _at(float("inf"))),
    "a negative square": _value(2, "exp_avg_sq.up_nER", _at(-1.0)), "a negative unit": _value(2, "stale_n", _at(-1.0)),
    "an impossible count": _every("done", lambda t: t - 100), "one layer ahead": _value(3, "done", lambda t: t + 1),
    "not begun, but with weights": _every("done", lambda t: t.fill_(-1)), "one layer not begun": _value(0, "done", lambda t: t.fill_(-1)),
    "no step, but with moments": _every("done", lambda t: t.fill_(0)), "a count that is no integer": _value(1, "done", lambda t: t.float()),
    "weights in halves": _value(1, "up_nER", lambda t: t.half()), "no tensor": _value(2, "mean_nD", lambda t: t.tolist()),
    "another shape": _value(1, "out_nE", lambda t: t[..., :-1])}


@case(1)
def damaged_checkpoints(folder: Path) -> Any:
    """Each kind of damage, through the model itself and through a wrapper of it, into a fit that has weights of its own."""
    harness.groups()
    run, saved = harness.train(harness.config(), convert=with_prefetch, attach=fitter(), steps=4)
    good = run.chunks[0].state_dict()
    other, fit = harness.train(harness.config(), convert=with_prefetch, attach=fitter(), steps=3)
    model = other.chunks[0]
    wrapper = Float16Module(harness.config(bf16=True), model)
    before, found = everything(model, fit), {}
    for name, damage in DAMAGE.items():
        for target in (model, wrapper):
            state = dict(good)
            key = damage(state)
            kind, text = refusal(lambda state=state, target=target: target.load_state_dict(state))  # type: ignore[misc]
            same = all(torch.equal(a, b) for a, b in zip(before, everything(model, fit), strict=True))
            found[f"{name}, {type(target).__name__}"] = [kind, text, key.rsplit(".", 1)[0] in text, same]
    model.load_state_dict(good)
    return {"found": found, "good": [fit.done, saved.done]}


@case(1)
def checkpoints_without_probes(folder: Path) -> Any:
    """Loaded where a ProbeFit is attached: refused, unless it was asked to start anew; both formats of a checkpoint."""
    harness.groups()
    stock, _ = harness.train(harness.config(), steps=1)
    plain = stock.chunks[0].state_dict()
    place = folder / "stock"
    place.mkdir()
    dist_checkpointing.save({"model": stock.chunks[0].sharded_state_dict()}, str(place))

    def made(**options: Any) -> tuple[Any, ProbeFit]:
        model = harness.build(harness.config(), with_prefetch)[0]
        return model, ProbeFit(model, SMALL, moment_tokens=128, tokens=64, **options)

    model, fit = made()
    before = everything(model, fit)
    out: dict[str, Any] = {"refused": refusal(lambda: model.load_state_dict(plain))}
    out["untouched"] = all(torch.equal(a, b) for a, b in zip(before, everything(model, fit), strict=True))
    try:
        dist_checkpointing.load({"model": model.sharded_state_dict()}, str(place))
    except BaseException as error:  # noqa: BLE001 Megatron's own word on it, as docs/megatron.md quotes it
        out["megatrons"] = [type(error).__name__, str(error)]
    fit.close()
    out["closed"] = refusal(lambda: model.load_state_dict(plain))
    model, fit = made(anew=True)
    out["anew"] = [*refusal(lambda: model.load_state_dict(plain)), equal(model, stock.chunks[0])]
    model, fit = made(anew=True)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(place))
    out["anew_distributed"] = [*refusal(lambda: model.load_state_dict(state["model"])), equal(model, stock.chunks[0])]

    # Once it has seen something, it is part of checkpoints; one that holds probes is passed over by the next that starts anew.
    run, fit = harness.train(harness.config(), convert=with_prefetch, attach=fitter(anew=True), steps=3)
    place = folder / "probes"
    place.mkdir()
    held = run.chunks[0].sharded_state_dict()
    dist_checkpointing.save({"model": held}, str(place))
    model, again = made(anew=True)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(place))
    model.load_state_dict(state["model"])
    model.load_state_dict(run.chunks[0].state_dict())
    goes_on, resumed = made()
    state = dist_checkpointing.load({"model": goes_on.sharded_state_dict()}, str(place))
    goes_on.load_state_dict(state["model"])
    return out | {"done": fit.done, "again": [again.done, again.chunks[0].trainer.started, equal(model, run.chunks[0])],
                  "resumed": resumed.done, "keys": sum("probes." in k for k in held)}


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# use ------------------------------------------------------------------------------------------------------------------------
@case(1)
def a_second_fit(folder: Path) -> Any:
    harness.groups()
    model = harness.build(harness.config(), with_prefetch)[0]
    first = ProbeFit(model, SMALL)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    wrapper = Float16Module(harness.config(bf16=True), model)
    out = {"second": refusal(lambda: ProbeFit(model, SMALL)), "wrapped": refusal(lambda: ProbeFit(wrapper, SMALL))}
    out["same"] = [[len(m._forward_pre_hooks) for m in model.modules()] == hooks]
    first.open()
    out["open_again"] = [[len(m._forward_pre_hooks) for m in model.modules()] == hooks]
    first.close()
    second = ProbeFit(model, SMALL)
    out["reopened"] = refusal(first.open)
    second.close()
    first.open()
    return out | {"left": [len(megatron.moe_layers(model)[0].mlp.passengers) == 1]}


@case(1)
def wrong_arguments(folder: Path) -> Any:
    harness.groups()
    model, spec = harness.build(harness.config(), with_prefetch)[0], harness.spec(harness.config())
    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._load_state_dict_pre_hooks) for m in model.modules())

    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    before = hooks()
    calls: dict[str, Callable[[], Any]] = {f"with_prefetch({bad!r})": lambda bad=bad: with_prefetch(bad)  # type: ignore[misc]
                                           for bad in (None, 5, "spec", {}, [])}
    calls |= {"spec without submodules": lambda: with_prefetch(ModuleSpec(module=MoELayer)),
              "groups": lambda: with_prefetch(spec, pg_collection=5)}
    calls |= {f"ProbeFit({bad!r})": lambda bad=bad: ProbeFit(bad) for bad in (None, 5, "model", [], [None], {}, torch.nn.Linear(2, 2))}  # type: ignore[misc]
    for name, values in {"tokens": ("x", 1.5, 0, True, None), "every": (0,), "after": (-1,), "moment_tokens": (0,), "held_out_every": (1,),
                         "held_out_tokens": ([],), "log_every": (0,), "edges": (1,), "anew": ("yes",), "config": ({}, 5), "watch": (5,),
                         "metrics": ({},)}.items():
        for value in values:
            calls[f"{name}={value!r}"] = lambda name=name, value=value: ProbeFit(model, **{name: value})  # type: ignore[misc]
    calls |= {"dropout": lambda: ProbeFit(model, FitConfig(dropout=0.1)), "gates": lambda: megatron.gates(5),  # type: ignore[arg-type]
              "observe": lambda: megatron.observe(None, None).__enter__()}  # type: ignore[arg-type]
    found = {name: refusal(call) for name, call in calls.items()}
    fit = ProbeFit(model, SMALL)
    for bad in (None, 5, "", []):
        found[f"save_pretrained({bad!r})"] = refusal(lambda bad=bad: fit.save_pretrained(bad))  # type: ignore[misc,arg-type]
    fit.close()
    return {"found": found, "every": refusal(lambda: ProbeFit(model, tokens=0, every="x", watch=5)),  # type: ignore[arg-type]
            "hooks": hooks() - before}


@case(2)
def too_short(folder: Path) -> Any:
    """Why a probe can't be judged yet, told on every rank, also by a stage that has no MoE layer."""
    out = {}
    for name, change, options in (
            ("start", {}, {"moment_tokens": 1 << 14}), ("held_out", {}, {"held_out_every": 50}),
            ("both", {}, {"moment_tokens": 1 << 14, "held_out_every": 50, "after": 2, "every": 2}),
            ("dense_stage", {"moe_layer_freq": [1, 1, 0, 0]}, {"held_out_every": 50})):
        harness.groups(pp=2)
        _, fit = harness.train(harness.config(**harness.sizes(pp=2), **change), convert=with_prefetch, attach=fitter(**options), steps=4)
        out[name] = refusal(lambda fit=fit: fit.save_pretrained(folder / "short"))  # type: ignore[misc]
        fit.close()
    return out | {"written": (folder / "short").exists()}


@case(2)
def ragged(folder: Path) -> Any:
    """A first pass of two tokens, one of padding alone, then whole ones: the start comes by rows. What is kept back is padding on one rank,
    then on both."""
    harness.groups(ep=2)
    megatron_cpu.seed(1)
    told: list[str] = []
    few, warning = megatron_stage.FEW, megatron_stage.log.warning
    megatron_stage.FEW, megatron_stage.log.warning = (5,), lambda *words: told.append(str(words))
    out: dict[str, Any] = {"horizons": []}
    for both in (False, True):
        model = harness.build(harness.config(**harness.sizes(ep=2), moe_token_dispatcher_type="alltoall"), with_prefetch)[0].train()
        fit = ProbeFit(model, SMALL, tokens=64, moment_tokens=500, held_out_every=4)
        out["started"] = []
        for i in range(9):
            length = 1 if i == 0 else harness.SEQUENCE
            pad = torch.full((harness.MICRO_BATCH, length), i == 1 or (i % 4 == 3 and (both or dist.get_rank() == 0)))
            ids = torch.randint(0, harness.VOCABULARY, pad.shape, generator=torch.Generator().manual_seed(i))
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
            model(ids, torch.arange(length).expand(len(pad), -1), mask, padding_mask=pad)
            out["started"].append(fit.chunks[0].trainer.started)
        out["horizons"].append(sorted(fit.recall()))
        if both:
            out["unjudged"] = refusal(lambda fit=fit: fit.save_pretrained(folder / "never"))  # type: ignore[misc]
        else:
            fit.save_pretrained(folder / "ragged", force=True)
            out["card"] = (folder / "ragged" / "README.md").read_text()
            out["judged"] = sorted({int(row.split("|")[5]) for row in out["card"].splitlines() if row.startswith("| online")})
        fit.close()
    megatron_stage.FEW, megatron_stage.log.warning = few, warning
    return out | {"told": len(told), "written": (folder / "never").exists()}


@case(1)
def documented(folder: Path) -> Any:
    """The first example of docs/megatron.md, as it stands there, in an empty folder."""
    import os

    text = (ROOT / "docs" / "megatron.md").read_text()
    harness.groups()
    os.chdir(folder)
    scope: dict[str, Any] = {}
    exec(compile(text.split("```python\n", 1)[1].split("```", 1)[0], "docs/megatron.md", "exec"), scope)
    return {"written": (folder / "probes" / "mine" / "config.json").exists(), "steps": scope["fit"].done}


# learning -------------------------------------------------------------------------------------------------------------------
def _learns(layout: dict[str, int]) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        harness.groups(**layout)
        losses: list[list[float]] = []

        def attach(chunks: list[Any]) -> ProbeFit:
            fit = fitter(held_out_every=50)(chunks)
            for chunk in fit.chunks:
                step, mine = chunk.trainer.step, []

                def kept(taps: Any, gates: Any, step: Any = step, mine: list[float] = mine) -> Any:
                    mine.append(float(loss := step(taps, gates)))
                    return loss

                chunk.trainer.step = kept
                losses.append(mine)
            return fit

        harness.train(harness.config(**harness.sizes(**layout)), convert=with_prefetch, attach=attach, steps=16)
        return {"losses": losses}

    return run


for _name, (_world, _layout) in {"one": (1, {}), "ep2": (2, {"ep": 2}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "ep4": (4, {"ep": 4}),
                                 "tp2ep2": (4, {"tp": 2, "ep": 2}), "pp2ep2": (4, {"pp": 2, "ep": 2})}.items():
    case(_world, f"learns_{_name}")(_learns(_layout))
