"""Which rank holds which layers, and the whole model's probe put together from what every stage fitted."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_prefetch.probes.fit import Report
from moe_prefetch.probes.probe import HORIZONS, Residual, RoutingProbe


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A rank that taps come from or go to, and how many layers' taps."""

    rank: int
    count: int


class Places:
    """The chunks with MoE layers of one pipeline, in the order of their layers. Make it on every rank of the world.

    numbers  layer numbers of the MoE layers, per chunk of this rank        pp  the pipeline group, None without torch.distributed
    """

    def __init__(self, numbers: list[list[int]], pp: Any, edges: bool) -> None:
        self.pp, self.group, self.me = pp, None, dist.get_rank() if pp is not None else 0
        everyone: list[Any] = [(self.me, numbers)]
        if pp is not None:
            everyone = [None] * dist.get_world_size(pp)
            dist.all_gather_object(everyone, (self.me, numbers), group=pp)
        self.order = sorted((chunk[0], rank, i, len(chunk)) for rank, chunks in everyone for i, chunk in enumerate(chunks) if chunk)
        self.edges = edges and pp is not None and dist.get_world_size(pp) > 1
        if self.edges:
            # A group of its own: on the pipeline's, a message of ours could be taken for an activation.
            pipelines: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(pipelines, dist.get_process_group_ranks(pp))
            for ranks in sorted({tuple(p) for p in pipelines}):
                made = dist.new_group(list(ranks))
                if self.me in ranks:
                    self.group = made
            self._acquaint()

    def _acquaint(self) -> None:
        """One message along every edge: NCCL connects two ranks at their first message, and both must be there. Later, the receiver would
        be waiting for an activation that the sender makes after it."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(self.group) == "nccl" else torch.device("cpu")
        token = torch.zeros(1, device=device)
        for (_, a, _, _), (_, b, _, _) in zip(self.order, self.order[1:]):
            if self.me == a != b:
                dist.send(token, b, group=self.group)
            elif self.me == b != a:
                dist.recv(token, a, group=self.group)

    def _beside(self, chunk: int, step: int) -> tuple[int, int, int, int] | None:
        at = next(i for i, (_, rank, c, _) in enumerate(self.order) if (rank, c) == (self.me, chunk)) + step
        return self.order[at] if self.edges and 0 <= at < len(self.order) and self.order[at][1] != self.me else None

    def before(self, chunk: int) -> Neighbour | None:
        """Who sends its last layers' MoE input to this chunk: two layers are as far as a horizon reaches."""
        found = self._beside(chunk, -1)
        return None if found is None else Neighbour(found[1], min(2, found[3]))

    def after(self, chunk: int) -> Neighbour | None:
        found = self._beside(chunk, 1)
        mine = next(count for _, rank, c, count in self.order if (rank, c) == (self.me, chunk))
        return None if found is None else Neighbour(found[1], min(2, mine))

    def gather(self, rows: list[tuple[int, Any]]) -> list[Any]:
        """Every stage's rows in the order of layers, on every rank."""
        everyone: list[Any] = [rows]
        if self.pp is not None:
            everyone = [None] * dist.get_world_size(self.pp)
            dist.all_gather_object(everyone, rows, group=self.pp)
        return [row for _, row in sorted((pair for part in everyone for pair in part), key=lambda pair: pair[0])]


def assemble(rows: list[Any], linear: int, report: Report) -> RoutingProbe:
    """One probe of all layers from the stages' rows, with the release gate's findings in `report`: a layer below the stale gate uses it.

    A row is a dict: `gate`, `figures` float64 [horizons, (temperature, recall, stale temperature, stale recall)], how many `tokens` these
    are of, and per fitted horizon (down_RD, shift_R, up_ER, out_E).
    """
    tokens = min(row["tokens"] for row in rows)
    residuals: list[Residual | None] = []
    for h in HORIZONS:
        example = next((row[h] for row in rows if h in row), None)
        if example is None:
            residuals.append(None)
            continue
        parts = [row.get(h) or tuple(torch.zeros_like(t) for t in example) for row in rows]
        figures = torch.stack([row["figures"][h] for row in rows])
        fitted = [h in row for row in rows]
        used = [f and bool(x[1] >= x[3]) for f, x in zip(fitted, figures)]
        temperature = torch.tensor([float(x[0] if u else x[2]) if f else 1.0 for u, f, x in zip(used, fitted, figures)])
        residuals.append(Residual(*(torch.stack([p[k] for p in parts]) for k in range(4)), temperature, linear, used))
        below = [i for i, (f, u) in enumerate(zip(fitted, used)) if f and not u]
        mine, stale = figures[torch.tensor(fitted)][:, [1, 3]].mean(0).tolist()
        report.rows.append({"domain": "online", "horizon": h, "recall_at_k": mine, "stale_recall_at_k": stale, "tokens": tokens,
                            "layers_below": len(below)})
        if below:
            report.fallback[h] = below
        if mine < stale:
            report.refused.append(f"online at horizon {h}: {mine:.4f} against {stale:.4f}")
    return RoutingProbe([row["gate"] for row in rows], residuals)
