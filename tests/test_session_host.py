"""attach with experts.home: host: the device's path end to end; on a CPU its laws, on a GPU its kernels and a captured step."""
from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")

import moe_prefetch
from moe_prefetch.config import load
from moe_prefetch.errors import BudgetError, ConfigError, SessionError, UnsupportedModelError
from moe_prefetch.types import PROB_ONE

from .tiny import FAMILIES, tiny

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
E = 8


def model_of(family: str = "qwen2_moe"):
    return tiny(family, dtype=torch.bfloat16 if GPU else torch.float32).to(DEVICE)


def text(seed: int, tokens: int = 9) -> torch.Tensor:
    return torch.randint(2, 200, (2, tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def run(model, steps: int = 5) -> list[torch.Tensor]:
    """Logits of a prompt and of single tokens after it."""
    with torch.no_grad():
        out = model(text(0), use_cache=True)
        said, cache = [out.logits], out.past_key_values
        for n in range(steps):
            out = model(text(n + 1, 1), past_key_values=cache)
            said.append(out.logits)
    return said


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Liar:
    """Says anything, another thing each time; nothing every third time."""

    def __init__(self, experts: int) -> None:
        self.experts, self.asked, self.g = experts, 0, torch.Generator().manual_seed(7)

    def forecast(self, layer: int, step: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        self.asked += 1
        return () if self.asked % 3 == 0 else tuple(torch.randint(0, PROB_ONE + 1, (self.experts,), generator=self.g).tolist())

    def next_step(self, layer: int, step: int) -> tuple[int, ...]:
        return self.forecast(layer, step, 0, torch.empty(0))

    def keep(self, layer: int, step: int) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_plan_budget_or_forecast_changes_a_bit(family: str) -> None:
    model = model_of(family)
    experts = model.config.get_text_config().num_local_experts if family == "mixtral" else model.config.num_experts
    before, weights = run(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    with moe_prefetch.attach(model, {"experts": {"home": "host"}}):
        want = run(model)
    # In bf16 another rounding may move a router's choice.
    assert GPU or all(torch.allclose(a, b, atol=1e-3) for a, b in zip(want, before, strict=True))
    liar = {"forecaster": Liar(experts)}
    for config, more in (({"resident": 1}, {}), ({"resident": "50%", "plan": "recent"}, {}), ({"resident": 2}, liar)):
        with moe_prefetch.attach(model, {"experts": {"home": "host", **config}}, **more) as session:
            assert same(run(model), want), config
            total = session.ledger.total
            assert total.demanded > 0
            assert session.ledger.layers[0].demanded > 0
            assert total.bytes_moved >= total.miss * session.ledger.record_bytes > 0
            slots, home = session.num_slots * session.num_layers * session.ledger.record_bytes, session.held_bytes()["total"]
            assert session.held_bytes()["resident"] == slots + (0 if GPU else home), "on a CPU homes are in the same memory"
        assert session.ledger.total == total
    assert {n: p.shape for n, p in model.named_parameters()} == {n: w.shape for n, w in weights.items()}
    assert all(torch.equal(p, weights[n]) and p.device == weights[n].device for n, p in model.named_parameters())
    assert same(run(model), before)


def test_its_taps_are_the_probes(tmp_path) -> None:
    model = model_of()
    with moe_prefetch.attach(model, {"experts": {"home": "host", "resident": "50%"}}) as session:
        run(model)
        assert session.ledger.total.hit > 0
        session.report().save(tmp_path)
        with pytest.raises(SessionError, match="demands"):
            session.record_demands()
    assert (tmp_path / "report.md").exists()


def test_what_can_not_be_is_refused_before_the_model_is_touched() -> None:
    model = model_of()
    for bad, error in (({"plan": "lru"}, ConfigError), ({"threads": 8}, ConfigError), ({"resident": 10_000}, BudgetError)):
        with pytest.raises(error):
            moe_prefetch.attach(model, {"experts": {"home": "host", **bad}})
        assert not any(p.is_meta for p in model.parameters())
    assert load({"experts": {"home": "host", "resident": 3}}).experts.home == "host"
    with pytest.raises(ConfigError) as e:
        load({"experts": {"home": "host", "path": "x", "deadline": 3, "plan": "lru"}})
    assert all(f"experts.{key} is" in str(e.value) for key in ("path", "deadline", "plan"))


def test_attached_in_inference_mode_and_used_out_of_it() -> None:
    model = model_of()
    with torch.inference_mode():
        session = moe_prefetch.attach(model, {"experts": {"home": "host", "resident": 2}})
    with session:
        run(model, 2)
        assert session.ledger.total.demanded > 0


def test_another_activation_is_refused() -> None:
    model = model_of()
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = torch.nn.GELU()
    with moe_prefetch.attach(model, {"experts": {"home": "host"}}), pytest.raises(UnsupportedModelError, match="GELU"):
        run(model)


def test_a_pass_that_was_abandoned_leaves_the_session_usable() -> None:
    model = model_of()
    with moe_prefetch.attach(model, {"experts": {"home": "host", "resident": 2}}) as session:
        want = run(model)

        def stop(*args) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            run(model)
        handle.remove()
        assert same(run(model), want)
        session.wait_idle()
        assert session._device is not None
        session._device.check()


def test_looking_during_a_pass_sees_the_passes_before_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's streams and plans are the pass's; a report may be made in another thread meanwhile."""
    model, seen = model_of(), []
    with moe_prefetch.attach(model, {"experts": {"home": "host", "resident": 2}}) as session:
        run(model, 1)
        before = session.ledger.total

        def look(*args) -> None:
            with monkeypatch.context() as m:
                m.setattr(session._device, "rest", lambda: pytest.fail("it waits for the device"))
                thread = threading.Thread(target=lambda: seen.append((session.report(), session.ledger.total)))
                thread.start()
                thread.join()

        handle = model.model.layers[1].register_forward_hook(look)
        run(model, 0)
        handle.remove()
        assert [total for _, total in seen] == [before]
        assert session.ledger.total.demanded > before.demanded


def test_a_detach_without_memory_for_the_weights_may_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    before = run(model, 1)
    session = moe_prefetch.attach(model, {"experts": {"home": "host", "resident": 2}})

    def none_left(*args, **kwargs) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as m:
        m.setattr(torch, "empty_strided", none_left)
        with pytest.raises(torch.OutOfMemoryError):
            session.detach()
    with pytest.raises(SessionError, match="detach"):
        run(model, 1)
    assert session.held_bytes()["total"] > 0
    session.detach()
    assert same(run(model, 1), before)


def test_a_decode_step_over_a_static_cache() -> None:
    """On a GPU captured by the caller and replayed with other tokens: the logits of the steps as they are."""
    from transformers import StaticCache

    model = model_of("qwen3_moe")
    tokens, at = text(1, 1), torch.tensor([[9], [9]], device=DEVICE)
    with moe_prefetch.attach(model, {"experts": {"home": "host", "resident": 2}}) as session, torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=64)
        model(text(0), past_key_values=cache)

        def step() -> torch.Tensor:
            return model(tokens, past_key_values=cache, position_ids=at).logits

        def rewind() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(9)

        def steps(run) -> list[torch.Tensor]:
            rewind()
            said = []
            for n in range(6):
                tokens.copy_(text(n + 1, 1))
                at.fill_(9 + n)
                said.append(run().clone())
            return said

        want = steps(step)
        if GPU:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = step()
            assert same(steps(lambda: graph.replay() or logits), want)
        assert same(steps(step), want)
        before = session.ledger.total.demanded
        assert before > 0
        assert len({float(x.float().sum()) for x in want}) == 6
