"""attach and detach: the one file that knows the whole path.

The probe forecasts, the planner plans, the mover moves, the router decides, compute computes, the ledger settles.
"""
from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from .config import Config, load
from .errors import BudgetError, ConfigError, SessionError, UnsupportedModelError
from .experts.compute import LocalCompute, SlotCompute, check_hidden, check_silu, in_dtype_of
from .experts.device import DeviceExperts
from .experts.homes import HostHome, MemoryStore
from .experts.ledger import Ledger
from .experts.mover import Mover, bounce_buffers, modelled
from .experts.planner import Budget, cancellable
from .experts.slots import SlotTable, slots_per_layer
from .experts.sources import LentSource
from .experts.store import DiskStore, LocalStore, RecordLayout
from .observe.report import Report, session_report
from .probes.forecast import Forecaster, ProbeForecaster, checked
from .probes.policy import policy_of
from .probes.probe import RoutingProbe
from .runtime import REAL, Runtime
from .seam import HostModel, open_model
from .types import Demand, Forecast, Settlement

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

    Raises ConfigError, BudgetError, UnsupportedModelError, SessionError, ProbeMismatchError, ArtefactError: before the model is touched.
    """
    host = open_model(model)
    try:
        return Session(host, load(config), forecaster, plan, runtime, progress)
    except MemoryError as e:
        raise BudgetError(f"memory for the slots can't be had: {e}", where="experts.resident", do="lower experts.resident") from e
    except RuntimeError:
        # torch's word for weights that another thread's attach has taken away meanwhile.
        host.check_free()
        raise


class Session:
    """A model with the library under it. One forward pass at a time; the passes may come from different threads."""

    def __init__(self, host: HostModel, config: Config, forecaster: Forecaster | None, plan: str | None, runtime: Runtime,
                 progress: Callable[[int, int], None] | None) -> None:
        if config.fit is not None:
            raise ConfigError("fit was set, but an attached model does not train", where="fit", expected="experts, probe or kv",
                              do="drop fit, or train with deepspeed.initialize of moe_prefetch.integrations.deepspeed")
        host.check_free()
        self.config = config
        self.num_layers, self.num_experts = host.num_layers, host.num_experts
        self.demands: list[Demand] | None = None
        self._host, self._runtime = host, runtime
        self._step, self._kind = 0, "prefill"
        # The pass under way: its thread, and a frame that is on that thread's stack as long as it lasts.
        self._pass: tuple[int, FrameType] | None = None
        self._pass_lock = threading.Lock()
        self._attached = False
        self._mover: Mover | None = None
        self._store: MemoryStore | None = None
        self._device: DeviceExperts | None = None
        self._held: int | None = None
        self._clock = [0.0, 0.0]  # last tap, mean seconds from layer to layer
        host.check_kv(config.kv)
        self.policy = policy_of(config, plan, forecaster)
        probe = None if forecaster else self._probe()
        self._forecaster = forecaster or (host.share(ProbeForecaster(probe)) if probe and config.experts.home == "disk" else None)
        if config.experts.home == "host":
            self._start_device(progress)
        elif config.experts.home == "local":
            store = LocalStore(host, runtime)
            self._ledger = Ledger(host.num_layers, store.layout.nbytes)
            self._compute: LocalCompute | SlotCompute = LocalCompute(store, self._ledger, self._note, host.how)
            self.num_slots = host.num_experts
        else:
            self._start_mover(progress)
        self._attached = True
        try:
            host.install(self, config.kv)
            if config.experts.home != "local":
                host.release()
            if self._store:
                # Now that the device has the experts' memory back.
                dtype, device = getattr(torch, self._store.layout.parts[0].dtype), host.gates[0].weight_ED.device
                taps = [probe.tap(n, dtype) for n in range(host.num_layers)] if probe else []
                self._device = DeviceExperts(self._store, device, runtime, self.num_slots, taps=taps)
        except BaseException:
            try:
                self._restore()
            finally:
                self._close()
            raise

    # set-up ---------------------------------------------------------------------------------------------------------
    def _probe(self) -> RoutingProbe | None:
        if self.config.experts.home == "local" or not self.policy.forecasts:
            return None
        if (path := self.config.probe.path) is not None and self.policy.name == "probe":
            return RoutingProbe.from_pretrained(path, self._host.gates)
        log.info("forecasts come from each layer's own gate, unfitted")
        return RoutingProbe(self._host.gates)

    def _start_device(self, progress: Callable[[int, int], None] | None) -> None:
        host, gate_up = self._host, self._host.tensors(0, 0)["gate_up"]
        layout = RecordLayout.of(host.tensors(0, 0))
        if host.gates[0].experts != host.num_experts:
            raise UnsupportedModelError("its experts are spread over ranks", where="experts.home: host", expected="all in this process",
                                        do="use home: local")
        if gate_up.is_cuda and gate_up.dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedModelError(f"its experts are {gate_up.dtype}", where="experts.home: host",
                                        expected="bfloat16 or float16 on a GPU", do="convert the model, or use home: local")
        if not gate_up.is_cuda:
            log.warning("experts.home: host is for GPUs: on a CPU it only costs memory; use local or disk")
        self.num_slots = slots_per_layer(self.config.experts, num_layers=host.num_layers, num_experts=host.num_experts,
                                         record_bytes=layout.nbytes)
        self._ledger = Ledger(host.num_layers, layout.nbytes)
        self._store = MemoryStore(LentSource(host), HostHome(self._runtime), self._runtime, progress)

    def _start_mover(self, progress: Callable[[int, int], None] | None) -> None:
        host, experts, runtime = self._host, self.config.experts, self._runtime
        parts = host.tensors(0, 0)
        if devices := {t.device.type for t in parts.values()} - {"cpu"}:
            raise UnsupportedModelError(f"its experts are on {', '.join(devices)}", where="experts.home: disk",
                                        expected="weights on the CPU", do="load the model on the CPU, or use home: local")
        self.num_slots = slots_per_layer(experts, num_layers=host.num_layers, num_experts=host.num_experts,
                                         record_bytes=RecordLayout.of(parts).nbytes, reserve=bounce_buffers(experts.threads))
        drive = modelled(experts, RecordLayout.of(parts).nbytes)
        folder, store = experts.path or Path(tempfile.mkdtemp(prefix="moe_prefetch-")), None
        try:
            store = DiskStore.obtain(folder, host, runtime, progress)
            if experts.path is None:
                # The open file is enough; without a name it can't outlive this process, however that ends.
                store.unlink()
            self.table = SlotTable(host.num_layers, self.num_slots, host.num_experts)
            self._ledger = Ledger(host.num_layers, store.layout.nbytes)
            self._mover = Mover(store, self.table, runtime, threads=experts.threads, deadline=experts.deadline, drive=drive)
            self._mover.start(self)
        except BaseException:
            if self._mover is not None:
                self._mover.close()
            if store is not None:
                store.close()
            if experts.path is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._compute = SlotCompute(self._mover, self.policy, self._ledger, runtime, self._note, self._keep, host.how)

    # taps (called by the host) --------------------------------------------------------------------------------------
    def step_begin(self, batch: int, tokens: int) -> None:
        if self._mover is not None:
            self._mover.check_usable()
        if self._store is not None and self._device is None:
            raise SessionError("a detach broke off: the weights are not back", where="experts.home: host", do="call detach() again")
        with self._pass_lock:
            if self._in_pass():
                raise SessionError("a second forward pass began before the first ended", where=f"step {self._step}",
                                   expected="one pass at a time per session", do="serialise the calls, or attach one model per thread")
            abandoned = self._pass is not None
            # The caller of the host's hook: it runs the whole pass.
            self._pass = threading.get_ident(), sys._getframe(3)
        if abandoned and self._mover is not None:
            self._mover.reset()
        if abandoned and self._device is not None:
            self._device.step_end()
        self._kind = "decode" if tokens <= batch else "prefill"
        self._clock[0] = self._runtime.now()

    def _in_pass(self) -> bool:
        """Whether a pass is under way. One that Ctrl-C ended never said so (torch tells hooks of an Exception only): it left the stack."""
        if self._pass is None:
            return False
        thread, started = self._pass
        frame = sys._current_frames().get(thread)
        while frame is not None and frame is not started:
            frame = frame.f_back
        return frame is not None

    def _owns_pass(self) -> bool:
        return self._pass is not None and self._pass[0] == threading.get_ident()

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        """Horizon 0 has no use while records come from a drive: the attention in between is shorter than a read."""

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        if self._device is not None:
            if self._owns_pass():
                self._tell(self._device, layer, hidden_TD)
            return
        now, (last, mean) = self._runtime.now(), self._clock
        self._clock = [now, mean + ((now - last) - mean) / 8]
        if self._mover is None or not self._owns_pass():
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

    def _tell(self, device: DeviceExperts, layer: int, hidden_TD: torch.Tensor) -> None:
        """What is expected after `layer`. A forecaster of the caller's own answers on the host, so the device waits for it."""
        if self._forecaster is None:
            device.moe_input(layer, in_dtype_of(device.store.layout, hidden_TD))
            return
        ahead = range(1, min(PLAN_HORIZON, self.num_layers - 1 - layer) + 1)
        rows = [self._forecast(layer + h, h, hidden_TD) or (-1,) * self.num_experts for h in ahead]
        if rows:
            device.forecast(layer, torch.tensor(rows, dtype=torch.int32, device=device.next_NE.device))
        if layer < len(device.next_NE):
            probs = checked(self._forecaster.next_step(layer, self._step + 1), self.num_experts, self._forecaster)
            device.next_NE[layer] = torch.tensor(probs or (-1,) * self.num_experts, dtype=torch.int32)

    def experts(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
                act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if self.config.experts.home != "local" and not self._owns_pass():
            raise SessionError("experts were called outside a forward pass of the model", where=f"layer {layer}",
                               expected="a call of the model", do="call the model itself, or detach first")
        if self._device is not None:
            check_hidden(hidden_TD, self._device.store.layout, layer, self._host.how)
            check_silu(act, layer)
            return self._device.experts(layer, in_dtype_of(self._device.store.layout, hidden_TD), ids_TK, weights_TK).to(hidden_TD.dtype)
        return self._compute.run(layer, self._step, self._kind, hidden_TD, ids_TK, weights_TK, act)

    def step_end(self) -> None:
        if not self._owns_pass():
            return
        try:
            self._step += 1
            if self._device is not None:
                self._device.step_end()
            if self._mover is not None:
                for layer in range(min(PLAN_HORIZON, self.num_layers)):
                    probs = self._forecaster.next_step(layer, self._step) if self._forecaster else ()
                    self._plan(Forecast(layer, self._step, PLAN_HORIZON, checked(probs, self.num_experts, self._forecaster)))
        finally:
            self._pass = None

    # inside ---------------------------------------------------------------------------------------------------------
    def _forecast(self, layer: int, horizon: int, hidden_TD: torch.Tensor) -> tuple[int, ...]:
        if self._forecaster is None or not self.policy.forecasts:
            return ()
        return checked(self._forecaster.forecast(layer, self._step, horizon, hidden_TD), self.num_experts, self._forecaster)

    def _keep(self, layer: int, step: int) -> tuple[int, ...]:
        return checked(self._forecaster.keep(layer, step), self.num_experts, self._forecaster) if self._forecaster else ()

    def _plan(self, forecast: Forecast) -> None:
        assert self._mover is not None
        keep = self._keep(forecast.layer, forecast.step)
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
        """Keep every demand from now on (for an oracle, or a trace of expert ids). Returns the growing list. Raises SessionError."""
        if self._device is not None:
            raise SessionError("demands stay on the device", where="experts.home: host", do="use home: local or disk to record them")
        self.demands = []
        return self.demands

    # looking --------------------------------------------------------------------------------------------------------
    def held_bytes(self) -> dict[str, int]:
        """Expert bytes: `resident` on the model's device while attached (also asked afterwards), `total` of the model."""
        total = self._ledger.record_bytes * self.num_layers * self.num_experts
        held = m.held_bytes() if (m := self._mover) else d.held_bytes() if (d := self._device) else self._held
        return {"resident": total if held is None else held, "total": total}

    @property
    def ledger(self) -> Ledger:
        """Every demand so far, settled; home: host waits for the device, or in a pass tells of those before, and knows no prefill."""
        return self.so_far(wait=not self._in_pass())

    def so_far(self, *, wait: bool = False) -> Ledger:
        """The ledger as of the last finished pass: asks nothing of the device, so it may be called from any thread, at any time."""
        if (device := self._device) is not None:
            said = device.counts(wait=wait)
            self._ledger.layers, self._ledger.kinds = list(said.layers), {"all": said.total}
        return self._ledger

    def report(self) -> Report:
        """Tables and figures of everything since attach; `.save(folder)` writes them."""
        return session_report(self)

    def wait_idle(self) -> None:
        """Cancel fetches that have not started, wait for the others, and settle them. Raises DeadlineError."""
        if self._device is not None:
            self._device.rest()
        if (mover := self._mover) is not None:
            mover.check_usable()
            with mover.lock:
                mover.drain()
            self._settle_rest(mover)

    def _settle_rest(self, mover: Mover) -> None:
        """Book what moved since each layer's last demand, so that the ledger's bytes are the drive's."""
        for layer in range(self.num_layers):
            moved, wasted, cancelled = mover.take_counts(layer)
            if moved or wasted or cancelled:
                self._ledger.settle(Settlement(layer, self._step, 0, 0, 0, wasted, cancelled, moved * self._ledger.record_bytes, 0.0),
                                    self._kind)

    # the end --------------------------------------------------------------------------------------------------------
    def detach(self) -> None:
        """Weights back into the same parameters, hooks gone, memory and files back. Calling it again does nothing.

        Raises ArtefactError when a record can't be read back, DeadlineError when the drive hangs, torch's error when memory is short. Then
        nothing is lost: the session stays attached (of home: host it runs no pass), and `detach` may be called again.
        """
        if not self._attached:
            return
        if self._in_pass():
            raise SessionError("detach was called inside a forward pass", do="let the pass end first")
        mover = self._mover
        if mover is not None and not mover.closed and not mover.forked:
            if self._pass is not None:
                mover.reset()
                self._pass = None
            self.wait_idle()
            with mover.lock:
                mover.drop_slots()
            self._settle_rest(mover)
        if self._device is not None:
            # Slots go first: the weights need their place.
            self._held, self._ledger, self._device = self._device.held_bytes(), self.ledger, None
        self._restore()
        self._close()

    def _restore(self) -> None:
        mover, memory = self._mover, self._store
        if mover is not None and not mover.closed:
            buffer = mover.scratch()

            def read(layer: int, expert: int) -> dict[str, torch.Tensor]:
                mover.store.read_whole(layer, expert, buffer)
                return mover.store.layout.views(buffer)

            self._host.restore(read)
        elif memory is not None:
            self._host.restore(lambda layer, expert: memory.layout.views(memory.buffer(layer, expert)))

    def _close(self) -> None:
        # Each part may be repeated: an interrupt in here leaves a session that `detach` ends.
        self._host.uninstall()
        if self._mover is not None:
            self._held = self._mover.held_bytes()
            self._mover.close()
            self._mover.store.close()
            self._mover = None
        if self._store is not None:
            self._store.close()
        self._attached = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()
