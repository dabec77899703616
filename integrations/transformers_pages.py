"""transformers' attention straight from the pages: steps of decode and speculative verify go to `kv_attend`, nothing is decoded first.

    model.set_attn_implementation("moe_prefetch")    # `attach` and `make_cache(model, ...)` do this, and what MLA needs, for `kv.attention`

An implementation in transformers' own registry, over `sdpa`: a cache of ours hands it a step's own K and V, which stand for all that is
cached (`Held`); everything else goes on to `sdpa` as it came: other caches, prompts, training, masks that are not causal. A twin stands
over `eager`, for models with soft-capped scores or learned sinks.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import ConfigError
from moe_prefetch.integrations.transformers_held import Held, Step, absorb, as_they_are, latents_refused, release
from moe_prefetch.kv.static import StaticStore
from moe_prefetch.kv.store import LayerStore

log = logging.getLogger(__name__)

# Our names, and whose place each takes.
OVER = {"moe_prefetch": "sdpa", "moe_prefetch_over_eager": "eager"}
# Models whose own eager attention is softmax(cap(scale q k) + mask, sink) v, with the cap and the sink in its arguments.
EAGER_MODELS = ("gemma2", "gpt_oss")


def reads_pages(text_config: Any) -> bool:
    """Whether attention under this config is ours. It may be changed at any time."""
    return getattr(text_config, "_attn_implementation", None) in OVER


class Decoder:
    """The config that says at each step who attends. Copies of a cache share it, as they share the model: what was switched on for the
    first lasts until the last of them is gone.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        return self

    def __reduce__(self) -> tuple[type[Decoder], tuple[None]]:
        # a copy of the config would say for good what was so when the cache was pickled
        return Decoder, (None,)


# masks -----------------------------------------------------------------------------------------------------------------
class Origin(NamedTuple):
    """What a mask was made from: `causal` and no more, and padding bool [B, S]. `agrees`: with which left padding (a step asks once)."""

    causal: bool
    padding: torch.Tensor | None
    agrees: dict[tuple[int, ...], bool]


def _mask_over(base: str) -> Callable[..., torch.Tensor | None]:
    def mask(**kwargs: Any) -> torch.Tensor | None:
        made = ALL_MASK_ATTENTION_FUNCTIONS[base](**kwargs)
        if made is not None and not torch.compiler.is_compiling():
            causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
            made.origin = Origin(causal, kwargs.get("attention_mask"), {})
        return made

    return mask


def _mask_refused(mask: torch.Tensor | None, store: LayerStore | StaticStore, base: str, queries: int) -> str:
    """Why the pages can't be read under this mask; empty: each token sees all tokens of its row up to itself, which is what they do."""
    if mask is None:
        return "" if base == "sdpa" or queries == 1 else "eager attention without a mask is not causal"
    origin = getattr(mask, "origin", None)
    if origin is None or not origin.causal:
        return "a mask of the caller's own" if origin is None else "a mask that is more than causal"
    if origin.padding is None:
        return ""
    pads = tuple(store.pads) if isinstance(store, LayerStore) else (0,) * store.batch
    if pads not in origin.agrees:
        if origin.padding.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a padding mask can't be read in a graph; leave it out"
        there = origin.padding.bool()
        length = store.length if isinstance(store, LayerStore) else int(store.length[0])
        mine = torch.arange(there.shape[1], device=there.device)[None] >= torch.tensor(pads, device=there.device)[:, None]
        origin.agrees[pads] = length <= there.shape[1] and torch.equal(there[:, :length], mine[:, :length])
    return "" if origin.agrees[pads] else "padding that the cache was not told of (cache.set_padding)"


def left_padding(attention_mask: torch.Tensor) -> list[int] | None:
    """Zeros before the first one of each row of a mask [B, S]; None where there are zeros behind it."""
    there = attention_mask.bool()
    count = there.sum(1)
    pads, tidy = torch.stack([there.shape[1] - count, there.cummax(1).values.sum(1) == count]).tolist()
    return pads if all(tidy) else None


# attention ---------------------------------------------------------------------------------------------------------------
def _refused(base: str, module: Any, step: Step, query: torch.Tensor, mask: torch.Tensor | None, args: Any, kw: dict[str, Any]) -> str:
    """Why a step is left to the implementation beneath; empty: it is not."""
    if args or kw.get("position_bias") is not None:
        return "a position bias"
    if kw.get("dropout") or query.requires_grad or step.trains():
        return "training"
    if kw.get("output_attentions"):
        return "output_attentions"
    if kw.get("is_causal") is False or not getattr(module, "is_causal", True):
        return "attention that is not causal"
    if base == "sdpa" and (kw.get("softcap") or kw.get("s_aux") is not None):
        return "sdpa leaves out soft-cap and sink logits; load the model with attn_implementation='eager'"
    return _mask_refused(mask, step.store, base, query.shape[2])


def _attention_over(base: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kw: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(key, Held):
            step = key.step
            why = _refused(base, module, step, query, attention_mask, args, kw)
            step.note(why)
            if not why:
                scale = kw.get("scaling")
                options: dict[str, Any] = {
                    "scale": query.shape[-1] ** -0.5 if scale is None else scale,
                    "softcap": kw.get("softcap") or 0.0,
                    "sink_H": None if (sinks := kw.get("s_aux")) is None else sinks.detach(),
                }
                with as_they_are(query):
                    return step.attend(query, **options).transpose(1, 2).to(query.dtype), None
            key, value = step.all()
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(base, own)(module, query, key, value, attention_mask, *args, **kw)

    return attention


for _name, _base in OVER.items():
    AttentionInterface.register(_name, _attention_over(_base))
    AttentionMaskInterface.register(_name, _mask_over(_base))


# switching on --------------------------------------------------------------------------------------------------------------
@dataclass
class _Lease:
    """That attention under a config is ours: `before` is what it was, `users` how many still ask for it, for all models of the config."""

    before: str
    users: int = 0


_LEASES: weakref.WeakKeyDictionary[Any, _Lease] = weakref.WeakKeyDictionary()


@dataclass
class Served:
    """What `serve` decided: `says` in words. With the last `remove` of a model its attention is what it was before the first `serve`."""

    model: Any
    says: str
    lease: _Lease | None

    def remove(self) -> None:
        lease, self.lease = self.lease, None
        if lease is None:
            return
        lease.users -= 1
        if lease.users:
            return
        models = [model for model, now in _LEASES.items() if now is lease]
        for model in models:
            del _LEASES[model]
            release(model)
        # Else it was switched off meanwhile, and on by others.
        if models and reads_pages(self.model.config.get_text_config(decoder=True)):
            _set(self.model, lease.before)


def _set(model: Any, name: str) -> None:
    config, text = model.config, model.config.get_text_config(decoder=True)
    part = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
    model.set_attn_implementation(name if part is None else {part: name})
    if reads_pages(text):
        absorb(model)


def _asks_by_name(model: Any) -> bool:
    """Whether the code of the model or its layers does other things under `sdpa` or `eager` than call it: then another name would change
    more."""
    kinds = {type(model), *(type(m) for m in model.modules() if hasattr(m, "layer_idx"))}
    return any(_compares_names(c.__module__) for c in {c for kind in kinds for c in kind.__mro__} - {*PreTrainedModel.__mro__})


@cache
def _compares_names(module: str) -> bool:
    try:
        code = inspect.getsource(sys.modules[module])
    except (KeyError, TypeError, OSError):
        # A notebook's classes, or those of a REPL: their parents' code is looked at, too.
        return False
    return "_attn_implementation ==" in code or "_attn_implementation in" in code


def _name_for(model: Any, text: Any) -> tuple[str | None, str]:
    """Which of our names fits the model, or None; and why."""
    now = text._attn_implementation
    if getattr(text, "kv_lora_rank", None) and (why := latents_refused(model, text)):
        return None, why
    if _asks_by_name(model):
        return None, f"{type(model).__name__} asks for its attention by name"
    if now == "eager" and text.model_type not in EAGER_MODELS:
        return None, f"{text.model_type} with eager attention; load it with attn_implementation='sdpa'"
    name = next((ours for ours, base in OVER.items() if base == now), None)
    return name, f"over {now}" if name else f"attention is {now!r}, which is left as it is; 'sdpa' can be served"


def choose(model: Any, kv: KVConfig) -> tuple[str | None, str]:
    """Which of our names `serve` would set, or None, and why. Raises ConfigError where `kv.attention: pages` can't be had."""
    text = model.config.get_text_config(decoder=True)
    if kv.attention == "tensors":
        return None, "decoded tensors, by kv.attention"
    if reads_pages(text):
        return None, "pages, switched on before"
    if kv.attention == "auto" and model.device.type != "cuda":
        return None, f"decoded tensors: the model is on {model.device.type}"
    name, why = _name_for(model, text)
    if name is None and kv.attention == "pages":
        raise _cannot(why)
    return name, f"pages, {why}" if name else f"decoded tensors: {why}"


def _cannot(why: str) -> ConfigError:
    return ConfigError(
        f"attention can't read pages: {why}", where="kv.attention: pages", expected="sdpa, plain heads", do="use auto or tensors"
    )


def serve(model: Any, kv: KVConfig) -> Served:
    """Let the model's decode steps read pages, as `kv.attention` says; the decision is logged.

    auto     on a GPU, where the model's attention allows it
    pages    everywhere; raises ConfigError where it does not
    tensors  never: the cache decodes everything for the model's own attention
    """
    name, says = choose(model, kv)
    text = model.config.get_text_config(decoder=True)
    lease = None
    if kv.attention != "tensors" and reads_pages(text):
        # Switched on before by another cache (of a model with the same config, too), or by the user himself: not ours to take back.
        lease = next((x for m, x in _LEASES.items() if m.config.get_text_config(decoder=True) is text), None)
        absorb(model)
        if lease is not None:
            _LEASES[model] = lease
    if name is not None:
        before = text._attn_implementation
        _set(model, name)
        if text._attn_implementation == name:
            lease = _LEASES[model] = _Lease(before)
        elif kv.attention == "pages":
            raise _cannot(f"{type(model).__name__} does not take its attention from the registry")
        else:
            says = f"decoded tensors: {type(model).__name__} does not take its attention from the registry"
    if lease is not None:
        lease.users += 1
    log.info("attention over the KV cache reads %s", says)
    return Served(model, says, lease)
