"""A probe fitted beside DeepSpeed training: `probes.fit.OnlineFit` fed from hooks, in step on every data-parallel rank.

The model's loss, gradients and random numbers stay what they were: the taps are detached copies, the probe's weights belong to no
DeepSpeed optimizer, and what is random about the fit has generators of its own. ZeRO stages 0 to 2 keep routers whole, so the gates can
be read at any time; they change while the model learns, so the probe follows them.
"""
from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_prefetch.config import FitSection
from moe_prefetch.errors import ArtefactError, MoEPrefetchError, ReleaseError, SessionError, ShapeError
from moe_prefetch.integrations.transformers import FITTED
from moe_prefetch.probes.collect import Collector, Step
from moe_prefetch.probes.fit import FitConfig, OnlineFit, Taps
from moe_prefetch.probes.fit import finish as write
from moe_prefetch.probes.probe import HORIZONS, GateSpec, RoutingProbe

HELD_OUT_EVERY = 8  # of so many passes one is kept back
# What rank 0 tells the others, by its place here; anything else that went wrong is a SessionError to them.
OUTCOMES: tuple[type[MoEPrefetchError], ...] = (SessionError, ReleaseError, ArtefactError)


class ProbeFit:
    """`engine.moe_prefetch` of a training engine. Learns at every training forward; `finish()` judges the probe and writes it."""

    def __init__(self, host: Any, section: FitSection, device: torch.device | str) -> None:
        self.section = section
        self._host = host
        horizons = tuple(h for h in getattr(host, "horizons", HORIZONS) if h < host.num_layers)
        config = FitConfig(rank=section.rank, linear=section.linear, steps=section.steps, batch=section.batch, lr=section.lr,
                           warmup=min(50, section.steps // 10), horizons=horizons)
        if host.model in FITTED:
            raise SessionError("a fit runs beside this model already", where=type(host.model).__name__,
                               do="finish() or stop() it first: it is on engine.moe_prefetch")
        # Held-out text is kept here: a model that learns is judged by what it does now, so the last passes count, not a sample of all.
        self._online = OnlineFit(_gates(host), config, device=device, moment_tokens=section.moment_tokens)
        self._held: deque[Taps] = deque()
        self._passes, self._left = 0, section.after
        self._losses: list[torch.Tensor] = []
        self._collector = Collector(host.num_layers, self._take)
        self._open = False
        self._observed = host.observe(self)
        self._observed.__enter__()
        FITTED.add(host.model)

    @property
    def losses(self) -> list[float]:
        """The probe's loss at every fitting step so far, mean over the ranks' own targets; reading it waits for the device."""
        return [float(x) for x in self._losses]

    # listener --------------------------------------------------------------------------------------------------------
    def step_begin(self, batch: int, tokens: int) -> None:
        # Evaluation may run on one rank alone, and a step of ours is a collective; recomputed blocks come outside of any step.
        self._open = self._host.model.training and torch.is_grad_enabled()
        if self._open and self._left:
            self._open, self._left = False, self._left - 1
        if self._open:
            self._collector.step_begin(batch, tokens)

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        if self._open:
            self._collector.residual(layer, hidden_TD)

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        if self._open:
            self._collector.moe_input(layer, hidden_TD)

    def routed(self, layer: int, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> None:
        if self._open:
            self._collector.routed(layer, logits_TE, ids_TK)

    def step_end(self) -> None:
        if self._open:
            self._open = False
            self._collector.step_end()

    def _take(self, step: Step) -> None:
        """The same number of tokens on every rank, so that all of them reach each of the fit's collectives."""
        tokens = torch.tensor([step.taps.tokens], device=step.taps.logits_LTE.device)
        if _world() > 1:
            dist.all_reduce(tokens, dist.ReduceOp.MIN)
        n = int(tokens)
        if not n:
            return
        self._passes += 1
        if self._passes % HELD_OUT_EVERY == 0:
            self._held.append(step.taps.slice(0, n))
            while sum(t.tokens for t in self._held) - self._held[0].tokens >= self.section.held_out_tokens:
                self._held.popleft()
            return
        self._online.trainer.follow(_gates(self._host))
        with torch.autocast(step.taps.logits_LTE.device.type, enabled=False):
            loss = self._online.learn(step.taps.slice(0, n))
        if loss is not None:
            self._losses.append(loss.detach())

    # the end ---------------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Hooks off; calling it again does nothing."""
        self._observed.__exit__(None, None, None)
        FITTED.discard(self._host.model)

    def finish(self, out: Path | str | None = None, *, force: bool = False) -> RoutingProbe | None:
        """Stop, judge the probe against the unfitted gate on held-out tokens, write it to `out` (default: fit.out). Call it on every rank;
        rank 0 judges and writes, and gets the probe.

        Raises on every rank ReleaseError (below the unfitted gate; nothing written; `force` writes it) or ArtefactError (nothing can be
        written there); ShapeError on rank 0 and SessionError on the others when too few tokens were seen; SessionError on every rank when
        rank 0 met any other error.
        """
        self.stop()
        error: MoEPrefetchError | None = None
        probe = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            # Whatever goes wrong, the other ranks wait for the outcome.
            try:
                self._online.trainer.follow(_gates(self._host))
                probe = self._judge(Path(out or self.section.out), force)
            except Exception as e:  # noqa: BLE001
                error = _typed(e, str(out or self.section.out))
        code = 0 if error is None else next((i for i, kind in enumerate(OUTCOMES, 1) if isinstance(error, kind)), 1)
        outcome = torch.tensor([code], device=self._online.trainer.device)
        if _world() > 1:
            dist.broadcast(outcome, 0)
        if error is not None:
            raise error
        if int(outcome):
            raise OUTCOMES[int(outcome) - 1]("rank 0 did not write the probe", where=str(out or self.section.out),
                                             expected="a probe written by rank 0", do="read its error")
        return probe

    def _judge(self, out: Path, force: bool) -> RoutingProbe:
        if not self._online.trainer.started or not self._held:
            raise ShapeError(f"{self._passes} training passes gave {self._online.seen} tokens to learn from: too few"
                             f"{self._online.lost()}", where="fit",
                             expected=f"more than fit.moment_tokens ({self.section.moment_tokens}), and {HELD_OUT_EVERY} passes, one of "
                             "which is kept back", do=f"train longer (fit.after lets {self.section.after} passes go by; fewer than "
                             f"fit.batch={self.section.batch} tokens are pooled), or lower fit.moment_tokens")
        return write(self._online.trainer, {"training": Taps.join(list(self._held))}, out, force=force)


def _typed(error: Exception, where: str) -> MoEPrefetchError:
    if isinstance(error, MoEPrefetchError):
        return error
    kind, what = (ArtefactError, "written") if isinstance(error, OSError) else (SessionError, "finished")
    typed = kind(f"the probe can't be {what}: {type(error).__name__}: {error}", where=where, expected="a folder that can be written",
                 do="call finish with another folder; what was learnt is still there")
    typed.__cause__ = error
    return typed


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gates(host: Any) -> list[GateSpec]:
    """The routers as they are now: an optimizer step may have given their parameters other memory."""
    return [host._gate(block) for block in host.blocks]
