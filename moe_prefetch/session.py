"""attach and detach: the one file that knows the whole path.

The probe forecasts, the planner plans, the mover moves, the router decides, compute computes, the ledger settles.
"""
from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from . import config as config_module
from .config import Config
from .errors import SessionError
from .experts.compute import LocalCompute, SlotCompute
from .experts.ledger import Ledger
from .experts.mover import Drive, Mover
from .experts.planner import POLICIES, Budget, cancellable
from .experts.slots import SlotTable
from .experts.store import DiskStore, LocalStore
from .metrics import Metrics
from .observe.report import Report, session_report
from .probes.forecast import Forecaster, ProbeForecaster
from .probes.probe import RoutingProbe
from .runtime import REAL, Runtime
from .seam import HostModel, open_model
from .types import Demand, Forecast

log = logging.getLogger(__name__)

# Movement for layer L is planned from the tap two layers before; layers below that are planned at the end of the step before.
PLAN_HORIZON = 2


def attach(model: Any, config: Config | dict[str, Any] | str | Path | None = None, *, forecaster: Forecaster | None = None,
           plan: str | None = None, runtime: Runtime = REAL, progress: Callable[[int, int], None] | None = None) -> Session:
    """Put the library under a model; use as a context manager, or call `detach()`.

    config      path of a YAML file, a dict, a Config, or None (defaults: nothing moves)
    forecaster  a source of forecasts of your own, in place of the probe
    plan        overrides experts.plan; also takes "oracle", which has no use outside a measurement
    progress    called with (records written, of) while the record file is made

    Raises ConfigError, BudgetError, UnsupportedModelError, ProbeMismatchError, ArtefactError: all before the model is touched.
    """
    return Session(open_model(model), config_module.load(config), forecaster, plan, runtime, progress)


class Session:
    """A model with the library under it. One forward pass at a time; the passes may come from different threads."""

    def __init__(self, host: HostModel, config: Config, forecaster: Forecaster | None, plan: str | None, runtime: Runtime,
                 progress: Callable[[int, int], None] | None) -> None:
        self.config, self.metrics = config, Metrics()
        self.num_layers, self.num_experts = host.num_layers, host.num_experts
        self.demands: list[Demand] | None = None
        self._host, self._runtime = host, runtime
        self._step, self._kind, self._in_step = 0, "prefill", threading.Lock()
        self._undo: Callable[[], None] | None = None
        self._mover: Mover | None = None
        self._temporary: Path | None = None
        self._clock = [0.0, 0.0]  # last tap, mean seconds from layer to layer
        self._forecaster = forecaster or self._probe(plan or config.experts.plan)
        name = plan or config.experts.plan
        self.policy = POLICIES["probe" if name == "auto" and config.probe.path else "stale" if name == "auto" else name]
        if config.experts.home == "local":
            store = LocalStore(host)
            self.ledger = Ledger(host.num_layers, store.layout.nbytes)
            self._compute: LocalCompute | SlotCompute = LocalCompute(store, self.ledger, self._note)
            self.num_slots = host.num_experts
        else:
            self._start_mover(progress)
        try:
            self._undo = host.install(self, config.kv)
            if self._mover:
                host.release()
        except BaseException:
            self._abandon()
            raise

    # set-up ---------------------------------------------------------------------------------------------------------
    def _probe(self, plan: str) -> Forecaster | None:
        if self.config.experts.home == "local" or plan in ("lru", "recent"):
            return None
        if self.config.probe.path is not None and plan != "stale":
            return ProbeForecaster(RoutingProbe.from_pretrained(self.config.probe.path, self._host.gates))
        if plan == "auto":
            log.info("no probe.path given: forecasts come from each layer's own gate, unfitted")
        return ProbeForecaster(RoutingProbe(self._host.gates))

    def _start_mover(self, progress: Callable[[int, int], None] | None) -> None:
        host, experts, runtime = self._host, self.config.experts, self._runtime
        record_bytes = LocalStore(host).layout.nbytes
        # The budget is checked before a byte is written.
        self.num_slots = config_module.slots_per_layer(experts, num_layers=host.num_layers, num_experts=host.num_experts, record_bytes=record_bytes)
        folder = experts.path
        if folder is None:
            folder = self._temporary = Path(tempfile.mkdtemp(prefix="moe_prefetch-"))
        try:
            if (folder / "manifest.json").exists():
                store = DiskStore.open(folder, host, runtime)
                if not store.matches(host):
                    store.close()
                    log.warning("the record file in %s holds other weights than the model: it is written again", folder)
                    store = DiskStore.create(folder, host, runtime, progress)
            else:
                store = DiskStore.create(folder, host, runtime, progress)
        except BaseException:
            self._remove_temporary()
            raise
        self.table = SlotTable(host.num_layers, self.num_slots, host.num_experts)
        self.ledger = Ledger(host.num_layers, store.layout.nbytes)
        drive = Drive(experts.drive.bandwidth, experts.drive.latency) if experts.drive else None
        self._mover = Mover(store, self.table, runtime, threads=experts.threads, deadline=experts.deadline, drive=drive)
        keep = self._forecaster.keep if self._forecaster else lambda layer, step: ()
        self._compute = SlotCompute(self._mover, self.policy, self.ledger, runtime, self._note, keep)

    # taps (called by the host) --------------------------------------------------------------------------------------
    def step_begin(self, batch: int, tokens: int) -> None:
        if not self._in_step.acquire(blocking=False):
            raise SessionError("a second forward pass began before the first ended", where=f"step {self._step}",
                               expected="one pass at a time per session", do="serialise the calls, or attach one model per thread")
        self._kind = "decode" if tokens <= batch else "prefill"
        self._clock[0] = self._runtime.now()

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        """Horizon 0 has no use while records come from a drive: the attention in between is shorter than a read."""

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        now = self._runtime.now()
        last, mean = self._clock
        self._clock = [now, mean + ((now - last) - mean) / 8]
        if self._mover is None:
            return
        if layer + PLAN_HORIZON < self.num_layers:
            probs = self._forecast(layer + PLAN_HORIZON, PLAN_HORIZON, hidden_TD)
            self._plan(Forecast(layer + PLAN_HORIZON, self._step, PLAN_HORIZON, probs))
        if layer + 1 < self.num_layers and self._forecaster is not None:
            # The nearer forecast can only take back what has not started; where nothing waits it is not worth computing.
            with self._mover.lock:
                waiting = bool(self._mover.unstarted(layer + 1))
            if waiting:
                nearer = Forecast(layer + 1, self._step, 1, self._forecast(layer + 1, 1, hidden_TD))
                with self._mover.lock:
                    jobs = {j.move: j for j in self._mover.unstarted(layer + 1)}
                    for move in cancellable(tuple(jobs), nearer):
                        self._mover.cancel(jobs[move])

    def experts(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
                act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self._compute.run(layer, self._step, self._kind, hidden_TD, ids_TK, weights_TK, act)

    def step_end(self) -> None:
        try:
            self._step += 1
            if self._mover is not None and self._undo is not None:
                for layer in range(min(PLAN_HORIZON, self.num_layers)):
                    probs = self._forecaster.next_step(layer, self._step) if self._forecaster else ()
                    self._plan(Forecast(layer, self._step, PLAN_HORIZON, probs))
        finally:
            self._in_step.release()

    # inside ---------------------------------------------------------------------------------------------------------
    def _forecast(self, layer: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        if self._forecaster is None or not self.policy.forecasts:
            return ()
        return self._forecaster.forecast(layer, self._step, horizon, hidden_TD)

    def _plan(self, forecast: Forecast) -> None:
        assert self._mover is not None
        keep = self._forecaster.keep(forecast.layer, forecast.step) if self._forecaster else ()
        with self._mover.lock:
            self._mover.prefetch(self.policy.plan(self.table.view(forecast.layer), forecast, self._budget(), keep))

    def _budget(self) -> Budget:
        """Records that the link brings in the time until the target layer, at the pace seen so far."""
        mover = self._mover
        assert mover is not None
        pace = mover.read_s / mover.started / self.config.experts.threads if mover.started else 0.0
        window = PLAN_HORIZON * self._clock[1]
        return Budget(self.num_slots if not pace or not window else max(1, min(self.num_slots, int(window / pace))))

    def _note(self, demand: Demand) -> None:
        if self.demands is not None:
            self.demands.append(demand)

    def record_demands(self) -> list[Demand]:
        """Keep every demand from now on (for an oracle, or a trace of expert ids). Returns the growing list."""
        self.demands = []
        return self.demands

    # looking --------------------------------------------------------------------------------------------------------
    def held_bytes(self) -> dict[str, int]:
        """Expert bytes: `resident` in this process now, `total` of the model."""
        total = self.ledger.record_bytes * self.num_layers * self.num_experts
        return {"resident": self._mover.held_bytes() if self._mover else total, "total": total}

    def report(self) -> Report:
        """Tables and figures of everything since attach; `.save(folder)` writes them."""
        return session_report(self)

    def wait_idle(self) -> None:
        """Cancel fetches that have not started and wait for the others. Raises DeadlineError."""
        if self._mover:
            with self._mover.lock:
                self._mover.drain()

    # the end --------------------------------------------------------------------------------------------------------
    def detach(self) -> None:
        """Weights back into the same parameters, hooks gone, memory and files back. Calling it again does nothing.

        Raises ArtefactError or OSError when a record can't be read back; then nothing is lost: the session stays attached, and
        `detach` may be called again.
        """
        if self._undo is None:
            return
        if self._in_step.locked():
            raise SessionError("detach was called inside a forward pass", do="let the pass end first")
        if self._mover:
            self.wait_idle()
            store = self._mover.store
            buffer = self._runtime.allocate(store.layout.nbytes)

            def read(layer: int, expert: int) -> dict[str, torch.Tensor]:
                store.read_into(layer, expert, buffer)
                return store.layout.views(buffer)

            self._host.restore(read)
        self._abandon()

    def _abandon(self) -> None:
        undo, self._undo = self._undo, None
        if undo:
            undo()
        if self._mover:
            mover, self._mover = self._mover, None
            mover.close()
            mover.store.close()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()
