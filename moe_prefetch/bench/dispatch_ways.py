"""Ways to run a MoE layer whose experts lie on several ranks: ours, and by collectives as people do it today. All use one expert kernel.

A way is `way(n, hidden_TD, ids_TK, weights_TK)`: the layer's sum [T, D]; n counts layers. `captured`: it can be in a CUDA graph. Every rank
has T tokens. Experts are even over ranks, consecutive.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.groups import Group
from ..distributed.symmetric import SharedBlock, symmetric_memory
from ..errors import ConfigError
from ..experts.dispatch import Dispatch, DispatchSpec, LayerExperts, Mode
from ..experts.placement import Placement
from ..kernels.expert_mlp.op import expert_mlp
from ..kernels.expert_mlp.record import Form
from .expert_mlp import random_block


@dataclass(frozen=True)
class Model:
    form: Form
    experts: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.form.weights, torch.bfloat16) if self.form.weights in ("float32", "float16") else torch.bfloat16


class Bank:
    """One model's experts over a group: this rank's records in memory that all ranks of the host read, and room for `slots` copies.

    Collective to make. `even`: each expert on one rank, as the baselines have it; `placement`: with copies, as `copy` left it, for ours.
    """

    def __init__(self, group: Group, model: Model, device: torch.device, slots: int = 0) -> None:
        self.group, self.model, self.device, self.rank, self.ranks = group, model, device, group.rank, group.size
        if model.experts < group.size:
            raise ConfigError(f"{model.experts} experts on {group.size} ranks", where="bench dispatch", expected="an expert for each rank",
                              do="take fewer ranks")
        self.even = Placement.even(model.experts, group.size)
        self.owner_E = torch.tensor(self.even.serve_RE[0], dtype=torch.int64, device=device)
        held = [self.even.held_by(r) for r in range(group.size)]
        self.first_R = torch.tensor([mine[0] for mine in held], dtype=torch.int64, device=device)
        self.count_R = torch.tensor([len(mine) for mine in held], dtype=torch.int64, device=device)
        size, most = model.form.layout().nbytes, max(map(len, held))
        memory = symmetric_memory(group, device)
        self._block: SharedBlock = memory.allocate((most + slots) * size)
        views = [v[: (most + slots) * size].view(most + slots, size) for v in self._block.views]
        torch.manual_seed(1000 + group.rank)
        views[memory.rank][: len(held[group.rank])].copy_(random_block(model.form, len(held[group.rank]), device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        group.gather(b"filled")
        self.records = [views[r][i] for r, mine in enumerate(held) for i in range(len(mine))]
        self.own = [views[group.rank][i] for i in range(len(held[group.rank]))]
        self._room = [views[group.rank][most + i] for i in range(slots)]
        self.copy([[0] * model.experts] * group.size)

    def copy(self, load_RE: list[list[int]]) -> None:
        """Fill the room with copies of what this rank's tokens choose most. Collective, between cases."""
        self.placement = self.even.with_copies(load_RE, len(self._room))
        self.group.gather(b"nobody reads")
        near = dict(zip(self.even.held_by(self.rank), self.own, strict=True))
        far = [e for e in self.placement.held_by(self.rank) if e not in near]
        for slot, e in zip(self._room, far, strict=False):
            near[e] = slot.copy_(self.records[e])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.group.gather(b"copied")
        self._near = near

    def _experts(self, records: list[torch.Tensor]) -> LayerExperts:
        table = torch.tensor([r.data_ptr() for r in records], dtype=torch.int64, device=self.device)
        twin = records if self.device.type == "cpu" else ()
        return lambda layer, x, ids, weights: expert_mlp(x, ids, weights, table, self.model.form, records=twin)

    def local(self) -> LayerExperts:
        """This rank's experts in `even`."""
        return self._experts(self.own)

    def served(self) -> LayerExperts:
        """Those in `placement`, which has copies among them."""
        return self._experts([self._near[e] for e in self.placement.held_by(self.rank)])

    def everywhere(self) -> LayerExperts:
        """All, from the nearest memory."""
        return self._experts([self._near.get(e, record) for e, record in enumerate(self.records)])

    def spec(self, tokens: int) -> DispatchSpec:
        return DispatchSpec(self.model.form.hidden, self.model.top_k, self.model.dtype, max(1, tokens))


def nothing(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts that do nothing: what is left is the way there and back."""
    return x


def unpacked(rows_NB: torch.Tensor, dtype: torch.dtype, per: int, hidden: int, top_k: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, ids and weights of uint8 rows that carry them one after another, each of `per` tokens."""
    size, found = dtype.itemsize, []
    widths = [per * hidden * size, per * top_k * 8, per * top_k * 4]
    for part, kind, columns in zip(rows_NB.split(widths, 1), (dtype, torch.int64, torch.float32), (hidden, top_k, top_k), strict=True):
        # Flat first: a single row counts as contiguous whatever its stride.
        found.append(part.contiguous().reshape(-1).view(kind).view(len(rows_NB) * per, columns))
    return tuple(found)


class Way:
    """Made for calls of `tokens` tokens; `experts` are this rank's own: with copies where the way is `ours`."""

    name = ""
    captured = True
    ours = False

    def __init__(self, bank: Bank, tokens: int, experts: LayerExperts) -> None:
        self.bank, self.tokens, self.experts = bank, tokens, experts

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def check(self) -> None:
        """Raises what a device has found."""

    def close(self) -> None: ...



class OneSided(Way):
    """Ours, mode gather: one-sided put and give."""

    name, ours = "gather", True
    mode: Mode = "gather"

    def __init__(self, bank: Bank, tokens: int, experts: LayerExperts) -> None:
        super().__init__(bank, tokens, experts)
        self._dispatch = Dispatch(bank.group, bank.spec(tokens), bank.placement, self.mode, local=experts, device=bank.device)

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return self._dispatch(n, x_TD, ids_TK, weights_TK)

    def check(self) -> None:
        self._dispatch.check()

    def close(self) -> None:
        self._dispatch.close()


class InPlace(Way):
    """Ours, mode stay: every rank reads the experts it needs where they lie."""

    name = "stay"

    def __init__(self, bank: Bank, tokens: int, experts: LayerExperts) -> None:
        super().__init__(bank, tokens, bank.everywhere())

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return self.experts(n, x_TD, ids_TK, weights_TK)


class Host(OneSided):
    """Ours, mode host: messages by the framework's all-to-all, with the host in between."""

    name, captured = "host", False
    mode: Mode = "host"


class AllToAll(Way):
    """Exact sizes, the usual way: counts are exchanged and read by the host, then rows go out and back. A token goes once to a rank."""

    name, captured = "a2a_eager", False

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        bank, (T, D), K = self.bank, x_TD.shape, ids_TK.shape[1]
        dest_TK = bank.owner_E[ids_TK]
        goes_RT = (dest_TK[None] == torch.arange(bank.ranks, device=x_TD.device)[:, None, None]).any(-1)
        rank_N, token_N = goes_RT.nonzero(as_tuple=True)
        out_R = goes_RT.sum(1)
        in_R = torch.empty_like(out_R)
        dist.all_to_all_single(in_R, out_R, group=bank.group.process_group)
        outs, ins = torch.stack([out_R, in_R]).tolist()
        number_NK = ids_TK[token_N] - bank.first_R[rank_N][:, None]
        # One message a row: a collective less than rows, ids and weights apart.
        sent = torch.cat([part.contiguous().view(torch.uint8) for part in (x_TD[token_N], number_NK, weights_TK[token_N])], 1)
        got = sent.new_empty(sum(ins), sent.shape[1])
        dist.all_to_all_single(got, sent, ins, outs, group=bank.group.process_group)
        y_MD = self.experts(n, *unpacked(got, x_TD.dtype, 1, D, K))
        back_ND = y_MD.new_empty(len(token_N), D)
        dist.all_to_all_single(back_ND, y_MD, outs, ins, group=bank.group.process_group)
        return torch.zeros(T, D, dtype=torch.float32, device=x_TD.device).index_add_(0, token_N, back_ND.float()).to(x_TD.dtype)


class AllToAllPadded(Way):
    """Static sizes: every token's row to every rank, with the ids that it serves; no host in between."""

    name = "a2a_padded"

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        bank, (T, D), K, R = self.bank, x_TD.shape, ids_TK.shape[1], self.bank.ranks
        ids_RTK = ids_TK - bank.first_R[:, None, None]
        parts = (x_TD.expand(R, T, D), ids_RTK, weights_TK.expand(R, T, K))
        sent = torch.cat([p.contiguous().view(torch.uint8).view(R, -1) for p in parts], 1)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=bank.group.process_group)
        y_ND = self.experts(n, *unpacked(got, x_TD.dtype, T, D, K))
        back = torch.empty_like(y_ND)
        dist.all_to_all_single(back, y_ND, group=bank.group.process_group)
        there_RT1 = ((ids_RTK >= 0) & (ids_RTK < bank.count_R[:, None, None])).any(-1, keepdim=True)
        return torch.where(there_RT1, back.view(R, T, D), 0).sum(0, dtype=torch.float32).to(x_TD.dtype)


class AllGather(Way):
    """Every rank gets every token, computes its experts, and sums are scattered back. Rows, ids and weights in one launch of NCCL."""

    name = "ag_rs"

    def __init__(self, bank: Bank, tokens: int, experts: LayerExperts) -> None:
        super().__init__(bank, tokens, experts)
        self._first = int(bank.first_R[bank.rank])

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        # As bytes: tensors that share a launch must have one type.
        parts = [p.contiguous().view(torch.uint8) for p in (x_TD, ids_TK, weights_TK)]
        every = [p.new_empty(self.bank.ranks * len(p), p.shape[1]) for p in parts]
        group = self.bank.group.process_group
        if x_TD.device.type == "cuda":
            with dist._coalescing_manager(group=group):
                for whole, part in zip(every, parts, strict=True):
                    dist.all_gather_into_tensor(whole, part, group=group)
        else:
            for whole, part in zip(every, parts, strict=True):
                dist.all_gather_into_tensor(whole, part, group=group)
        return self._serve(n, x_TD, *(p.view(t.dtype) for p, t in zip(every, (x_TD, ids_TK, weights_TK), strict=True)))

    def _serve(self, n: int, x_TD: torch.Tensor, x_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        # What others serve falls outside, and is masked.
        y_ND = x_ND if self.experts is nothing else self.experts(n, x_ND, ids_NK - self._first, weights_NK)
        out = torch.empty_like(x_TD)
        dist.reduce_scatter_tensor(out, y_ND, group=self.bank.group.process_group)
        return out


class AllGatherPacked(AllGather):
    """The same with one message for rows, ids and weights."""

    name = "ag_rs_packed"

    def __call__(self, n: int, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        (T, D), K, R = x_TD.shape, ids_TK.shape[1], self.bank.ranks
        sent = torch.cat([p.contiguous().view(torch.uint8).view(-1) for p in (x_TD, ids_TK, weights_TK)])
        got = sent.new_empty(R * len(sent))
        dist.all_gather_into_tensor(got, sent, group=self.bank.group.process_group)
        return self._serve(n, x_TD, *unpacked(got.view(R, -1), x_TD.dtype, T, D, K))


WAYS: tuple[type[Way], ...] = (OneSided, InPlace, AllGather, AllGatherPacked, AllToAllPadded, AllToAll, Host)
MakeWays = Callable[[Bank, int], list[Any]]
