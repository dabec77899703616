"""How right a forecast is, and how well it knows it. All on float32 scores or probabilities [T, E] against true ids [T, K]."""
from __future__ import annotations

import torch

BINS = 15


def hits(score_TE: torch.Tensor, true_TK: torch.Tensor, count: int) -> torch.Tensor:
    """How many of each token's true experts are among the `count` best-scored ones: int64 [T]."""
    best = torch.zeros_like(score_TE, dtype=torch.bool).scatter_(1, score_TE.topk(count, -1).indices, True)
    return best.gather(1, true_TK).sum(1)


def recall(score_TE: torch.Tensor, true_TK: torch.Tensor, count: int | None = None) -> float:
    """Mean share of the true experts among the `count` best-scored (the number of true ones by default)."""
    k = true_TK.shape[1]
    return float(hits(score_TE, true_TK, count or k).double().mean() / k)


def exact_set(score_TE: torch.Tensor, true_TK: torch.Tensor) -> float:
    """Share of tokens whose whole set is right."""
    k = true_TK.shape[1]
    return float((hits(score_TE, true_TK, k) == k).double().mean())


def union_recall(score_TE: torch.Tensor, true_TK: torch.Tensor, batch: int) -> float:
    """Tokens in groups of `batch` (as a decode step holds them; the rest is dropped): the union of each group's predicted top-k
    against the union of its true ones, share of the true union found. Raises ValueError when there are fewer tokens than `batch`."""
    groups, k = score_TE.shape[0] // batch, true_TK.shape[1]
    if groups == 0:
        raise ValueError(f"{score_TE.shape[0]} tokens make no batch of {batch}")
    # Interleaved, so that a group holds tokens of different places in the text, as independent requests do.
    order = torch.arange(groups * batch, device=score_TE.device).view(batch, groups).T.reshape(-1)

    def union(ids_TK: torch.Tensor) -> torch.Tensor:
        hot = torch.zeros(groups, score_TE.shape[1], dtype=torch.bool, device=score_TE.device)
        return hot.scatter_(1, ids_TK[order].reshape(groups, -1), True)

    true, found = union(true_TK), union(score_TE.topk(k, -1).indices)
    return float((true & found).sum() / true.sum())


def reliability(prob_TE: torch.Tensor, true_TK: torch.Tensor, bins: int = BINS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all (token, expert) pairs in `bins` equal bins of probability: (mean probability, share chosen, pairs), float64 [bins] each;
    empty bins are zero."""
    p = prob_TE.flatten().double()
    y = torch.zeros_like(prob_TE, dtype=torch.float64).scatter_(1, true_TK, 1.0).flatten()
    index = (p * bins).long().clamp_(0, bins - 1)
    count = torch.zeros(bins, dtype=torch.float64, device=p.device).index_add_(0, index, torch.ones_like(p))
    total_p = torch.zeros_like(count).index_add_(0, index, p)
    total_y = torch.zeros_like(count).index_add_(0, index, y)
    some = count.clamp_min(1)
    return total_p / some, total_y / some, count


def calibration_error(prob_TE: torch.Tensor, true_TK: torch.Tensor, bins: int = BINS) -> float:
    """Expected calibration error of P(expert is in the top-k): mean over pairs of |mean probability - share chosen| of their bin
    (arXiv 1706.04599)."""
    p, y, count = reliability(prob_TE, true_TK, bins)
    return float(((p - y).abs() * count).sum() / count.sum())


def table(score_TE: torch.Tensor, true_TK: torch.Tensor, *, probability: bool, candidates: int) -> dict[str, float]:
    """All metrics of one (predictor, layer, horizon). `candidates` is the K of recall@K; calibration only for probabilities."""
    row = {"recall_at_k": recall(score_TE, true_TK), f"recall_at_{candidates}": recall(score_TE, true_TK, candidates),
           "exact_set": exact_set(score_TE, true_TK)}
    for batch in (1, 8, 32):
        if score_TE.shape[0] >= batch:
            row[f"union_recall_b{batch}"] = union_recall(score_TE, true_TK, batch)
    if probability:
        row["ece"] = calibration_error(score_TE, true_TK)
    return row
