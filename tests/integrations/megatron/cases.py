"""What is tried on both versions of Megatron-core: each case runs on every rank of its group and returns what is to be asserted."""
from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router_replay import RouterReplay

from moe_prefetch.integrations import megatron, megatron_fit
from moe_prefetch.integrations.megatron import with_prefetch
from moe_prefetch.integrations.megatron_fit import ProbeFit
from moe_prefetch.probes.probe import RoutingProbe
from moe_prefetch.probes.trainer import FitConfig, find_fused_adam
from tests.integrations.megatron import harness

SMALL = FitConfig(rank=16, linear=8, steps=200, lr=3e-2, warmup=1, rank_weight=0.02, whiten=False)


@dataclass(frozen=True)
class Case:
    world: int
    run: Callable[[Path], Any]
    asked: bool = False  # runs only when named


CASES: dict[str, Case] = {}


def case(world: int, name: str = "", asked: bool = False) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def register(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CASES[name or run.__name__] = Case(world, run, asked)
        return run

    return register


class Losses(list[float]):
    """A watch that keeps the losses."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if "loss" in tag:
            self.append(value)


def fitter(losses: Losses | None = None, **change: Any) -> Callable[[list[Any]], ProbeFit]:
    values: dict[str, Any] = dict(tokens=64, moment_tokens=128, held_out_every=10, log_every=1, watch=losses) | change
    return lambda chunks: ProbeFit(chunks, values.pop("config", SMALL), **values)


def alike(a: harness.Run, b: harness.Run) -> dict[str, bool]:
    """Which of a run's traces are equal bit by bit."""
    def same(x: list[Any], y: list[Any]) -> bool:
        return len(x) == len(y) and all(torch.equal(p, q) if torch.is_tensor(p) else p == q for p, q in zip(x, y))

    one, two = a.pictures(), b.pictures()
    return {k: same(one[k], two[k]) for k in one}


def compared(layout: dict[str, Any], change: dict[str, Any], *, steps: int = 5, attach: Callable[[list[Any]], Any] | None = None,
             **options: Any) -> dict[str, Any]:
    """A stock run beside one with our spec and probes."""
    harness.groups(**layout)
    vp = layout.get("vp")
    values = {**harness.sizes(**{k: v for k, v in layout.items() if k != "vp"}), **change}
    stock, _ = harness.train(harness.config(**values), vp=vp, steps=steps, **options)
    losses = Losses()
    ours, fit = harness.train(harness.config(**values), vp=vp, steps=steps, convert=with_prefetch, attach=attach or fitter(losses),
                              **options)
    out: dict[str, Any] = {"same": alike(stock, ours), "norms": ours.norms, "model_losses": [float(x) for x in ours.losses]}
    if isinstance(fit, ProbeFit):
        out |= {"losses": losses, "steps": fit.done, "targets": [c.trainer.targets for c in fit.chunks],
                "recall": fit.recall(), "passes": [c.passes for c in fit.chunks],
                "counted": [fit.metrics.value("probe_fit_steps", stage=c.index) for c in fit.chunks]}
        fit.close()
    return out


# the matrix -----------------------------------------------------------------------------------------------------------------
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}), "ep2": (2, {"ep": 2}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "ep4": (4, {"ep": 4}),
    "tp2ep2": (4, {"tp": 2, "ep": 2}), "pp2ep2": (4, {"pp": 2, "ep": 2})}
for (_name, (_world, _layout)), _how in itertools.product(LAYOUTS.items(), ("allgather", "alltoall")):
    def _matrix(folder: Path, layout: dict[str, int] = _layout, how: str = _how) -> Any:
        return compared(layout, {"moe_token_dispatcher_type": how})

    case(_world, f"matrix_{_name}_{_how}")(_matrix)

ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared": ({}, {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}),
    "shared_overlap": ({"ep": 2}, {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True} | ALLTOALL),
    "losses": ({}, {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
                           "moe_aux_loss_coeff": [1e-2, 1e-2, 1e-2], "moe_z_loss_coeff": 1e-3}),
    "expert_bias": ({}, SIGMOID | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-2}),
    "groups": ({}, SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 1}),
    "drop_and_pad": ({"ep": 2}, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True} | ALLTOALL),
    "bf16": ({}, {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}),
    "jitter": ({}, {"moe_input_jitter_eps": 1e-2}),
    "mtp": ({}, {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}),
    "virtual_pipeline": ({"pp": 2, "vp": 2}, {"virtual_pipeline_model_parallel_size": 2}),
    "expert_tensor": ({"tp": 2, "etp": 2}, ALLTOALL),
    "dense_between": ({"pp": 2}, {"moe_layer_freq": [0, 1, 1, 1]}),
    "recompute_full": ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "recompute_parts": ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]}),
}
for _name, (_layout, _change) in FEATURES.items():
    def _feature(folder: Path, layout: dict[str, Any] = _layout, change: dict[str, Any] = _change) -> Any:
        return compared(layout, change)

    case(2 if _layout else 1, f"feature_{_name}")(_feature)


@case(2)
def overlap(folder: Path) -> Any:
    """1F1B: Megatron calls our layer's steps, not its forward."""
    change = ALLTOALL | {"overlap_moe_expert_parallel_comm": True, "bf16": True, "params_dtype": torch.bfloat16,
                         "pipeline_dtype": torch.bfloat16}
    called: list[int] = []

    def attach(chunks: list[Any]) -> ProbeFit:
        for layer in megatron.moe_layers(chunks[0]):
            layer.mlp.register_forward_pre_hook(lambda *a: called.append(1))
        return fitter(losses)(chunks)

    losses = Losses()
    return compared({"ep": 2}, change, attach=attach) | {"forward_calls": len(called), "losses": losses}


@case(1)
def routing_replay(folder: Path) -> Any:
    """Recorded choices are the same with and without us."""
    harness.groups()
    values = {**harness.sizes(), "moe_enable_routing_replay": True}
    runs = []
    for convert, attach in ((lambda s: s, lambda c: None), (with_prefetch, fitter())):
        RouterReplay.clear_global_router_replay_instances()
        taken: list[torch.Tensor] = []

        def start(chunks: list[Any]) -> None:
            from megatron.core.transformer.moe.router_replay import RouterReplayAction

            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)

        def after(taken: list[torch.Tensor] = taken) -> None:
            taken += [t.clone() for t in RouterReplay.get_recorded_data()]

        run, _ = harness.train(harness.config(**values), convert=convert, attach=attach, prepare=start, after_step=after)
        runs.append((run, taken))
    RouterReplay.clear_global_router_replay_instances()
    (a, x), (b, y) = runs
    return {"same": alike(a, b), "records": len(x), "same_records": all(torch.equal(p, q) for p, q in zip(x, y))}


# no double count, no evaluation, nothing left behind --------------------------------------------------------------------------
def weights(fit: ProbeFit) -> list[torch.Tensor]:
    return [p.detach().clone() for c in fit.chunks for p in c.trainer._params()]


@case(1)
def recompute_counts_once(folder: Path) -> Any:
    """The probes of a run with recomputation are those of one without, bit by bit."""
    harness.groups()
    fits = []
    # Recomputing norms changes the order of a sum of the model's own gradients, with and without us; the other two change no bit.
    for change in ({}, FEATURES["recompute_full"][1], {"recompute_granularity": "selective", "recompute_modules": ["moe"]}):
        _, fit = harness.train(harness.config(**change), convert=with_prefetch, attach=fitter())
        fits.append(fit)
    return {"steps": [f.done for f in fits], "passes": [f.chunks[0].passes for f in fits],
            "same": [all(torch.equal(a, b) for a, b in zip(weights(fits[0]), weights(f))) for f in fits[1:]]}


@case(1)
def evaluation_and_close(folder: Path) -> Any:
    harness.groups()
    run, fit = harness.train(harness.config(), convert=with_prefetch, attach=fitter(after=4))
    model, before = run.chunks[0], (fit.chunks[0].passes, fit.done)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    tokens = harness.batches(1)[0][0]
    place = torch.arange(harness.SEQUENCE).expand(harness.MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(harness.SEQUENCE, harness.SEQUENCE, dtype=torch.bool), 1)[None, None]
    model.eval()
    with torch.no_grad():
        model(tokens[:, :-1], place, mask)
    after_eval = (fit.chunks[0].passes, fit.done)
    model.train()
    fit.close()
    model(tokens[:, :-1], place, mask)
    return {"before": before, "after_eval": after_eval, "after_close": (fit.chunks[0].passes, fit.done), "hooks": max(hooks),
            "left": max(len(m._forward_pre_hooks) for m in model.modules()),
            "keys": [k for k in model.state_dict() if "probes" in k],
            "listening": [layer.mlp.router.listening for layer in megatron.moe_layers(model)]}


@case(1)
def specs(folder: Path) -> Any:
    """Users' own subclasses are kept, what is converted stays converted, the original spec is left alone, and faults have names."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter

    class Mine(MoELayer):
        pass

    class MyRouter(TopKRouter):
        pass

    harness.groups()
    plain = harness.spec(harness.config())
    mlp = plain.submodules.mlp
    inner = dataclasses.replace(mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"], router=MyRouter)
    own = functools.partial(Mine, submodules=inner) if isinstance(mlp, functools.partial) else dataclasses.replace(
        mlp, module=Mine, submodules=inner)
    mine = dataclasses.replace(plain, submodules=dataclasses.replace(plain.submodules, mlp=own))
    model = harness.build(harness.config(), lambda s: with_prefetch(with_prefetch([mine, s, mine]))[0])[0]
    layer = megatron.moe_layers(model)[0]
    twice = with_prefetch([mine, mine])
    faults = {}
    for name, value in (("normalization", "LayerNorm"), ("cuda_graph_impl", "local"), ("moe_router_score_function", "sqrtsoftplus")):
        kept, bias = getattr(layer.config, name), layer.mlp.router.expert_bias
        setattr(layer.config, name, value)
        layer.mlp.router.expert_bias = torch.zeros(8) if value == "sqrtsoftplus" else bias
        try:
            megatron.gate(layer)
        except megatron.UnsupportedModelError as error:
            faults[name] = str(error)
        setattr(layer.config, name, kept)
        layer.mlp.router.expert_bias = bias
    refused = []
    for wrong in (lambda: with_prefetch(harness.get_gpt_layer_local_spec(normalization="RMSNorm")), lambda: ProbeFit(harness.build(
            harness.config())[0])):
        try:
            wrong()
        except megatron.UnsupportedModelError as error:
            refused.append(str(error))
    return {"mine": isinstance(layer.mlp, Mine) and isinstance(layer.mlp.router, MyRouter), "names": [type(layer.mlp).__name__,
            type(layer.mlp.router).__name__], "one": twice[0] is twice[1], "untouched": harness.spec(harness.config()) is not plain and
            mine.submodules.mlp is own, "faults": faults, "refused": refused}


@case(1)
def planted(folder: Path) -> Any:
    """The comparison sees what it is there to see: a drawn number, a probe's loss in the model's graph, a probe among its parameters."""
    def draw(chunks: list[Any]) -> None:
        chunks[0].register_forward_pre_hook(lambda *a: (torch.rand(1), None)[1])

    def leak(chunks: list[Any]) -> None:
        def hook(module: Any, args: Any, output: Any) -> Any:
            return MoEAuxLossAutoScaler.apply(output[0], 1e-3 * (args[0].float() ** 2).mean()), output[1]

        megatron.moe_layers(chunks[0])[0].mlp.router.register_forward_hook(hook)

    def parameter(chunks: list[Any]) -> None:
        layer = megatron.moe_layers(chunks[0])[0]
        layer.mlp.extra = torch.nn.Parameter(torch.ones(4))
        layer.mlp.register_forward_hook(lambda m, a, out: (MoEAuxLossAutoScaler.apply(out[0], (m.extra**2).sum()), out[1]))

    return {f.__name__: compared({}, {}, attach=f)["same"] for f in (draw, leak, parameter)}


# artefacts ------------------------------------------------------------------------------------------------------------------
@case(2)
def saves_the_whole_model(folder: Path) -> Any:
    """Two stages, one probe; the layers of the second stage are fitted at every horizon, from taps that were sent."""
    out = {}
    for edges in (True, False):
        harness.groups(pp=2)
        run, fit = harness.train(harness.config(**harness.sizes(pp=2)), steps=20, convert=with_prefetch,
                                 attach=fitter(held_out_every=8, edges=edges))
        target = folder / f"probe_{edges}"
        probe = fit.save_pretrained(target, force=True)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, [g.to("cpu") for g in megatron.gates(run.chunks)])
        read = RoutingProbe.from_pretrained(target, gathered[0] + gathered[1])
        out[str(edges)] = {"layers": probe.layers, "used": [r.used_L if r else None for r in read.residuals],
                           "fitted": [[t - h for t in range(probe.layers) if r and float(r.up_LER[t].abs().sum()) > 0] for h, r in
                                      enumerate(read.residuals)],
                           "temperatures": [r.temperature_L.tolist() if r else None for r in probe.residuals],
                           "card": (target / "README.md").read_text()}
    return out


@case(2)
def checkpoint(folder: Path) -> Any:
    """Saved by Megatron at TP1 x EP2, loaded at TP2 x EP1, and gone on with."""
    harness.groups(ep=2)
    run, fit = harness.train(harness.config(**harness.sizes(ep=2)), convert=with_prefetch, attach=fitter())
    saved = {i: fit.chunks[0].trainer.layer_state(i) for i in range(4)}
    place = folder / "checkpoint"
    place.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({"model": run.chunks[0].sharded_state_dict()}, str(place))
    plain = run.chunks[0].state_dict()

    harness.groups(tp=2)
    found: dict[str, Any] = {}

    def attach(chunks: list[Any]) -> ProbeFit:
        again = fitter()(chunks)
        state = dist_checkpointing.load({"model": chunks[0].sharded_state_dict()}, str(place))
        found["load"] = str(chunks[0].load_state_dict(state["model"], strict=True))
        found["same"] = all(torch.equal(v, saved[i][k]) for i in saved for k, v in again.chunks[0].trainer.layer_state(i).items())
        found["done"] = again.done
        return again

    _, again = harness.train(harness.config(**harness.sizes(tp=2)), convert=with_prefetch, attach=attach, steps=2)
    return found | {"tensors": sum(len(s) for s in saved.values()), "saved_done": fit.done, "went_on": again.done,
                    "plain": sum("probes." in k for k in plain)}


@case(1)
def old_checkpoint(folder: Path) -> Any:
    """A model whose checkpoint has no probes, loaded before they are attached; and probes of other settings, refused."""
    harness.groups()
    stock, _ = harness.train(harness.config(), steps=1)
    state = stock.chunks[0].state_dict()
    run, fit = harness.train(harness.config(), convert=with_prefetch, steps=4,
                             attach=lambda chunks: (chunks[0].load_state_dict(state, strict=True), fitter()(chunks))[1])
    other = harness.build(harness.config(), with_prefetch)[0]
    ProbeFit(other, FitConfig(rank=4, linear=2, whiten=False))
    try:
        other.load_state_dict(run.chunks[0].state_dict())
    except megatron_fit.ShapeError as error:
        return {"done": fit.done, "refused": str(error)}
    return {"done": fit.done, "refused": ""}


@case(1)
def whitened(folder: Path) -> Any:
    """The default start, from the ridge solution: better than the stale gate at once."""
    harness.groups()
    losses = Losses()
    _, fit = harness.train(harness.config(), convert=with_prefetch, steps=12,
                           attach=fitter(losses, config=FitConfig(rank=8, linear=8, steps=100, lr=3e-3, warmup=2), moment_tokens=512))
    rows = fit.chunks[0].judged()
    recall, stale = (sum(float(r["figures"][h, k]) for _, r in rows for h in (0, 1, 2)) for k in (1, 3))
    return {"losses": losses, "recall": recall, "stale": stale}


@case(1)
def padding(folder: Path) -> Any:
    """Padded tokens are no tokens to learn from, and a pass of padding alone is no step towards anything."""
    harness.groups()
    taken: list[int] = []
    run, fit = harness.train(harness.config(), convert=with_prefetch, steps=4, attach=fitter())
    learn = fit.chunks[0]._learn
    fit.chunks[0]._learn = lambda taps: (taken.append(taps.tokens), learn(taps))[1]
    model = run.chunks[0].train()
    tokens = harness.batches(1)[0][0]
    place = torch.arange(harness.SEQUENCE).expand(harness.MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(harness.SEQUENCE, harness.SEQUENCE, dtype=torch.bool), 1)[None, None]
    before = weights(fit)
    for keep in (10, 0, 0, 0):
        pad = torch.ones(harness.MICRO_BATCH, harness.SEQUENCE, dtype=torch.bool)
        pad[:, :keep] = False
        model(tokens[:, :-1], place, mask, padding_mask=pad)
    return {"taken": taken, "finite": all(bool(torch.isfinite(w).all()) for w in weights(fit)),
            "moved": any(not torch.equal(a, b) for a, b in zip(before, weights(fit)))}


@case(1, asked=True)
def namesake_of_apex(folder: Path) -> Any:
    """PyPI's `apex` is another project; Megatron-core takes it for NVIDIA's and needs a norm of the user's own. We are not fooled."""
    import apex

    found = compared({}, {})
    return found | {"apex": apex.__file__, "found": str(find_fused_adam())}


@case(2)
def own_groups(folder: Path) -> Any:
    """A model built with groups that are not the global ones: 0.16.1 does not hand them to a subclass of MoELayer."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    harness.groups(ep=2)
    mine = ProcessGroupCollection.use_mpu_process_groups()
    mine.ep = dist.new_group([0, 1])
    values = harness.config(**harness.sizes(ep=2))
    out = {}
    for told in (True, False):
        spec = with_prefetch(harness.spec(values), pg_collection=mine if told else None)
        model = GPTModel(values, spec, harness.VOCABULARY, harness.SEQUENCE, position_embedding_type="rope", pg_collection=mine)
        out[f"same_{told}"] = model.decoder.layers[0].mlp.ep_group is mine.ep
        try:
            megatron.moe_layers(model)
            out[f"refused_{told}"] = False
        except megatron.UnsupportedModelError:
            out[f"refused_{told}"] = True
    return out | {"world": parallel_state.get_expert_model_parallel_world_size()}
