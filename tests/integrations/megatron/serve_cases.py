"""A model's MoE layers served by our dispatch, beside Megatron's own dispatchers: what every rank returns is asserted in `checks`."""
from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from torch.nn.utils import parametrize

from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.integrations import megatron_cpu
from moe_prefetch.integrations.megatron_dispatch import serve_experts, weights_of
from tests.integrations.megatron import harness
from tests.integrations.megatron.cases import case

SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_router_load_balancing_type": "none", "hidden_dropout": 0.0}


def model_of(**layout: int) -> Any:
    harness.groups(**layout)
    cfg = harness.config(**harness.sizes(**layout, moe_token_dispatcher_type="alltoall", **SHARED))
    megatron_cpu.seed(3)
    torch.manual_seed(3)
    (model,) = harness.build(cfg)
    return model.eval()


def run(model: Any, batch: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank() + 10 * batch)
    tokens = torch.randint(0, harness.VOCABULARY, (batch, harness.SEQUENCE), generator=g)
    place = torch.arange(harness.SEQUENCE).expand_as(tokens)
    mask = torch.triu(torch.ones(harness.SEQUENCE, harness.SEQUENCE, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        return model(tokens, place, mask)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def refusal(call: Any) -> str:
    try:
        call()
    except MoEPrefetchError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def served(folder: Path, **layout: int) -> dict[str, Any]:
    """Batches that differ between ranks, by every mode; bits between modes and against `deterministic` off; what is left afterwards."""
    model = model_of(**layout)
    rank = parallel_state.get_data_parallel_rank()
    batches = (1, 2 - rank % 2, 1 + rank % 2)
    want, names = [run(model, b) for b in batches], sorted(model.state_dict())
    before = {k: v.clone() for k, v in model.state_dict().items() if torch.is_tensor(v)}
    most, out = harness.SEQUENCE * 2, {}
    for name, modes, bits in (("gather", {most: "gather"}, True), ("host", {most: "host"}, True), ("sums", {most: "gather"}, False),
                              ("rounds", {7: "gather"}, True), ("sizes", {harness.SEQUENCE: "gather", most: "host"}, True)):
        with serve_experts(model, modes, deterministic=bits, deadline=60.0) as serving:
            out[name] = [run(model, b) for b in batches]
            same = sorted(model.state_dict()) == names and all(
                torch.equal(v, model.state_dict()[k]) for k, v in before.items())
            sizes = [serving.steps.next(harness.SEQUENCE * b).size for b in batches] if name == "sizes" else []
            twice = refusal(lambda: serve_experts(model)) if name == "gather" else ""
            training = refusal(lambda: model(torch.zeros(1, 4, dtype=torch.long), torch.arange(4)[None], None)) if name == "host" else ""
        out |= {f"{name}_same": same, "made": sizes or out.get("made"), "twice": twice or out.get("twice"),
                "training": training or out.get("training")}
    after = [run(model, b) for b in batches]
    return {"off": {k: max(off(a, b) for a, b in zip(out[k], want, strict=True)) for k in ("gather", "host", "sums", "rounds", "sizes")},
            "bits": [all(torch.equal(a, b) for a, b in zip(out["gather"], out[k], strict=True)) for k in ("host", "rounds", "sizes")],
            "same": [out[f"{k}_same"] for k in ("gather", "host", "sums", "rounds", "sizes")], "made": out["made"], "twice": out["twice"],
            "training": out["training"], "restored": all(torch.equal(a, b) for a, b in zip(after, want, strict=True))}


@case(2)
def serve_ep2(folder: Path) -> dict[str, Any]:
    return served(folder, ep=2)


@case(4)
def serve_tp2ep2(folder: Path) -> dict[str, Any]:
    return served(folder, tp=2, ep=2)


def lent_and_broken() -> dict[str, Any]:
    """Weights that are pieces of an optimizer's buffer get back there; and a pass that an error ended."""
    model = model_of()
    weights = [w for m in model.modules() if type(m).__name__ == "MoELayer" for pair in weights_of(m) for w in pair]
    buffer = torch.cat([w.detach().flatten() for w in weights])
    for w, piece in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
        w.data = piece.view_as(w)
    where, want = [w.data_ptr() for w in weights], [w.detach().clone() for w in weights]
    with serve_experts(model, deadline=20.0) as serving, torch.no_grad():
        weights[0].add_(1.0)
        buffer[-1] += 1.0
        moved = [w.data_ptr() for w in weights] != where
        run(model, 1)
        shared = next(m for m in model.modules() if type(m).__name__ == "MoELayer").shared_experts
        hook = shared.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            run(model, 1)
        except ZeroDivisionError:
            hook.remove()
        broken = refusal(lambda: run(model, 1))
        kept = weights[2].data
        weights[2].data = kept.clone()
        moved_on = refusal(serving.check)
        weights[2].data = kept
        serving.close()
    want[0] += 1.0
    want[-1].view(-1)[-1] += 1.0
    back = moved and [w.data_ptr() for w in weights] == where
    return {"lent": back and all(torch.equal(w, x) for w, x in zip(weights, want, strict=True)), "broken": broken, "elsewhere": moved_on}


class Adapter(torch.nn.Module):
    """As a LoRA library wraps a linear layer; `weight` for those who look no closer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(base.weight.shape[1], base.weight.shape[0], bias=False)

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + self.more(x), bias


class Coded(torch.Tensor):
    """Stands for a quantised weight."""


class Halved(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def halved(e: Any) -> None:
    parametrize.register_parametrization(e.linear_fc2, "weight", Halved())


def doubled(module: Any) -> None:
    was = module.forward
    module.forward = lambda *args: tuple(x if x is None else x * 2 for x in was(*args))


def clamped(e: Any) -> None:
    e.config = copy.deepcopy(e.config)
    e.config.activation_func_clamp_value = 0.0


def subclass(e: Any) -> None:
    e.__class__ = type("MyMLP", (type(e),), {})


def patched(e: Any) -> Any:
    was = type(e).forward
    type(e).forward = lambda self, *args: was(self, *args)
    return lambda: setattr(type(e), "forward", was)


# Name: (what is done to one expert, a word of what is said)
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "hook": (lambda e: e.register_forward_hook(lambda m, a, o: (o[0] * 2, o[1])).remove, "its local_experts.1 has hooks"),
    "hook of a layer": (lambda e: e.linear_fc2.register_forward_pre_hook(lambda m, a: None).remove, "local_experts.1.linear_fc2 has hooks"),
    "adapter": (lambda e: setattr(e, "linear_fc1", Adapter(e.linear_fc1)), "other parameters: local_experts.1.linear_fc1.more"),
    "forward": (doubled, "its local_experts.1 has a forward of its own"),
    "forward of a layer": (lambda e: doubled(e.linear_fc1), "its local_experts.1.linear_fc1 has a forward"),
    "subclass": (subclass, "its local_experts.1 is MyMLP"),
    "activation": (lambda e: setattr(e, "activation_func", torch.nn.functional.gelu), "its local_experts.1 has another activation"),
    "its own configuration": (clamped, "activation_func_clamp_value is 0.0"),
    "parametrization": (halved, "not plain parameters"),
    "quantised": (lambda e: setattr(e.linear_fc2, "weight", torch.nn.Parameter(e.linear_fc2.weight.data.as_subclass(Coded))),
                  "not plain parameters"),
    "patched class": (patched, "its local_experts.0 is MLP, whose forward is of tests"),
    "every module": (lambda e: torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: None).remove, "every module has hooks"),
}


def expert_of(model: Any) -> Any:
    return [m for m in model.modules() if type(m).__name__ == "MoELayer"][1].experts.local_experts[1]


@case(1)
def serve_leaves_nothing_out(folder: Path) -> dict[str, Any]:
    """What one expert does beside SwiGLU is refused, before and while it is served."""
    said = {}
    for name, (change, _) in LEFT_OUT.items():
        model = model_of()
        undo = change(expert_of(model))
        try:
            said[name] = refusal(lambda: serve_experts(model))  # noqa: B023
        finally:
            if callable(undo):
                undo()
    model = model_of()
    experts = [m for m in model.modules() if type(m).__name__ == "MoELayer"][1].experts
    doubled(experts)
    own, said["own"] = experts.forward, refusal(lambda: serve_experts(model))
    said["kept"] = experts.forward is own
    model, later = model_of(), {}
    want, expert = run(model, 1), expert_of(model)
    with serve_experts(model, deadline=20.0) as serving:
        got = run(model, 1)
        for name, do, undo in (
                ("hook", lambda: expert.register_forward_hook(lambda m, a, o: None), lambda h: h.remove()),
                ("forward", lambda: doubled(expert.linear_fc1), lambda _: delattr(expert.linear_fc1, "forward")),
                ("adapter", lambda: setattr(expert, "linear_fc1", Adapter(expert.linear_fc1)),
                 lambda _: setattr(expert, "linear_fc1", expert.linear_fc1.base)),
                ("outside", lambda: torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: None), lambda h: h.remove())):
            made = do()
            later[name] = [refusal(lambda: run(model, 1)), refusal(serving.check)]
            undo(made)
        said["again"] = torch.equal(run(model, 1), got) and off(got, want) < 1e-5
    words = {name: word for name, (_, word) in LEFT_OUT.items()}
    return said | {"words": words, "later": later, "restored": torch.equal(run(model, 1), want)}


class Grouped(torch.nn.Module):
    """Stands for modules of Transformer Engine, which is not here."""

    __module__ = "transformer_engine.pytorch"

    def forward(self) -> None:
        """Never called."""

    forward.__module__ = "transformer_engine.pytorch"


@case(1)
def serve_refuses(folder: Path) -> dict[str, Any]:
    """Experts that our kernel does not compute; and how Transformer Engine's grouped layers carry theirs."""
    said = {}
    for name, change in {"gelu": {"activation_func": torch.nn.functional.gelu, "gated_linear_unit": False},
                         "bias": {"add_bias_linear": True}, "clamp": {"activation_func_clamp_value": 1.0},
                         "offset": {"glu_linear_offset": 1.0}}.items():
        harness.groups()
        (model,) = harness.build(harness.config(**harness.sizes(**change)))
        said[name] = refusal(lambda: serve_experts(model))  # noqa: B023
    said |= lent_and_broken()
    (moe,) = [m for m in model_of().modules() if type(m).__name__ == "MoELayer"][:1]
    plain = weights_of(moe)
    grouped = SimpleNamespace(config=moe.config, layer_number=1, num_local_experts=moe.num_local_experts, experts=Grouped())
    for n, name in enumerate(("linear_fc1", "linear_fc2")):
        setattr(grouped.experts, name, Grouped())
        for i, pair in enumerate(plain):
            setattr(getattr(grouped.experts, name), f"weight{i}", pair[n])
    said["grouped"] = all(a is b for x, y in zip(weights_of(grouped), plain, strict=True) for a, b in zip(x, y, strict=True))  # type: ignore[arg-type]
    for key, value in (("moe_mlp_glu_interleave_size", 2), ("_inference_token_dispatcher", None)):
        odd = SimpleNamespace(**vars(grouped))
        if key.startswith("_"):
            setattr(odd, key, value)
        else:
            odd.config = SimpleNamespace(**{**vars(moe.config), key: value})
        said[key] = refusal(lambda: weights_of(odd))  # type: ignore[arg-type]  # noqa: B023
    grouped.experts = Grouped()
    said["other"] = refusal(lambda: weights_of(grouped))  # type: ignore[arg-type]
    return said
