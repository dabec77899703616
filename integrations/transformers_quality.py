"""Teacher-forced quality of KV formats on a transformers model: what decode would answer, in one pass per text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from moe_prefetch.config import KVConfig
from moe_prefetch.errors import ConfigError, ShapeError, UnsupportedModelError
from moe_prefetch.integrations.transformers_attention import Attention, are_ids, refuse_another_models, replace_attention
from moe_prefetch.integrations.transformers_held import MLA_MODELS, latents_of, latents_shown, through_latents
from moe_prefetch.kv.attention import attend_as_decoded
from moe_prefetch.kv.basis import Basis
from moe_prefetch.kv.codec import OutlierStats, make_coding, prompt_book, turns_keys
from moe_prefetch.kv.format import PageLayout, format_of, layout_for
from moe_prefetch.kv.gate import Verdict, judge, judge_bits
from moe_prefetch.kv.outliers import Policy

SETTLE = KVConfig().settle
# (layer, k_BNTd, v_BNTd) -> the K and V that a cache would have given back
Transform = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def log_probs(model: Any, token_ids: torch.Tensor, attention: Attention | None = None, keep: int = 0) -> torch.Tensor:
    """FP32 log-probabilities [S, vocab] of one text [S], or [B, S, vocab] of texts of one length [B, S], under another attention if given;
    with `keep`, of the last `keep` positions.
    """
    with torch.no_grad(), replace_attention(model, attention) if attention else nullcontext(), latents_shown(model):
        logits = model(input_ids=token_ids.view(-1, token_ids.shape[-1]), use_cache=False, logits_to_keep=keep).logits
    return logits.float().log_softmax(-1).view(*token_ids.shape[:-1], *logits.shape[1:])


def ask(
    model: Any, token_ids: torch.Tensor, asked: int, caches: Mapping[str, Cache | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, FP32 logits [asked, vocab]) of the last `asked` tokens of a text [S] over each cache; None: the model's own.

    What comes before is prefilled once, by the model's own attention; each cache gets its K and V, and the question reads them from there.
    """
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=token_ids[None, :-asked], past_key_values=past, logits_to_keep=1)
        for name, cache in caches.items():
            # The question leaves its own K and V: the model's own cache too is a copy.
            cache = DynamicCache(config=model.config) if cache is None else cache
            for number, layer in enumerate(past.layers):
                cache.update(layer.keys, layer.values, number)
            yield name, model(input_ids=token_ids[None, -asked:], past_key_values=cache).logits[0].float()


def log_probs_pinned(model: Any, token_ids: torch.Tensor, attention: Attention, keep: int = 0) -> torch.Tensor:
    """As `log_probs`, but every token goes to the experts, with the weights, that it has under the model's own attention: what is left of
    a drift when no routing decision flips. Raises UnsupportedModelError for a model without routers that we know.
    """
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    if not routers:
        raise UnsupportedModelError(
            "no router to pin", where=type(model).__name__, expected="an MoE model of transformers 5", do="measure without _pinned"
        )
    kept: dict[Any, Any] = {}

    def hook(module: Any, _args: Any, out: Any) -> Any:
        return kept.setdefault(module, out)

    handles = [m.register_forward_hook(hook) for m in routers]
    try:
        log_probs(model, token_ids, keep=1)
        return log_probs(model, token_ids, attention, keep)
    finally:
        for handle in handles:
            handle.remove()


def decoded(
    stats: OutlierStats | None,
    formats: Mapping[int, str],
    *,
    policy: Policy = "importance",
    sinks: int = 4,
    window: int | None = None,
    settle: int = 1,
    seen: dict[int, PageLayout] | None = None,
) -> Attention:
    """Attention as decode does it over pages, for the layers in `formats`; `seen` receives their layouts.

    Without `stats` each text makes its codebooks from the tokens that a cache has seen when the first ones leave its window, as a cache
    without a calibration does. Raises ConfigError for stats that lack one of the layers.
    """
    books: dict[int, tuple[PageLayout, Any, Basis | None]] = {}

    def book_of(n: int, key: torch.Tensor, value: torch.Tensor, latent: bool) -> tuple[PageLayout, Any, Basis | None]:
        if n not in books:
            fmt = format_of(formats[n])
            outliers = 0 if policy == "none" and fmt.max_bits is not None else None
            # Outliers as the cache that will be served grants them.
            most = fmt.window_or(window) + max(settle, SETTLE) - 1
            dims = key.shape[-1], value.shape[-1]
            granted = {"outliers": outliers, "sinks": sinks, "window": most}
            layout = layout_for(fmt, dims[0], 0, rope=dims[1]) if latent else layout_for(fmt, *dims, **granted)
            made = (layout, key.shape[1], policy, key.device)
            if stats is not None and n not in stats.layers and fmt.has_book:
                raise ConfigError(
                    f"the calibration has not seen layer {n}", where="stats", expected="all layers that are measured", do="calibrate anew"
                )
            if stats is None and fmt.has_book:
                books[n] = layout, prompt_book(*made, first=most + 1), None
            else:
                books[n] = layout, *make_coding(stats.layers.get(n) if stats else None, *made)[:2]
            if seen is not None:
                seen[n] = layout
        return books[n]

    def attention(
        own: Attention, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        n = module.layer_idx
        if n not in formats:
            return own(module, query, key, value, *args, **kwargs)
        latent = bool(getattr(module, "kv_lora_rank", None))
        if kwargs.get("softcap") or kwargs.get("s_aux") is not None or (latent and module.config.model_type not in MLA_MODELS):
            raise UnsupportedModelError(
                f"MLA of {module.config.model_type} is not measured" if latent else "soft-cap and sink logits are not measured in one pass",
                where=type(module).__name__,
                expected="plain softmax attention",
                do="measure by generating with make_cache",
            )
        if latent:
            key, value = latents_of(module)
        layout, book, basis = book_of(n, key, value, latent)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        kept = {"sinks": sinks, "window": layout.format.window_or(window), "settle": settle, "sliding": kwargs.get("sliding_window") or 0}
        attend = partial(attend_as_decoded, layout=layout, book=book, scale=scale, basis=basis, **kept)
        if latent:
            both = torch.cat([key, value], -1)
            out = through_latents(module, query, lambda q: attend(q, both, value[..., :0]))
        else:
            out = attend(query, key, value)
        return out.transpose(1, 2).to(query.dtype), None

    return attention


def through(transform: Transform) -> Attention:
    """The model's own attention over K and V that went through `transform`: how other packages' quantisers are measured."""

    def attention(
        own: Attention, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        k, v = transform(module.layer_idx, key, value)
        return own(module, query, k.to(key.dtype), v.to(value.dtype), *args, **kwargs)

    return attention


def gate(
    model: Any,
    texts: Sequence[torch.Tensor],
    stats: OutlierStats | None,
    *,
    format: str = "fp4-quality",
    max_kl: float | None = None,
    max_layer_kl: float | None = None,
    max_bits: float | None = None,
    formats: Sequence[str] = ("fp4-72", "fp4-quality", "fp8"),
    policy: Policy = "importance",
    sinks: int = 4,
    window: int | None = None,
    settle: int = 1,
) -> Verdict:
    """Judge the cache on the user's own token ids ([S] each), under one of two budgets.

    max_kl    nats per token: every layer gets `format`, the worst ones fall back to fp8 and fp16 (`moe_prefetch.kv.gate.judge`)
    max_bits  bits per element of one sequence of 32k tokens with everything counted, the basis of a calibration with axes too, as in
              `PagedCache.report`: each layer gets one of `formats` (`moe_prefetch.kv.gate.judge_bits`)

    `stats` None: as a cache without a calibration (`decoded`). Sinks, window (None: that of `format`) and settle as in the configuration to
    come; with `settle` 1 answers move most. The verdict names the window, for `kv.window`. One pass per text, layer and format tried.
    Raises ConfigError unless exactly one budget is given, for texts that never leave the window (they would be read exactly), for formats
    that `kv.format` does not take, and for another model's calibration, ShapeError for texts that are no token ids of the model's.
    """
    if (max_kl is None) == (max_bits is None):
        raise ConfigError(
            "the gate needs one budget", where="gate(max_kl=, max_bits=)", expected="exactly one of the two", do="give a KL or a bit budget"
        )
    texts = list(texts)
    if not texts or not formats:
        raise ConfigError(
            f"{len(texts)} texts and {len(formats)} formats", where="gate(texts, formats)", expected="one of each at least", do="give some"
        )
    for name in (format, *formats):
        KVConfig(format=name)
    window = format_of(format).window_or(window)
    if window < 0 or sinks < 0 or settle < 1:
        raise ConfigError(
            f"a window of {window}, {sinks} sinks, settle {settle}", where="gate", expected="0, 0 and 1 or more", do="correct them"
        )
    if strange := [n for n, ids in enumerate(texts) if not are_ids(model, ids, 1)]:
        raise ShapeError(
            f"text {strange[0]} is none", where="gate(texts)", expected="tensors [tokens] of the model's token ids",
            do="pass the tokenizer's ids",
        )  # fmt: skip
    # The last token is the first that reads a page.
    if short := [len(ids) for ids in texts if len(ids) <= sinks + window + settle]:
        raise ConfigError(
            f"a text of {min(short)} tokens shows nothing: {sinks} sinks and a window of {window} stay in FP16, {settle} leave it at once",
            where="gate(texts)",
            expected=f"more than {sinks + window + settle} tokens, best as many as will be served",
            do="give longer texts, or name the window that you will serve with",
        )
    kept = {"sinks": sinks, "window": window, "settle": settle}

    def logits_of(chosen: Mapping[int, str]) -> list[torch.Tensor]:
        attention = decoded(stats, chosen, policy=policy, **kept) if chosen else None
        return [log_probs(model, ids, attention) for ids in texts]

    layers = range(model.config.get_text_config(decoder=True).num_hidden_layers)
    if stats is not None:
        refuse_another_models(stats, model, layers)
    if max_kl is not None:
        return replace(judge(logits_of, texts, layers=layers, format=format, max_kl=max_kl, max_layer_kl=max_layer_kl), window=window)
    layouts: dict[int, dict[str, PageLayout]] = {n: {} for n in layers}
    for name in formats:
        seen: dict[int, PageLayout] = {}
        log_probs(model, texts[0][:2], decoded(stats, dict.fromkeys(layers, name), policy=policy, seen=seen, **kept))
        for n, layout in seen.items():
            layouts[n][name] = layout
    most = window + max(settle, SETTLE) - 1
    known = list(stats.layers.values()) if stats is not None else []

    def cost(layout: PageLayout) -> float:
        basis = any(turns_keys(x, layout.format, policy) for x in known)
        return layout.bits_per_element(sinks=sinks, window=most, basis=basis)

    found = judge_bits(logits_of, texts, layouts=layouts, max_bits=max_bits, cost=cost)
    return replace(found, window=window)
