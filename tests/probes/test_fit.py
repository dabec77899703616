"""Fitting: it learns, stops, resumes as if never stopped, refuses to ship what is worse than nothing, runs data-parallel."""
from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from typer.testing import CliRunner

from moe_prefetch import cli
from moe_prefetch.errors import (
    ArtefactError,
    ConfigError,
    DeadlineError,
    ReleaseError,
    SessionError,
    ShapeError,
    UnsupportedModelError,
)
from moe_prefetch.integrations import transformers
from moe_prefetch.probes import RoutingProbe, jobs, metrics
from moe_prefetch.probes.batches import Memory, batches
from moe_prefetch.probes.calibrate import calibrate, fit_temperature, margin_and_truth, reliability_plot
from moe_prefetch.probes.collect import Step
from moe_prefetch.probes.fit import OnlineFit, finish, fit, release
from moe_prefetch.probes.probe import HORIZONS, Residual, normalise
from moe_prefetch.probes.targets import FitConfig, Taps
from moe_prefetch.probes.traces import TraceWriter
from moe_prefetch.probes.trainer import Trainer
from moe_prefetch.runtime import Runtime
from tests.probes.synthetic import D, E, K, L, gates, step
from tests.tiny import tiny

CONFIG = FitConfig(rank=24, linear=12, steps=120, batch=256, lr=1e-2, ema=0.9, warmup=5)


def recalls(probe: RoutingProbe, taps: Taps) -> list[float]:
    out = []
    for h in HORIZONS:
        got = [metrics.recall(*margin_and_truth(probe, taps, t, h)) for t in range(h, probe.layers)]
        out.append(sum(got) / len(got))
    return out


def trained(specs: list, config: FitConfig = CONFIG, steps: int | None = None) -> Trainer:
    trainer, data = Trainer(specs, config), step(specs, 4096, 1).taps
    trainer.accumulate(data)
    trainer.start()
    g = torch.Generator().manual_seed(0)
    for _ in range(config.steps if steps is None else steps):
        trainer.step(data.take(torch.randint(0, data.tokens, (config.batch,), generator=g)))
    return trainer


@pytest.mark.parametrize("kind", [{}, {"kind": "sigmoid_group", "n_group": 3, "topk_group": 2}])
def test_training_beats_ridge_beats_the_stale_gate(kind: dict) -> None:
    specs = gates(**kind)
    if kind:
        specs = [replace(s, bias_E=0.2 * torch.randn(E, generator=torch.Generator().manual_seed(5))) for s in specs]
    held = step(specs, 2000, 2).taps
    stale, ridge, probe = (recalls(p, held) for p in (RoutingProbe(specs), trained(specs, steps=0).probe(), trained(specs).probe()))
    for h in HORIZONS:
        assert ridge[h] > stale[h] + 0.01, (h, stale, ridge)
    assert sum(probe) > sum(ridge) + (0.002 if kind else 0.02), (ridge, probe)


def test_export_is_what_was_trained() -> None:
    specs = gates()
    trainer, held = trained(specs, steps=20), step(specs, 500, 2).taps
    probe = trainer.probe()
    found = trainer.evaluate(held)
    for h in HORIZONS:
        mine = [metrics.recall(*margin_and_truth(probe, held, t, h)) for t in range(h, L)]
        assert mine == pytest.approx(found[h], abs=2e-3)  # near ties may fall otherwise in another order of sums
        for t in range(h, L):
            u = (held.residual_LTD if h == 0 else held.moe_input_LTD)[t - h]
            horizon = trainer.horizons[h]
            x = u.float() * torch.rsqrt(u.float().square().mean(-1, keepdim=True) + 1e-6)
            want = horizon.logits(x.expand(len(horizon.specs), -1, -1), trainer.whole(trainer.average)[h])[t - h]
            torch.testing.assert_close(probe.logits(t - h, h, u), want, atol=1e-4, rtol=1e-4)


def test_diagonal_start_learns_too() -> None:
    specs = gates()
    held = step(specs, 2000, 2).taps
    stale, probe = recalls(RoutingProbe(specs), held), recalls(trained(specs, replace(CONFIG, whiten=False)).probe(), held)
    assert all(p > s + 0.01 for p, s in zip(probe, stale)), (stale, probe)


def test_boundary_term_helps_at_the_boundary() -> None:
    """The reason the term exists: with it the top-k is more often right than with divergence alone."""
    specs = gates()
    held = step(specs, 4000, 2).taps
    with_, without = (sum(recalls(trained(specs, replace(CONFIG, rank_weight=w, steps=200)).probe(), held)) for w in (0.3, 0.0))
    assert with_ > without


def test_temperature_recovers_the_truth() -> None:
    """Choices drawn with a known temperature: the fit finds it, from any scale of margins."""
    g = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 1e3):
        margin = scale * torch.randn(200_000, 1, generator=g)
        chosen = torch.rand(200_000, 1, generator=g) < torch.sigmoid(margin / (0.7 * scale))
        ids = torch.where(chosen, 0, 1)
        pair = torch.cat([margin, -margin], 1)  # choosing 1 is as likely as not choosing 0
        assert fit_temperature(pair, ids) == pytest.approx(0.7 * scale, rel=0.02)


def test_calibration_lowers_the_error_and_survives_bad_rows() -> None:
    specs = gates()
    probe, held, test = trained(specs, steps=40).probe(), step(specs, 3000, 2).taps, step(specs, 3000, 3).taps

    def error() -> float:
        values = []
        for h in HORIZONS:
            for t in range(h, L):
                margin, true = margin_and_truth(probe, test, t, h)
                values.append(metrics.calibration_error(torch.sigmoid(margin / probe.residuals[h].temperature_L[t]), true))
        return sum(values) / len(values)

    before = error()
    held.moe_input_LTD[:, 7] = float("nan")
    calibrate(probe, held)
    assert error() < 0.03 < before
    with pytest.raises(ShapeError, match="finite"):
        fit_temperature(torch.full((3, E), float("nan")), torch.zeros(3, K, dtype=torch.long))


def test_reliability_plot_is_a_picture(tmp_path: Path) -> None:
    p = torch.rand(500, 4)
    reliability_plot(tmp_path / "a" / "r.png", {"h1": (p, p.topk(2).indices)})
    assert (tmp_path / "a" / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# the loop -----------------------------------------------------------------------------------------------------------------
class Log:
    def __init__(self) -> None:
        self.tags: dict[str, list[float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.tags.setdefault(tag, []).append(value)


def source(specs: list, shards: int = 3, tokens: int = 1024) -> Memory:
    return Memory([step(specs, tokens, 10 + i) for i in range(shards)])


def test_fit_writes_a_probe_that_loads_and_tells_its_figures(tmp_path: Path) -> None:
    specs, log = gates(), Log()
    held = {"a": step(specs, 800, 2).taps}
    probe = fit(specs, source(specs), held, tmp_path, CONFIG, watch=log)
    loaded = RoutingProbe.from_pretrained(tmp_path, specs)
    assert recalls(loaded, held["a"]) == pytest.approx(recalls(probe, held["a"]), abs=0.01)
    assert sum(recalls(loaded, held["a"])) > sum(recalls(RoutingProbe(specs), held["a"])) + 0.05
    assert "| a | h1 |" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["extra"]["fit"]["rank"] == CONFIG.rank
    assert not (tmp_path / "fit-state").exists()
    assert log.tags["fit/loss"][-1] < log.tags["fit/loss"][0] and log.tags["fit/held_out_recall"]


def test_fit_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    specs = gates()
    held = {"a": step(specs, 600, 2).taps}
    log = Log()
    # A rate far too high: no epoch is better than the start, which is what must be kept.
    fit(specs, source(specs), held, tmp_path, replace(CONFIG, lr=3.0, steps=400), watch=log, patience=2)
    assert len(log.tags["fit/held_out_recall"]) <= 4
    start = recalls(trained_on(specs, source(specs)), held["a"])
    assert recalls(RoutingProbe.from_pretrained(tmp_path, specs), held["a"]) == pytest.approx(start, abs=0.01)


def trained_on(specs: list, data: Memory) -> RoutingProbe:
    trainer = Trainer(specs, CONFIG)
    trainer.accumulate(Taps.join([s.taps for s in data.steps]))
    trainer.start()
    return trainer.probe()


class Stop(BaseException):
    """Stands in for a kill."""


class Dying(Runtime):
    """Dies at the n-th call that touches the disk."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def replace(self, src: Path, dst: Path) -> None:
        self._count()
        super().replace(src, dst)


def probe_of(folder: Path, specs: list) -> list[torch.Tensor]:
    probe, x = RoutingProbe.from_pretrained(folder, specs), torch.randn(50, D, generator=torch.Generator().manual_seed(0))
    return [probe.forecast(0, h, x) for h in HORIZONS]


def test_a_fit_killed_at_any_moment_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    specs = gates()
    held, config = {"a": step(specs, 300, 2).taps}, replace(CONFIG, steps=40)
    fit(specs, source(specs), held, tmp_path / "whole", config)
    want = probe_of(tmp_path / "whole", specs)
    died = 0
    for at in range(1, 60, 3):
        out, runtime = tmp_path / f"k{at}", Dying(at)
        try:
            fit(specs, source(specs), held, out, config, runtime=runtime)
        except Stop:
            died += 1
            fit(specs, source(specs), held, out, config)
        for a, b in zip(want, probe_of(out, specs)):
            assert torch.equal(a, b), f"killed at disk call {at}"
    assert died > 5, "the runtime never died: the test tests nothing"


@pytest.mark.parametrize("at", ["README.md", "config.json"])
def test_killed_while_its_probe_is_put_in_place_it_goes_on(tmp_path: Path, at: str) -> None:
    """Weights without a config are somebody else's elsewhere, and beside a fit's state its own."""
    specs, held = gates(), {"a": step(gates(), 300, 2).taps}

    class Dies(Runtime):
        def replace(self, src: Path, dst: Path) -> None:
            if dst == tmp_path / at:
                raise Stop
            super().replace(src, dst)

    with pytest.raises(Stop):
        fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=8), force=True, runtime=Dies())
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "config.json").exists()
    fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=8), force=True)
    RoutingProbe.from_pretrained(tmp_path, specs)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "README.md", "config.json"}


def test_a_fit_removes_its_own_state_and_nothing_else(tmp_path: Path) -> None:
    specs, held, state = gates(), {"a": step(gates(), 300, 2).taps}, tmp_path / "fit-state"
    state.mkdir()
    for name in ("epoch-best.safetensors", "notes.md"):
        (state / name).write_text("mine")
    (state / ".state.json.0123456789ab.tmp").write_text("{")
    fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=30), force=True)
    assert sorted(p.name for p in state.iterdir()) == ["epoch-best.safetensors", "notes.md"]
    stopped(specs, source(specs), held, tmp_path, replace(CONFIG, steps=30))
    finish(trained(specs, steps=1), held, tmp_path, force=True)
    assert (state / "state.json").exists(), "a fit of another kind wrote a probe beside it"


def test_killed_between_epochs_it_repeats_at_most_one(tmp_path: Path) -> None:
    specs, seen = gates(), []
    held, config = {"a": step(specs, 300, 2).taps}, replace(CONFIG, steps=60)

    def kill(done: int, total: int) -> None:
        seen.append(done)
        if done == 31:
            raise Stop

    with pytest.raises(Stop):
        fit(specs, source(specs), held, tmp_path, config, progress=kill)
    fit(specs, source(specs), held, tmp_path, config, progress=lambda done, total: seen.append(done))
    epoch = source(specs).tokens // config.batch
    assert 31 - seen[31] < epoch, "the second run starts at the last epoch's end"


def test_state_of_other_settings_or_damaged_is_refused(tmp_path: Path) -> None:
    specs = gates()
    held, config = {"a": step(specs, 300, 2).taps}, replace(CONFIG, steps=30)

    def kill(done: int, total: int) -> None:
        if done == 25:
            raise Stop

    with pytest.raises(Stop):
        fit(specs, source(specs), held, tmp_path, config, progress=kill)
    with pytest.raises(ArtefactError, match="other settings"):
        fit(specs, source(specs), held, tmp_path, replace(config, lr=1e-4))
    file = next((tmp_path / "fit-state").glob("epoch-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtefactError, match=file.name):
        fit(specs, source(specs), held, tmp_path, config)
    (tmp_path / "fit-state" / "state.json").write_text("{}")
    with pytest.raises(ArtefactError, match=r"delete state\.json there"):
        fit(specs, source(specs), held, tmp_path, config)
    (tmp_path / "fit-state" / "state.json").unlink()
    fit(specs, source(specs), held, tmp_path, config, force=True)


def stopped(specs: list, train: Memory, held: dict, out: Path, config: FitConfig) -> None:
    def kill(done: int, total: int) -> None:
        if done == 25:
            raise Stop

    with pytest.raises(Stop):
        fit(specs, train, held, out, config, progress=kill)


def test_a_fit_goes_on_with_its_own_text_only(tmp_path: Path) -> None:
    """Or tokens that it has learnt from could be those it is judged on."""
    specs = gates()
    held, config = {"a": step(specs, 300, 2).taps}, replace(CONFIG, rank=(16, 12), linear=8, steps=30)
    stopped(specs, source(specs), held, tmp_path, config)
    others = [(Memory([*source(specs).steps, step(specs, 64, 50)]), held), (source(specs), {"a": step(specs, 300, 3).taps}),
              (source(specs), {"b": held["a"]}), (Memory([step(specs, 300, 2), *source(specs, 2).steps]), held)]
    for train, judges in others:
        with pytest.raises(ArtefactError, match="other text"):
            fit(specs, train, judges, tmp_path, config)
    seen: list[int] = []
    fit(specs, source(specs), held, tmp_path, config, progress=lambda done, total: seen.append(done))
    assert seen[0] > 1, "it began anew: a rank of two numbers is no other rank"


def test_two_fits_into_one_folder_are_one_too_many(tmp_path: Path) -> None:
    specs, held, said = gates(), {"a": step(gates(), 300, 2).taps}, []

    def other(done: int, total: int) -> None:
        if done == 2:
            with pytest.raises(DeadlineError, match="another process"):
                fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=8))
            said.append(done)

    fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=8), progress=other, force=True)
    assert said and (tmp_path / "config.json").exists()
    fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=8), force=True)


def test_where_every_expert_is_chosen_there_is_nothing_to_forecast(tmp_path: Path) -> None:
    specs = [replace(g, top_k=E) for g in gates()]
    held = {"a": step(gates(), 50, 2).taps}
    for attempt in (lambda: fit(specs, source(gates()), held, tmp_path / "p", CONFIG), lambda: OnlineFit(specs, CONFIG)):
        with pytest.raises(UnsupportedModelError, match="nothing to forecast"):
            attempt()
    assert not (tmp_path / "p").exists()


def test_a_state_that_does_not_name_its_text_goes_on_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    specs, seen = gates(), []
    held, config = {"a": step(specs, 300, 2).taps}, replace(CONFIG, steps=30)
    stopped(specs, source(specs), held, tmp_path, config)
    file = tmp_path / "fit-state" / "state.json"
    state = json.loads(file.read_text())
    del state["identity"]["text"]
    file.write_text(json.dumps(state))
    with pytest.raises(ArtefactError, match="other settings"):
        fit(specs, source(specs), held, tmp_path, replace(config, lr=1e-4))
    fit(specs, source(specs), held, tmp_path, config, progress=lambda done, total: seen.append(done))
    assert seen[0] > 1 and "does not say what text" in caplog.text


# what a batch is ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "shards"), [(4096, (2048,) * 5), (1500, (2048,) * 5), (700, (512, 100, 1, 300)), (64, (1000,)),
                                              (9, (0, 20))])
def test_batches_are_of_the_size_that_was_asked_for(size: int, shards: tuple[int, ...]) -> None:
    """Whatever the shards: cut across them, each token at most once an epoch, and all of them but the last rest."""
    specs = gates()
    data = Memory([step(specs, n, i) for i, n in enumerate(shards)])
    number = iter(range(sum(shards)))
    for s in data.steps:
        s.taps.logits_LTE[0, :, 0] = torch.tensor([next(number) for _ in range(s.taps.tokens)])
    got = list(batches(data, size, 0, 0))
    assert [t.tokens for t in got] == [size] * (sum(shards) // size)
    seen = torch.cat([t.logits_LTE[0, :, 0] for t in got])
    assert len(seen.unique()) == len(seen)
    again = torch.cat([t.logits_LTE[0, :, 0] for t in batches(data, size, 1, 0)])
    assert not torch.equal(seen, again)


def test_fewer_tokens_than_a_batch_are_one_batch_and_the_card_says_so(tmp_path: Path) -> None:
    specs = gates()
    held = {"a": step(specs, 300, 2).taps}
    fit(specs, Memory([step(specs, 130, 1), step(specs, 70, 2)]), held, tmp_path, replace(CONFIG, steps=4, batch=4096), force=True)
    assert "4 steps of 200 tokens" in (tmp_path / "README.md").read_text()
    fit(specs, source(specs), held, tmp_path, replace(CONFIG, steps=4, batch=1500), force=True)
    assert "4 steps of 1500 tokens" in (tmp_path / "README.md").read_text()


def test_the_cards_count_survives_a_resume(tmp_path: Path) -> None:
    specs, held = gates(), {"a": step(gates(), 300, 2).taps}
    config = replace(CONFIG, steps=30)
    stopped(specs, source(specs), held, tmp_path, config)
    fit(specs, source(specs), held, tmp_path, config)
    assert f"30 steps of {config.batch} tokens" in (tmp_path / "README.md").read_text()


# the release gate ---------------------------------------------------------------------------------------------------------
def test_a_probe_below_the_stale_gate_on_any_domain_is_refused(tmp_path: Path) -> None:
    specs = gates()
    # Layers that change nothing: the stale gate is all but perfect there, and a probe trained on the other domain is worse.
    home, away = step(specs, 800, 2).taps, step(specs, 800, 3, shift=4.0, scale=0.02).taps
    with pytest.raises(ReleaseError, match="away at horizon"):
        fit(specs, source(specs), {"home": home, "away": away}, tmp_path / "p", CONFIG)
    assert not (tmp_path / "p" / "config.json").exists()
    fit(specs, source(specs), {"home": home, "away": away}, tmp_path / "p", CONFIG, force=True)
    assert "by force" in (tmp_path / "p" / "README.md").read_text()


def test_a_single_losing_layer_falls_back_and_says_so() -> None:
    specs = gates()
    trainer = trained(specs)
    probe, held = trainer.probe(), {"a": step(specs, 1500, 2).taps}
    r = probe.residuals[1]
    # Noise instead of what was learnt: wrong, but not so wrong that the mean over layers falls below the floor.
    r.up_LER[2] = 0
    r.out_LE[2] = 0.25 * torch.randn(E, generator=torch.Generator().manual_seed(0))
    probe.refresh()
    report = release(probe, held)
    assert report.fallback == {1: [2]} and r.used_L[2] is False and not report.refused
    x = torch.randn(5, D)
    assert torch.equal(probe.logits(1, 1, x), RoutingProbe(specs).logits(1, 1, x))


# online and parallel ------------------------------------------------------------------------------------------------------
def test_online_fit_beside_a_running_model(tmp_path: Path) -> None:
    specs = gates()
    online = OnlineFit(specs, replace(CONFIG, steps=60), moment_tokens=1024, held_out_tokens=600)
    with torch.inference_mode():  # as generate() runs
        for i in range(90):
            s = step(specs, 128, 100 + i)
            online.listener.step_begin(1, 128)
            for layer in range(L):
                online.listener.residual(layer, s.taps.residual_LTD[layer])
                online.listener.moe_input(layer, s.taps.moe_input_LTD[layer])
                online.listener.routed(layer, s.taps.logits_LTE[layer], s.ids_TLK[:, layer])
            online.listener.step_end()
    probe = online.finish(tmp_path)
    test = step(specs, 1000, 2).taps
    assert all(p > s + 0.01 for p, s in zip(recalls(probe, test), recalls(RoutingProbe(specs), test)))
    with pytest.raises(ShapeError, match="too few"):
        OnlineFit(specs, CONFIG).finish(tmp_path)


def test_passes_that_are_not_finite_do_not_make_an_online_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    specs = gates()
    online = OnlineFit(specs, replace(CONFIG, batch=64, steps=30), moment_tokens=256, held_out_every=50)
    for i in range(8):
        s = step(specs, 64, i)
        s.taps.moe_input_LTD[1, 3, 2] = float("nan")
        online._take(s)
    assert not online.trainer.started and online.seen == 512
    with pytest.raises(ShapeError, match="8 batches held values that are not finite"):
        online.finish(tmp_path)
    for i in range(50):
        online._take(step(specs, 64, 10 + i))
    assert online.trainer.started and online.trainer.done == 30
    online.finish(tmp_path, force=True)
    assert "8 batches were left out" in caplog.text


@pytest.mark.parametrize("kw", [{"held_out_tokens": 0}, {"held_out_tokens": -1}, {"moment_tokens": 0}, {"held_out_every": 1}], ids=str)
def test_an_online_fit_that_could_not_learn_or_be_judged_is_refused(kw):
    with pytest.raises(ConfigError, match=next(iter(kw))):
        OnlineFit(gates(), CONFIG, **kw)


def test_the_held_out_sample_is_of_the_whole_run_and_bounded() -> None:
    specs, size = gates(), 256
    held = []
    for _ in range(2):
        online = OnlineFit(specs, CONFIG, moment_tokens=1 << 20, held_out_tokens=size, held_out_every=2)
        for i in range(128):
            s = step(specs, 32, 100 + i % 7)
            # Each pass carries its number where it can be read again.
            s.taps.residual_LTD[0, :, 0] = i
            online._take(s)
            assert online.held.taps is None or online.held.taps.tokens <= size
        held.append(online.held.taps)
    numbers = held[0].residual_LTD[0, :, 0]
    assert held[0].tokens == size and torch.equal(held[0].residual_LTD, held[1].residual_LTD)
    assert bool((numbers % 2 == 1).all()), "a pass that was kept back was learnt from, or the other way round"
    # 256 of 2,048 tokens, in quarters of the run: 64 each, with a standard deviation of 6.5.
    quarters = torch.histc(numbers, 4, 0, 128)
    assert bool(((quarters - 64).abs() < 32).all()), quarters


class ApexLike(torch.optim.Optimizer):
    """Adam as apex's FusedAdam keeps it: one count of steps in the group, none in the state."""

    def __init__(self, params: list[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            n = group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
                with torch.no_grad():
                    p -= group["lr"] * state["exp_avg"] / (1 - 0.9**n) / ((state["exp_avg_sq"] / (1 - 0.99**n)).sqrt() + 1e-8)


@pytest.mark.parametrize("apex", [False, True])
def test_a_resumed_optimiser_goes_on_counting(monkeypatch: pytest.MonkeyPatch, apex: bool) -> None:
    if apex:
        monkeypatch.setattr("moe_prefetch.probes.trainer.make_adamw", lambda params, lr, weight_decay: ApexLike(params, lr))
    specs, taps = gates(), [step(gates(), 200, i).taps for i in range(8)]
    whole = Trainer(specs, replace(CONFIG, steps=60))
    for t in taps:
        whole.accumulate(t)
    whole.start()
    for t in taps[:4]:
        whole.step(t)
    resumed = Trainer(specs, replace(CONFIG, steps=60))
    resumed.load_state({k: v.clone() for k, v in whole.state().items()})
    for t in taps[4:]:
        assert float(whole.step(t)) == float(resumed.step(t))
    assert all(torch.equal(a, b) for a, b in zip(whole.averages().values(), resumed.averages().values()))


def test_following_routers_that_move_copies_them() -> None:
    specs = gates()
    trainer = Trainer(specs, replace(CONFIG, steps=60))
    for seed in range(4):
        trainer.accumulate(step(specs, 400, seed).taps)
    trainer.start()
    moved = [replace(g, weight_ED=g.weight_ED * 1.5, norm_D=g.norm_D + 0.25) for g in specs]
    before = [g.weight_ED.clone() for g in specs]
    trainer.follow(moved)
    assert all(torch.equal(g.weight_ED, b) for g, b in zip(specs, before)), "the caller's own weights were written over"
    probe = trainer.probe()
    assert all(torch.equal(a.weight_ED, b.weight_ED) and torch.equal(a.norm_D, b.norm_D) for a, b in zip(probe.gates, moved))
    for h in trainer.horizons:
        want = torch.stack([g.weight_ED * g.norm_D for g in moved[h.horizon :]])
        assert torch.equal(h.gate_nED, want) and torch.equal(h.norm_nW, torch.stack([g.norm_D for g in moved[h.horizon :]]))
    kept = moved[0].weight_ED.clone()
    moved[0].weight_ED.zero_()
    assert torch.equal(trainer.gates[0].weight_ED, kept)
    with pytest.raises(ShapeError, match="another model"):
        trainer.follow(specs[:-1])
    with pytest.raises(ShapeError, match="another model"):
        trainer.follow([replace(g, top_k=1) for g in specs])


def _worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    specs = gates()
    # Shards of unequal length: the ranks must still make the same number of steps.
    data = Memory([step(specs, n, 10 + i) for i, n in enumerate((1500, 400, 700))])
    trainer_held = {"a": step(specs, 300, 2).taps}
    probe = fit(specs, data, trainer_held, Path(folder) / "out", replace(CONFIG, steps=30, batch=128))
    torch.save([r.up_LER for r in probe.residuals], f"{folder}/rank{rank}.pt")
    assert jobs._fewest(5 - rank) == 5 - (world - 1)
    # Ranks that see other text would make another number of steps and wait for ever.
    with pytest.raises(SessionError, match="do not see the same"):
        fit(specs, Memory(data.steps[rank:]), trainer_held, Path(folder) / "other", CONFIG)
    # One that can't go on tells the others.
    with pytest.raises(ArtefactError if rank else SessionError, match="damaged"):
        fit(specs, data, trainer_held, Path(folder) / f"bad{rank}", CONFIG)
    # As many passes on each rank, with more tokens on one than on the other.
    online = OnlineFit(specs, replace(CONFIG, steps=6, batch=64), moment_tokens=128, held_out_tokens=64)
    # Behind the last step one rank may make passes that the other does not.
    for i in range(20 if rank else 23):
        online._take(step(specs, 40 if rank else 64, 100 * rank + i))
    made = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(made, torch.tensor([online.trainer.done, online.trainer.tokens]))
    assert made[0][0] == made[1][0] == 6 and made[0][1] == made[1][1]
    torch.save(online.trainer.averages(), f"{folder}/online{rank}.pt")
    dist.destroy_process_group()
    _command(rank, world, Path(folder))


def _command(rank: int, world: int, folder: Path) -> None:
    """`fit` as torchrun starts it, with a first rank that takes its time to write: the others must not look for what is not there, nor
    end before it is (torchrun ends all of them with the first that fails)."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    starts = dist.init_process_group
    dist.init_process_group = lambda backend: starts(backend, init_method=f"file://{folder}/again", rank=rank, world_size=world)
    model, writes = tiny("qwen3_moe"), RoutingProbe.save_pretrained
    jobs.load_model = lambda name: (model, None)
    jobs.FitConfig = lambda **kw: FitConfig(rank=4, linear=2, steps=4, batch=256, **kw)

    def slowly(*args: object, **kw: object) -> None:
        time.sleep(0.5)
        writes(*args, **kw)

    RoutingProbe.save_pretrained = slowly
    said = CliRunner().invoke(cli.app, ["fit", "--trace", f"{folder}/t", "--out", f"{folder}/made", "--force"])
    (folder / f"said{rank}").write_text(f"{said.exit_code} {said.output}")
    assert (folder / "made" / "README.md").exists()


def test_two_ranks_hold_the_same_weights_and_write_once(tmp_path: Path) -> None:
    writer, model = TraceWriter(tmp_path / "t", transformers.gates(tiny("qwen3_moe")), shard_tokens=256), tiny("qwen3_moe")
    jobs.record(model, torch.randint(2, 90, (6, 256)), writer.add)
    (tmp_path / "bad1" / "fit-state").mkdir(parents=True)
    (tmp_path / "bad1" / "fit-state" / "state.json").write_text("[]")
    mp.start_processes(_worker, (2, str(tmp_path)), nprocs=2, start_method="spawn")
    first, other = ((tmp_path / f"said{r}").read_text() for r in range(2))
    assert first.startswith("0 ") and "4 steps of 320 tokens" in first, first
    assert other.startswith("0 ") and "# Routing probe" not in other and "fitting" not in other, other
    a, b = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    a, b = (torch.load(tmp_path / f"online{r}.pt") for r in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    specs = gates()
    held = step(specs, 1000, 3).taps
    assert sum(recalls(RoutingProbe.from_pretrained(tmp_path / "out", specs), held)) > sum(recalls(RoutingProbe(specs), held)) + 0.05


def test_the_card_of_a_fit_that_went_on_with_more_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = gates()
    trainer = Trainer(specs, replace(CONFIG, steps=4))
    trainer.accumulate(step(specs, 500, 0).taps)
    trainer.start()
    for i in range(4):
        trainer.step(step(specs, 100, 1 + i).taps)
    again = Trainer(specs, replace(CONFIG, steps=4))
    again.load_state(trainer.state())
    monkeypatch.setattr("moe_prefetch.probes.fit.ranks", lambda: (0, 2))
    finish(again, {"a": step(specs, 300, 9).taps}, tmp_path / "p", force=True)
    assert "4 steps of 100 tokens" in (tmp_path / "p" / "README.md").read_text()


@pytest.mark.parametrize("kw", [
    {"lr": float("nan")}, {"lr": float("inf")}, {"lr": 0.0}, {"lr": -1e-3}, {"lr": "1e-3"}, {"tau": 0.0}, {"tau": float("nan")},
    {"ridge": -1.0}, {"ridge": float("inf")}, {"ema": 1.0}, {"ema": -0.1}, {"ema": float("nan")}, {"weight_decay": float("nan")},
    {"rank_weight": -1.0},
    {"warmup": -1}, {"warmup": 1.5}, {"horizons": ()}, {"horizons": (3,)}, {"horizons": (2, 1)}, {"horizons": (0, 0)}, {"horizons": 1},
    {"steps": 0}, {"steps": 10.0}, {"batch": True}, {"seed": -1}, {"rank": (8, 8, 8)}, {"rank": 0}, {"rank": 8.0}, {"linear": -1},
    {"linear": 65}, {"dropout": 1.0}, {"past": 1}, {"whiten": None}], ids=str)
def test_settings_that_no_fit_can_have_are_named(kw: dict) -> None:
    with pytest.raises(ShapeError, match=f"{next(iter(kw))} is"):
        FitConfig(**kw)


def test_taps_of_another_model_and_none_at_all_are_refused_before_any_work(tmp_path: Path) -> None:
    specs, other = gates(), [replace(g, weight_ED=g.weight_ED[:, : D // 2], norm_D=g.norm_D[: D // 2]) for g in gates()]
    held = {"a": step(specs, 50, 2).taps}
    nothing = Taps(*(t[:, :0] for t in (held["a"].residual_LTD, held["a"].moe_input_LTD, held["a"].logits_LTE)))
    for wrong in (other, specs[:3], [replace(g, weight_ED=g.weight_ED[: E // 2]) for g in specs]):
        with pytest.raises(ShapeError, match="taps"):
            fit(wrong, source(specs), held, tmp_path / "p", CONFIG)
    narrow = [Step(s.taps.map(lambda t: t[..., :7]), s.ids_TLK, s.start_T) for s in source(specs).steps]
    with pytest.raises(ShapeError, match="taps"):
        fit(specs, Memory(narrow), held, tmp_path / "p", CONFIG)
    for empty in (Memory([]), Memory([Step(nothing, torch.zeros(0, L, K), torch.zeros(0, dtype=torch.bool))])):
        with pytest.raises(ShapeError, match="no tokens to learn from"):
            fit(specs, empty, held, tmp_path / "p", CONFIG)
    with pytest.raises(ShapeError, match="no held-out tokens"):
        fit(specs, source(specs), {**held, "b": nothing}, tmp_path / "p", CONFIG)
    with pytest.raises(ShapeError, match="none"):
        fit([], source(specs), held, tmp_path / "p", CONFIG)
    with pytest.raises(ShapeError, match="reach beyond"):
        Trainer(specs[:1], replace(CONFIG, horizons=(1, 2)))
    assert not (tmp_path / "p").exists()


def test_held_out_tokens_that_are_not_finite_judge_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    specs, good = gates(), step(gates(), 300, 2).taps
    bad = step(specs, 300, 2).taps
    bad.moe_input_LTD[1, :40, 3] = float("nan")
    bad.logits_LTE[0, 299] = float("inf")
    fit(specs, source(specs), {"a": bad}, tmp_path / "p", replace(CONFIG, steps=20))
    assert "| 259 |" in (tmp_path / "p" / "README.md").read_text() and "41 of 300" in caplog.text
    fit(specs, source(specs), {"a": good.take(torch.arange(40, 299))}, tmp_path / "q", replace(CONFIG, steps=20))
    assert (tmp_path / "p" / "README.md").read_text() == (tmp_path / "q" / "README.md").read_text()
    bad.logits_LTE[3, :, 0] = float("nan")
    with pytest.raises(ShapeError, match="no held-out tokens"):
        fit(specs, source(specs), {"good": good, "bad": bad}, tmp_path / "r", CONFIG)
    # A probe without a horizon 0 is not judged by the tap that it does not read.
    good.residual_LTD[:] = float("nan")
    fit(specs, source(specs), {"a": good}, tmp_path / "s", replace(CONFIG, steps=4, horizons=(1, 2)), force=True)
    online = OnlineFit(specs, replace(CONFIG, batch=64), moment_tokens=64, held_out_every=2)
    for i in range(6):
        s = step(specs, 64, i)
        online._take(s if i % 2 == 0 else Step(s.taps.slice(0, 0), s.ids_TLK[:0], s.start_T[:0]))
    with pytest.raises(ShapeError, match="too few"):
        online.finish(tmp_path / "t")


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ShapeError):
        FitConfig(rank=8, linear=9)
    with pytest.raises(ShapeError, match="held-out"):
        fit(gates(), source(gates()), {}, "nowhere", CONFIG)
    odd = gates()[:3] + [replace(gates()[3], top_k=K + 1)]
    with pytest.raises(ShapeError, match="differ"):
        Trainer(odd, CONFIG)
    other = trained(gates(), replace(CONFIG, rank=16, linear=8), steps=1)
    with pytest.raises(ShapeError, match="no fitting"):
        Trainer(gates(), CONFIG).load_state(other.state())


def test_zero_residual_has_no_effect_on_release() -> None:
    specs = gates()
    probe = RoutingProbe(specs, [Residual.zero(L, E, D, 4)] * 3)
    report = release(probe, {"a": step(specs, 200, 2).taps})
    assert not report.refused and not report.fallback


def test_horizon_0_learns_from_the_recent_past(tmp_path: Path) -> None:
    """Routers that look at the mean of the tokens before: only a probe that sees the past can know, and it survives storing."""
    specs, g = gates(), torch.Generator().manual_seed(5)
    mix = torch.randn(D, D, generator=g)

    def sequence(tokens: int, seed: int) -> Step:
        s = step(specs, tokens, seed)
        past = s.taps_with_past(specs[0].norm_eps).past_LTD
        s.taps.logits_LTE = torch.stack([normalise(r + 2 * p @ mix / D**0.5, spec) @ spec.weight_ED.T
                                         for r, p, spec in zip(s.taps.residual_LTD, past, specs)])
        return s

    test = sequence(400, 2)
    held = {"a": test.taps_with_past(specs[0].norm_eps)}
    found = {}
    for past in (False, True):
        config = FitConfig(rank=(16, 12), linear=12, steps=60, batch=256, past=past, horizons=(0, 1), lr=3e-3)
        fit(specs, Memory([sequence(2000, 1)]), held, tmp_path / str(past), config)
        probe = RoutingProbe.from_pretrained(tmp_path / str(past), specs)
        assert probe.sees_past(0) == past and not probe.sees_past(1)
        assert [r.down_LRW.shape[1:] for r in probe.residuals[:2]] == [(16, D * (1 + past)), (12, D)]
        found[past] = sum(metrics.recall(*margin_and_truth(probe, held["a"], t, 0)) for t in range(L)) / L
    assert found[True] > found[False] + 0.1, found
    x = test.taps.residual_LTD[0]
    assert torch.allclose(probe.logits(0, 0, x), probe.logits(0, 0, x, torch.zeros_like(x)), atol=1e-4), "no past is a past of zeros"
    with pytest.raises(ShapeError, match="past has shape"):
        probe.logits(0, 0, x, held["a"].past_LTD[0][:3])
    for use in (lambda: margin_and_truth(probe, test.taps, 0, 0),
                lambda: fit(specs, Memory([test]), {"a": test.taps}, tmp_path / "x", config)):
        with pytest.raises(ShapeError, match="no recent past"):
            use()


def test_horizons_1_and_2_share_their_units_in_training_and_on_disk(tmp_path: Path) -> None:
    specs = gates()
    # A channel that one target's norm removes: the shared units can't be read through it there.
    specs[2] = replace(specs[2], norm_D=specs[2].norm_D.index_fill(0, torch.tensor([3]), 0.0))
    trainer, s = Trainer(specs, replace(CONFIG, steps=30)), step(specs, 1500, 1)
    trainer.accumulate(s.taps)
    trainer.start()
    for _ in range(30):
        trainer.step(s.taps)
    assert "white_nRW" not in trainer.horizons[2].params
    probe = trainer.probe()
    probe.save_pretrained(tmp_path / "shared")
    again = RoutingProbe.from_pretrained(tmp_path / "shared", specs)
    other = trainer.probe()
    other.residuals[2].shift_LR += 1e-3  # no longer the same units: kept twice
    other.refresh()
    other.save_pretrained(tmp_path / "apart")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("shared", "apart")]
    assert sizes[1] - sizes[0] > (L - 2) * CONFIG.rank * D
    for h in HORIZONS:
        for t in range(h, L):
            hidden = (s.taps.residual_LTD if h == 0 else s.taps.moe_input_LTD)[t - h][:50]
            want = probe.logits(t - h, h, hidden)
            for folder, kept in (("shared", probe), ("apart", other)):
                got = RoutingProbe.from_pretrained(tmp_path / folder, specs).logits(t - h, h, hidden)
                assert (got - kept.logits(t - h, h, hidden)).norm() / want.norm() < 0.03
    again.save_pretrained(tmp_path / "again")
    assert sizes[0] == (tmp_path / "again" / "model.safetensors").stat().st_size, "still shared after a round trip"


def test_a_covariance_that_rounding_made_indefinite_still_gives_a_start() -> None:
    specs = gates()
    trainer, s = Trainer(specs, CONFIG), step(specs, 600, 1)
    trainer.accumulate(s.taps)
    trainer.horizons[0].moments["cov"][1] -= torch.eye(D, dtype=torch.float64) * 600 * 0.3
    assert torch.linalg.eigvalsh(trainer.horizons[0].moments["cov"][1])[0] < 0
    trainer.start()
    assert all(p.isfinite().all() for h in trainer.horizons for p in h.params.values())
    broken = Trainer(specs, CONFIG)
    s.taps.moe_input_LTD[1, 3] = float("nan")
    broken.accumulate(s.taps)
    with pytest.raises(ShapeError, match="not finite"):
        broken.start()


def test_a_batch_that_is_not_finite_teaches_nothing() -> None:
    specs = gates()
    trainer, good, bad = Trainer(specs, CONFIG), step(specs, 600, 1).taps, step(specs, 600, 2).taps
    bad.moe_input_LTD[1, 3, 2] = float("nan")
    bad.logits_LTE[0, 4] = float("-inf")
    trainer.accumulate(bad)
    trainer.accumulate(good)
    trainer.start()
    trainer.step(good)
    before = trainer.averages()
    assert float(trainer.step(bad)) == 0.0
    assert int(trainer.unsound) == 2
    for k, v in trainer.averages().items():
        assert v.isfinite().all()
        assert (v - before[k]).norm() < 0.3 * before[k].norm() + 0.2, k
    assert float(trainer.step(good)) > 0
