"""Captured decode steps of `generate`: the same tokens as its own loop. Without a GPU the same loop runs, with plain steps."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import moe_prefetch
from moe_prefetch.errors import CacheError, ConfigError
from moe_prefetch.integrations import transformers_graph
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.integrations.transformers_graph import Decode, captured, step_of
from tests.tiny import tiny

from . import models

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "moe_prefetch"
ROOM = 140


@pytest.fixture(scope="module")
def case() -> Any:
    model = models.moe("qwen3_moe").to(DEVICE)
    stats = calibrate(model, models.ids(200, 2, seed=9).to(DEVICE))
    model.set_attn_implementation(OURS)
    return model, stats


class Replay:
    """Stands for a CUDA graph: runs the step, leaves its logits where they always are."""

    def __init__(self, step: Decode, model: Any, cache: Any) -> None:
        self.step, self.model, self.cache = step, model, weakref.ref(cache)

    def replay(self) -> None:
        logits = self.step._forward(self.model, self.cache())
        if self.step.logits is None:
            self.step.logits = logits.clone()
        self.step.logits.copy_(logits)


@pytest.fixture(params=["plain", "replayed"] if DEVICE == "cpu" else ["captured"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU every test runs with plain steps and with steps that are launched ahead, as those of a graph are."""
    if request.param == "replayed":
        own = Decode.run

        def run(self: Decode, model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
            if self.graph is None and self.plain_steps >= 2:
                self.graph = Replay(self, model, cache)  # type: ignore[assignment]
            return own(self, model, cache, tokens)

        monkeypatch.setattr(Decode, "run", run)
    return request.param


def cache_of(case: Any, kind: str, room: int = ROOM) -> Any:
    model, stats = case
    return StaticCache(config=model.config, max_cache_len=room) if kind == "static" else make_cache(
        model.config, models.config(kind), stats, max_length=room)  # fmt: skip


def both(case: Any, kind: str, prompt: torch.Tensor, n: int = 24, **kw: Any) -> tuple[Any, Any, Any]:
    """What `generate` gives by its own loop and by ours, with the same seed; and our cache."""
    model, said = case[0], []
    for custom in ({}, {"custom_generate": captured}):
        cache = cache_of(case, kind)
        torch.manual_seed(3)
        given = {k: v() if callable(v) else v for k, v in kw.items()}
        with torch.no_grad():
            said.append(
                model.generate(
                    prompt.to(DEVICE), past_key_values=cache, max_new_tokens=n, disable_compile=True,
                    **{"do_sample": False, "attention_mask": torch.ones_like(prompt).to(DEVICE)} | given | custom,
                )
            )  # fmt: skip
    return said[0], said[1], cache


def lengths(cache: Any) -> set[int]:
    host = {x.static.known for x in cache.layers if hasattr(x, "static")}
    return host | {int(cache.get_seq_length(i)) for i in range(len(cache.layers))}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["static", "fp16", "fp8", "fp4-quality", "fp4-72+fp8"])
def test_greedy_tokens_are_those_of_generate(case, way: str, kind: str, batch: int) -> None:
    want, got, cache = both(case, kind, models.ids(60, batch))
    assert torch.equal(want, got) and got.shape == (batch, 84)
    assert lengths(cache) == {83}
    step = step_of(cache)
    assert step is not None and step.plain_steps + step.replays == 23 and (step.replays == 21) == (way != "plain")


def test_the_next_generate_uses_the_same_step(case, way: str) -> None:
    model, _ = case
    cache, step = cache_of(case, "fp8"), None
    for i, length in enumerate((60, 9, 100)):
        prompt = models.ids(length, 2, seed=i).to(DEVICE)
        want, got, _ = both(case, "fp8", prompt, 16)
        cache.reset()
        assert torch.equal(models.generate(model, prompt, cache, 16, custom_generate=captured), want) and torch.equal(want, got)
        step = step or step_of(cache)
        assert step_of(cache) is step and step.plain_steps + step.replays == 15 * (i + 1)
    gone = weakref.ref(step)
    del step, cache
    gc.collect()
    assert gone() is None, "a step goes with its cache"


@pytest.mark.parametrize("kind", ["static", "fp8", "fp4-quality"])
def test_a_conversation_goes_on_in_the_same_cache(case, way: str, kind: str) -> None:
    """The second turn brings what is new; its first step is the graph's."""
    model, said = case[0], []
    for kw in ({"disable_compile": True}, {"custom_generate": captured}):
        cache, talk = cache_of(case, kind), models.ids(40, 2).to(DEVICE)
        for turn in range(3):
            talk = models.generate(model, talk, cache, 9, **kw)
            talk = torch.cat([talk, models.ids(20, 2, seed=turn).to(DEVICE)], 1)
        said.append(talk)
    assert torch.equal(*said) and lengths(cache) == {40 + 9 + 20 + 9 + 20 + 8}
    step = step_of(cache)
    assert step.plain_steps + step.replays == 24 and (step.replays == 22) == (way != "plain")


def test_another_model_attention_or_address_takes_another_step(case, way: str) -> None:
    model, _ = case
    cache, prompt = cache_of(case, "fp8"), models.ids(40).to(DEVICE)

    def step() -> Decode:
        cache.reset()
        models.generate(model, prompt, cache, 6, custom_generate=captured)
        return step_of(cache)

    first = step()
    assert step() is first
    handle = model.model.layers[0].register_forward_hook(lambda *a: None)
    assert (hooked := step()) is not first
    handle.remove()
    weight = model.model.layers[1].self_attn.q_proj.weight
    old = weight.data
    weight.data = old.clone()
    assert (moved := step()) is not hooked
    weight.data = old
    model.set_attn_implementation("sdpa")
    assert step() is not moved
    model.set_attn_implementation(OURS)


@pytest.mark.parametrize("kind", ["static", "fp8"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_with_a_seed(case, way: str, kind: str, batch: int) -> None:
    want, got, _ = both(case, kind, models.ids(60, batch), do_sample=True, top_k=20, top_p=0.9, temperature=1.7, repetition_penalty=1.1)
    assert torch.equal(want, got)
    greedy, _, _ = both(case, kind, models.ids(60, batch))
    assert not torch.equal(want, greedy)


@pytest.mark.parametrize("kind", ["static", "fp8"])
def test_rows_end_at_one_of_several_ends(case, way: str, kind: str) -> None:
    """A step is under way when the last row ends: it is taken back, and nothing of it is seen."""
    prompt = models.ids(60, 3)
    plain, _, _ = both(case, kind, prompt)
    # each row ends at another step, in the middle of the run
    ends = [int(plain[b, 60 + at]) for b, at in enumerate((5, 9, 12))]
    want, got, cache = both(case, kind, prompt, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(want, got) and 62 < got.shape[1] < 84
    assert lengths(cache) == {got.shape[1] - 1}
    # what is in the cache is what plain steps leave: go on from there
    go = models.ids(1, 3, seed=5).to(DEVICE)
    other = cache_of(case, kind)
    with torch.no_grad():
        case[0](input_ids=got[:, :60], past_key_values=other)
        with case[0]._optimize_model_for_decode():
            for t in range(60, got.shape[1] - 1):
                case[0](input_ids=got[:, t : t + 1], past_key_values=other)
        a, b = (case[0](input_ids=go, past_key_values=c).logits for c in (cache, other))
    assert torch.equal(a, b)


class Ban(LogitsProcessor):
    """In place, and by what came before."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores.scatter_(1, input_ids[:, -3:], -torch.inf)
        return scores


class Third(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kw: Any) -> torch.Tensor:
        return (input_ids[:, 60:] % 3 == 0).sum(1) >= 3


def test_processors_and_criteria_of_the_callers_own(case, way: str) -> None:
    given = {"logits_processor": LogitsProcessorList([Ban()]), "stopping_criteria": StoppingCriteriaList([Third()])}
    want, got, cache = both(case, "fp8", models.ids(60, 2), n=40, **{k: (lambda v=v: v) for k, v in given.items()})
    assert torch.equal(want, got) and got.shape[1] < 100 and lengths(cache) == {got.shape[1] - 1}


class Told(BaseStreamer):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.said.append(value.tolist())

    def end(self) -> None:
        self.said.append("end")


def test_a_streamer_gets_the_prompt_each_token_and_the_end(case, way: str) -> None:
    told = Told(), Told()
    streamers = iter(told)
    _, got, _ = both(case, "fp8", models.ids(60), n=12, streamer=lambda: next(streamers), eos_token_id=[int(models.ids(1))])
    assert told[0].said == told[1].said and told[1].said[-1] == "end" and len(told[1].said) == got.shape[1] - 60 + 2


def test_a_streamer_is_told_through_a_wrapper_too(case) -> None:
    model, stats = case
    cache = make_cache(model, models.config("fp8", attention="pages"), stats, max_length=100)
    told = Told()
    wrapped = lambda *args, **kw: captured(*args, **kw)  # noqa: E731
    got = models.generate(model, models.ids(60).to(DEVICE), cache, n=5, streamer=told, custom_generate=wrapped)
    assert told.said[-1] == "end" and len(told.said) == got.shape[1] - 60 + 2


def test_a_cache_made_in_inference_mode_is_used_outside_of_it(case) -> None:
    model, stats = case
    for size in (None, 100):
        cache = make_cache(model, models.config("fp8", attention="pages"), stats, max_length=size)
        with torch.inference_mode():
            first = models.generate(model, models.ids(60).to(DEVICE), cache, n=5)
        cache.reset()
        assert torch.equal(models.generate(model, models.ids(60).to(DEVICE), cache, n=5), first)


def test_a_dict_with_scores_logits_and_the_cache(case, way: str) -> None:
    want, got, cache = both(case, "fp4-quality", models.ids(60, 2), n=12, return_dict_in_generate=True, output_scores=True,
                            output_logits=True, repetition_penalty=1.3)  # fmt: skip
    assert torch.equal(want.sequences, got.sequences) and got.past_key_values is cache and type(got) is type(want)
    for name in ("scores", "logits"):
        a, b = getattr(want, name), getattr(got, name)
        assert len(a) == len(b) == 12 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(got.scores[3], got.logits[3])


def test_left_padding_over_transformers_own_cache(case, way: str) -> None:
    prompt = models.ids(60, 3)
    mask = torch.ones_like(prompt)
    mask[1, :20], mask[2, :59] = 0, 0
    for m in (mask, torch.ones_like(prompt), mask.flip(0)):
        want, got, _ = both(case, "static", prompt, attention_mask=m.to(DEVICE))
        assert torch.equal(want, got)
    with pytest.raises(CacheError, match="equal lengths"):
        both(case, "fp8", prompt, attention_mask=lambda: mask.to(DEVICE))


def test_a_cache_that_generate_makes_itself(case, way: str) -> None:
    model, prompt = case[0], models.ids(30, 2).to(DEVICE)
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt), "cache_implementation": "static"}
    with torch.no_grad():
        want, got = (model.generate(prompt, disable_compile=True, **given, **kw) for kw in ({}, {"custom_generate": captured}))
    assert torch.equal(want, got)


def test_one_token_and_embeddings(case, way: str) -> None:
    want, got, cache = both(case, "fp8", models.ids(20), n=1)
    assert torch.equal(want, got) and step_of(cache) is None and lengths(cache) == {20}
    model, ids = case[0], models.ids(20, 2).to(DEVICE)
    said = []
    for kw in ({}, {"custom_generate": captured}):
        with torch.no_grad():
            embeds = model.get_input_embeddings()(ids)
            said.append(model.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), past_key_values=cache_of(case, "fp8"),
                                       max_new_tokens=9, do_sample=False, disable_compile=True, **kw))  # fmt: skip
    assert torch.equal(*said) and said[0].shape == (2, 9)


def test_inference_mode_and_then_none(case, way: str) -> None:
    model, prompt, cache = case[0], models.ids(40).to(DEVICE), cache_of(case, "fp8")
    want = models.generate(model, prompt, cache_of(case, "fp8"), 8, disable_compile=True)
    for mode in (torch.no_grad, torch.no_grad):
        cache.reset()
        with mode():
            assert torch.equal(models.generate(model, prompt, cache, 8, custom_generate=captured), want)
    with torch.inference_mode():
        assert torch.equal(models.generate(model, prompt, cache_of(case, "fp8"), 8, custom_generate=captured), want)


def test_a_full_cache_is_refused_before_work_and_a_fitting_one_is_filled(case, way: str) -> None:
    model, prompt = case[0], models.ids(60, 2).to(DEVICE)
    for kind in ("static", "fp8"):
        cache = cache_of(case, kind, 70)
        with pytest.raises(CacheError, match=r"71 tokens with those to come.*at most 70"):
            models.generate(model, prompt, cache, 12, custom_generate=captured)
        assert int(cache.get_seq_length()) == 0
        models.generate(model, prompt, cache, 11, custom_generate=captured)
        assert lengths(cache) == {70}


@pytest.mark.parametrize(
    ("kw", "match"),
    [
        ({"num_beams": 2}, "beam"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"past_key_values": None}, "DynamicLayer.*cache_implementation='static'"),
        ({"past_key_values": None, "use_cache": False}, "no cache"),
    ],
)
def test_what_can_not_be_had_is_refused(case, kw: dict[str, Any], match: str) -> None:
    model, prompt = case[0], models.ids(20).to(DEVICE)
    given = {"past_key_values": cache_of(case, "fp8"), "max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with pytest.raises(ConfigError, match=match):
        model.generate(prompt, custom_generate=captured, **{**given, **kw})


def test_growing_and_sliding_caches_and_assistants_are_refused(case) -> None:
    model, prompt = case[0], models.ids(20).to(DEVICE)
    with pytest.raises(ConfigError, match=r"PagedLayer.*max_length=n"):
        models.generate(model, prompt, make_cache(model.config, models.config("fp8")), 4, custom_generate=captured)
    gemma = models.gemma2()
    with pytest.raises(ConfigError, match="sliding-window layers can't be captured"):
        models.generate(gemma, models.ids(20), StaticCache(config=gemma.config, max_cache_len=50), 4, custom_generate=captured)
    helper = models.moe("qwen3_moe", 1).to(DEVICE)
    with pytest.raises(ConfigError, match="assisted"):
        models.generate(model, prompt, cache_of(case, "fp8"), 4, custom_generate=captured, assistant_model=helper)


class Reads(TorchDispatchMode):
    """Notes operators that make the host wait for the device, where they are called. What runs inside an operator is its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::masked_select", "aten::equal"):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["static", "fp8", "fp4-quality"])
def test_a_step_reads_nothing_on_the_host(case, kind: str) -> None:
    """Across the end of a page and steps in which a token leaves the window. Eager experts do read: they can't be captured."""
    model, ids = case[0], models.ids(220, 2).to(DEVICE)
    seen = {}
    for experts in ("batched_mm", "eager"):
        cache = cache_of(case, kind, 220)
        at = torch.full((2, 1), 140, device=DEVICE)
        inputs = {"input_ids": at, "position_ids": at, "past_key_values": cache, "use_cache": True}
        model.set_experts_implementation(experts)
        try:
            with torch.no_grad():
                model(input_ids=ids[:, :140], past_key_values=cache)
                step = Decode(model, inputs, None, ())
                step.begin(inputs, None)
                with Reads() as reads:
                    for t in range(140, 160):
                        step.tokens.copy_(ids[:, t : t + 1])
                        step._forward(model, cache)
        finally:
            model.set_experts_implementation("grouped_mm")
        seen[experts] = set(reads.seen)
    assert not seen["batched_mm"] and "aten::nonzero" in seen["eager"]
    assert int(step.positions[0]) == 160 and lengths(cache) == {160}


def test_a_hook_of_others_keeps_steps_plain(case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python would not run in a replay."""
    model, device = case[0], torch.device("cuda")
    assert transformers_graph._plain_because(model, {}, device) == ""
    handle = model.model.layers[0].register_forward_hook(lambda *a: None)
    with caplog.at_level(logging.WARNING):
        assert "forward hook" in transformers_graph._plain_because(model, {}, device)
    handle.remove()
    assert "as slow as without" in caplog.text
    assert "wants token_type_ids" in transformers_graph._plain_because(model, {"token_type_ids": torch.ones(1)}, device)
    monkeypatch.setattr(model, "hf_device_map", {"a": 0, "b": 1}, raising=False)
    assert "several devices" in transformers_graph._plain_because(model, {}, device)


@pytest.mark.parametrize("kind", ["static", "fp8"])
def test_with_experts_that_are_fetched(way: str, kind: str) -> None:
    """`experts.home: host` plans and moves on the device: its steps can be captured, hooks and all."""
    # Its kernels are for BF16.
    model = tiny("qwen3_moe", dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32).to(DEVICE)
    model.set_attn_implementation(OURS)
    prompt = models.ids(30, 2).to(DEVICE)
    with moe_prefetch.attach(model, {"experts": {"home": "host", "resident": 2}}) as session:
        assert transformers_graph._plain_because(model, {}, torch.device("cuda")) == ""
        cache = cache_of((model, None), kind)
        want = models.generate(model, prompt, cache_of((model, None), kind), 16, disable_compile=True)
        once = session.ledger.total.demanded
        assert torch.equal(models.generate(model, prompt, cache, 16, custom_generate=captured), want)
        assert session.ledger.total.demanded == 2 * once, "a replay counts as a step does"


# on a GPU ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["static", "fp16", "fp8", "fp4-72", "fp4-quality"])
def test_replayed_steps_have_the_bits_of_plain_ones(case, kind: str) -> None:
    """From an all but empty cache across the sinks, the window and the end of a page."""
    model, cache, ids, said = case[0], cache_of(case, kind, 400), models.ids(380, 2).to(DEVICE), []
    with torch.no_grad(), model._optimize_model_for_decode():
        for plain in (True, False):
            cache.reset()
            model(input_ids=ids[:, :9], past_key_values=cache)
            at = torch.full((2, 1), 9, device=DEVICE)
            inputs = {"input_ids": at, "position_ids": at, "past_key_values": cache}
            step = Decode(model, inputs, None, ())
            step.begin(inputs, None)
            step.why = "to be compared with" if plain else step.why
            said.append(torch.stack([step.run(model, cache, ids[:, t]) for t in range(9, 380)]))
            assert plain or step.replays == 369, step.why
    assert torch.equal(*said)


@pytest.mark.gpu
def test_experts_that_read_the_host_go_plain_with_a_hint(case, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = case[0], models.ids(40).to(DEVICE)
    model.set_experts_implementation("eager")
    try:
        want = models.generate(model, prompt, cache_of(case, "fp8"), 12, disable_compile=True)
        cache = cache_of(case, "fp8")
        with caplog.at_level(logging.WARNING):
            got = models.generate(model, prompt, cache, 12, custom_generate=captured)
        assert torch.equal(want, got) and step_of(cache).replays == 0 and "set_experts_implementation" in caplog.text
        assert "modeling_qwen3_moe.py" in caplog.text
        # and where the watch is passed by: a capture that breaks off leaves everything usable, sampling too
        cache = cache_of(case, "fp8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decode, "_watched", Decode._forward)
            torch.manual_seed(3)
            got = models.generate(model, prompt, cache, 12, custom_generate=captured)
            assert "can't be captured" in step_of(cache).why and torch.equal(want, got)
        torch.randn(3, device="cuda")
    finally:
        model.set_experts_implementation("grouped_mm")
