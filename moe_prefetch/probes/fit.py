"""The fitting loop: from a trace, or online beside a running model; one device or data-parallel under torchrun.

A fit keeps its state in `<out>/fit-state/`: after every epoch the weights, averages and optimiser moments, written whole and then named
by `state.json`. Started again with the same settings it goes on from the last epoch; with others it refuses. Before anything is
written to `<out>` itself the release gate compares the probe with the stale gate on held-out text of every domain: a probe that is
below it on average is refused (`force` writes it all the same), a single layer that is below it falls back to the stale gate.
"""
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..checkpoint import load_tensors, read_json, save_tensors, sha256_file, write_json
from ..errors import ArtefactError, ConfigError, ReleaseError, ShapeError
from ..runtime import REAL, Runtime
from . import metrics
from .calibrate import calibrate, margin_and_truth
from .collect import Collector, Step
from .probe import HORIZONS, GateSpec, RoutingProbe, gate_hash
from .targets import FitConfig, Taps
from .trainer import Trainer


class Scalars(Protocol):
    """What a TensorBoard SummaryWriter offers; any object with this method can watch a fit."""

    def add_scalar(self, tag: str, value: float, step: int) -> Any: ...


class Source(Protocol):
    """Shards of recorded steps: `traces.Trace`, or `Memory`."""

    def __len__(self) -> int: ...

    def shard(self, index: int) -> Step: ...

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Steps already in memory as a source."""

    steps: Sequence[Step]

    def __len__(self) -> int:
        return len(self.steps)

    def shard(self, index: int) -> Step:
        return self.steps[index]

    @property
    def tokens(self) -> int:
        return sum(s.taps.tokens for s in self.steps)


@dataclass(slots=True)
class Report:
    """What the release gate saw: figures per (domain, horizon), and the layers that fell back. `rows` are tables for the card."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    fallback: dict[int, list[int]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def batches(source: Source, size: int, epoch: int, seed: int, past_eps: float | None = None) -> Iterator[Taps]:
    """This rank's batches of one epoch: its shards in random order, their tokens shuffled. Every rank yields the same number, whatever the
    sizes of its shards, so that no collective is missed: an equal share of the tokens, going round again where a rank holds fewer. With
    `past_eps` (the norms' epsilon) the taps hold the recent past."""
    rank, world = _ranks()
    mine = [i for i in range(len(source)) if i % world == rank] or [rank % max(1, len(source))]
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    left = max(1, source.tokens // (size * world))
    while True:
        for i in torch.randperm(len(mine), generator=generator).tolist():
            taps = source.shard(mine[i]).taps_with_past(past_eps)
            order = torch.randperm(taps.tokens, generator=generator)
            for start in range(0, max(1, taps.tokens - size + 1), size):
                yield taps.take(order[start : start + size])
                left -= 1
                if not left:
                    return


def fit(gates: Sequence[GateSpec], train: Source, held_out: Mapping[str, Taps], out: Path | str, config: FitConfig | None = None, *,
        device: torch.device | str = "cpu", force: bool = False, patience: int = 3, moment_tokens: int = 1 << 17,
        watch: Scalars | None = None, progress: Callable[[int, int], None] | None = None, runtime: Runtime = REAL) -> RoutingProbe:
    """Fit, calibrate, judge and write a probe; returns it on the CPU.

    train      recorded taps of the domains to learn from
    held_out   taps per domain that were not trained on; their mean recall stops the fit early after `patience` epochs without gain, sets
               the temperatures and decides about release
    out        folder that gets the probe; `out/fit-state` while the fit is not done
    config     `steps` is the length of the schedule; epochs follow from it and the size of `train`
    progress   called with (steps done, steps in all)

    Raises ReleaseError (nothing written to `out`), ShapeError, ArtefactError (a damaged shard is named).
    """
    config, out = config or FitConfig(), Path(out)
    if not held_out or any(not t.tokens for t in held_out.values()):
        raise ShapeError("no held-out tokens", where="fit", expected="at least one domain with tokens", do="keep some text back")
    trainer = Trainer(gates, config, device)
    past_eps = gates[0].norm_eps if config.past else None
    state = _State(out / "fit-state", config, gates, runtime)
    epoch, best, stale_epochs, best_weights = state.load(trainer)
    if not trainer.started:
        seen = 0
        for taps in batches(train, config.batch, 0, config.seed, past_eps):
            trainer.accumulate(taps)
            seen += taps.tokens
            if seen >= moment_tokens:
                break
        trainer.start()
        best_weights = trainer.averages()
        best = _mean_recall(trainer, held_out)
    while trainer.done < config.steps and stale_epochs < patience:
        for taps in batches(train, config.batch, epoch, config.seed, past_eps):
            loss = trainer.step(taps)
            if progress is not None:
                progress(trainer.done, config.steps)
            if watch is not None and trainer.done % 10 == 0:
                watch.add_scalar("fit/loss", float(loss), trainer.done)
            if trainer.done >= config.steps:
                break
        epoch += 1
        found = _mean_recall(trainer, held_out)
        if watch is not None:
            watch.add_scalar("fit/held_out_recall", found, trainer.done)
        if found > best:
            best, stale_epochs, best_weights = found, 0, trainer.averages()
        else:
            stale_epochs += 1
        state.save(trainer, epoch, best, stale_epochs, best_weights)
    trainer.set_averages(best_weights)
    return finish(trainer, held_out, out, force=force, runtime=runtime)


def finish(trainer: Trainer, held_out: Mapping[str, Taps], out: Path, *, force: bool, runtime: Runtime = REAL) -> RoutingProbe:
    """Calibrate, pass the release gate, write."""
    probe = trainer.probe().to("cpu")
    cpu = {k: t.map(torch.Tensor.cpu) for k, t in held_out.items()}
    every = Taps.join(list(cpu.values()))
    horizons = tuple(h.horizon for h in trainer.horizons)
    report = release(probe, cpu, horizons=horizons)
    if report.refused and not force:
        raise ReleaseError("the probe is below the stale gate: " + "; ".join(report.refused), where=str(out),
                           expected="a recall above the unfitted gate on every domain",
                           do="train on text of that domain, or longer; `force` writes it all the same")
    calibrate(probe, every, horizons=horizons)
    if _ranks()[0] == 0:
        probe.save_pretrained(out, card=card(report, trainer), extra={"figures": report.rows, "fit": asdict(trainer.config)})
        shutil.rmtree(out / "fit-state", ignore_errors=True)
    return probe


@torch.no_grad()
def release(probe: RoutingProbe, held_out: Mapping[str, Taps], *, horizons: Sequence[int] = HORIZONS) -> Report:
    """The release gate. Compares with the stale gate per domain, horizon and layer; layers that lose on any domain stop using their
    residual (in place)."""
    report, stale = Report(), RoutingProbe(probe.gates)
    losing: dict[int, set[int]] = {h: set() for h in horizons}
    for domain, taps in held_out.items():
        for h in horizons:
            mine, floor = [], []
            for target in range(h, probe.layers):
                margin, true = margin_and_truth(probe, taps, target, h)
                mine.append(metrics.recall(margin, true))
                floor.append(metrics.recall(margin_and_truth(stale, taps, target, h)[0], true))
                if mine[-1] < floor[-1]:
                    losing[h].add(target)
            a, b = sum(mine) / max(1, len(mine)), sum(floor) / max(1, len(floor))
            report.rows.append({"domain": domain, "horizon": h, "recall_at_k": a, "stale_recall_at_k": b, "tokens": taps.tokens,
                                "layers_below": sum(m < f for m, f in zip(mine, floor))})
            if a < b:
                report.refused.append(f"{domain} at horizon {h}: {a:.4f} against {b:.4f}")
    for h, layers in losing.items():
        r = probe.residuals[h]
        if r is not None and layers:
            report.fallback[h] = sorted(layers)
            for target in layers:
                r.used_L[target] = False
    probe.refresh()
    return report


def card(report: Report, trainer: Trainer) -> str:
    c = trainer.config
    lines = ["# Routing probe", "", f"Rank {c.rank} ({c.linear} linear), {trainer.done} steps of {c.batch} tokens.", "",
             "| held-out domain | horizon | recall@k | stale gate | tokens | layers below the stale gate |", "|---|---|---|---|---|---|"]
    for r in report.rows:
        lines.append(f"| {r['domain']} | h{r['horizon']} | {r['recall_at_k']:.4f} | {r['stale_recall_at_k']:.4f} | {r['tokens']} "
                     f"| {r['layers_below']} |")
    lines += ["", "Mean over all layers where the horizon exists, before fallback."]
    lines += [f"Horizon {h}: layers {', '.join(map(str, ls))} fell back to the stale gate." for h, ls in report.fallback.items()]
    if report.refused:
        lines.append("Written by force, although below the stale gate: " + "; ".join(report.refused) + ".")
    return "\n".join(lines) + "\n"


def _mean_recall(trainer: Trainer, held_out: Mapping[str, Taps]) -> float:
    """Mean over domains, horizons and layers."""
    every = [v for taps in held_out.values() for values in trainer.evaluate(taps) for v in values]
    return sum(every) / len(every)


class Sample:
    """A fair sample of a stream of tokens in bounded memory: each token that was offered is as likely to be in it as any other. A token's
    lot is drawn once, from a generator of the sample's own, and the `size` lowest lots stay."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self._generator = size, torch.Generator().manual_seed(seed)
        self.taps: Taps | None = None
        self._lots_T = torch.empty(0, dtype=torch.float64)

    def offer(self, taps: Taps) -> None:
        lots_T = torch.rand(taps.tokens, generator=self._generator, dtype=torch.float64)
        every, lots_T = taps if self.taps is None else Taps.join([self.taps, taps]), torch.cat([self._lots_T, lots_T])
        kept = lots_T.topk(min(self.size, len(lots_T)), largest=False).indices.sort().values
        self.taps, self._lots_T = every.take(kept), lots_T[kept]


class OnlineFit:
    """Learns beside a running model: pass `listener` to `observe(model, listener)`. Hidden states are used once; those of the held-out
    tokens alone are kept.

    The first `moment_tokens` tokens give the start, every later pass one step (small passes are pooled until `config.batch` tokens, or
    `moment_tokens` where these are fewer, are there). One pass in `held_out_every` is not learnt from, to the end of the run: a fair
    sample of `held_out_tokens` of their tokens judges the probe; call `finish` to judge and write.
    """

    def __init__(self, gates: Sequence[GateSpec], config: FitConfig | None = None, *, device: torch.device | str = "cpu",
                 moment_tokens: int = 8192, held_out_tokens: int = 2048, held_out_every: int = 8) -> None:
        for name, value in (("moment_tokens", moment_tokens), ("held_out_tokens", held_out_tokens), ("held_out_every", held_out_every)):
            least = 2 if name == "held_out_every" else 1
            if value < least:
                raise ConfigError(f"{name} is {value}", where="OnlineFit", expected=f"{least} or more", do="correct it")
        self.trainer = Trainer(gates, config or FitConfig(), device)
        self.past_eps = gates[0].norm_eps if self.trainer.config.past else None
        self.listener = Collector(len(gates), self._take)
        self.moment_tokens, self.held_out_every = moment_tokens, held_out_every
        self.held = Sample(held_out_tokens, self.trainer.config.seed)
        self.seen = self.passes = 0
        self._pending: list[Taps] = []

    @torch.inference_mode(False)
    def _take(self, step: Step) -> None:
        # Clones made outside inference mode: a model run under it hands out tensors that autograd refuses.
        taps = step.taps_with_past(self.past_eps).map(torch.clone)
        self.passes += 1
        if self.passes % self.held_out_every == 0:
            self.held.offer(taps)
        else:
            self.learn(taps)

    def learn(self, taps: Taps) -> torch.Tensor | None:
        """Learn from tokens that are this fit's to keep; the loss of the step, if one was made (reading it synchronises)."""
        self._pending.append(taps)
        if sum(t.tokens for t in self._pending) < min(self.trainer.config.batch, self.moment_tokens):
            return None
        taps, self._pending = Taps.join(self._pending), []
        self.seen += taps.tokens
        with torch.enable_grad():
            if self.trainer.started:
                return self.trainer.step(taps) if self.trainer.done < self.trainer.config.steps else None
            self.trainer.accumulate(taps)
            if self.seen >= self.moment_tokens:
                self.trainer.start()
        return None

    def finish(self, out: Path | str, *, force: bool = False) -> RoutingProbe:
        """Raises ShapeError when too little was seen, ReleaseError as `fit` does."""
        if not self.trainer.started or self.held.taps is None:
            raise ShapeError(f"{self.seen} tokens in {self.passes} passes are too few", where="OnlineFit",
                             expected=f"more than {self.moment_tokens} tokens, and {self.held_out_every} passes, one of which is kept back",
                             do="let the model run longer")
        return finish(self.trainer, {"online": self.held.taps}, Path(out), force=force)


class _State:
    """Resume: `epoch-N.safetensors` first, then `state.json` that names it and its hash; the one before goes last."""

    def __init__(self, folder: Path, config: FitConfig, gates: Sequence[GateSpec], runtime: Runtime) -> None:
        self.folder, self.runtime = folder, runtime
        self.identity = {"config": {**asdict(config), "horizons": list(config.horizons)}, "gate_hash": gate_hash(gates)}

    def load(self, trainer: Trainer) -> tuple[int, float, int, dict[str, torch.Tensor]]:
        if not (self.folder / "state.json").exists():
            return 0, -1.0, 0, {}
        s = read_json(self.folder / "state.json")
        if not isinstance(s, dict) or s.get("identity") != self.identity:
            raise ArtefactError("an unfinished fit with other settings lies here", where=str(self.folder),
                                expected="the same model and settings",
                                do="finish it with its own settings, or choose another output folder")
        try:
            tensors = load_tensors(self.folder / s["file"], sha256=s["sha256"])
            best = {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
            trainer.load_state({k: v for k, v in tensors.items() if not k.startswith("best.")})
            return int(s["epoch"]), float(s["best"]), int(s["stale_epochs"]), best
        except (KeyError, TypeError, ValueError) as e:
            raise ArtefactError(f"the fit's state is damaged: {e}", where=str(self.folder), do="delete the folder to start over") from e

    def save(self, trainer: Trainer, epoch: int, best: float, stale_epochs: int, weights: dict[str, torch.Tensor]) -> None:
        if _ranks()[0]:
            return
        name = f"epoch-{epoch}.safetensors"
        save_tensors(self.folder / name, {**trainer.state(), **{"best." + k: v for k, v in weights.items()}}, runtime=self.runtime)
        write_json(self.folder / "state.json", {"identity": self.identity, "file": name, "sha256": sha256_file(self.folder / name),
                                                "epoch": epoch, "best": best, "stale_epochs": stale_epochs}, self.runtime)
        for old in self.folder.glob("epoch-*.safetensors"):
            if old.name != name:
                old.unlink()
