"""Which K channels stay in FP16, and the means and gains of the rest. Pure: sums in, decisions out.

`importance` ranks by E[q^2] E[(k - mean)^2], what a channel's error does to the logits, and where there is a calibration turns keys first
so that few channels matter (`basis`); `topn` ranks by E[(k - mean)^2]; `sigma` takes
channels whose mean |k| lies more than 3 standard deviations above the layer's mean (the design note's rule, correctly stated). Means cost
nothing on the logits: softmax does not see a constant, and q . mean is added back where only some tokens are centred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError

Policy = Literal["importance", "sigma", "topn", "none"]
POLICIES: tuple[Policy, ...] = ("importance", "sigma", "topn", "none")
Rows = Sequence[Sequence[float]]  # [N][d]


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Moments of one layer over calibration tokens, [N][d] each: E[q^2] (mean over the query heads of a KV head), E[k], E[k^2], E|k|,
    E[v^2]; K after RoPE. `tokens` is how many were seen. `axes`: the canonical axes of its keys (`basis.Axes`), where they were sought."""

    tokens: int
    q2: Rows
    k1: Rows
    k2: Rows
    ka: Rows
    v2: Rows
    axes: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one layer: `channels` [N][O] ascending, -1 where a head uses fewer; then [N][d] means, gains and error weights."""

    channels: tuple[tuple[int, ...], ...]
    k_mean: Rows
    k_gain: Rows
    k_weight: Rows
    v_gain: Rows
    v_weight: Rows

    def share(self, k_dim: int, v_dim: int) -> float:
        """FP16 outliers among all K and V elements."""
        used = sum(c >= 0 for row in self.channels for c in row)
        return used / (len(self.channels) * (k_dim + v_dim))


def rank(stats: LayerStats, policy: Policy, limit: int) -> list[list[int]]:
    """Up to `limit` channels per head, most important first. Raises ConfigError for an unknown policy."""
    if policy not in POLICIES:
        raise ConfigError(f"{policy!r} is no outlier policy", where="kv.outliers", expected=" | ".join(POLICIES), do="choose one of them")
    if policy == "none" or limit == 0:
        return [[] for _ in stats.k2]
    if policy == "sigma":
        flat = [m for row in stats.ka for m in row]
        mean = math.fsum(flat) / len(flat)
        edge = mean + 3 * math.sqrt(math.fsum((m - mean) ** 2 for m in flat) / len(flat))
        return [sorted((c for c, m in enumerate(row) if m > edge), key=lambda c: (-row[c], c))[:limit] for row in stats.ka]
    out = []
    for q2, k1, k2 in zip(stats.q2, stats.k1, stats.k2, strict=True):
        power = [max(0.0, b - a * a) * (q if policy == "importance" else 1.0) for q, a, b in zip(q2, k1, k2, strict=True)]
        out.append(sorted(range(len(power)), key=lambda c: (-power[c], c))[:limit])
    return out


def _gains(power: Sequence[float]) -> list[float]:
    """power^(1/2) of each channel over their geometric mean, kept within 2^-6 .. 2^6; a channel that never spoke gets 1."""
    logs = [0.5 * math.log2(p) if p > 0 else None for p in power]
    known = [x for x in logs if x is not None]
    centre = math.fsum(known) / len(known) if known else 0.0
    return [2.0 ** max(-6.0, min(6.0, x - centre)) if x is not None else 1.0 for x in logs]


def _unit_mean(row: Sequence[float]) -> list[float]:
    mean = math.fsum(row) / max(1, len(row))
    return [x / mean for x in row] if mean > 0 else [1.0] * len(row)


def choose(stats: LayerStats, policy: Policy, limit: int) -> Choice:
    """Everything the codec needs to know about one layer; `limit` outlier channels per head at most (the layout's O).

    K gains balance what the query reads, sqrt(E[q^2] / Var[k]) to the power 1/2, so that one scale serves 32 channels well; V gains make
    the channels equally loud, so that one scale serves 64. Errors are weighed as they will be felt: by E[q^2] and back through the gain.
    """
    channels, k_mean, k_gain, k_weight, v_gain, v_weight = [], [], [], [], [], []
    chosen = rank(stats, policy, limit)
    for head, best in enumerate(chosen):
        q2, k1, k2, v2 = stats.q2[head], stats.k1[head], stats.k2[head], stats.v2[head]
        channels.append(tuple(sorted(best)) + (-1,) * (limit - len(best)))
        var = [max(0.0, b - a * a) for a, b in zip(k1, k2, strict=True)]
        gain = _gains([math.sqrt(q / p) if p > 0 and q > 0 else 0.0 for q, p in zip(q2, var, strict=True)])
        k_mean.append(list(k1))
        k_gain.append(gain)
        k_weight.append(_unit_mean([q / (g * g) for q, g in zip(q2, gain, strict=True)]))
        vg = _gains([1 / p if p > 0 else 0.0 for p in v2])
        v_gain.append(vg)
        v_weight.append(_unit_mean([1 / (g * g) for g in vg]))
    return Choice(tuple(channels), k_mean, k_gain, k_weight, v_gain, v_weight)
