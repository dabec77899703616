"""Mode gather on a device: a launch before the experts and one or two behind, nothing that the host waits for, so that a step can be
captured in a graph.

`Dispatch` opens it on GPUs.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..distributed.groups import DEADLINE, Group
from ..distributed.health import culprits
from ..distributed.symmetric import SharedBlock, SymmetricMemory, symmetric_memory
from ..errors import PeerError, ShapeError, UnsupportedModelError
from ..kernels.dispatch import op
from ..kernels.dispatch.message import LINE
from ..kernels.dispatch.naive import serve
from ..kernels.dispatch.planes import LATE, MOVED, NUMBER, STATE, Planes
from ..runtime import REAL, Runtime
from .dispatch import DispatchSpec, LayerExperts
from .placement import Placement


class Gather:
    """Collective to open and to call, on ranks of one host. The same layer as `Dispatch`, in rounds of `spec.capacity` tokens a rank.

    tokens    the most tokens that any rank has in a call; all ranks run as many rounds as they take
    deadline  seconds that a device waits for another, in every wait
    memory    None: what `symmetric_memory` finds

    Raises ConfigError: ranks that differ; UnsupportedModelError: ranks on several hosts; ShapeError; PeerError; MemoryError.
    """

    def __init__(self, group: Group, spec: DispatchSpec, placement: Placement, local: LayerExperts, *, tokens: int,
                 device: torch.device | str, deadline: float = 30.0, attach_deadline: float = DEADLINE, runtime: Runtime = REAL,
                 memory: SymmetricMemory | None = None) -> None:
        self.group, self.spec, self.placement, self._local = group, spec, placement, local
        self._device, self._deadline = torch.device(device), deadline
        self.planes = Planes(group.size, spec.capacity, spec.hidden, spec.top_k, spec.dtype, spec.deterministic)
        self.rounds = max(1, -(-tokens // spec.capacity))
        self._message = spec.message()
        facts = {"spec": str(spec), "placement": placement.digest, "rounds": self.rounds, "deadline": deadline, "device": self._device.type}
        group.agree("gather", facts, attach_deadline)
        if len(set(group.hosts(attach_deadline))) > 1 or spec.fp8:
            raise UnsupportedModelError("rows in fp8" if spec.fp8 else "a group that spans hosts", where="gather",
                                        expected="one host, rows in the model's dtype", do="use mode host")
        memory = memory or symmetric_memory(group, self._device, runtime, attach_deadline)
        self.block: SharedBlock = memory.allocate(self.planes.nbytes, attach_deadline)
        with torch.inference_mode(False):
            self._bases_R = torch.tensor(self.block.bases, dtype=torch.int64, device=self._device)
            self._state = torch.zeros(STATE, dtype=torch.int64, device=self._device)
            # The host looks at it without a stop: on a GPU it is pinned, and kernels write it in place.
            self._failed = torch.zeros(1, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._serve_E = torch.empty(placement.experts, dtype=torch.int64, device=self._device)
            self._number_RE = torch.empty(group.size, placement.experts, dtype=torch.int64, device=self._device)
            self.place(placement)
            if self._device.type == "cuda":
                # Calls may come on any stream.
                torch.cuda.synchronize(self._device)
        # Nanoseconds on a GPU; the interpreter has no clock and counts its looks, a few thousand a second, by words a few hundred.
        self._limit = int(deadline * (1e9 if self._device.type == "cuda" else 300 if self.planes.by_words else 5e3))
        group.agree("gather", {"ready": True}, attach_deadline)

    def place(self, placement: Placement) -> None:
        """Another placement of as many experts, on all ranks between layers. Tables keep their addresses: captured graphs follow."""
        number_RE = torch.full((self.group.size, placement.experts), -1, dtype=torch.int64)
        for r in range(self.group.size):
            number_RE[r, list(placement.held_by(r))] = torch.arange(len(placement.held_by(r)))
        self.placement = placement
        self._serve_E.copy_(torch.tensor(placement.serve_RE[self.group.rank], dtype=torch.int64))
        self._number_RE.copy_(number_RE)

    def __call__(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """See `Dispatch.__call__`; ids int64, weights FP32, all contiguous. NaN where a rank failed: `check` says which."""
        return self.begin(layer, hidden_TD, ids_TK, weights_TK, waits=True)()

    def begin(self, layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor,
              waits: bool = False) -> Callable[[], torch.Tensor]:
        """Sends the rows (of the first round) off; what it returns waits for the others' and gives the result.

        Work enqueued in between runs while rows travel. `waits`: there is none, so the launch that sends waits too.
        """
        tokens, C, spec = len(hidden_TD), self.spec.capacity, self.spec
        if (hidden_TD.shape != (tokens, spec.hidden) or ids_TK.shape != (tokens, spec.top_k) or weights_TK.shape != ids_TK.shape
                or tokens > C * self.rounds or hidden_TD.dtype != spec.dtype or ids_TK.dtype != torch.int64
                or weights_TK.dtype != torch.float32 or not (hidden_TD.is_contiguous() and ids_TK.is_contiguous()
                                                             and weights_TK.is_contiguous())):
            raise ShapeError(f"hidden {hidden_TD.dtype} {tuple(hidden_TD.shape)}, ids {ids_TK.dtype} {tuple(ids_TK.shape)}, weights "
                             f"{weights_TK.dtype} {tuple(weights_TK.shape)}", where=f"gather, layer {layer}",
                             expected=f"{spec.dtype} [T, {spec.hidden}], int64 and float32 [T, {spec.top_k}], T up to {C * self.rounds}, "
                             "contiguous", do="open it with the model's sizes, and as many tokens as a call may have")
        parts = [tuple(x[r * C : (r + 1) * C] for x in (hidden_TD, ids_TK, weights_TK)) for r in range(self.rounds)]
        self._put(layer & 1, parts[0], waits)

        def finish() -> torch.Tensor:
            outs = []
            for r, part in enumerate(parts):
                turn = (layer + r) & 1
                if r:
                    self._put(turn, part, True)
                elif not waits:
                    op.wait(*part, self._serve_E, self._number_RE, *self._same, self.group.rank, self._limit)
                outs.append(self._serve(layer, turn, part[1], part[2]))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return finish

    @property
    def _same(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool]:
        return self._bases_R, self.block.mine, self._state, self._failed, self.spec.capacity, self.spec.deterministic

    def _put(self, turn: int, part: tuple[torch.Tensor, ...], waits: bool) -> None:
        op.put(*part, self._serve_E, self._number_RE, *self._same, turn, self.group.rank, self._limit, waits)

    def _serve(self, layer: int, turn: int, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """From rows that are there to this rank's results."""
        spec = self.spec
        ids, weights, rows, _ = self.planes.views(self.block.mine, 0 if self.planes.by_words else turn)
        result = serve(self._message, functools.partial(self._local, layer), rows, ids, weights)
        out = op.give(result.reshape(-1, spec.hidden), ids_TK, self._serve_E, *self._same, turn, self.group.rank, self._limit)
        if not spec.deterministic:
            return out
        return op.total(out, ids_TK, weights_TK, self.placement.experts, spec.dtype)

    # health ------------------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise what a device has found, without waiting for it: PeerError names the ranks. Called between steps."""
        if not (bits := int(self._failed[0])):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            bits = int(self._failed[0])
        missing = tuple(r for r in range(self.group.size) if bits >> r & 1)
        flags = torch.stack([v[: 3 * self.group.size * LINE].view(torch.int64)[:: LINE // 8] for v in self.block.views]).cpu()
        size, number = self.group.size, int(self._state[NUMBER]) + 1
        half = 0 if any(int(flags[self.group.rank, r]) < number for r in missing) else 1
        blamed = culprits(lambda reader, h, writer: int(flags[reader, h * size + writer]), size, half, number, missing)
        raise PeerError(f"nothing came within {self._deadline:g} s", ranks=blamed or missing, where=f"group {self.group.axis}, gather",
                        expected="every rank in every layer, with or without tokens",
                        do="see what became of that rank; attach anew with the ranks that are left")

    def waited(self) -> tuple[float, float]:
        """Seconds since the start that this device waited for ranks that had not arrived, and for rows and results of those that had."""
        return int(self._state[LATE]) / 1e9, int(self._state[MOVED]) / 1e9
