"""What a cache of ours hands a model in place of K and V at a step of decode: tensors that stand for everything cached.

MLA layers cache a latent and the rotary part of K, and make K and V of every head from all of it at each step (`expand_kv`). Where pages
are read, queries are taken to the latents instead, and the output from them: the absorbed form of DeepSeek-V2 (arXiv 2405.04434, 2.1.2).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from moe_prefetch.kv.attention import attend
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

Pair = tuple[torch.Tensor, torch.Tensor]
# Model types whose attention caches latents, makes heads of them by `expand_kv` and attends at once, queries being (plain, rotary).
MLA_MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")


@contextmanager
def as_they_are(x: torch.Tensor) -> Iterator[None]:
    """A while without autocast and inference mode: what a cache keeps, and the law of what is read, have dtypes of their own, and a
    cache made in inference mode is written to outside of it, too."""
    kind = x.device.type
    with ExitStack() as stack:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


@dataclass
class Step:
    """What a step of decode left for attention: the store that took its tokens, and its own K and V [B, N, T, d] as they came."""

    store: LayerStore | StaticStore
    own: Pair
    note: Callable[[str], None]
    _all: Pair | None = field(default=None, repr=False)

    def all(self) -> Pair:
        """K and V [B, N, S, d] of all tokens: pages decoded, the step's own unrounded. Of an MLA layer: latents and rotary parts."""
        if self._all is None:
            if not self.store.layout.v_dim:
                self.note("heads are made of all latents; give make_cache the model itself")
            self._all = self._decoded()
        return self._all

    def _decoded(self) -> Pair:
        n = self.own[0].shape[2]
        k, v = self.store.gather(self.own[0].dtype)
        if not self.store.layout.v_dim:
            k, v = k.split([x.shape[3] for x in self.own], -1)
        v = v.to(self.own[1].dtype)
        if isinstance(self.store, StaticStore):
            at = self.store.length[0] - n + torch.arange(n, device=k.device)
            return k.index_copy(2, at, self.own[0]), v.index_copy(2, at, self.own[1])
        k[:, :, -n:], v[:, :, -n:] = self.own
        return k, v

    def trains(self) -> bool:
        """Whether a weight that attention would use here wants a gradient."""
        return False

    def attend(self, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Queries [B, H, T, d] over pages; FP32 [B, H, T, dv]."""
        if isinstance(self.store, StaticStore):
            return self.store.attend(query, **options)[0]
        return attend(self.store, query, **options)[0]


@dataclass
class LatentStep(Step):
    """A step of an MLA layer, in terms of heads: `module` makes K and V of latents for whoever asks."""

    module: Any = None

    def all(self) -> Pair:
        if self._all is None:
            self._all = type(self.module).expand_kv(self.module, *self._decoded())
        return self._all

    def trains(self) -> bool:
        return torch.is_grad_enabled() and self.module.kv_b_proj.weight.requires_grad

    def attend(self, query: torch.Tensor, **options: Any) -> torch.Tensor:
        return through_latents(self.module, query, lambda q: super(LatentStep, self).attend(q, **options))


class Held(torch.Tensor):
    """A step's own K or V that stands for everything cached: whoever computes with it, or asks for its shape, gets all of it.

    So an attention that knows nothing of pages is right with it, too.
    """

    step: Step
    side: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_open(args), **_open(kwargs or {}))


def _open(x: Any) -> Any:
    if isinstance(x, Held):
        return x.step.all()[x.side]
    if isinstance(x, (list, tuple)):
        return type(x)(*map(_open, x)) if hasattr(x, "_fields") else type(x)(map(_open, x))
    return {k: _open(v) for k, v in x.items()} if isinstance(x, dict) else x


def hold(step: Step) -> Pair:
    """The K and V that a cache returns for a step whose tokens are in its store already."""
    k, v = (x.as_subclass(Held) for x in step.own)
    k.step = v.step = step
    k.side, v.side = 0, 1
    return k, v


# MLA ---------------------------------------------------------------------------------------------------------------------
def _sides(module: Any) -> Pair:
    """Of each head: queries to latents [H, nope, r], and latents to outputs [H, v, r]; views of the layer's weight."""
    weight = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_b_proj.in_features)
    return weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)  # type: ignore[return-value]


def through_latents(module: Any, query: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """An MLA layer's attention in absorbed form: `attend` has queries [B, H, T, r + rotary] and gives latents [B, H, T, r]; this gives
    [B, H, T, v]."""
    plain, rotary = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    into, out_of = (side.to(query.dtype) for side in _sides(module))
    return attend(torch.cat([plain @ into, rotary], -1)).to(query.dtype) @ out_of.mT


_SHOWN: weakref.WeakKeyDictionary[Any, Pair] = weakref.WeakKeyDictionary()


@contextmanager
def latents_shown(model: Any) -> Iterator[None]:
    """While open, MLA layers make heads as ever, and `latents_of` tells of what."""
    before = {module: vars(module).get("expand_kv") for module in latent_layers(model)}

    def show(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Pair:
        _SHOWN[module] = kv_nope, k_rot
        return type(module).expand_kv(module, kv_nope, k_rot)  # type: ignore[no-any-return]

    for module in before:
        module.expand_kv = partial(show, module)
    try:
        yield
    finally:
        for module, own in before.items():
            _SHOWN.pop(module, None)
            if own is None:
                del module.expand_kv
            else:
                module.expand_kv = own


def latents_of(module: Any) -> Pair:
    """Latents [B, 1, T, r] and rotary parts [B, 1, T, rotary] that a layer just made heads of, under `latents_shown`."""
    return _SHOWN[module]


def _absorbs(module: Any) -> str:
    """Why queries can't be taken to the latents here; empty: they can. Asked at each step: an adapter may have come since."""
    made, whose = module.kv_b_proj, type(module).expand_kv
    if (whose.__module__, whose.__qualname__) != (type(module).__module__, f"{type(module).__qualname__}.expand_kv") or (
        not whose.__module__.startswith("transformers.models.")
    ):
        return "expand_kv is not transformers' own"
    weight, shape = getattr(made, "weight", None), (module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
    plain = type(made) is nn.Linear and made.bias is None and type(weight) in (nn.Parameter, torch.Tensor) and "forward" not in vars(made)
    plain = plain and nn.Linear.forward.__module__ == "torch.nn.modules.linear"
    if not plain or not weight.is_floating_point() or weight.is_meta or weight.shape[0] % shape[0] or weight.shape[1] != shape[1]:
        return "kv_b_proj is no plain linear layer"
    anywhere = nn.modules.module
    if made._forward_hooks or made._forward_pre_hooks or hasattr(made, "_hf_hook"):
        return "kv_b_proj has hooks"
    return "every module has hooks" if anywhere._global_forward_hooks or anywhere._global_forward_pre_hooks else ""


class _Expand:
    """`expand_kv` of one module, of which nothing is done where attention reads pages. In a file it is the module's own."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Pair:
        if isinstance(kv_nope, Held):
            step, why = kv_nope.step, _absorbs(self.module)
            if not why:
                return hold(LatentStep(step.store, step.own, step.note, module=self.module))
            step.note(why)
            kv_nope, k_rot = step._decoded()
        return type(self.module).expand_kv(self.module, kv_nope, k_rot)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return getattr, (self.module, "expand_kv")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Expand:
        return _Expand(copy.deepcopy(self.module, memo))


def latent_layers(model: Any) -> list[Any]:
    """A model's MLA attention modules."""
    return [m for m in model.modules() if hasattr(type(m), "expand_kv") and hasattr(m, "kv_b_proj")]


def latents_refused(model: Any, text: Any) -> str:
    """Why a model's MLA layers can't read pages; empty: they can."""
    if text.model_type not in MLA_MODELS:
        return f"MLA layers of {text.model_type} make heads of their latents before attention"
    layers = latent_layers(model)
    own = (vars(m)["expand_kv"] for m in layers if "expand_kv" in vars(m))
    if not all(isinstance(x, _Expand) for x in own):
        return "expand_kv is the caller's own"
    return next(filter(None, map(_absorbs, layers)), "") if layers else f"no MLA layers were found in {type(model).__name__}"


def absorb(model: Any) -> None:
    """Let MLA layers leave latents as they are where a step may read pages. On the instances: the library has no registry for what stands
    between cache and attention."""
    for module in latent_layers(model):
        vars(module).setdefault("expand_kv", _Expand(module))


def release(model: Any) -> None:
    """Undo `absorb`."""
    for module in latent_layers(model):
        if isinstance(vars(module).get("expand_kv"), _Expand):
            del module.expand_kv
