"""Whether an expert of `deepspeed.moe` computes down_proj(act(gate_proj(x)) * up_proj(x)) and nothing else, and with which activation.

Served, an expert is never called: the formula is computed from its three weights. So whatever else it does would be left out without a
word, and is looked for here: by what its modules are, by running each expert on weights and inputs of ours, and, while it is served, by
what came to it since.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from moe_prefetch.errors import SessionError, UnsupportedModelError
from moe_prefetch.integrations.watch import Watch, beside

Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FORMULA = (f"down_proj(act(gate_proj(x)) * up_proj(x)), plain nn.Linear without bias, no hooks, act one of {', '.join(ACTIVATIONS)}; "
           "the same for all experts of a layer")
REMEDY = "serve it without moe_prefetch; a probe can be fitted beside any expert (`fit` in the section)"
# Of the largest value of a row: above FP32's rounding, below what tells exact GELU from the one with tanh (1e-4).
TOLERANCE = 1e-5
# What rows are multiplied by: activations differ near 1, clamps show beyond it.
SCALES = (1e-3, 0.03, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4, 1e6)


def why_not(expert: nn.Module) -> str:
    """What a module has, or is, that the formula leaves out; empty: nothing, as far as can be seen without running it."""
    if (nn.Linear.forward.__module__, nn.Linear.forward.__qualname__) != (nn.Linear.__module__, "Linear.forward"):
        return "nn.Linear.forward is not torch's own"
    for name in PROJECTIONS:
        made = getattr(expert, name, None)
        weight = getattr(made, "weight", None)
        if type(made) is not nn.Linear:
            return f"its {name} is {'missing' if made is None else f'a {type(made).__name__}, no plain nn.Linear'}"
        # A subclass of Tensor (quantised, distributed) has no bytes that a record could hold.
        if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor or not weight.is_floating_point():
            return f"the weight of its {name} is no plain parameter"
    more = {n for n, _ in expert.named_parameters(remove_duplicate=False)} - {f"{n}.weight" for n in PROJECTIONS}
    if more:
        return f"it has other parameters: {', '.join(sorted(more))}"
    return beside(expert)


class _Trial:
    """Weights and rows to run experts on, and what the formula gives of them with each activation. On the CPU, whatever the model is on."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype) -> None:
        made = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made, dtype=torch.float64, device="cpu")

        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        self.weights = {f"{n}.weight": (normal(*s) / s[1] ** 0.5).to(dtype) for n, s in shapes.items()}
        scale_S11 = torch.tensor(SCALES, dtype=torch.float64, device="cpu")[:, None, None]
        # Of each scale two dense rows, and one whose only channel is hot.
        rows_S3D = torch.stack([normal(hidden), normal(hidden), hidden**0.5 * torch.eye(hidden, dtype=torch.float64, device="cpu")[0]])
        # As DeepSpeed gives them: [ranks of the group, 1, capacity, D].
        self.rows = (scale_S11 * rows_S3D).view(1, 1, -1, hidden).to(dtype)
        gate, up, down = (self.weights[f"{n}.weight"] for n in PROJECTIONS)
        self.want = {n: F.linear(act(F.linear(self.rows, gate)) * F.linear(self.rows, up), down) for n, act in ACTIVATIONS.items()}

    def off(self, expert: nn.Module) -> tuple[float, str]:
        """(How far the expert is from the nearest activation's formula, of the largest value of a row; its name)."""
        got = functional_call(expert, self.weights, (self.rows,))
        got = got[0] if isinstance(got, tuple) else got  # as DeepSpeed takes it
        if not isinstance(got, torch.Tensor) or got.shape != self.rows.shape:
            raise TypeError(f"it gives {f'[{got.shape}]' if isinstance(got, torch.Tensor) else type(got).__name__}")
        off = {n: float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max()) for n, want in self.want.items()}
        name = min(off, key=lambda n: off[n] if off[n] == off[n] else float("inf"))
        return off[name], name


@contextmanager
def _as(expert: nn.Module, training: bool) -> Iterator[None]:
    before = {m: m.training for m in expert.modules()}
    try:
        for m in before:
            m.training = training
        yield
    finally:
        for m, was in before.items():
            m.training = was


class Formula:
    """The activations of a model's experts, `layers[layer][expert]`, all of which are looked at and run. Raises UnsupportedModelError."""

    def __init__(self, layers: Sequence[Sequence[nn.Module]]) -> None:
        self._trials: dict[tuple[int, int, torch.dtype], _Trial] = {}
        found = [[self._look(expert, f"MoE layer {i}, expert {e}") for e, expert in enumerate(experts)] for i, experts in enumerate(layers)]
        self._trials = {}
        for i, layer in enumerate(found):
            other = next((e for e, (name, _) in enumerate(layer) if name != layer[0][0]), None)
            if other is not None:
                raise UnsupportedModelError(f"its experts can't be served: expert {other} has {layer[other][0]}, expert 0 "
                                            f"{layer[0][0]}", where=f"MoE layer {i}", expected=FORMULA, do=REMEDY)
        self.acts = [ACTIVATIONS[layer[0][0]] for layer in found]
        self._served = [_Served(experts, [e for e, (_, steady) in zip(experts, layer, strict=True) if not steady])
                        for experts, layer in zip(layers, found, strict=True)]

    def _look(self, expert: nn.Module, where: str) -> tuple[str, bool]:
        """(Its activation's name, whether it computes the same in training)."""
        why = why_not(expert)
        if not why:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
                with _as(expert, False):
                    off, name, trial = self._run(expert)
                if off <= TOLERANCE and trial is not None:
                    with _as(expert, True):
                        try:
                            return name, trial.off(expert)[0] <= TOLERANCE
                        except Exception:  # noqa: BLE001 (whatever its training needs, it is served in evaluation)
                            return name, False
            why = f"it can't be run alone: {name}" if trial is None else (
                f"it computes something else: {name}, the nearest, is off by {off:.1g} of a row's largest value")
        raise UnsupportedModelError(f"its experts can't be served: {type(expert).__name__}: {why}", where=where, expected=FORMULA,
                                    do=REMEDY)

    def _run(self, expert: Any) -> tuple[float, str, _Trial | None]:
        width, hidden = expert.gate_proj.weight.shape
        said = ""
        # Small ones first; some insist on their own shapes, some on FP32.
        for shape in ((8, 64), (hidden, width)):
            for dtype in (torch.float64, torch.float32):
                if (key := (*shape, dtype)) not in self._trials:
                    self._trials[key] = _Trial(*key)
                try:
                    return *self._trials[key].off(expert), self._trials[key]
                except Exception as e:  # noqa: BLE001 (an expert may say anything)
                    said = f"{type(e).__name__}: {e}"
        return float("inf"), said, None

    def check(self, layer: int) -> None:
        """Whether the layer's experts still are what was found. Raises SessionError: a hook, an adapter, a mode in which they drop."""
        self._served[layer].check(layer)


class _Served:
    """What must stay as it was while a layer is served."""

    def __init__(self, experts: Sequence[nn.Module], unsteady: list[nn.Module]) -> None:
        self._experts, self._unsteady, self._watch = experts, [m for e in unsteady for m in e.modules()], Watch(experts)

    def check(self, layer: int) -> None:
        if any(m.training for m in self._unsteady):
            raise SessionError("its experts compute something else in training", where=f"MoE layer {layer}", expected="evaluation",
                               do="call eval() on the model, or detach")
        if not self._watch.unchanged():
            found = ((e, why_not(expert)) for e, expert in enumerate(self._experts))
            e, why = next((f for f in found if f[1]), (0, "modules of its experts were replaced"))
            raise SessionError(f"{why} since it was attached", where=f"MoE layer {layer}, expert {e}",
                               expected="experts as they were: served ones are not called", do="undo it, or detach first")
