"""`moe_prefetch::dispatch_put`, `_wait`, `_give`: an exchange on a device, over blocks of symmetric memory.

`put` and `give` write into every rank's block, of which a process can name its own: that one stands for all in the lists of changes.
They run where Triton does, a CPU's interpreter included; without Triton a CPU exchanges through `distributed.channel`.
"""
from __future__ import annotations

import torch

from .naive import combine_rows
from .planes import Planes


@torch.library.custom_op("moe_prefetch::dispatch_put", mutates_args=("block", "state", "failed"))
def put(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, serve_E: torch.Tensor, number_RE: torch.Tensor,
        bases_R: torch.Tensor, block: torch.Tensor, state: torch.Tensor, failed: torch.Tensor, slots: int, unreduced: bool, turn: int,
        me: int, limit: int, waits: bool) -> None:
    """Send rows to the ranks that serve their experts, and wait for everybody's, or leave that to `wait`.

    hidden_TD [T, D], T at most `slots`; ids_TK int64; weights_TK FP32; serve_E, number_RE, bases_R, state [8] int64; failed int64 [1], on
    the device or pinned; block uint8, this rank's; limit: nanoseconds of each wait.
    """
    from . import fused, fused_words

    planes = Planes(len(bases_R), slots, hidden_TD.shape[1], ids_TK.shape[1], hidden_TD.dtype, unreduced)
    same = (hidden_TD, ids_TK, weights_TK, serve_E, number_RE, bases_R, state, failed, planes)
    if planes.by_words:
        fused_words.launch_put(*same, me, limit, True, waits)
    else:
        fused.launch_put(*same, turn, me, limit, waits)


@torch.library.custom_op("moe_prefetch::dispatch_wait", mutates_args=("block", "state", "failed"))
def wait(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, serve_E: torch.Tensor, number_RE: torch.Tensor,
         bases_R: torch.Tensor, block: torch.Tensor, state: torch.Tensor, failed: torch.Tensor, slots: int, unreduced: bool, me: int,
         limit: int) -> None:
    """Wait for everybody's rows after a `put` with the same arguments that did not."""
    from . import fused, fused_words

    planes = Planes(len(bases_R), slots, hidden_TD.shape[1], ids_TK.shape[1], hidden_TD.dtype, unreduced)
    if planes.by_words:
        fused_words.launch_put(hidden_TD, ids_TK, weights_TK, serve_E, number_RE, bases_R, state, failed, planes, me, limit, False, True)
    else:
        fused.launch_wait(bases_R, state, failed, me, limit)


@torch.library.custom_op("moe_prefetch::dispatch_give", mutates_args=("block", "state", "failed"))
def give(result_ND: torch.Tensor, ids_TK: torch.Tensor, serve_E: torch.Tensor, bases_R: torch.Tensor, block: torch.Tensor,
         state: torch.Tensor, failed: torch.Tensor, slots: int, unreduced: bool, turn: int, me: int, limit: int) -> torch.Tensor:
    """Send results [R slots (K), D] back, take this rank's tokens' and end the exchange.

    [T, D], the sums of all ranks in ascending order; unreduced [T K, D] FP32, each expert's row. NaN after a failure.
    """
    from . import fused, fused_words

    planes = Planes(len(bases_R), slots, result_ND.shape[1], ids_TK.shape[1], result_ND.dtype, unreduced)
    if planes.by_words:
        return fused_words.launch_give(result_ND, ids_TK, serve_E, bases_R, state, failed, planes, me, limit)
    fused.launch_give(result_ND, bases_R, state, failed, planes, turn, me, limit)
    return fused.launch_gather(ids_TK, serve_E, block, state, planes, turn)


@give.register_fake
def _(result_ND, ids_TK, serve_E, bases_R, block, state, failed, slots, unreduced, turn, me, limit):
    shape = (ids_TK.numel() if unreduced else len(ids_TK), result_ND.shape[1])
    return result_ND.new_empty(shape, dtype=torch.float32 if unreduced else result_ND.dtype)


def total(rows_PD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, D] from each expert's row [T K, D], as `naive.combine_rows`.

    On a GPU one kernel does it in every mode: whether a product is rounded before it is added must not depend on the mode.
    """
    if rows_PD.device.type == "cuda" and len(ids_TK):
        from ..expert_mlp import fused

        return fused.total(rows_PD, ids_TK.contiguous(), weights_TK.float().contiguous(), experts, dtype)
    return combine_rows(rows_PD.view(*ids_TK.shape, rows_PD.shape[1]), ids_TK, weights_TK, experts, dtype)
