"""The quality gate: how far answers move, which layers do it, and what format each may have.

Nothing here knows a model: `logits_of(layers)` runs the user's tokens with the formats given and is supplied by an integration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import ConfigError
from .format import PageLayout

# Log-probabilities [T, vocab] of each text, under per-layer formats ({} = FP16 throughout).
LogitsOf = Callable[[Mapping[int, str]], Sequence[torch.Tensor]]
Cost = Callable[[PageLayout], float]  # bits per element, with what the caller wants counted
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
    """What the gate decided. `layers` are the formats that must differ from `format`; `passed` says whether the budget holds with
    them and with that `window` of FP16 tokens (None: none was named)."""

    format: str
    layers: dict[int, str] = field(default_factory=dict)
    sensitivity: dict[int, float] = field(default_factory=dict)
    before: Drift | None = None
    after: Drift | None = None
    passed: bool = True
    bits: float | None = None
    window: int | None = None

    def __str__(self) -> str:
        moved = ", ".join(f"layer {n} to {f}" for n, f in sorted(self.layers.items())) or "no layer changed"
        kl = self.after.kl if self.after else float("nan")
        bits = f", {self.bits:.3f} bits per element" if self.bits is not None else ""
        return f"{self.format}: KL {kl:.4f}{bits}, {'within' if self.passed else 'ABOVE'} the budget; {moved}"


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


def spend(
    sensitivity: Mapping[int, Mapping[str, float]], layouts: Mapping[int, Mapping[str, PageLayout]], max_bits: float, cost: Cost
) -> dict[int, str]:
    """The formats with the least sum of KL within `max_bits` per element over all layers; pure, exact.

    sensitivity  layer -> format -> KL of that layer alone in that format
    layouts      layer -> format -> its pages; `cost` gives their bits per element
    Raises ConfigError when the cheapest formats are above the budget.
    """
    budget = max_bits * sum(next(iter(row.values())).element_count for row in layouts.values())
    # Bits spent so far -> (KL, formats so far); what costs more and is no better is dropped.
    best: dict[float, tuple[float, tuple[str, ...]]] = {0.0: (0.0, ())}
    for n, row in layouts.items():
        tried: dict[float, tuple[float, tuple[str, ...]]] = {}
        for spent, (kl, formats) in best.items():
            for f, layout in row.items():
                bits = round(spent + cost(layout) * layout.element_count, 6)
                new = kl + sensitivity[n][f], (*formats, f)
                if bits <= budget and (bits not in tried or new[0] < tried[bits][0]):
                    tried[bits] = new
        best, least = {}, math.inf
        for bits in sorted(tried):
            if tried[bits][0] < least:
                best[bits], least = tried[bits], tried[bits][0]
    if not best:
        raise ConfigError(
            f"{max_bits} bits per element can't be met",
            where="kv gate",
            expected="room for the cheapest format in every layer",
            do="allow more bits, or name a smaller format",
        )
    return dict(zip(layouts, min(best.values())[1], strict=True))


def judge_bits(
    logits_of: LogitsOf,
    token_ids: Sequence[torch.Tensor],
    *,
    layouts: Mapping[int, Mapping[str, PageLayout]],
    max_bits: float,
    cost: Cost,
) -> Verdict:
    """The best formats under a byte budget: each layer alone in each format it may have, then `spend`.

    The verdict's `format` is the one most layers got, `before` the drift with every layer in its cheapest; `passed` is False where the
    choice is worse than that (what single layers do alone need not add up). Raises ConfigError as `spend` does.
    """
    reference = logits_of({})
    compare = lambda formats: drift(reference, logits_of(formats), token_ids)  # noqa: E731
    alone = {n: {f: compare({n: f}).kl for f in row} for n, row in layouts.items()}
    chosen = spend(alone, layouts, max_bits, cost)
    cheapest = {n: min(row, key=lambda f, row=row: cost(row[f])) for n, row in layouts.items()}
    before = compare(cheapest)
    after = compare(chosen) if chosen != cheapest else before
    held = [row[chosen[n]] for n, row in layouts.items()]
    bits = sum(cost(x) * x.element_count for x in held) / sum(x.element_count for x in held)
    most = Counter(chosen.values()).most_common(1)[0][0]
    moved = {n: f for n, f in chosen.items() if f != most}
    return Verdict(most, moved, {n: alone[n][chosen[n]] for n in alone}, before, after, after.kl <= before.kl, bits)
