"""The fitting loop: from a trace, or online beside a running model; one device or data-parallel under torchrun.

A fit keeps its state in `<out>/fit-state/`: after every epoch the weights, averages and optimiser moments, written whole and then named
by `state.json`. Started again with the same settings and text it goes on from the last epoch; with others it refuses. Before anything is
written to `<out>` itself the release gate compares the probe with the stale gate on held-out text of every domain: a probe that is
below it on average is refused (`force` writes it all the same), a single layer that is below it falls back to the stale gate.
"""
from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..checkpoint import exclusive, load_tensors, read_json, save_tensors, sha256_file, write_json
from ..errors import ArtefactError, ConfigError, MoEPrefetchError, ReleaseError, SessionError, ShapeError
from ..runtime import REAL, Runtime
from . import metrics
from .batches import Source, batches, digest, ranks
from .calibrate import calibrate, margin_and_truth
from .collect import Collector, Step
from .probe import HORIZONS, GateSpec, RoutingProbe, check_folder, gate_hash
from .targets import FitConfig, Taps, all_sum
from .trainer import Trainer

log = logging.getLogger(__name__)
_STATE = re.compile(r"\.?(epoch-\d+\.safetensors|state\.json)(\.[0-9a-f]{12}\.tmp)?")


class Scalars(Protocol):
    """What a TensorBoard SummaryWriter offers; any object with this method can watch a fit."""

    def add_scalar(self, tag: str, value: float, step: int) -> Any: ...


@dataclass(slots=True)
class Report:
    """What the release gate saw: figures per (domain, horizon), and the layers that fell back. `rows` are tables for the card."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    fallback: dict[int, list[int]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def _agree(error: Exception | None, said: object, where: Path) -> None:
    """Raise `error`, this rank's own; or say that another rank met one, or sees something else: before a collective in which the others
    would wait."""
    told: list[Any] = [(None if error is None else str(error), said)]
    if ranks()[1] > 1:
        mine, told = told[0], [None] * ranks()[1]
        dist.all_gather_object(told, mine)
    if error is not None:
        raise error
    for rank, (what, _) in enumerate(told):
        if what is not None:
            raise SessionError(f"rank {rank} can't go on: {what}", where=str(where), do=f"see to rank {rank}; the others wait for it")
    if any(other != said for _, other in told):
        raise SessionError("the ranks do not see the same text and state of the fit", where=str(where),
                           expected="the same traces and output folder on every host", do="put both on a file system that the hosts share")


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

    Under torch.distributed every rank is given the same, takes its share of the shards, and returns once rank 0 has written.

    Raises ReleaseError (nothing written to `out`), ShapeError, ArtefactError (a damaged shard is named), DeadlineError (another process
    fits into `out`), SessionError (another rank met an error, or sees other data), UnsupportedModelError (nothing to forecast).
    """
    wanted, out = config or FitConfig(), Path(out)
    if not held_out:
        raise ShapeError("no held-out tokens", where="fit", expected="at least one domain with tokens", do="keep some text back")
    if not len(train) or not train.tokens:
        raise ShapeError("no tokens to learn from", where="fit", expected="at least one shard with tokens", do="record some text first")
    # No batch holds more tokens than there are.
    config = replace(wanted, batch=max(1, min(wanted.batch, train.tokens // ranks()[1])))
    trainer = Trainer(gates, config, device)
    state = _State(out / "fit-state", wanted, gates, train, held_out, runtime)
    held_out = _judges(trainer, held_out)
    trainer.check(train.shard(0).taps)
    past_eps = gates[0].norm_eps if config.past else None
    with ExitStack() as alone:
        error, found = None, (0, -1.0, 0, {})
        try:
            if ranks()[0] == 0:
                check_folder(out).mkdir(parents=True, exist_ok=True)
                alone.enter_context(exclusive(out, runtime, wait_s=1.0))
            found = state.load(trainer)
        except (MoEPrefetchError, OSError) as e:
            error = e
        epoch, best, stale_epochs, best_weights = found
        _agree(error, (state.identity, epoch, trainer.done), out)
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
            recall = _mean_recall(trainer, held_out)
            if watch is not None:
                watch.add_scalar("fit/held_out_recall", recall, trainer.done)
            if recall > best:
                best, stale_epochs, best_weights = recall, 0, trainer.averages()
            else:
                stale_epochs += 1
            state.save(trainer, epoch, best, stale_epochs, best_weights)
        trainer.set_averages(best_weights)
        probe = None
        try:
            probe = finish(trainer, held_out, out, force=force, runtime=runtime)
            if ranks()[0] == 0:
                state.remove()
        except (MoEPrefetchError, OSError) as e:
            error = e
        _agree(error, None, out)
        assert probe is not None
        return probe


def _judges(trainer: Trainer, held_out: Mapping[str, Taps]) -> dict[str, Taps]:
    """The tokens of each domain whose values are all finite. Raises ShapeError where none is left: on nothing, no probe is worse."""
    out = {}
    for domain, taps in held_out.items():
        trainer.check(taps)
        bad_T = torch.stack([~t.isfinite().all(-1).all(0) for t in trainer.read(taps)]).any(0)
        out[domain] = taps.take((~bad_T).nonzero().flatten()) if bad_T.any() else taps
        if not out[domain].tokens:
            raise ShapeError("no held-out tokens", where=domain, expected="tokens whose values are finite", do="keep some text back")
        if bad_T.any():
            log.warning("%s: %d of %d held-out tokens are left out: values are not finite", domain, int(bad_T.sum()), len(bad_T))
    return out


def finish(trainer: Trainer, held_out: Mapping[str, Taps], out: Path, *, force: bool, runtime: Runtime = REAL) -> RoutingProbe:
    """Calibrate, pass the release gate, write. Raises ShapeError when there is nothing to judge by."""
    if lost := int(trainer.unsound):
        log.warning("%d batches were left out of the fit: they held values that are not finite", lost)
    probe = trainer.probe().to("cpu")
    cpu = {k: t.map(torch.Tensor.cpu) for k, t in _judges(trainer, held_out).items()}
    every = Taps.join(list(cpu.values()))
    horizons = tuple(h.horizon for h in trainer.horizons)
    report = release(probe, cpu, horizons=horizons)
    if report.refused and not force:
        raise ReleaseError("the probe is below the stale gate: " + "; ".join(report.refused), where=str(out),
                           expected="a recall above the unfitted gate on every domain",
                           do="train on text of that domain, or longer; `force` writes it all the same")
    calibrate(probe, every, horizons=horizons)
    if ranks()[0] == 0:
        text = card(report, trainer.config, trainer.done, trainer.tokens)
        probe.save_pretrained(out, card=text, extra={"figures": report.rows, "fit": asdict(trainer.config)}, runtime=runtime)
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


def card(report: Report, config: FitConfig, steps: int, tokens: int) -> str:
    """`tokens` of all `steps` and ranks together."""
    lines = ["# Routing probe", "", f"Rank {config.rank} ({config.linear} linear), {steps} steps of {tokens // max(1, steps)} tokens.", "",
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

    The first `moment_tokens` tokens (batches with values that are not finite do not count) give the start, every later pass one step (small
    passes are pooled until `config.batch` tokens, or `moment_tokens` where these are fewer, are there). One pass in `held_out_every` is not
    learnt from, to the end of the run: a fair sample of `held_out_tokens` of their tokens judges the probe; call `finish` to judge and
    write. Under torch.distributed every rank makes as many passes, each with as many tokens as it has.
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
        self.seen = self.passes = self._gathered = 0
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
        if self.trainer.started and self.trainer.done >= self.trainer.config.steps:
            return None  # no collective: others may make no further pass
        self._pending.append(taps)
        of_all = sum(t.tokens for t in self._pending)
        enough = of_all >= min(self.trainer.config.batch, self.moment_tokens)
        if ranks()[1] > 1:
            # A rank with fewer tokens would miss the collectives of the others.
            all_sum([found := torch.tensor([enough, of_all], dtype=torch.float64, device=self.trainer.device)])
            ready, of_all = (int(n) for n in found.tolist())
            enough = ready == ranks()[1]
        if not enough:
            return None
        taps, self._pending = Taps.join(self._pending), []
        self.seen += taps.tokens
        with torch.enable_grad():
            if self.trainer.started:
                return self.trainer.step(taps, of_all)
            # Summed, so that all ranks start at the same pass, whatever each of them could use.
            tokens = self.trainer.accumulate(taps)
            all_sum([tokens])
            self._gathered += int(tokens)
            if self._gathered >= self.moment_tokens * ranks()[1]:
                self.trainer.start()
        return None

    def lost(self) -> str:
        """For a sentence: what was left out."""
        count = int(self.trainer.unsound)
        return f" ({count} batches held values that are not finite)" if count else ""

    def finish(self, out: Path | str, *, force: bool = False) -> RoutingProbe:
        """Raises ShapeError when too little was seen, ReleaseError as `fit` does."""
        if not self.trainer.started or self.held.taps is None or not self.held.taps.tokens:
            raise ShapeError(f"{self.seen} tokens in {self.passes} passes are too few{self.lost()}", where="OnlineFit",
                             expected=f"more than {self.moment_tokens} tokens, and {self.held_out_every} passes, one of which is kept back",
                             do="let the model run longer")
        return finish(self.trainer, {"online": self.held.taps}, Path(out), force=force)


class _State:
    """Resume: `epoch-N.safetensors` first, then `state.json` that names it and its hash; the one before goes last."""

    def __init__(self, folder: Path, config: FitConfig, gates: Sequence[GateSpec], train: Source, held_out: Mapping[str, Taps],
                 runtime: Runtime) -> None:
        self.folder, self.runtime = folder, runtime
        # As it will be read: JSON knows no tuples.
        self.identity = json.loads(json.dumps({"config": asdict(config), "gate_hash": gate_hash(gates), "text": {
            "train": train.identity, "held_out": {k: digest([t]) for k, t in held_out.items()}}}))

    def load(self, trainer: Trainer) -> tuple[int, float, int, dict[str, torch.Tensor]]:
        if not (self.folder / "state.json").exists():
            return 0, -1.0, 0, {}
        s = read_json(self.folder / "state.json")
        old = s.get("identity") if isinstance(s, dict) else None
        if not isinstance(old, dict):
            raise ArtefactError("the fit's state is damaged", where=str(self.folder), do="delete state.json there to start over")
        if "text" not in old:
            log.warning("%s does not say what text its fit has seen: going on as if it were this", self.folder)
        wrong = [name for name, keys in (("settings", ("config", "gate_hash")), ("text", ("text",) * ("text" in old)))
                 if any(old.get(k) != self.identity[k] for k in keys)]
        if wrong:
            raise ArtefactError(f"an unfinished fit with other {' and other '.join(wrong)} lies here", where=str(self.folder),
                                expected="the same model, settings, traces and held-out text",
                                do="finish it with its own, or choose another output folder")
        try:
            tensors = load_tensors(self.folder / s["file"], sha256=s["sha256"])
            best = {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
            trainer.load_state({k: v for k, v in tensors.items() if not k.startswith("best.")})
            return int(s["epoch"]), float(s["best"]), int(s["stale_epochs"]), best
        except (KeyError, TypeError, ValueError) as e:
            raise ArtefactError(f"the fit's state is damaged: {e}", where=str(self.folder),
                                do="delete state.json there to start over") from e

    def save(self, trainer: Trainer, epoch: int, best: float, stale_epochs: int, weights: dict[str, torch.Tensor]) -> None:
        if ranks()[0]:
            return
        name = f"epoch-{epoch}.safetensors"
        save_tensors(self.folder / name, {**trainer.state(), **{"best." + k: v for k, v in weights.items()}}, runtime=self.runtime)
        write_json(self.folder / "state.json", {"identity": self.identity, "file": name, "sha256": sha256_file(self.folder / name),
                                                "epoch": epoch, "best": best, "stale_epochs": stale_epochs}, self.runtime)
        self._sweep(keep=(name, "state.json"))

    def _sweep(self, keep: tuple[str, ...] = ()) -> None:
        for path in self.folder.iterdir():
            if path.name not in keep and _STATE.fullmatch(path.name):
                path.unlink()

    def remove(self) -> None:
        """The folder goes, too, if nothing else is in it."""
        with suppress(OSError):
            self._sweep()
            self.folder.rmdir()
