"""A MoE layer through `torch._grouped_mm`: for many tokens, over plain records that lie one after another in one block.

Rows of tokens are sorted by expert. Records are one tensor [E, rows, columns] whose first stride is a record, so nothing is copied. The
weighted sum is that of the kernels: ascending experts, in FP32.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from .naive import gated
from .record import Form


def block_of(records: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The uint8 [E, record] tensor that the records are rows of; None where they are not."""
    if not records or records[0].device.type not in ("cuda", "cpu"):
        return None
    start, size, storage = records[0].data_ptr(), records[0].numel(), records[0].untyped_storage().data_ptr()
    for i, r in enumerate(records):
        if r.data_ptr() != start + i * size or r.numel() != size or r.untyped_storage().data_ptr() != storage:
            return None
    return records[0].as_strided((len(records), size), (size, 1))


def serves(form: Form, dtype: torch.dtype, records: Sequence[torch.Tensor]) -> bool:
    plain = form.weights == "bfloat16" and dtype == torch.bfloat16 and form.hidden % 8 == 0 and form.width % 8 == 0
    return plain and block_of(records) is not None


def matrices(block_EB: torch.Tensor, form: Form, name: str) -> torch.Tensor:
    """One part of all records, [E, ...], without a copy."""
    part = next(p for p in form.layout().parts if p.name == name)
    flat = block_EB[:, part.offset : part.offset + part.nbytes].view(getattr(torch, part.dtype))
    return flat.unflatten(1, part.shape)


def launch(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, records: Sequence[torch.Tensor], form: Form,
           limit: float, alpha: float) -> torch.Tensor:
    """See `op.expert_mlp`. The host waits for nothing."""
    block_EB = block_of(records)
    assert block_EB is not None
    experts, top_k = len(records), ids_TK.shape[1]
    flat = ids_TK.reshape(-1)
    # Masked pairs come last, behind the end of the last group.
    expert_P, order_P = torch.where((flat < 0) | (flat >= experts), experts, flat).sort(stable=True)
    ends_E = torch.searchsorted(expert_P, torch.arange(experts, device=flat.device), right=True).to(torch.int32)
    safe_P = expert_P.clamp(max=experts - 1)
    x_PD = hidden_TD[order_P // top_k]
    gate_up_P = torch._grouped_mm(x_PD, matrices(block_EB, form, "gate_up").mT, offs=ends_E)
    if form.bias:
        gate_up_P = gate_up_P + matrices(block_EB, form, "gate_up_bias")[safe_P].to(gate_up_P.dtype)
    h_PF = gated(gate_up_P.float(), limit, alpha).to(hidden_TD.dtype)
    y_PD = torch._grouped_mm(h_PF, matrices(block_EB, form, "down").mT, offs=ends_E)
    if form.bias:
        y_PD = y_PD + matrices(block_EB, form, "down_bias")[safe_P].to(y_PD.dtype)
    back_PD = torch.empty_like(y_PD)
    back_PD[order_P] = y_PD
    from .fused import total

    return total(back_PD, ids_TK, weights_TK, experts, hidden_TD.dtype)
