"""Brings tokens and experts of different ranks together: a MoE layer over an expert group.

    stay    tokens stay, every expert is read where it lies (`experts.where`); no rank waits for another
    gather  a token's row goes one-sided to the ranks that hold its experts, their sums come back
    host    the same exchange by the framework's collective; also for what mode gather can't reach

Every rank calls every layer, with or without tokens. Sizes are static: a message holds `capacity` rows, and tokens that find it full go in
a further exchange, which all ranks join because every message says whether its sender has more. Nothing is dropped, no size is asked for.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import torch

from .. import __version__
from ..distributed.groups import DEADLINE, Group
from ..distributed.health import BACK, OUT
from ..errors import ConfigError, SessionError, ShapeError
from ..kernels.dispatch.message import LAYER, MORE, Message
from ..kernels.dispatch.naive import combine_sums, expert_rows, read, route, serve, tokens_in, write
from ..kernels.dispatch.op import total
from ..metrics import Metrics
from ..runtime import REAL, Runtime
from .placement import Placement
from .transport import Transport, open_transport

if TYPE_CHECKING:
    from .gather import Gather

Mode = Literal["stay", "gather", "host"]
MODES = ("stay", "gather", "host")
# One layer's experts: (layer, rows [N, D], ids int64 [N, K], weights FP32 [N, K]) -> [N, D] in the rows' dtype; ids outside are masked.
LayerExperts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DispatchSpec:
    """What all ranks must say alike.

    hidden, top_k, dtype  of the model's MoE layers
    capacity       rows of a message: more tokens for one rank than that take a further exchange
    tokens         on GPUs, mode gather: the most tokens that a rank has in a call (0: capacity); all calls take as many exchanges
    deterministic  experts' rows come back unreduced and are added in ascending order of experts: the same bits in every mode
    fp8            rows travel as E4M3 with a scale per 128 numbers; results come back in full
    """

    hidden: int
    top_k: int
    dtype: torch.dtype
    capacity: int = 64
    deterministic: bool = False
    fp8: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.deterministic and self.fp8:
            raise ConfigError("deterministic and fp8 are both set: rows that are rounded on their way give other bits in every mode",
                              where="dispatch", do="drop one of them")

    def message(self) -> Message:
        """Raises ShapeError."""
        return Message(self.capacity, self.hidden, self.top_k, self.dtype, self.fp8, self.deterministic)


def _whole(experts: LayerExperts | None) -> LayerExperts | None:
    """The same, a row for a row: one row for all would be spread over them, and other tokens' sums be added to each other."""
    if experts is None:
        return None

    def checked(layer: int, rows_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        out_ND = experts(layer, rows_ND, ids_NK, weights_NK)
        if out_ND.shape != rows_ND.shape:
            raise ShapeError(f"experts returned {tuple(out_ND.shape)}", where=f"dispatch, layer {layer}",
                             expected=f"{tuple(rows_ND.shape)}", do="return a row for each row")
        return out_ND

    return checked


class Dispatch:
    """Collective to open; `agree` and `switch` are collective too, and so is every call in modes gather and host.

    local       experts that `placement.held_by(this rank)` names, ids counted within them; for gather and host
    everywhere  all experts, ids as the router gives them; for stay

    Raises ConfigError: ranks that differ, by name; PeerError, UnsupportedModelError, MemoryError.
    """

    def __init__(self, group: Group, spec: DispatchSpec, placement: Placement, mode: Mode, *, local: LayerExperts | None = None,
                 everywhere: LayerExperts | None = None, device: torch.device | str = "cpu", deadline: float = 30.0,
                 attach_deadline: float = DEADLINE, runtime: Runtime = REAL, metrics: Metrics | None = None) -> None:
        self.group, self.spec, self._message = group, spec, spec.message()
        self._local, self._everywhere, self._device = _whole(local), _whole(everywhere), torch.device(device)
        self._deadline, self._attach_deadline = deadline, attach_deadline
        self._runtime, self._metrics = runtime, metrics
        self._transports: dict[str, Transport] = {}
        self._gather: Gather | None = None
        self._flying: Flight | DeviceFlight | None = None
        group.agree("dispatch", {**{k: str(v) for k, v in asdict(spec).items()}, "deadline": deadline, "version": __version__,
                                 "experts": placement.experts, "device": self._device.type}, attach_deadline)
        self.switch(mode, placement)

    def switch(self, mode: Mode, placement: Placement | None = None) -> None:
        """Another mode, other replicas, on all ranks together, between layers. What differs is refused everywhere and nothing changes.

        Raises ConfigError, SessionError (rows are under way), PeerError.
        """
        placement = placement or self.placement
        wanted = self._local if mode != "stay" else self._everywhere
        fault = ("no such mode" if mode not in MODES else "its experts were not given" if wanted is None else
                 f"placement has {placement.ranks} ranks" if placement.ranks != self.group.size else
                 "rows are under way" if self._flying is not None else "")
        # A rank with a fault says so in the agreement: the others must not wait for it.
        self.group.agree("dispatch", {"mode": str(mode), "placement": placement.digest, "fault": fault}, self._attach_deadline)
        if fault:
            raise (SessionError if "under way" in fault else ConfigError)(
                fault, where=f"dispatch mode {mode}", expected=f"one of {', '.join(MODES)}, between layers, with what it needs",
                do="pass local for gather and host, everywhere for stay, and a placement of this group")
        self._on_device = mode == "gather" and self._launches()
        if self._on_device:
            self._place_gather(placement)
        elif mode != "stay" and mode not in self._transports:
            self._transports[mode] = open_transport(mode, self.group, (self._message.out_bytes, self._message.back_bytes), self._device,
                                                    self._deadline, self._runtime, self._attach_deadline)
        self.mode: Mode = mode
        self.placement = placement
        serve_RE = torch.tensor(placement.serve_RE, dtype=torch.int64, device=self._device)
        self._serve_E = serve_RE[self.group.rank]
        # For each rank its own number of each expert it serves, -1 for the others.
        self._number_RE = torch.full_like(serve_RE, -1)
        for r in range(placement.ranks):
            held = torch.tensor(placement.held_by(r), dtype=torch.int64, device=self._device)
            self._number_RE[r, held] = torch.arange(len(held), device=self._device)

    def _launches(self) -> bool:
        """Whether kernels do mode gather."""
        return self._device.type == "cuda"

    def _place_gather(self, placement: Placement) -> None:
        from .gather import Gather

        if self._gather is not None:
            self._gather.place(placement)
            return
        assert self._local is not None
        self._gather = Gather(self.group, self.spec, placement, self._local, tokens=self.spec.tokens or self.spec.capacity,
                              device=self._device, deadline=self._deadline, attach_deadline=self._attach_deadline, runtime=self._runtime)

    # a layer -----------------------------------------------------------------------------------------------------------------
    def __call__(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, [T, D] in the model's dtype.

        hidden_TD [T, D]; ids_TK [T, K] integers, masked outside 0..E-1; weights_TK [T, K]. T may be zero and differ between ranks.
        Raises ShapeError before anything is sent; PeerError: another rank did not come, or gave up; SessionError: ranks differ in layers.
        """
        return self._start(layer, hidden_TD, ids_TK, weights_TK, waits=True).finish()

    def begin(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Flight | DeviceFlight:
        """Send the rows off; what does not need them (a shared expert) is computed before `finish`. One flight at a time."""
        return self._start(layer, hidden_TD, ids_TK, weights_TK, waits=False)

    def _start(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
               waits: bool) -> Flight | DeviceFlight:
        tokens, spec = len(hidden_TD), self.spec
        if (hidden_TD.shape != (tokens, spec.hidden) or ids_TK.shape != (tokens, spec.top_k) or weights_TK.shape != ids_TK.shape
                or hidden_TD.dtype != spec.dtype or ids_TK.dtype.is_floating_point):
            raise ShapeError(f"hidden {hidden_TD.dtype} {tuple(hidden_TD.shape)}, ids {ids_TK.dtype} {tuple(ids_TK.shape)}, weights "
                             f"{tuple(weights_TK.shape)}", where=f"dispatch, layer {layer}",
                             expected=f"{spec.dtype} [T, {spec.hidden}], integers [T, {spec.top_k}], [T, {spec.top_k}]",
                             do="open the dispatch with the model's sizes")
        if self._flying is not None:
            raise SessionError("rows of another layer are under way", where=f"dispatch, layer {layer}", do="finish it first")
        if not self._on_device and self.mode != "stay" and self.mode not in self._transports:
            raise SessionError("the dispatch is closed", where=f"dispatch, layer {layer}", do="open another")
        if self._on_device:
            self._flying = device_flight = DeviceFlight(self, layer, hidden_TD, ids_TK.to(torch.int64), weights_TK, waits)
            return device_flight
        flight = Flight(self, layer, hidden_TD, ids_TK.to(torch.int64), weights_TK)
        if self.mode != "stay":
            self._flying = flight
            with self._leaving_if_broken():
                flight.send(0)
        return flight

    def check(self) -> None:
        """Between steps: raises what a device has found, PeerError, without waiting for it. Results are NaN until then. Elsewhere layers
        raise by themselves."""
        if self._gather is not None:
            self._gather.check()

    def _land(self, flight: Flight | DeviceFlight) -> None:
        if self._flying is not flight:
            raise SessionError("this flight was finished, or broke off", where="dispatch", do="begin another")

    def _leaving_if_broken(self) -> _Leaving:
        return _Leaving(self)

    def close(self) -> None:
        """Leave. Ranks that still wait for this one are told. Calling it again does nothing."""
        for transport in self._transports.values():
            transport.give_up()
        self._transports = {}


class _Leaving:
    """Whatever ends a layer early ends it for all: the other ranks are told at once."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._dispatch._flying = None
            for transport in self._dispatch._transports.values():
                transport.give_up()


class DeviceFlight:
    """A `Flight` that is enqueued: nothing here waits, and what is launched between `begin` and `finish` runs while rows travel."""

    def __init__(self, dispatch: Dispatch, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
                 waits: bool) -> None:
        assert dispatch._gather is not None
        self._d = dispatch
        self._finish = dispatch._gather.begin(layer, hidden_TD.contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous(), waits)

    def finish(self) -> torch.Tensor:
        self._d._land(self)
        self._d._flying = None
        return self._finish()


class Flight:
    """One layer's rows on their way; made by `Dispatch.begin`, ended by `finish`, which is called once."""

    def __init__(self, dispatch: Dispatch, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        self._d, self._layer = dispatch, layer
        self._hidden_TD, self._ids_TK, self._weights_TK = hidden_TD, ids_TK, weights_TK
        if dispatch.mode != "stay":
            self._transport, self._message = dispatch._transports[dispatch.mode], dispatch._message
            self._route = route(ids_TK, dispatch._serve_E, dispatch.group.size)
            self._rounds = -(-int(self._route.count_R.max()) // self._message.capacity)

    def send(self, round_: int) -> None:
        d, message = self._d, self._message
        self._transport.begin()
        safe_TK = self._ids_TK.clamp(0, d.placement.experts - 1)
        for r in range(d.group.size):
            chosen_TK = torch.where(self._route.dest_TK == r, d._number_RE[r][safe_TK], -1)
            write(message, self._transport.outbox(OUT, r), tokens_in(self._route, r, round_, message.capacity), chosen_TK, self._hidden_TD,
                  self._weights_TK, layer=self._layer, more=round_ + 1 < self._rounds)
        self._transport.send(OUT)

    def finish(self) -> torch.Tensor:
        d = self._d
        if d.mode == "stay":
            return self._stay()
        d._land(self)
        with d._leaving_if_broken():
            back: list[list[torch.Tensor]] = [[] for _ in range(d.group.size)]
            round_ = 0
            while self._exchange(back, round_):
                round_ += 1
                self.send(round_)
        d._flying = None
        return self._combine([torch.cat(rows) for rows in back])

    def _exchange(self, back: list[list[torch.Tensor]], round_: int) -> bool:
        """One exchange from where the rows have been sent; whether some rank has more."""
        d, message = self._d, self._message
        buffers = self._transport.receive(OUT)
        headers = torch.stack([message.out_views(b)["header"][:3] for b in buffers]).tolist()
        if strays := [(r, h[LAYER]) for r, h in enumerate(headers) if h[LAYER] != self._layer]:
            raise SessionError(f"rank {strays[0][0]} is in layer {strays[0][1]}, this one in layer {self._layer}", where="dispatch",
                               expected="all ranks in the same layers in one order",
                               do="run every MoE layer on every rank, also without tokens")
        assert d._local is not None
        rows_ND = serve(message, lambda x, i, w: d._local(self._layer, x, i, w), *read(message, buffers))  # type: ignore[misc]
        for r in range(d.group.size):
            message.back_rows(self._transport.outbox(BACK, r)).copy_(rows_ND[r * message.capacity : (r + 1) * message.capacity])
        self._transport.send(BACK)
        for r, buffer in enumerate(self._transport.receive(BACK)):
            count = len(tokens_in(self._route, r, round_, message.capacity))
            back[r].append(message.back_rows(buffer)[:count].clone())
        self._note()
        return any(h[MORE] for h in headers)

    def _note(self) -> None:
        if (metrics := self._d._metrics) is not None:
            waits = self._transport.waits
            metrics.observe("dispatch_late_seconds", waits.late, rank=waits.late_rank)
            metrics.observe("dispatch_transfer_seconds", waits.transfer)
            metrics.observe("dispatch_results_seconds", waits.results)
            metrics.add("dispatch_exchanges")

    # results -----------------------------------------------------------------------------------------------------------------
    def _combine(self, back: list[torch.Tensor]) -> torch.Tensor:
        spec, slot_RT = self._d.spec, self._route.slot_RT
        tokens = [(slot_RT[r] >= 0).nonzero().squeeze(-1) for r in range(len(back))]
        if not spec.deterministic:
            return combine_sums(self._hidden_TD.shape, back, tokens, spec.dtype, self._hidden_TD.device)
        rows_TKD = self._hidden_TD.new_zeros(*self._ids_TK.shape, spec.hidden)
        for r, (rows, token_n) in enumerate(zip(back, tokens, strict=True)):
            on_nK = self._route.dest_TK[token_n] == r
            rows_TKD[token_n] = torch.where(on_nK[..., None], rows, rows_TKD[token_n])
        return total(rows_TKD.flatten(0, 1), self._ids_TK, self._weights_TK, self._d.placement.experts, spec.dtype)

    def _stay(self) -> torch.Tensor:
        d = self._d
        assert d._everywhere is not None

        def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return d._everywhere(self._layer, x, ids, weights)  # type: ignore[misc]

        if not d.spec.deterministic:
            return experts(self._hidden_TD, self._ids_TK, self._weights_TK.float())
        rows_TKD = expert_rows(experts, self._hidden_TD, self._ids_TK)
        return total(rows_TKD.flatten(0, 1), self._ids_TK, self._weights_TK, d.placement.experts, d.spec.dtype)
