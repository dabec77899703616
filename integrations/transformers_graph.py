"""Decode steps of `generate` as one CUDA graph: the model's forward over a cache of fixed size, captured once, replayed for every token.

    cache = make_cache(model, kv, max_length=4096)
    model.generate(**inputs, past_key_values=cache, custom_generate=captured)

A step of decode is Python that launches some hundred small kernels; a replay is one launch. The prompt, logits processors, sampling and
stopping criteria run as transformers runs them. The graph stays with the cache: `cache.reset()`, and the next `generate` replays it.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import warnings
import weakref
from typing import Any

import torch
from transformers import Cache, GenerationMixin
from transformers.cache_utils import StaticLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from moe_prefetch.errors import CacheError, ConfigError
from moe_prefetch.integrations.transformers_layers import StaticPagedLayer

log = logging.getLogger(__name__)

WHERE = "generate(custom_generate=captured)"
# A hook's Python runs when a step is captured, not when it is replayed: these leave nothing behind there, or count on the device.
HOOKS = ("transformers.", "moe_prefetch.integrations.transformers")


class Decode:
    """One model's step over one cache, in buffers that stay: tokens [B, 1] and positions in, logits FP32 [B, V] out.

    On a GPU the first step warms up, the second is watched for host reads, the third is captured. `replays` counts; where steps stay
    plain, `why` says it.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], mask: torch.Tensor | None, key: tuple[Any, ...]) -> None:
        self.key, self.rest, self.replays, self.plain_steps = key, dict(inputs), 0, 0
        at, tokens = self.rest.pop("position_ids", None), self.rest.pop("input_ids")
        self.rest.pop("past_key_values")
        self.rest["attention_mask"] = mask
        # Not of inference mode, even where the first `generate` is in it and the next is not.
        with torch.inference_mode(False):
            self.tokens = torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
            self.positions = None if at is None else torch.zeros(at.shape, dtype=at.dtype, device=at.device)
        self.logits: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.why = _plain_because(model, self.rest, tokens.device)
        self.stream = None if self.why else torch.cuda.Stream(tokens.device)

    def begin(self, inputs: dict[str, Any], mask: torch.Tensor | None) -> None:
        """The first step after a prompt."""
        if self.positions is not None:
            self.positions.copy_(inputs["position_ids"])
        if mask is not None:
            self.rest["attention_mask"].copy_(mask)

    def _forward(self, model: Any, cache: Cache) -> torch.Tensor:
        at = {} if self.positions is None else {"position_ids": self.positions}
        out = model(input_ids=self.tokens, past_key_values=cache, **at, **self.rest, return_dict=True)
        if self.positions is not None:
            self.positions.add_(1)
        return out.logits[:, -1].float()

    def run(self, model: Any, cache: Cache, tokens_B: torch.Tensor) -> torch.Tensor:
        """Take one token of each row; logits of the next, a tensor that stays the caller's."""
        self.tokens.copy_(tokens_B[:, None])
        if self.graph is None and not self.why and self.plain_steps >= 2:
            self._capture(model, cache)
        if self.graph is not None:
            self.graph.replay()
            self.replays += 1
            assert self.logits is not None
            return self.logits.clone()
        self.plain_steps += 1
        if self.stream is None or self.why:
            return self._forward(model, cache).clone()
        # Where it will be captured: libraries keep workspaces for each stream.
        now = torch.cuda.current_stream(self.tokens.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            logits = self._forward(model, cache) if self.plain_steps == 1 else self._watched(model, cache)
        now.wait_stream(self.stream)
        return logits.clone()

    def _watched(self, model: Any, cache: Cache) -> torch.Tensor:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                logits = self._forward(model, cache)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        reads = [w for w in seen if "called a synchronizing" in str(w.message)]
        for w in seen:
            if w not in reads and "ynchronization debug mode" not in str(w.message):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        if reads:
            self._stay_plain(model, f"the host reads from the device at {'/'.join(reads[0].filename.split('/')[-2:])}:{reads[0].lineno}")
        return logits

    def _capture(self, model: Any, cache: Cache) -> None:
        device = self.tokens.device
        generator = torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
        spare, graph, now = generator.clone_state(), torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.logits = self._forward(model, cache)
            self.graph = graph
        except BaseException as error:
            # A capture that broke off leaves generator and stream in it.
            generator.graphsafe_set_state(spare)
            torch.cuda.set_stream(now)
            if not isinstance(error, RuntimeError):
                raise
            self._stay_plain(model, f"it can't be captured: {str(error).splitlines()[0]}")

    def _stay_plain(self, model: Any, why: str) -> None:
        self.why = why
        experts = set(model.get_experts_implementation().values()) if hasattr(model, "get_experts_implementation") else set()
        hint = ""
        if "eager" in experts:
            hint = "; eager experts do: model.set_experts_implementation('grouped_mm'), or attach with experts.home: host"
        log.warning("steps of decode are not captured, as slow as without: %s%s", why, hint)


_STEPS: weakref.WeakKeyDictionary[Cache, Decode] = weakref.WeakKeyDictionary()


def step_of(cache: Cache) -> Decode | None:
    """The step that `captured` keeps with a cache: how often it was replayed, or why it is not captured."""
    return _STEPS.get(cache)


def _plain_because(model: Any, rest: dict[str, Any], device: torch.device) -> str:
    """Why steps can't be captured, as far as that is known before one; logged."""
    why = ""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        why = "the model is on several devices"
    elif own := [k for k, v in rest.items() if isinstance(v, torch.Tensor) and k != "attention_mask"]:
        why = f"{type(model).__name__} wants {own[0]} at each step"
    elif foreign := next((h for h in _hooks(model).values() if not h.__module__.startswith(HOOKS)), None):
        why = f"a forward hook, {getattr(foreign, '__qualname__', foreign)}, would not run in a replay"
    if why:
        log.warning("steps of decode are not captured, as slow as without: %s", why)
    return why


def _hooks(model: Any) -> dict[int, Any]:
    return {k: h for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks) for k, h in hooks.items()}


def _key(model: Any, cache: Cache, inputs: dict[str, Any], mask: torch.Tensor | None) -> tuple[Any, ...]:
    """What a graph has built in: another model, other addresses, implementations, hooks or shapes need another graph."""
    layers = [x.static.pool if isinstance(x, StaticPagedLayer) else x.keys for x in cache.layers]  # type: ignore[union-attr]
    tensors = itertools.chain(model.parameters(), model.buffers(), layers)
    experts = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    shapes = tuple((k, tuple(v.shape) if isinstance(v, torch.Tensor) else v) for k, v in sorted(inputs.items()) if k != "past_key_values")
    asked = (model.config.get_text_config(decoder=True)._attn_implementation, *experts.values(), *_hooks(model))
    return (weakref.ref(model), tuple(t.data_ptr() for t in tensors), asked, shapes, None if mask is None else tuple(mask.shape),
            torch.is_autocast_enabled(model.device.type))  # fmt: skip


def _given(name: str) -> Any:
    """What `generate` was given: transformers 5.17 hands a callable neither streamer nor synced_gpus nor assistant_model. It may have been
    wrapped on its way here."""
    frame, code = sys._getframe(2), inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals.get(name) if frame is not None else None


def _refuse(model: Any, cache: Any, config: Any, assistant: Any, synced: bool, padded: bool) -> None:
    """Raises ConfigError or CacheError for what one captured step after another can't do, before any work."""
    mode, layers = config.get_generation_mode(assistant), getattr(cache, "layers", [])
    fixed = [isinstance(x, StaticPagedLayer) or type(x) is StaticLayer for x in layers]
    what, do = "", "leave custom_generate away"
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        what = f"{str(getattr(mode, 'value', mode)).replace('_', ' ')} is asked for"
    elif model.config.is_encoder_decoder:
        what = f"{type(model).__name__} has an encoder"
    elif synced:
        what = "synced_gpus is asked for: other ranks run as many steps"
    elif config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        what = "attentions or hidden states are asked for, and a replay writes over those of the last one"
    elif not config.use_cache or not fixed:
        what, do = "there is no cache", "pass past_key_values=make_cache(model, kv, max_length=n), or cache_implementation='static'"
    elif not all(fixed):
        number = fixed.index(False)
        what = f"layer {number} of the cache is a {type(layers[number]).__name__}, whose size changes or whose steps ask the host"
        do = "pass past_key_values=make_cache(model, kv, max_length=n), or cache_implementation='static'"
        if getattr(layers[number], "is_sliding", False):
            do = "leave custom_generate away: sliding-window layers can't be captured"
    elif getattr(cache, "offloading", False):
        what = "the cache is offloaded"
    if what:
        raise ConfigError(what, where=WHERE, expected="greedy search or sampling over a cache of fixed size", do=do)
    if padded and any(isinstance(x, StaticPagedLayer) for x in layers):
        raise CacheError("rows of a static cache have equal lengths", where=WHERE, expected="no padding",
                         do="give prompts of one length, or use make_cache without max_length and leave custom_generate away")  # fmt: skip


class _Done:
    """Whether all rows have ended, and their new tokens, on the way to the host: asked for before the next step is launched."""

    def __init__(self, tokens_B: torch.Tensor, streamer: Any) -> None:
        cuda = tokens_B.is_cuda
        self.streamer, self.event = streamer, torch.cuda.Event() if cuda else None
        self.flag = torch.zeros((), dtype=torch.bool, pin_memory=cuda)
        self.tokens = torch.zeros(tokens_B.shape, dtype=tokens_B.dtype, pin_memory=cuda)

    def send(self, unfinished_B: torch.Tensor, tokens_B: torch.Tensor) -> None:
        self.flag.copy_(unfinished_B.max() == 0, non_blocking=True)
        if self.streamer is not None:
            self.tokens.copy_(tokens_B, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        if self.streamer is not None:
            self.streamer.put(self.tokens.clone())
        return bool(self.flag)


def captured(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """A decoding loop for `generate(custom_generate=captured)`: transformers' own, with steps that are replayed on a GPU.

    Greedy search and sampling, over `make_cache(..., max_length=n)` or transformers' `StaticCache`. Gives what `generate` gives. What can't
    be captured (a model that reads from the device at each step, several devices, forward hooks of others) runs in plain steps, and the
    log says why; so do models that are not on a GPU. One step is launched before the last one's tokens are known to have ended: it is
    taken back.

    Raises ConfigError for beams, assistants, encoders, synced_gpus, attentions, hidden states or another kind of cache; CacheError for
    left padding over pages, and where prompt and new tokens are more than the cache holds.
    """
    streamer = _given("streamer") if streamer is None else streamer
    synced_gpus, assistant = synced_gpus or bool(_given("synced_gpus")), _given("assistant_model")
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    padded = mask is not None and not bool(mask.all())
    _refuse(model, cache, generation_config, assistant, synced_gpus, padded)
    capacity, length = min(x.get_max_length() for x in cache.layers), int(cache.get_seq_length())
    embeds = model_kwargs.get("inputs_embeds")
    prompt = input_ids.shape[1] if embeds is None else embeds.shape[1]
    whole = length == 0 or (mask is not None and mask.shape[1] == prompt)
    most = stopping_criteria.max_length
    # The last token is not cached.
    need = (prompt if whole else length + prompt) + (0 if most is None else max(0, most - input_ids.shape[1] - 1))
    if need > capacity:
        raise CacheError(f"{need} tokens with those to come", where=WHERE, expected=f"at most {capacity}",
                         do="make the cache longer, or max_new_tokens smaller")  # fmt: skip

    # Prompts in chunks would be compiled.
    generation_config.disable_compile = True
    out = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(out, model_kwargs)
    logits = out.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    del out
    if padded:
        mask = torch.nn.functional.pad(mask, (0, capacity - mask.shape[1]), value=1)
    length, step = int(cache.get_seq_length()), None
    dicts = generation_config.return_dict_in_generate
    scores = () if dicts and generation_config.output_scores else None
    raw = () if dicts and generation_config.output_logits else None
    ends = any(hasattr(c, "eos_token_id") for c in stopping_criteria)
    pad = generation_config._pad_token_tensor
    pad = pad if pad is None else pad.to(input_ids.device)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    done = _Done(unfinished, streamer)
    try:
        with model._optimize_model_for_decode():
            while True:
                chosen = logits_processor(input_ids, logits)
                scores = scores if scores is None else (*scores, chosen)
                raw = raw if raw is None else (*raw, logits)
                if generation_config.do_sample:
                    tokens = torch.multinomial(torch.nn.functional.softmax(chosen, dim=-1), num_samples=1).squeeze(1)
                else:
                    tokens = torch.argmax(chosen, dim=-1)
                if ends:
                    tokens = tokens * unfinished + pad * (1 - unfinished)
                input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
                unfinished = unfinished & ~stopping_criteria(input_ids, scores)
                done.send(unfinished, tokens)
                # Launched before the host knows whether all have ended, so that the device need not wait for it.
                ahead = step is not None and step.graph is not None and length < capacity and (most is None or input_ids.shape[1] < most)
                if ahead:
                    logits, length = step.run(model, cache, tokens), length + 1
                if done.read():
                    if ahead:
                        _take_back(cache)
                        length -= 1
                    break
                if ahead:
                    continue
                if length >= capacity:
                    raise CacheError(f"the cache is full at {capacity} tokens", where=WHERE, expected="room for each new token",
                                     do="make it longer, or give max_new_tokens")  # fmt: skip
                if step is None:
                    step = _step(model, cache, input_ids, mask if padded else None, model_kwargs)
                logits, length = step.run(model, cache, tokens), length + 1
    finally:
        for layer in cache.layers:
            if isinstance(layer, StaticPagedLayer) and layer.static is not None:
                layer.static.known = length
    if streamer is not None:
        streamer.end()
    if not dicts:
        return input_ids
    return GenerateDecoderOnlyOutput(sequences=input_ids, scores=scores, logits=raw, past_key_values=cache)


def _step(model: Any, cache: Cache, input_ids: torch.Tensor, mask: torch.Tensor | None, model_kwargs: dict[str, Any]) -> Decode:
    """The cache's step, or a new one where it was another model's, or of other inputs."""
    # Without a mask each token sees all tokens before it; a 2D one of full length hides the padding, and what comes later is hidden anyway.
    inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **{**model_kwargs, "attention_mask": None})
    inputs.pop("attention_mask", None)
    key, step = _key(model, cache, inputs, mask), _STEPS.get(cache)
    if step is None or step.key != key:
        step = _STEPS[cache] = Decode(model, inputs, None if mask is None else mask.clone(), key)
    step.begin(inputs, mask)
    return step


def _take_back(cache: Cache) -> None:
    """Forget the last token. Device work only."""
    for layer in cache.layers:
        if isinstance(layer, StaticPagedLayer):
            layer.crop(-1)
        else:
            layer.cumulative_length.sub_(1)
