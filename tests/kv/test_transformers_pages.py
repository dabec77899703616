"""Attention of transformers models straight from the pages, against the same models over decoded tensors."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import moe_prefetch
from moe_prefetch.errors import CacheError, ConfigError
from moe_prefetch.integrations import transformers_layers
from moe_prefetch.integrations.transformers_cache import PagedLayer, calibrate, make_cache
from moe_prefetch.integrations.transformers_held import Held
from moe_prefetch.integrations.transformers_pages import choose, serve
from moe_prefetch.kv.store import LayerStore

from . import models

FAMILIES = ["qwen2_moe", "qwen3_moe", "mixtral"]
FORMATS = ["fp16", "fp8", "fp4-72", "fp4-quality", "fp4-72+fp8"]
OURS, OVER_EAGER = "moe_prefetch", "moe_prefetch_over_eager"


class Calls(TorchDispatchMode):
    """Counts operators by name while open."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    made = {f: models.moe(f) for f in FAMILIES}
    return {f: (m, calibrate(m, models.ids(200, 2, seed=9))) for f, m in made.items()}


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.llama()


def under(model: Any, implementation: str, run: Any) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            return run()
    finally:
        model.set_attn_implementation(before)


def both(model: Any, make: Any, prompt: torch.Tensor, *, ours: str = OURS, n: int = 32, mask: Any = None, **kw: Any) -> Any:
    """Greedy tokens over decoded tensors and over pages: equal, or the first that differs was a near-tie. Returns the second cache."""
    out, last = {}, None
    for name in (model.config._attn_implementation, ours):
        last = make()
        if mask is not None:
            last.set_padding(mask)
        given = {"mask": mask} if mask is not None else {}
        out[name] = under(
            model,
            name,
            lambda last=last, given=given: models.generate(
                model, prompt, last, n, output_logits=True, output_scores=True, return_dict_in_generate=True, **given, **kw
            ),
        )
    want, got = out.values()
    for b in range(len(got.sequences)):
        differ = (want.sequences[b] != got.sequences[b]).nonzero().flatten().tolist()
        steps = (differ[0] if differ else got.sequences.shape[1]) - prompt.shape[1]
        assert steps >= 0
        if "num_beams" in kw:
            # Mean log-probabilities of the best beams: other tokens may be as good, others' scores may not be far.
            assert abs(float(want.sequences_scores[b] - got.sequences_scores[b])) < 1e-3
            continue
        for i in range(min(steps + 1, len(got.logits))):
            a, c = want.logits[i][b], got.logits[i][b]
            # One key of a step, the query's own, is read as FP16: 2^-11 of it, then through some layers.
            slack = 0.02 * float(a.abs().max())
            assert float((a - c).abs().max()) < slack, f"step {i}"
            if i == steps:
                top = a.topk(2).values
                assert float(top[0] - top[1]) < 2 * slack, f"row {b} differs at step {i} without a tie"
    return last


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_decoded_tensors(cases, family: str, format: str) -> None:
    model, stats = cases[family]
    cache = both(model, lambda: make_cache(model.config, models.config(format), stats), models.ids(60, 2))
    assert [row["attention"] for row in cache.report()] == ["pages", "pages"]
    cache.check_integrity()


@pytest.mark.parametrize("format", ["fp8", "fp4-quality"])
def test_without_a_calibration_each_row_has_its_own_codebook(cases, format: str) -> None:
    model, _ = cases["qwen3_moe"]
    cache = both(model, lambda: make_cache(model.config, models.config(format)), models.ids(70, 3))
    assert {row["attention"] for row in cache.report()} == {"pages"}


@pytest.mark.parametrize("format", FORMATS)
def test_beams_and_drafts(cases, format: str) -> None:
    model, stats = cases["qwen3_moe"]
    make = lambda: make_cache(model.config, models.config(format), stats)  # noqa: E731
    cache = both(model, make, models.ids(60, 2), num_beams=3, n=16)
    assert {row["attention"] for row in cache.report()} == {"pages"}
    cache = both(model, make, models.ids(12).repeat(1, 6), prompt_lookup_num_tokens=5)
    assert {row["attention"] for row in cache.report()} == {"pages"}
    cache = both(model, make, models.ids(60), assistant_model=models.moe("qwen3_moe", 1), num_assistant_tokens=4)
    assert {row["attention"] for row in cache.report()} == {"pages"}


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
@pytest.mark.parametrize("kw", [{}, {"num_beams": 2, "n": 12}])
def test_left_padding(cases, family: str, kw: dict[str, int]) -> None:
    model, stats = cases[family]
    batch = models.ids(80, 3)
    mask = torch.ones_like(batch)
    mask[1, :30], mask[2, :79] = 0, 0
    cache = both(model, lambda: make_cache(model.config, models.config("fp4-quality"), stats), batch, mask=mask, **kw)
    assert {row["attention"] for row in cache.report()} == {"pages"}


@pytest.mark.parametrize("format", ["fp8", "fp4-quality"])
def test_tokens_leave_the_window_together(cases, format: str) -> None:
    """`settle`: pages are written in one step of so many, and the window holds as many more at most."""
    model, stats = cases["qwen2_moe"]
    kv = models.config(format, settle=8)
    cache = both(model, lambda: make_cache(model.config, kv, stats), models.ids(60, 2))
    assert {row["attention"] for row in cache.report()} == {"pages"}
    cache = make_cache(model.config, kv, stats)
    held = []

    def run() -> Counter[str]:
        model(input_ids=models.ids(60), past_key_values=cache)
        with Calls() as calls:
            for _ in range(32):
                model(input_ids=models.ids(1), past_key_values=cache)
                held.append(cache.layers[0].store.live(0))
        return calls.seen

    # at 60 tokens, at 68, 76 and 84
    assert under(model, OURS, run)["moe_prefetch::kv_encode"] == 2 * 4
    # the step's own token counted
    assert set(held) == set(range(17, 25)) and cache.layers[0].most_recent == 23


def test_a_prompt_in_chunks(cases) -> None:
    """Chunks above the draft length read the decoded past; a short last one reads pages."""
    model, stats = cases["qwen3_moe"]
    ids = models.ids(190)

    def run() -> torch.Tensor:
        cache = make_cache(model.config, models.config(), stats)
        return torch.cat([model(input_ids=x, past_key_values=cache).logits for x in ids.split([100, 60, 20, 8, 1, 1], 1)], 1)

    want, got = under(model, "sdpa", run), under(model, OURS, run)
    assert torch.allclose(got, want, atol=0.02 * float(want.abs().max()))


def test_padding_longer_than_the_first_chunk(llama) -> None:
    """A row that has no token yet when a step reads pages."""
    model, stats = llama, calibrate(llama, models.ids(60, 2))
    ids, pads = models.ids(110, 3), [0, 30, 75]
    mask = torch.stack([torch.arange(110) >= p for p in pads]).long()

    def run() -> torch.Tensor:
        cache = make_cache(model.config, models.config(), stats)
        cache.set_padding(mask)
        out, at = [], 0
        for chunk in ids.split([60, 20, 25, 4, 1], 1):
            at += chunk.shape[1]
            out.append(model(input_ids=chunk, attention_mask=mask[:, :at], past_key_values=cache).logits)
        assert "pages" in cache.report()[0]["attention"] or model.config._attn_implementation == "sdpa"
        return torch.cat(out, 1)

    want, got = under(model, "sdpa", run), under(model, OURS, run)
    for b, pad in enumerate(pads):
        assert torch.allclose(got[b, pad:], want[b, pad:], atol=0.02 * float(want.abs().max()))
    assert bool(got.isfinite().all())


def test_the_kernel_is_called_at_every_step_and_nothing_is_decoded(cases, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stats = cases["mixtral"]
    cache = make_cache(model.config, models.config(), stats)
    gathered: list[int] = []
    own = LayerStore.gather
    monkeypatch.setattr(LayerStore, "gather", lambda self, dtype=torch.float32: gathered.append(1) or own(self, dtype))

    def run() -> tuple[int, int]:
        model(input_ids=models.ids(90), past_key_values=cache)
        gathered.clear()
        with Calls() as calls:
            for _ in range(3):
                model(input_ids=models.ids(1), past_key_values=cache)
        return calls.seen["moe_prefetch::kv_attend"], len(gathered)

    assert under(model, OURS, run) == (6, 0)
    calls, gathers = under(model, "sdpa", run)
    assert calls == 0 and gathers == 6


@pytest.mark.parametrize(("format", "batch", "pads"), [("fp8", 1, 0), ("fp4-quality", 3, 7)])
def test_no_step_waits_for_the_device_layer_by_layer(monkeypatch: pytest.MonkeyPatch, format: str, batch: int, pads: int) -> None:
    """Host reads and tensors made from host numbers in steps of decode: as many with six layers as with two."""
    counts = []
    for layers in (2, 6):
        model = models.llama(layers=layers)
        cache = make_cache(model.config, models.config(format), calibrate(model, models.ids(60, 2)))
        mask = torch.ones(batch, 130, dtype=torch.long)
        mask[0, :pads] = 0
        cache.set_padding(mask)
        reads: Counter[str] = Counter()

        def run(model=model, cache=cache, mask=mask, reads=reads) -> Counter[str]:
            model(input_ids=models.ids(130, batch), attention_mask=mask, past_key_values=cache)
            with monkeypatch.context() as patch:
                for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                    own = getattr(torch.Tensor, name)
                    patch.setattr(torch.Tensor, name, lambda self, *a, own=own, name=name: reads.update([name]) or own(self, *a))
                with Calls() as calls:
                    # the window moves, a page fills and another opens
                    for i in range(30):
                        grown = torch.cat([mask, torch.ones(batch, i + 1, dtype=torch.long)], 1)
                        model(input_ids=models.ids(1, batch), attention_mask=grown, past_key_values=cache)
            host = ("aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::masked_select", "aten::equal")
            return reads + Counter({k: n for k, n in calls.seen.items() if k in host})

        counts.append(under(model, OURS, run))
        assert {row["attention"] for row in cache.report()} == {"pages"}
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0


# what is left to the implementation beneath ----------------------------------------------------------------------------------
def logits_of(model: Any, stats: Any, steps: int = 3, fit: Any = lambda cache: None, **kw: Any) -> tuple[torch.Tensor, Any]:
    cache = make_cache(model.config, models.config(), stats)
    fit(cache)
    out = [model(input_ids=models.ids(90, 2), past_key_values=cache).logits]
    for i in range(steps):
        given = {k: f(91 + i) for k, f in kw.items()}
        out.append(model(input_ids=models.ids(1, 2, seed=i), past_key_values=cache, **given).logits)
    return torch.cat(out, 1), cache


def hole(n: int) -> torch.Tensor:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, 5:40] = 0
    return mask


def four(n: int) -> torch.Tensor:
    mask = torch.ones(2, 1, 1, n, dtype=torch.bool)
    mask[1, :, :, 20:60] = False
    return mask


def padded(n: int) -> torch.Tensor:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, :30] = 0
    return mask


def short(n: int) -> torch.Tensor:
    return torch.ones(2, n - 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [(four, "caller's own"), (hole, "not told of"), (padded, "not told of"), (short, "not told of")],
)
def test_no_mask_is_ignored(cases, caplog: pytest.LogCaptureFixture, mask: Any, reason: str) -> None:
    model, stats = cases["qwen3_moe"]
    want, _ = under(model, "sdpa", lambda: logits_of(model, stats, attention_mask=mask))
    plain, _ = under(model, "sdpa", lambda: logits_of(model, stats))
    with caplog.at_level(logging.WARNING):
        got, cache = under(model, OURS, lambda: logits_of(model, stats, attention_mask=mask))
    assert torch.equal(got, want) and not torch.allclose(want, plain, atol=1e-2)
    assert all(reason in row["attention"] for row in cache.report())
    assert len([r for r in caplog.records if reason in r.getMessage()]) == 1, "said once, not at each step"


def test_a_mask_function_of_the_models_own_is_not_ignored(cases) -> None:
    """`or_mask_function` and its kind make masks that are more than causal."""
    from transformers.masking_utils import create_causal_mask

    model, stats = cases["qwen3_moe"]
    sees = lambda b, h, q, k: k % 2 == 0  # noqa: E731

    def run() -> tuple[torch.Tensor, Any]:
        cache = make_cache(model.config, models.config(), stats)
        model(input_ids=models.ids(90, 2), past_key_values=cache)
        embeds = model.get_input_embeddings()(models.ids(1, 2))
        mask = create_causal_mask(model.config, embeds, None, cache, and_mask_function=sees)
        return model(inputs_embeds=embeds, attention_mask=mask, past_key_values=cache).logits, cache

    (want, _), (got, cache) = under(model, "sdpa", run), under(model, OURS, run)
    assert torch.equal(got, want) and all("more than causal" in row["attention"] for row in cache.report())


def test_training_and_other_caches_go_on_as_they_came(cases) -> None:
    model, stats = cases["mixtral"]
    ids = models.ids(40)
    want = under(model, "sdpa", lambda: models.generate(model, ids, None))
    assert torch.equal(under(model, OURS, lambda: models.generate(model, ids, None)), want)

    def run() -> Any:
        cache = make_cache(model.config, models.config(), stats)
        model(input_ids=models.ids(90), past_key_values=cache)
        with torch.enable_grad():
            loss = model(input_ids=models.ids(4), past_key_values=cache).logits.square().mean()
            return torch.autograd.grad(loss, model.model.layers[0].self_attn.k_proj.weight)[0]

    grads = under(model, "sdpa", run), under(model, OURS, run)
    assert torch.equal(*grads) and bool(grads[0].any())


def test_attention_weights_come_from_eager_attention() -> None:
    """Asked for weights, eager attention gives them; without the question its pages are read."""
    model, ids = models.gemma2(), models.ids(60)

    def run(ask: bool) -> tuple[Any, Any]:
        cache = make_cache(model.config, models.config("fp8"))
        model(input_ids=ids, past_key_values=cache)
        return model(input_ids=models.ids(1), past_key_values=cache, output_attentions=ask), cache

    want, _ = under(model, "eager", lambda: run(True))
    got, cache = under(model, OVER_EAGER, lambda: run(True))
    assert all(torch.equal(a, b) for a, b in zip(got.attentions, want.attentions, strict=True)) and got.attentions[1].shape[-1] == 61
    assert cache.report()[0]["attention"] == "tensors: output_attentions"
    assert under(model, OVER_EAGER, lambda: run(False))[1].report()[0]["attention"] == "pages"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_cap_and_sink_logits(name: str) -> None:
    """Full layers read pages with the model's own soft cap or learned sinks, sliding ones keep transformers' cache."""
    model = getattr(models, name)()
    assert model.config._attn_implementation == "eager"
    cache = both(model, lambda: make_cache(model.config, models.config("fp16")), models.ids(70, 2), ours=OVER_EAGER)
    assert [row["attention"] for row in cache.report()] == ["pages"]
    layer = next(i for i, x in enumerate(cache.layers) if isinstance(x, PagedLayer))
    attention = model.model.layers[layer].self_attn

    def once() -> torch.Tensor:
        cache = make_cache(model.config, models.config("fp16"))
        model(input_ids=models.ids(70), past_key_values=cache)
        return model(input_ids=models.ids(1), past_key_values=cache).logits

    with_it = under(model, OVER_EAGER, once)
    try:
        if name == "gemma2":
            attention.attn_logit_softcapping = None
        else:
            with torch.no_grad():
                attention.sinks.add_(5.0)
        assert not torch.allclose(under(model, OVER_EAGER, once), with_it, atol=1e-3), "the option does something here"
    finally:
        if name == "gemma2":
            attention.attn_logit_softcapping = 3.0


def test_sdpa_knows_no_soft_cap() -> None:
    model = models.gemma2("sdpa")
    run = lambda: logits_of(model, None)  # noqa: E731
    (want, _), (got, cache) = under(model, "sdpa", run), under(model, OURS, run)
    assert torch.equal(got, want) and "soft-cap" in cache.report()[0]["attention"]


def test_held_keys_are_all_keys_to_whoever_computes_with_them(llama) -> None:
    """Another attention than ours, given what a cache made for ours: the numbers of decoded tensors."""

    def run() -> None:
        layer, twin = (make_cache(llama.config, models.config("fp8")).layers[0] for _ in range(2))
        k, v, k1, v1, q = (torch.randn(1, n, t, 64) for n, t in ((2, 130), (2, 130), (2, 1), (2, 1), (6, 1)))
        layer.update(k, v), twin.update(k, v)
        held_k, held_v = layer.update(k1, v1)
        assert type(held_k) is Held and held_k.shape == (1, 2, 131, 64) and held_v.size(2) == 131
        llama.set_attn_implementation("sdpa")
        want_k, want_v = twin.update(k1, v1)
        assert type(want_k) is torch.Tensor
        sdpa = torch.nn.functional.scaled_dot_product_attention
        assert torch.equal(sdpa(q, held_k, held_v, enable_gqa=True), sdpa(q, want_k, want_v, enable_gqa=True))
        assert torch.equal(torch.cat([held_k, held_v]), torch.cat([want_k, want_v])) and type(held_k + 0) is torch.Tensor

    under(llama, OURS, run)
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("format", ["fp8", "fp4-quality"])
def test_a_cache_of_fixed_size_is_read_by_pages_too(llama, format: str) -> None:
    stats = calibrate(llama, models.ids(60, 2))
    ids = models.ids(100, 2)

    def run(**kw: Any) -> tuple[torch.Tensor, Any]:
        cache = make_cache(llama.config, models.config(format), stats, max_length=120)
        out = [llama(input_ids=ids[:, :90], past_key_values=cache).logits]
        for at in (90, 91, 92):
            given = {k: f(at + 1) for k, f in kw.items()}
            out.append(llama(input_ids=ids[:, at : at + 1], past_key_values=cache, **given).logits)
        return torch.cat(out, 1), cache

    (want, _), (got, cache) = under(llama, "sdpa", run), under(llama, OURS, run)
    assert torch.allclose(got, want, atol=0.02 * float(want.abs().max())) and {r["attention"] for r in cache.report()} == {"pages"}
    (want, _), (got, cache) = (under(llama, name, lambda: run(attention_mask=hole)) for name in ("sdpa", OURS))
    assert torch.equal(got, want) and all("not told of" in r["attention"] for r in cache.report())


def test_a_step_that_is_traced_asks_for_no_modes_and_logs_nothing(llama, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Either would break the graph that `torch.compile` makes of it."""
    cache = make_cache(llama.config, models.config("fp8", attention="pages"), max_length=80)
    layer = cache.layers[0]
    layer.update(*(torch.randn(1, 2, 50, 64) for _ in "kv"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(transformers_layers, "as_they_are", lambda x: pytest.fail("asked in a trace"))
    with caplog.at_level(logging.DEBUG):
        k, _ = layer.update(*(torch.randn(1, 2, 1, 64) for _ in "kv"))
    assert type(k) is torch.Tensor and k.shape[2] == 80 and not caplog.records
    assert layer.attention == "tensors: a step that is traced"


# switching on --------------------------------------------------------------------------------------------------------------------
def test_one_line_switches_a_model(llama) -> None:
    assert "cpu" in serve(llama, models.config()).says and llama.config._attn_implementation == "sdpa"
    try:
        cache = make_cache(llama, models.config(attention="pages"))
        assert llama.config._attn_implementation == OURS
        models.generate(llama, models.ids(50), cache, n=4)
        assert {row["attention"] for row in cache.report()} == {"pages"}
        # tensors wins over an implementation that stays switched on
        cache = make_cache(llama, models.config(attention="tensors"))
        models.generate(llama, models.ids(50), cache, n=4)
        assert {row["attention"] for row in cache.report()} == {"tensors"}
    finally:
        llama.set_attn_implementation("sdpa")


def test_auto_is_pages_on_a_gpu_where_attention_allows_it(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    mla = models.mla()
    for model in (llama, mla):
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert choose(llama, models.config()) == (OURS, "pages, over sdpa")
    assert choose(llama, models.config(attention="tensors"))[0] is None
    assert choose(mla, models.config()) == (OURS, "pages, over sdpa")


@pytest.mark.parametrize("how", ["pages", "tensors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_either_cache_in_pieces(llama, how: str, dtype: torch.dtype) -> None:
    """K leaves RoPE in FP32 there, V comes in the dtype of autocast."""
    ids, said = models.ids(90, 2), []
    for size in (None, 120):
        cache = make_cache(llama, models.config("fp8", attention=how), max_length=size)
        with torch.no_grad(), torch.autocast("cpu", dtype):
            want = llama(ids).logits.float()
            got = [llama(piece, past_key_values=cache).logits for piece in (ids[:, :40], ids[:, 40:80], *ids[:, 80:].split(1, 1))]
        said.append(torch.cat(got, 1).float())
        assert float((said[-1] - want).norm() / want.norm()) < 0.06
        del cache
    assert float((said[0] - said[1]).norm() / said[0].norm()) < 0.06


def test_each_cache_takes_back_what_it_switched_itself(llama) -> None:
    ids = models.ids(50)
    first = make_cache(llama, models.config(attention="pages"))
    llama.set_attn_implementation("sdpa")
    models.generate(llama, ids, first, n=4)
    assert first.report()[0]["attention"] == "tensors: the model's attention is 'sdpa'"
    second = make_cache(llama, models.config(attention="pages"))
    del first
    models.generate(llama, ids, second, n=4)
    assert llama.config._attn_implementation == OURS and {row["attention"] for row in second.report()} == {"pages"}
    del second
    assert llama.config._attn_implementation == "sdpa"


def test_a_copy_reads_pages_as_its_original_does(llama) -> None:
    """A prompt's cache is copied for each text that begins with it; the prompt's own may be gone by then."""
    ids = models.ids(50)
    prompt = make_cache(llama, models.config(attention="pages"))
    with torch.no_grad():
        llama(ids[:, :-1], past_key_values=prompt)
    one, two = copy.deepcopy(prompt), copy.deepcopy(prompt)
    del prompt
    for cache in (one, two):
        models.generate(llama, ids, cache, n=4)
        assert {row["attention"] for row in cache.report()} == {"pages"}
    del one, two, cache
    assert llama.config._attn_implementation == "sdpa"
    later = make_cache(llama, models.config())
    with torch.no_grad():
        llama(ids[:, :-1], past_key_values=later)
    later = copy.deepcopy(later)
    under(llama, OURS, lambda: models.generate(llama, ids, later, n=4))
    assert {row["attention"] for row in later.report()} == {"pages"}


def test_a_pickled_cache_says_that_it_gives_decoded_tensors(llama) -> None:
    """It would know a copy of the model's config, which says nothing of how the model attends by now."""
    ids = models.ids(50)
    cache = make_cache(llama, models.config(attention="pages"))
    with torch.no_grad():
        llama(ids[:, :-1], past_key_values=cache)
    twin = pickle.loads(pickle.dumps(cache))
    del cache
    assert llama.config._attn_implementation == "sdpa"
    got = models.generate(llama, ids, twin, n=4)
    assert {row["attention"] for row in twin.report()} == {"tensors: it has been pickled"}
    assert torch.equal(got, models.generate(llama, ids, make_cache(llama, models.config(attention="tensors")), n=4))


@pytest.mark.parametrize(("before", "reason"), [("eager", "eager attention"), ("flex_attention", "left as it is")])
def test_what_can_not_be_served_says_why(llama, before: str, reason: str) -> None:
    llama.set_attn_implementation(before)
    try:
        with pytest.raises(ConfigError, match=reason):
            serve(llama, models.config(attention="pages"))
        assert llama.config._attn_implementation == before
    finally:
        llama.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ["tests.kv.models", "a_notebook"])
def test_a_class_of_the_users_own_is_judged_by_its_parents(llama, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From a file, or from a notebook, whose source nobody can read. GPT-2 asks for its attention by name, Llama does not."""
    if name == "a_notebook":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    mine = type("Mine", (type(llama),), {"__module__": name})(llama.config)
    assert choose(mine, models.config(attention="pages")) == (OURS, "pages, over sdpa")
    gpt2 = type("Mine", (GPT2LMHeadModel,), {"__module__": name})(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=16))
    with pytest.raises(ConfigError, match="asks for its attention by name"):
        choose(gpt2, models.config(attention="pages"))


def test_attach_switches_and_detach_switches_back(cases, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = cases["qwen2_moe"]
    prompt = models.ids(80, 2)
    mask = torch.ones_like(prompt)
    mask[1, :25] = 0
    kv = {"format": "fp8", "window": 16, "settle": 1, "attention": "pages"}
    with caplog.at_level(logging.INFO), moe_prefetch.attach(model, {"kv": kv}):
        assert model.config._attn_implementation == OURS and "pages, over sdpa" in caplog.text
        out = models.generate(model, prompt, None, mask=mask, return_dict_in_generate=True)
    layers = out.past_key_values.layers
    assert all(x.attention == "pages" and x.store.pads == [0, 25] for x in layers), "padding comes from the mask"
    assert model.config._attn_implementation == "sdpa"
    cache = make_cache(model.config, models.config("fp8"))
    cache.set_padding(mask)
    assert torch.equal(out.sequences, models.generate(model, prompt, cache, mask=mask))


def test_a_mask_that_is_no_left_padding_is_refused_as_such(llama) -> None:
    with pytest.raises(CacheError, match="zeros behind ones"):
        make_cache(llama.config, models.config()).set_padding(hole(60))
