"""Probes fitted beside a Megatron-core training run, whose numbers they never touch.

    spec = with_prefetch(get_gpt_layer_local_spec(num_experts=64))     # before the model is built
    fit = ProbeFit(model)                                              # after it; the training loop stays as it is
    ...
    fit.save_pretrained("probes/mine")                                 # on every rank

Hidden states and router logits are read as the model runs, detached; when the last router of a stage has spoken, every label of the pass
is known and the probes make one step of their own: own weights outside the module tree, own optimiser, one sum over the ranks of the stage.
The model's gradients, clipping norm, loss scale and random streams are what they would be without it, bit by bit.

Pipeline edges: a probe belongs to the stage of its target, where the label and the gate are. The MoE input of the last two layers of a
stage is sent to the next one (as many rows as a step takes), through a process group of its own.
"""
from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from moe_prefetch.errors import ArtefactError, ReleaseError, SessionError, ShapeError, UnsupportedModelError
from moe_prefetch.metrics import Metrics
from moe_prefetch.probes import metrics as figures
from moe_prefetch.probes.calibrate import fit_temperature
from moe_prefetch.probes.fit import Report, Scalars, card
from moe_prefetch.probes.probe import HORIZONS, GateSpec, Residual, RoutingProbe, margins, select
from moe_prefetch.probes.targets import FitConfig

from .megatron import adds_shared, chunks_of, gate, moe_layers, plain_logits, tap
from .megatron_places import Places, assemble
from .megatron_trainer import StageTaps, StageTrainer, group_sum

log = logging.getLogger(__name__)


class ProbeFit:
    """Fits probes for every MoE layer of `model` as it trains. Make it on every rank, after the model and before or after DDP wraps it.

    model      a GPTModel built from `with_prefetch(spec)`, or the list of its chunks on this rank (virtual pipeline)
    config     rank, rate, schedule and the like; `batch` and `dropout` mean nothing here. Default: rank 32, whitened up to 1,024 channels
    tokens     rows of a micro-batch that a step takes on this rank, spread evenly over it; a step holds about 30 bytes for each of them,
               each layer of the stage and each channel
    every      a step at every so many micro-batches: with `tokens`, what the fit costs
    after      micro-batches to let go by first: routers that still find their way can't be forecast
    moment_tokens    rows, over all ranks of the stage, that make the start
    held_out_every   every so many of the passes taken is kept out of training; the last `held_out_tokens` rows of these judge the probe
    edges      send taps across pipeline stages; without it, the first layers of a later stage keep the stale gate at horizons 1 and 2
    watch      a TensorBoard SummaryWriter or the like, written on the first rank of each stage every `log_every` steps
    metrics    the registry for `probe_fit_*` counters and gauges

    Attached before a checkpoint is loaded, probes are loaded with it; attached after, they start anew. Raises UnsupportedModelError.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], config: FitConfig | None = None, *, tokens: int = 1024, every: int = 1,
                 after: int = 0, moment_tokens: int = 1 << 15, held_out_every: int = 16, held_out_tokens: int = 2048, edges: bool = True,
                 watch: Scalars | None = None, log_every: int = 50, metrics: Metrics | None = None) -> None:
        if min(tokens, every, moment_tokens, held_out_tokens, log_every, after + 1) < 1 or held_out_every < 2:
            raise ShapeError("sizes must be positive, and held_out_every at least 2", where="ProbeFit", do="correct the arguments")
        chunks = chunks_of(model)
        layers = [moe_layers(chunk) for chunk in chunks]
        some = next((m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)), None)
        if some is None:
            raise UnsupportedModelError("this is no Megatron model with transformer layers", where="ProbeFit", do="pass the GPTModel")
        if config is None:
            config = FitConfig(rank=32, linear=16, whiten=some.config.hidden_size <= 1024)
        groups = some.pg_collection
        self.group = groups.tp_dp_cp if dist.is_initialized() else None
        self.config = replace(config, batch=tokens * (dist.get_world_size(self.group) if self.group is not None else 1))
        self.tokens, self.every, self.after, self.moment_tokens = tokens, every, after, moment_tokens
        self.held_out_every, self.held_out_tokens, self.watch, self.log_every = held_out_every, held_out_tokens, watch, log_every
        self.metrics = metrics or Metrics()
        self.first_rank = self.group is None or dist.get_rank(self.group) == 0
        self.places = Places([[m.layer_number for m in chunk] for chunk in layers], groups.pp if dist.is_initialized() else None, edges)
        if not self.places.order:
            raise UnsupportedModelError("the model has no MoE layers", where="ProbeFit", do="fit probes for an MoE model")
        self.chunks = [_Chunk(self, i, chunk) for i, chunk in enumerate(layers) if chunk]

    @property
    def done(self) -> int:
        """Steps made, by the chunk of this rank that made fewest."""
        return min((c.trainer.done for c in self.chunks), default=0)

    def open(self) -> None:
        """Go on after `close`, with what was learnt."""
        for chunk in self.chunks:
            chunk.open()

    def close(self) -> None:
        """Take every hook back; the model is as it was."""
        for chunk in self.chunks:
            chunk.close()

    def recall(self) -> dict[int, float]:
        """Recall of the router's top-k on what was held out, per horizon, mean over this rank's layers. Sums over the stage: call it on
        every rank. Empty where nothing is fitted yet."""
        out: dict[int, list[float]] = {}
        for chunk in self.chunks:
            for h, values in chunk.recall().items():
                out.setdefault(h, []).extend(values)
        return {h: sum(v) / len(v) for h, v in out.items() if v}

    def save_pretrained(self, folder: Path | str, *, force: bool = False) -> RoutingProbe:
        """Calibrate, judge and write the whole model's probe; returns it on the CPU. Call it on every rank; the first one writes.

        The release gate is that of `probes.fit`: a layer below the stale gate falls back to it, a horizon below it on average is refused.
        Raises ReleaseError (unless `force`), and ShapeError when too little was seen.
        """
        rows = [row for chunk in self.chunks for row in chunk.judged()]
        report = Report()
        probe = assemble(self.places.gather(rows), self.config.linear, sum(t.tokens for c in self.chunks for t in c.held), report)
        if report.refused and not force:
            raise ReleaseError("the probe is below the stale gate: " + "; ".join(report.refused), where=str(folder),
                               expected="a recall above the unfitted gate", do="train longer; `force` writes it all the same")
        if left_out := sum(int(c.trainer.unsound) for c in self.chunks):
            log.warning("%d passes of this rank were left out of the fit: they held values that are not finite", left_out)
        outcome: list[str | None] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                probe.save_pretrained(Path(folder), card=card(report, self), extra={"figures": report.rows})  # type: ignore[arg-type]
            except Exception as e:  # noqa: BLE001 the other ranks wait to hear of it
                outcome[0] = f"{type(e).__name__}: {e}"
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, 0)
        if outcome[0] is not None:
            raise ArtefactError(f"the probe can't be written: {outcome[0]}", where=str(folder), expected="a folder that can be made",
                                do="call save_pretrained again with another folder; nothing that was learnt is lost")
        return probe


class _Chunk:
    """One chunk of the model on this rank: its taps, its trainer, what it holds out."""

    def __init__(self, fit: ProbeFit, index: int, layers: list[TransformerLayer]) -> None:
        self.fit, self.index, self.layers = fit, index, layers
        spec = gate(layers[0])
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else spec.weight_ED.device
        self.before, self.after = fit.places.before(index), fit.places.after(index)
        self.trainer = StageTrainer(len(layers), spec.experts, spec.hidden, spec.norm_eps, fit.config, self.device, fit.group,
                                    self.before.count if self.before else 0)
        self.passes = self.taken = 0
        self.moment_passes: int | None = None
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
            self.held.append(replace(taps, residual_LTD=taps.residual_LTD.bfloat16(), moe_input_LTD=taps.moe_input_LTD.bfloat16()))
            while len(self.held) > 1 and sum(t.tokens for t in self.held) - self.held[0].tokens >= fit.held_out_tokens:
                self.held.popleft()
            return
        if trainer.started:
            loss = trainer.step(taps, gates)
            fit.metrics.add("probe_fit_steps", stage=self.index)
            if trainer.done % fit.log_every == 0:
                self._report(float(loss))
            return
        if self.moment_passes is None:
            # Counted in passes, which are alike on all ranks; tokens need not be.
            rows = torch.tensor([float(taps.tokens)], device=self.device)
            group_sum([rows], fit.group)
            self.moment_passes = max(1, -int(-fit.moment_tokens // max(1.0, float(rows))))
        trainer.accumulate(taps, gates)
        self.moment_passes -= 1
        if self.moment_passes == 0:
            trainer.start(taps, gates)

    def _report(self, loss: float) -> None:
        fit, done = self.fit, self.trainer.done
        fit.metrics.set("probe_fit_loss", loss, stage=self.index)
        if self.held:
            for h, values in self.recall().items():
                fit.metrics.set("probe_fit_recall", sum(values) / max(1, len(values)), stage=self.index, horizon=h)
        if fit.first_rank:
            number = self.layers[0].layer_number
            log.info("probes from layer %d: step %d, loss %.4f", number, done, loss)
            if fit.watch is not None:
                fit.watch.add_scalar(f"probes/loss_from_layer_{number}", loss, done)
                for h in fit.config.horizons:
                    recall = fit.metrics.value("probe_fit_recall", stage=self.index, horizon=h)
                    fit.watch.add_scalar(f"probes/recall_h{h}_from_layer_{number}", recall, done)

    def recall(self) -> dict[int, list[float]]:
        if not self.held or not self.trainer.started:
            return {}
        gates, live = self.gates(), [h for h in self.trainer.horizons if h.lead < len(self.layers)]
        taps = StageTaps.join(list(self.held))
        hits = self.trainer.hits(taps, gates)
        count = torch.tensor([taps.tokens * gates[0].top_k], dtype=torch.float64, device=self.device)
        group_sum([*hits, count], self.fit.group)
        return {h.horizon: (x / count.clamp_min(1)).tolist() for h, x in zip(live, hits)}

    @torch.no_grad()
    def judged(self) -> list[tuple[int, dict[Any, Any]]]:
        """(layer number, what the whole model's probe needs of it) per layer, on the CPU: alike on all ranks of the stage."""
        if not self.trainer.started or not self.held:
            raise ShapeError(f"{self.taken} passes are too few", where="ProbeFit", do="train longer, or lower held_out_every",
                             expected=f"{self.fit.moment_tokens} tokens for the start, and a pass that is held out")
        gates, taps, out = self.gates(), StageTaps.join(list(self.held)), []
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
        group_sum([sums, voters], self.fit.group)
        sums /= voters.clamp_min(1)
        sums[..., ::2] = sums[..., ::2].exp()
        for i, (spec, layer) in enumerate(zip(gates, self.layers)):
            row: dict[str, Any] = {"gate": spec.to("cpu"), "figures": sums[i].cpu()}
            row |= {h: tuple(t.cpu() for t in mine) for h, rows in learnt.items() if (mine := rows[i]) is not None}
            out.append((layer.layer_number, row))
        return out

    # checkpoints -----------------------------------------------------------------------------------------------------
    def layer_state(self, moe: nn.Module) -> dict[str, torch.Tensor]:
        return self.trainer.layer_state(self._index[id(moe)])

    def load_layer_state(self, moe: nn.Module, state: dict[str, torch.Tensor]) -> None:
        self.trainer.load_layer_state(self._index[id(moe)], state)
