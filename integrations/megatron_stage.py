"""One chunk of a Megatron model on this rank: its taps as it runs, what is learnt from them, what is kept back to judge it, and its
checkpoint. `megatron_fit.ProbeFit` holds the settings and puts the chunks together."""
from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from moe_prefetch.errors import ArtefactError, SessionError
from moe_prefetch.probes import metrics as figures
from moe_prefetch.probes.calibrate import fit_temperature
from moe_prefetch.probes.probe import HORIZONS, GateSpec, Residual, RoutingProbe, margins, select
from moe_prefetch.probes.targets import all_sum

from .megatron import PROBES, adds_shared, gate, plain_logits, tap
from .megatron_trainer import StageTaps, StageTrainer

if TYPE_CHECKING:
    from .megatron_fit import ProbeFit

log = logging.getLogger(__name__)

FEW = tuple(10**n for n in range(2, 10))  # passes after which a start that has not come is told of


class Chunk:
    """One chunk of the model on this rank: its taps, its trainer, what it holds out."""

    def __init__(self, fit: ProbeFit, index: int, model: nn.Module, layers: list[TransformerLayer]) -> None:
        self.fit, self.index, self.model, self.layers = fit, index, model, layers
        spec = gate(layers[0])
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else spec.weight_ED.device
        self.before, self.after = fit.places.before(index), fit.places.after(index)
        self.trainer = StageTrainer(len(layers), spec.experts, spec.hidden, spec.norm_eps, fit.config, self.device, fit.group,
                                    self.before.count if self.before else 0)
        self.passes = self.taken = 0
        # Over all ranks: passes and rows that make the start. On this one: rows of the steps since.
        self.gathered = self.moment_rows = 0
        self.steps = self.rows = 0
        self.held: deque[StageTaps] = deque()
        self._parts: dict[tuple[str, int], torch.Tensor] = {}
        self._row = slice(0)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._edge: tuple[Any, torch.Tensor] | None = None
        self._index = {id(layer.mlp): i for i, layer in enumerate(layers)}
        self._adds_shared = adds_shared(layers[0])
        self._handles: list[Any] = []
        self.open()

    def open(self) -> None:
        if self._handles:
            return
        for i, layer in enumerate(self.layers):
            self._handles += tap(layer, functools.partial(self._residual, i), functools.partial(self._moe_input, i))
            layer.mlp.board(self)
        # A parent's hook runs before anything below it is loaded. The wrappers of a model load what they wrap directly, so each has one.
        paths = [name.split(".")[:-1] for name, m in self.model.named_modules() if any(m is layer for layer in self.layers)]
        above = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths))]
        for n in range(len(above) + 1):
            parent = self.model.get_submodule(".".join(above[:n]))
            self._handles.append(parent.register_load_state_dict_pre_hook(self._check))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer in self.layers:
            layer.mlp.leave(self)

    def gates(self) -> list[GateSpec]:
        return [gate(layer) for layer in self.layers]

    # taps ------------------------------------------------------------------------------------------------------------
    def _residual(self, i: int, hidden: torch.Tensor) -> None:
        if i == 0:
            self._begin(hidden)
        if self._open and 0 in self.fit.config.horizons:
            self._keep("residual", i, hidden)

    def _moe_input(self, i: int, hidden: torch.Tensor) -> None:
        if self._open:
            self._keep("moe_input", i, hidden)

    def shared(self, moe: nn.Module, out_SBD: torch.Tensor) -> None:
        if self._open and self._adds_shared:
            self._parts["moe_input", self._index[id(moe)]] += out_SBD.reshape(-1, out_SBD.shape[-1])[self._row]

    _open = False

    def _keep(self, kind: str, i: int, value: torch.Tensor) -> None:
        # A copy: the model may free or reuse the buffer.
        dtype = torch.float32 if kind == "logits" else value.dtype
        self._parts[kind, i] = value.reshape(-1, value.shape[-1])[self._row].to(self.device, dtype, copy=True)

    def _begin(self, hidden: torch.Tensor) -> None:
        self._parts.clear()
        self._open = False
        if not self.layers[0].training:
            return
        self._open = self.passes >= self.fit.after and (self.passes - self.fit.after) % self.fit.every == 0
        tokens = hidden.numel() // hidden.shape[-1]
        stride = max(1, -(-tokens // self.fit.tokens))
        # Another row of each stretch every time, without a random number.
        self._row = slice((self.passes // self.fit.every) % stride, None, stride)
        self.passes += 1
        if self._open and self.before is not None:
            rows = len(range(*self._row.indices(tokens)))
            buffer = torch.zeros(self.before.count, rows, hidden.shape[-1], device=self.device)
            self._edge = (dist.irecv(buffer, self.before.rank, group=self.fit.places.group), buffer)

    def routed(self, moe: nn.Module, logits_TE: torch.Tensor, map_TE: torch.Tensor, padding_T: torch.Tensor | None) -> None:
        i = self._index[id(moe)]
        if not self._open:
            return
        self._keep("logits", i, plain_logits(self.layers[i], logits_TE))
        if i == len(self.layers) - 1:
            self._open = False
            self._end(padding_T)

    @torch.no_grad()
    def _end(self, padding_T: torch.Tensor | None) -> None:
        n = range(len(self.layers))
        missing = [i for i in n if ("moe_input", i) not in self._parts or ("logits", i) not in self._parts]
        if missing:
            raise SessionError(f"the pass came to its last router without layers {missing}", where="ProbeFit",
                               expected="every layer of the stage, in order, in eager mode", do="close() the fit for such a pass")
        moe_input = [self._parts["moe_input", i] for i in n]
        if self.after is not None:
            tail = torch.stack(moe_input[-self.after.count :]).float()
            self._sent.append((dist.isend(tail, self.after.rank, group=self.fit.places.group), tail))
            while self._sent and self._sent[0][0].is_completed():
                self._sent.popleft()
        edge: list[torch.Tensor] = []
        if self._edge is not None:
            handle, buffer = self._edge
            handle.wait()
            edge, self._edge, moe_input = list(buffer), None, [t.float() for t in moe_input]
        residual = [self._parts.get(("residual", i), moe_input[i]) for i in n]
        taps = StageTaps(torch.stack(residual), torch.stack(edge + moe_input), torch.stack([self._parts["logits", i] for i in n]))
        self._parts.clear()
        if padding_T is not None:
            taps = taps.take((~padding_T[self._row].bool()).nonzero().flatten())
        self._learn(taps)

    # learning --------------------------------------------------------------------------------------------------------
    def _learn(self, taps: StageTaps) -> None:
        fit, trainer, gates = self.fit, self.trainer, self.gates()
        self.taken += 1
        if self.taken % fit.held_out_every == 0:
            taps = taps.finite()
            self.held.append(replace(taps, residual_LTD=taps.residual_LTD.bfloat16(), moe_input_LTD=taps.moe_input_LTD.bfloat16()))
            while len(self.held) > 1 and sum(t.tokens for t in self.held) - self.held[0].tokens >= fit.held_out_tokens:
                self.held.popleft()
            return
        if trainer.started:
            loss = trainer.step(taps, gates)
            self.steps, self.rows = self.steps + 1, self.rows + taps.tokens
            fit.metrics.add("probe_fit_steps", stage=self.index)
            if trainer.done % fit.log_every == 0:
                self._report(float(loss))
            return
        # Summed at every pass: no pass tells how many rows the next one has, and all ranks must start at the same.
        rows = trainer.accumulate(taps, gates)
        all_sum([rows], fit.group)
        self.gathered, self.moment_rows = self.gathered + 1, self.moment_rows + int(rows)
        if self.moment_rows >= fit.moment_tokens:
            trainer.start(taps, gates)
        elif fit.first_rank and self.gathered in FEW:
            log.warning("probes from layer %d have not started: %d passes gave %d of moment_tokens=%d rows", self.layers[0].layer_number,
                        self.gathered, self.moment_rows, fit.moment_tokens)

    def _report(self, loss: float) -> None:
        fit, done = self.fit, self.trainer.done
        fit.metrics.set("probe_fit_loss", loss, stage=self.index)
        recall = {h: sum(values) / max(1, len(values)) for h, values in self.recall().items()}
        for h, value in recall.items():
            fit.metrics.set("probe_fit_recall", value, stage=self.index, horizon=h)
        if fit.first_rank:
            number = self.layers[0].layer_number
            log.info("probes from layer %d: step %d, loss %.4f", number, done, loss)
            if fit.watch is not None:
                fit.watch.add_scalar(f"probes/loss_from_layer_{number}", loss, done)
                for h, value in recall.items():
                    fit.watch.add_scalar(f"probes/recall_h{h}_from_layer_{number}", value, done)

    def recall(self) -> dict[int, list[float]]:
        if not self.held or not self.trainer.started:
            return {}
        gates, live = self.gates(), [h for h in self.trainer.horizons if h.lead < len(self.layers)]
        taps = StageTaps.join(list(self.held))
        hits = self.trainer.hits(taps, gates)
        count = torch.tensor([taps.tokens * gates[0].top_k], dtype=torch.float64, device=self.device)
        all_sum([*hits, count], self.fit.group)
        if not count:
            return {}
        return {h.horizon: (x / count).tolist() for h, x in zip(live, hits)}

    def total(self, *counts: int) -> list[int]:
        """Over the ranks of the stage, all of which must ask."""
        total = torch.tensor(counts, dtype=torch.float64, device=self.device)
        all_sum([total], self.fit.group)
        return [int(n) for n in total]

    def unready(self) -> str:
        """Why there is nothing to judge yet; empty where there is. Sums over the stage: call it on every rank."""
        fit, faults = self.fit, []
        before = f" (the first {fit.after} were let go by, then one in {fit.every} was taken)" if fit.after or fit.every > 1 else ""
        seen = f"{self.passes} micro-batches gave {self.taken} passes{before}"
        if not self.trainer.started:
            faults.append(f"the start has got {self.moment_rows} rows of its moment_tokens={fit.moment_tokens}")
        tokens, = self.total(sum(t.tokens for t in self.held))
        if self.held and not tokens:
            faults.append("what was kept back holds no tokens: padding, or values that are not finite")
        if not self.held:
            faults.append(f"none was kept back: the first to be is pass {fit.held_out_every} (held_out_every)")
        return f"{seen}; " + ", and ".join(faults) if faults else ""

    @torch.no_grad()
    def judged(self) -> list[tuple[int, dict[Any, Any]]]:
        """(layer number, what the whole model's probe needs of it) per layer, on the CPU: alike on all ranks of the stage."""
        gates, taps, out = self.gates(), StageTaps.join(list(self.held)), []
        tokens, = self.total(taps.tokens)
        learnt = {h.horizon: self.trainer.learnt(h.horizon) for h in self.trainer.horizons}
        # Per layer and horizon: temperature and recall of the probe, the same of the stale gate.
        sums = torch.zeros(len(self.layers), len(HORIZONS), 4, dtype=torch.float64, device=self.device)
        # A rank whose kept-back tokens were all padding has nothing to say.
        voters = torch.full((1,), float(taps.tokens > 0), dtype=torch.float64, device=self.device)
        for i, spec in enumerate(gates if taps.tokens else []):
            true = select(taps.logits_LTE[i], spec)
            for h, rows in learnt.items():
                mine = rows[i]
                if mine is None:
                    continue
                tap_TD = taps.residual_LTD[i] if h == 0 else taps.moe_input_LTD[self.trainer.edge + i - h]
                # A probe of one target: the target's row, with the tap as its layer's own.
                one = Residual(*(t.unsqueeze(0) for t in mine), torch.ones(1), self.fit.config.linear, [True])
                for j, probe in enumerate((RoutingProbe([spec], (one, None, None)), RoutingProbe([spec]))):
                    margin = margins(probe.logits(0, 0, tap_TD), spec)
                    sums[i, h, 2 * j] = math.log(max(fit_temperature(margin, true), 1e-30))
                    sums[i, h, 2 * j + 1] = figures.recall(margin, true)
        all_sum([sums, voters], self.fit.group)
        sums /= voters.clamp_min(1)
        sums[..., ::2] = sums[..., ::2].exp()
        for i, (spec, layer) in enumerate(zip(gates, self.layers)):
            row: dict[str, Any] = {"gate": spec.to("cpu"), "figures": sums[i].cpu(), "tokens": tokens}
            row |= {h: tuple(t.cpu() for t in mine) for h, rows in learnt.items() if (mine := rows[i]) is not None}
            out.append((layer.layer_number, row))
        return out

    # checkpoints -----------------------------------------------------------------------------------------------------
    @property
    def _anew(self) -> bool:
        return self.fit.anew and self.passes == 0

    def layer_state(self, moe: nn.Module) -> dict[str, torch.Tensor]:
        return {} if self._anew else self.trainer.layer_state(self._index[id(moe)])

    def load_layer_state(self, moe: nn.Module, state: dict[str, torch.Tensor]) -> None:
        if not self._anew:
            self.trainer.load_layer_state(self._index[id(moe)], state)

    def _check(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """All layers' states, before one of them or a weight of the model is taken over."""
        if self._anew:
            return
        heads = {id(m): f"{prefix}{name}.{PROBES}" for name, m in module.named_modules()}
        found: dict[str, dict[str, Any]] = {heads[i]: {} for i in self._index}
        for key, value in state_dict.items():
            head, mark, name = key.partition("." + PROBES)
            if head + mark in found:
                found[head + mark][name] = value
        where = ", ".join(found)
        if not any(found.values()):
            raise ArtefactError("the checkpoint holds no probes", where=where, expected="probes, since a ProbeFit is attached",
                                do="start them anew: ProbeFit(..., anew=True); or load before the ProbeFit is made")
        done = {head: self.trainer.check_layer_state(self._index_of(heads, head), state, head) for head, state in found.items()}
        if len(set(done.values())) > 1:
            raise ArtefactError(f"the layers' probes contradict each other: steps made {sorted(set(done.values()))}", where=where,
                                expected="one count in every `done`", do="load another checkpoint, or ProbeFit(..., anew=True)")
        if self.trainer.started and min(done.values()) < 0:
            raise SessionError("the checkpoint is from before the start of the probes, and these have begun", where=where,
                               do="close() this ProbeFit, and make another one before you load")

    def _index_of(self, heads: dict[int, str], head: str) -> int:
        return next(i for moe, i in self._index.items() if heads[moe] == head)
