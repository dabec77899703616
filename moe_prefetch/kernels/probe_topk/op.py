"""`moe_prefetch::probe_topk`: ids and quantised probabilities for all targets of one tap."""
from __future__ import annotations

import torch

from ...errors import ShapeError
from .naive import TapWeights, probe_topk_naive

# a word of scratch that nothing has been written to: a NaN that no sum is stored as
EMPTY_WORD = -1
# of the fused kernel: elements of the hidden size in a partial sum; the bit of a 64-bit word where the number of programs starts
CHUNK, COUNT_BIT = 512, 46
# more have room neither there nor below
MOST_TOKENS = 1 << 18


@torch.library.custom_op("moe_prefetch::probe_topk", mutates_args=("scratch",))
def _probe_topk(hidden_TD: torch.Tensor, past_TD: torch.Tensor | None, weight_HND: torch.Tensor, past_HRD: torch.Tensor | None,
                shift_HR: torch.Tensor, up_HER: torch.Tensor, out_HE: torch.Tensor, bias_HE: torch.Tensor, sharp_H: torch.Tensor,
                scratch: torch.Tensor, top_k: int, linear: int, norm_eps: float, sigmoid: bool, n_group: int,
                topk_group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return probe_topk_naive(hidden_TD, past_TD, weight_HND, past_HRD, shift_HR, up_HER, out_HE, bias_HE, sharp_H, top_k, linear, norm_eps,
                            sigmoid, n_group, topk_group)


@_probe_topk.register_kernel("cuda")
def _(hidden_TD, past_TD, weight_HND, past_HRD, shift_HR, up_HER, out_HE, bias_HE, sharp_H, scratch, top_k, linear, norm_eps, sigmoid,
      n_group, topk_group):
    weights = (hidden_TD, past_TD, weight_HND, past_HRD, shift_HR, up_HER, out_HE, bias_HE, sharp_H, top_k, linear, norm_eps, sigmoid)
    if not 0 < hidden_TD.shape[0] <= MOST_TOKENS or n_group != topk_group:
        return probe_topk_naive(*weights, n_group, topk_group)
    from .fused import launch

    return launch(*weights, scratch)


@_probe_topk.register_fake
def _(hidden_TD, past_TD, weight_HND, past_HRD, shift_HR, up_HER, out_HE, bias_HE, sharp_H, scratch, top_k, *rest):
    h, e = out_HE.shape
    return (hidden_TD.new_empty(h, hidden_TD.shape[0], top_k, dtype=torch.int32), hidden_TD.new_empty(h, e, dtype=torch.int32))


def sizes(tokens: int, hidden: int, targets: int, experts: int, rank: int, past: bool) -> tuple[int, int]:
    """Words of scratch: partial sums of every piece of the hidden size, an even number, and 64 bits an expert."""
    parts = targets * -(-hidden // CHUNK) * tokens * (experts + rank * (1 + past))
    return parts + parts % 2, targets * experts * 2


def _words(tokens: int, tap: TapWeights) -> int:
    (targets, experts), rank, hidden = tap.out_HE.shape, tap.shift_HR.shape[1], tap.weight_HND.shape[2]
    return sum(sizes(tokens, hidden, targets, experts, rank, tap.past_HRD is not None))


def scratch_for(tokens: int, tap: TapWeights) -> torch.Tensor:
    """Scratch for up to `tokens` tokens of `tap` and of taps no larger: 3 KB a token and target for 2048 -> 128 + 64. A tap that may run
    beside another needs its own; taps that follow each other in a stream share it."""
    return torch.full((_words(tokens, tap),), EMPTY_WORD, dtype=torch.int32, device=tap.weight_HND.device)


def probe_topk(hidden_TD: torch.Tensor, tap: TapWeights, scratch: torch.Tensor,
               past_TD: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What one tap expects: ids int32 [H, T, K], best first, and prob int32 [H, E] in units of 1/PROB_ONE (see `probe_topk_naive`).

    hidden_TD contiguous, of the weights' dtype; past_TD likewise (`probes.collect.recent_past`), read where the tap has weights for it;
    None is a past of zeros. `scratch` from `scratch_for`, EMPTY_WORD before and after. On a GPU one Triton launch; routers with group
    limits, and CPUs, take the naive path. Raises ShapeError.
    """
    rows, hidden = tap.weight_HND.shape[1:]
    for what, x in (("hidden", hidden_TD), ("past", past_TD)):
        if x is not None and (x.shape != (len(hidden_TD), hidden) or x.dtype != tap.weight_HND.dtype or not x.is_contiguous()):
            raise ShapeError(f"{what} is {x.dtype} {tuple(x.shape)}", where="probe_topk",
                             expected=f"contiguous {tap.weight_HND.dtype} [T, {hidden}]", do="pack the tap in the model's dtype")
    need = _words(len(hidden_TD), tap)
    # 64-bit words lie in the scratch, too
    odd = scratch.dtype != torch.int32 or not scratch.is_contiguous() or scratch.storage_offset() % 2 != 0
    if rows != tap.out_HE.shape[1] + tap.shift_HR.shape[1] or odd or scratch.numel() < need:
        raise ShapeError(f"{rows} rows, scratch of {scratch.numel()} {scratch.dtype}, from word {scratch.storage_offset()}",
                         where="probe_topk",
                         expected=f"E + R rows and contiguous int32 [{need}] from an even word on", do="use pack() and scratch_for()")
    return _probe_topk(hidden_TD, past_TD, tap.weight_HND, tap.past_HRD, tap.shift_HR, tap.up_HER, tap.out_HE, tap.bias_HE, tap.sharp_H,
                       scratch, tap.top_k, tap.linear, tap.norm_eps, tap.sigmoid, tap.n_group, tap.topk_group)
