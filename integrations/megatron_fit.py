"""Probes fitted beside a Megatron-core training run, whose numbers they never touch.

    spec = with_prefetch(get_gpt_layer_local_spec(num_experts=64, normalization="RMSNorm"))     # before the model is built
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

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from moe_prefetch.errors import ArtefactError, ConfigError, ReleaseError, SessionError, ShapeError, UnsupportedModelError
from moe_prefetch.metrics import Metrics
from moe_prefetch.probes.fit import Report, Scalars, card
from moe_prefetch.probes.probe import RoutingProbe
from moe_prefetch.probes.targets import FitConfig
from moe_prefetch.probes.trainer import check_gates

from .megatron import chunks_of, gate, moe_layers
from .megatron_places import Places, assemble
from .megatron_stage import Chunk
from .megatron_trainer import check_config

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
    anew       start anew whatever the checkpoint holds that is loaded before the first training pass, also one without probes

    Attached before a checkpoint is loaded, probes are loaded with it (one that lacks them, or whose state is damaged, is refused with
    ArtefactError before anything is taken over); attached after, they start anew. Raises, all before a hook is placed: ConfigError (wrong
    arguments, every one named in `.problems`), UnsupportedModelError, SessionError (a ProbeFit is attached already).
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], config: FitConfig | None = None, *, tokens: int = 1024, every: int = 1,
                 after: int = 0, moment_tokens: int = 1 << 15, held_out_every: int = 16, held_out_tokens: int = 2048, edges: bool = True,
                 watch: Scalars | None = None, log_every: int = 50, metrics: Metrics | None = None, anew: bool = False) -> None:
        _check_arguments({"tokens": (tokens, 1), "every": (every, 1), "after": (after, 0), "moment_tokens": (moment_tokens, 1),
                          "held_out_every": (held_out_every, 2), "held_out_tokens": (held_out_tokens, 1), "log_every": (log_every, 1)},
                         {"edges": (edges, bool), "anew": (anew, bool), "config": (config, FitConfig | None),
                          "metrics": (metrics, Metrics | None)}, watch)
        chunks = chunks_of(model)
        layers = [moe_layers(chunk) for chunk in chunks]
        some = next((m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)), None)
        if some is None:
            raise UnsupportedModelError("this is no Megatron model with transformer layers", where="ProbeFit", do="pass the GPTModel")
        self._layers = [layer for chunk in layers for layer in chunk]
        if self._layers:
            check_gates([gate(layer) for layer in self._layers])
        self._check_free()
        if config is None:
            config = FitConfig(rank=32, linear=16, whiten=some.config.hidden_size <= 1024)
        check_config(config)
        groups = some.pg_collection
        self.group = groups.tp_dp_cp if dist.is_initialized() else None
        self.config = replace(config, batch=tokens * (dist.get_world_size(self.group) if self.group is not None else 1))
        self.tokens, self.every, self.after, self.moment_tokens = tokens, every, after, moment_tokens
        self.held_out_every, self.held_out_tokens, self.watch, self.log_every = held_out_every, held_out_tokens, watch, log_every
        self.metrics, self.anew = metrics or Metrics(), anew
        self.first_rank = self.group is None or dist.get_rank(self.group) == 0
        self.places = Places([[m.layer_number for m in chunk] for chunk in layers], groups.pp if dist.is_initialized() else None, edges)
        if not self.places.order:
            raise UnsupportedModelError("the model has no MoE layers", where="ProbeFit", do="fit probes for an MoE model")
        self.chunks = [Chunk(self, i, chunk, found) for i, (chunk, found) in enumerate(zip(chunks, layers)) if found]

    def _check_free(self) -> None:
        """Two fits of one model would write the same keys of its checkpoints."""
        others = {p.fit for layer in self._layers for p in layer.mlp.passengers if isinstance(p, Chunk)} - {self}
        if others:
            raise SessionError("a ProbeFit is attached to this model already", where="ProbeFit", do="close() it first, or go on with it")

    @property
    def done(self) -> int:
        """Steps made, by the chunk of this rank that made fewest."""
        return min((c.trainer.done for c in self.chunks), default=0)

    def open(self) -> None:
        """Go on after `close`, with what was learnt. Raises SessionError when another ProbeFit came in between."""
        self._check_free()
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
        Raises, on every rank alike, ShapeError when too little was seen, ReleaseError (unless `force`), ArtefactError.
        """
        if not isinstance(folder, str | Path) or not str(folder):
            raise ConfigError(f"the folder is {folder!r}", where="save_pretrained", expected="a path", do="name a folder")
        # A stage without MoE layers must hear of it too: it would wait for the others' rows.
        unready = [fault for fault in self.places.gather([(c.layers[0].layer_number, c.unready()) for c in self.chunks]) if fault]
        if unready:
            raise ShapeError("too little was seen to judge the probes by", where="ProbeFit",
                             expected="a start, and passes that are kept back", do=f"{unready[0]}. Train longer, or set these lower")
        rows = [row for chunk in self.chunks for row in chunk.judged()]
        report = Report()
        probe = assemble(self.places.gather(rows), self.config.linear, report)
        # A micro-batch may have fewer rows than `tokens`, without its padding fewer still. Steps from before a checkpoint are not counted.
        counts = [c.total(c.rows, c.steps) for c in self.chunks]
        if report.refused and not force:
            raise ReleaseError("the probe is below the stale gate: " + "; ".join(report.refused), where=str(folder),
                               expected="a recall above the unfitted gate", do="train longer; `force` writes it all the same")
        if left_out := sum(int(c.trainer.unsound) for c in self.chunks):
            log.warning("%d passes of this rank were left out of the fit: they held values that are not finite", left_out)
        outcome: list[str | None] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                rows_made, made = counts[0] if counts else (0, 0)
                world = dist.get_world_size(self.group) if self.group is not None else 1
                step_tokens = rows_made * world // made if made else self.config.batch
                text = card(report, self.config, self.done, self.done * step_tokens)
                probe.save_pretrained(Path(folder), card=text, extra={"figures": report.rows})
            except Exception as e:  # noqa: BLE001 the other ranks wait to hear of it
                outcome[0] = f"{type(e).__name__}: {e}"
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, 0)
        if outcome[0] is not None:
            raise ArtefactError(f"the probe can't be written: {outcome[0]}", where=str(folder), expected="a folder that can be made",
                                do="call save_pretrained again with another folder; nothing that was learnt is lost")
        return probe


def _check_arguments(numbers: dict[str, tuple[Any, int]], others: dict[str, tuple[Any, Any]], watch: Any) -> None:
    found = [f"{name} is {value!r}; expected a whole number of at least {least}" for name, (value, least) in numbers.items()
             if isinstance(value, bool) or not isinstance(value, int) or value < least]
    found += [f"{name} is {value!r}; expected {getattr(kind, '__name__', kind)}" for name, (value, kind) in others.items()
              if not isinstance(value, kind)]
    if watch is not None and not callable(getattr(watch, "add_scalar", None)):
        found.append(f"watch is {watch!r}; expected an object with add_scalar, as SummaryWriter")
    if found:
        raise ConfigError("; ".join(found), problems=tuple(found), where="ProbeFit", do="correct the arguments named")
