"""The quality gate: how far answers move, which layers do it, and what format each may have.

Nothing here knows a model: `logits_of(layers)` runs the user's tokens with the formats given and is supplied by an integration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import ConfigError

# Log-probabilities [T, vocab] of each text, under per-layer formats ({} = FP16 throughout).
LogitsOf = Callable[[Mapping[int, str]], Sequence[torch.Tensor]]
LADDER = ("fp8", "fp16")


@dataclass(frozen=True, slots=True)
class Drift:
    """How one run differs from FP16 on the same tokens. kl: nats per token, mean; kl_by_position: the same in `len` equal parts of the
    text.
    """

    kl: float
    top1: float
    ppl: float
    ppl_fp16: float
    tokens: int
    kl_by_position: tuple[float, ...] = ()

    @property
    def ppl_ratio(self) -> float:
        return self.ppl / self.ppl_fp16


def drift(reference: Sequence[torch.Tensor], tried: Sequence[torch.Tensor], token_ids: Sequence[torch.Tensor], parts: int = 8) -> Drift:
    """Compare log-probabilities [T, vocab], text by text; `token_ids` [T] give the perplexities. A non-finite result counts as an
    infinite drift.
    """
    kl_sum = nll = nll_ref = 0.0
    same = tokens = predicted = 0
    by_part, part_n = torch.zeros(parts, dtype=torch.float64), torch.zeros(parts, dtype=torch.float64)
    for ref, got, ids in zip(reference, tried, token_ids, strict=True):
        ref, got = ref.float(), got.float()
        kl = (ref.exp() * (ref - got)).sum(-1).double()
        kl = torch.where(kl.isfinite(), kl, torch.inf)
        kl_sum += float(kl.sum())
        same += int((ref.argmax(-1) == got.argmax(-1)).sum())
        tokens += len(ref)
        part = (torch.arange(len(ref), device=kl.device) * parts // len(ref)).cpu()
        by_part.index_add_(0, part, kl.cpu())
        part_n.index_add_(0, part, torch.ones(len(ref), dtype=torch.float64))
        nxt = ids[1:, None].to(ref.device)
        nll -= float(got[:-1].gather(-1, nxt).double().sum())
        nll_ref -= float(ref[:-1].gather(-1, nxt).double().sum())
        predicted += len(nxt)
    exp = lambda x: float(torch.tensor(x / max(1, predicted), dtype=torch.float64).exp())  # noqa: E731
    return Drift(
        kl_sum / max(1, tokens), same / max(1, tokens), exp(nll), exp(nll_ref), tokens, tuple((by_part / part_n.clamp(min=1)).tolist())
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate decided. `layers` are the formats that must differ from `format`; `passed` says whether the budget holds with them."""

    format: str
    layers: dict[int, str] = field(default_factory=dict)
    sensitivity: dict[int, float] = field(default_factory=dict)
    before: Drift | None = None
    after: Drift | None = None
    passed: bool = True

    def __str__(self) -> str:
        moved = ", ".join(f"layer {n} to {f}" for n, f in sorted(self.layers.items())) or "no layer changed"
        kl = self.after.kl if self.after else float("nan")
        return f"{self.format}: KL {kl:.4f}, {'within' if self.passed else 'ABOVE'} the budget; {moved}"


def judge(
    logits_of: LogitsOf,
    token_ids: Sequence[torch.Tensor],
    *,
    layers: Sequence[int],
    format: str,
    max_kl: float,
    max_layer_kl: float | None = None,
) -> Verdict:
    """Give every layer `format`; where the answers move too far, give the worst layers fp8, then fp16, until they do not.

    max_kl        nats per token that the whole model may drift
    max_layer_kl  nats that one layer alone may cause (default: max_kl); layers above it fall back whatever the sum says
    Each layer is first tried alone: its drift is its sensitivity. Raises ConfigError for a budget that is not positive.
    """
    limit = max_kl if max_layer_kl is None else max_layer_kl
    if not (max_kl > 0 and limit > 0):
        raise ConfigError(
            f"a KL budget of {max_kl} can't be met",
            where="kv gate",
            expected="a positive number of nats per token",
            do="0.01 is strict, 0.05 is loose",
        )
    reference = logits_of({})
    compare = lambda formats: drift(reference, logits_of(formats), token_ids)  # noqa: E731
    before = compare(dict.fromkeys(layers, format))
    alone = {n: compare({n: format}).kl for n in layers} if before.kl > max_kl or len(layers) == 1 or limit < max_kl else {}
    chosen = dict.fromkeys(layers, format)
    for n, kl in alone.items():
        if kl > limit:
            chosen[n] = next((f for f in LADDER[:-1] if compare({n: f}).kl <= limit), LADDER[-1])
    after = compare(chosen) if chosen != dict.fromkeys(layers, format) else before
    for step in LADDER:
        for n in sorted(alone, key=lambda n: -alone[n]):
            if after.kl <= max_kl:
                break
            if chosen[n] == format or (step == "fp16" and chosen[n] != "fp16"):
                chosen[n] = step
                after = compare(chosen)
    moved = {n: f for n, f in chosen.items() if f != format}
    return Verdict(format, moved, alone, before, after, after.kl <= max_kl)
