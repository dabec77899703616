"""`moe_prefetch::expert_mlp`: a MoE layer from records, wherever their bytes are.

On a GPU the kernels follow `where_E`; on a CPU, and for forms and types that no kernel serves, the law reads the records themselves.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ShapeError
from .naive import moe_records
from .record import Form

# From how many pairs of token and expert on `torch._grouped_mm` serves bf16 records that lie in one block. None: never. On an H200 the
# kernels were faster up to 4096 tokens, and a token's bits do not depend on how many others there are.
GROUPED_FROM: int | None = None


@torch.library.custom_op("moe_prefetch::expert_mlp", mutates_args=())
def _expert_mlp(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor,
                records: Sequence[torch.Tensor], weights: str, width: int, bias: str, scale: str, block: int, limit: float,
                alpha: float) -> torch.Tensor:
    form = Form(weights, hidden_TD.shape[1], width, bias, scale, block)
    if not ids_TK.numel():
        return torch.zeros_like(hidden_TD)
    if hidden_TD.device.type == "cuda":
        from . import fused, grouped

        if GROUPED_FROM is not None and ids_TK.numel() >= GROUPED_FROM and grouped.serves(form, hidden_TD.dtype, records):
            return grouped.launch(hidden_TD, ids_TK, weights_TK, records, form, limit, alpha)
        if fused.serves(form, hidden_TD.dtype):
            return fused.launch(hidden_TD, ids_TK, weights_TK, where_E, form, limit, alpha)
    if len(records) != len(where_E):
        raise ShapeError(f"no kernel multiplies {form.weights} records with {hidden_TD.dtype} on {hidden_TD.device.type}",
                         where="expert_mlp", expected="bf16 or fp16 hidden states, of the weights' type where they are not quantised",
                         do="convert the model, or pass the records")
    return moe_records(hidden_TD, ids_TK, weights_TK, records, form, limit, alpha).to(hidden_TD.dtype)


@_expert_mlp.register_fake
def _(hidden_TD, *rest):
    return torch.empty_like(hidden_TD)


def expert_mlp(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, where_E: torch.Tensor, form: Form, *,
               records: Sequence[torch.Tensor] = (), limit: float = 0.0, alpha: float = 1.0) -> torch.Tensor:
    """The weighted sum of a layer's experts, [T, D] in the hidden states' dtype; see `naive.moe_records` for what it means.

    hidden_TD [T, D]; ids_TK [T, K] integers, at most 64 a token; weights_TK [T, K]; where_E int64 [E], a row of `experts.where.Where`, on
    the device of hidden_TD. `records` is the row's twin, one uint8 tensor an expert: needed on a CPU, and on a GPU for `torch._grouped_mm`.
    `limit` and `alpha` as in `naive.gated`. Raises ShapeError before any work.
    """
    (tokens, hidden), experts = hidden_TD.shape, where_E.shape[0]
    faults = [
        (f"hidden states of {hidden}", f"{form.hidden}", hidden == form.hidden),
        (f"ids {tuple(ids_TK.shape)}, weights {tuple(weights_TK.shape)}", f"[{tokens}, K], K at most 64",
         ids_TK.dim() == 2 and ids_TK.shape == weights_TK.shape and len(ids_TK) == tokens and ids_TK.shape[1] <= 64),
        (f"ids of {ids_TK.dtype}", "integers", not ids_TK.dtype.is_floating_point and ids_TK.dtype != torch.bool),
        (f"a table of {where_E.dtype} {tuple(where_E.shape)}", "int64 [E], contiguous",
         where_E.dtype == torch.int64 and where_E.dim() == 1 and where_E.is_contiguous()),
        (f"{len(records)} records", f"{experts} of at least {form.bytes_read} bytes",
         len(records) in (0, experts) and all(r.dtype == torch.uint8 and r.numel() >= form.bytes_read for r in records)),
        ("tensors on several devices", "one", len({t.device for t in (hidden_TD, ids_TK, weights_TK, where_E)}) == 1),
        (f"weights of {weights_TK.dtype}", "floating point", weights_TK.dtype.is_floating_point),
    ]
    for what, expected, right in faults:
        if not right:
            raise ShapeError(what, where="expert_mlp", expected=expected, do="build them from one model's layout")
    return _expert_mlp(hidden_TD.contiguous(), ids_TK.to(torch.int64).contiguous(), weights_TK.to(torch.float32).contiguous(), where_E,
                       list(records), form.weights, form.width, form.bias, form.scale, form.block, limit, alpha)


def with_shared(ids_TK: torch.Tensor, weights_TK: torch.Tensor, first: int, count: int,
                share_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights with the shared experts of a layer appended: `count` records from `first` on, which every token uses.

    A shared FFN n times as wide as a routed expert is n of them: its rows (and down's columns) in n pieces, since their outputs add up.
    share_T [T]: its gate for each token (Qwen2-MoE); None: 1 (DeepSeek).
    """
    tokens = len(ids_TK)
    ids = torch.arange(first, first + count, dtype=ids_TK.dtype, device=ids_TK.device).expand(tokens, count)
    share = torch.ones(tokens, dtype=weights_TK.dtype, device=weights_TK.device) if share_T is None else share_T.to(weights_TK.dtype)
    return torch.cat([ids_TK, ids], 1), torch.cat([weights_TK, share[:, None].expand(tokens, count)], 1)
