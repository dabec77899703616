"""A made-up residual stream whose routers are learnable from afar: each layer adds a fixed non-linear function of the stream and a
little noise, so a fitted probe must beat the stale gate and can't be perfect."""
from __future__ import annotations

import torch

from moe_prefetch.probes.collect import Step
from moe_prefetch.probes.probe import GateSpec, normalise, select
from moe_prefetch.probes.targets import Taps

L, E, D, K = 4, 12, 32, 2


def gates(seed: int = 0, **kw: object) -> list[GateSpec]:
    g = torch.Generator().manual_seed(seed)
    return [GateSpec(torch.randn(E, D, generator=g) / 4, 1 + 0.2 * torch.rand(D, generator=g), 1e-6, K, **kw) for _ in range(L)]


def step(specs: list[GateSpec], tokens: int, seed: int, *, shift: float = 0.0, scale: float = 0.6) -> Step:
    """`shift` moves the input distribution: another domain."""
    fixed, g = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=g) + shift
    residual, moe_input, logits = [], [], []
    for spec in specs:
        attention, ffn = (torch.randn(D, D, generator=fixed) / D**0.5 for _ in range(2))
        residual.append(x)
        x = x + scale * torch.tanh(x @ attention) + 0.05 * torch.randn(tokens, D, generator=g)
        moe_input.append(x)
        logits.append(normalise(x, spec) @ spec.weight_ED.T)
        x = x + scale * torch.relu(x @ ffn)
    ids = torch.stack([select(z, s) for z, s in zip(logits, specs)], 1)
    start = torch.zeros(tokens, dtype=torch.bool)
    start[:1] = True
    return Step(Taps(torch.stack(residual), torch.stack(moe_input), torch.stack(logits)), ids, start)
