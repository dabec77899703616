"""A decode step of MoE layers over `DeviceExperts`, beside one whose experts are all in this memory; drawn anew on the device each time.

Forecasts are perfect, random, nothing or the opposite of what comes, by turns or as said. All is enqueued, so a GPU captures it whole.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_prefetch.experts.device import HORIZON, DeviceExperts
from moe_prefetch.experts.homes import Home, LocalHome, MemoryStore
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.kernels.expert_mlp.record import Form, Piece
from moe_prefetch.runtime import REAL
from moe_prefetch.types import PROB_ONE

PERFECT, RANDOM, EMPTY, ADVERSARIAL = range(4)


class RandomSource:
    """Experts with random weights, another for each version; nothing is held."""

    def __init__(self, form: Form, layers: int, experts: int, version: int = 0) -> None:
        self.form, self.num_layers, self.num_experts, self.version = form, layers, experts, version

    def tensors(self, layer: int, expert: int) -> dict[str, Piece]:
        g = torch.Generator().manual_seed((self.version * self.num_layers + layer) * self.num_experts + expert)
        return {name: (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(getattr(torch, dtype))
                for name, (dtype, shape) in self.form.shapes().items()}

    def held_bytes(self, layer: int) -> int:
        return 0

    def forget(self, layer: int) -> None:
        pass

    def recall(self, layer: int, unpack: Callable[[int, Mapping[str, Piece]], None]) -> None:
        pass


class CopySource(RandomSource):
    """The experts of another store, from its records."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store.form, store.num_layers, store.num_experts)
        self._store = store

    def tensors(self, layer: int, expert: int) -> dict[str, Piece]:
        return {n: v for n, v in self._store.layout.views(self._store.buffer(layer, expert)).items() if n in self.form.shapes()}


class Traffic:
    """What routers choose and what is said of it before. `asked` counts distinct experts of all layers and steps."""

    def __init__(self, experts: DeviceExperts, device: str, hidden: int, tokens: int, top_k: int, mode: int | None) -> None:
        self.device_experts, self.device, self.top_k, self.mode = experts, device, top_k, mode
        layers, experts_ = experts.tables.where_LE.shape
        self.layers, self.num_experts = layers, experts_
        self.logits = torch.zeros(layers, tokens, experts_, device=device)
        self.next_ids = torch.zeros(layers, tokens, top_k, dtype=torch.int64, device=device)
        self.ids = torch.zeros_like(self.next_ids)
        self.weights = torch.zeros(layers, tokens, top_k, device=device)
        self.hidden = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
        self.prob, self.nearer = (torch.zeros(layers + HORIZON, experts_, dtype=torch.int32, device=device) for _ in range(2))
        self.asked = torch.zeros(1, dtype=torch.int64, device=device)

    def demanded(self, ids: torch.Tensor) -> torch.Tensor:
        """[L, E] bool."""
        return torch.zeros(self.layers, self.num_experts, device=self.device).scatter_(1, ids.flatten(1), 1.0) > 0

    def draw(self) -> None:
        """Routing of the next step, which resembles this one's, inputs of this step, and what is said of both."""
        self.ids.copy_(self.next_ids)
        self.logits.mul_(0.7).add_(torch.rand_like(self.logits))
        self.next_ids.copy_(self.logits.topk(self.top_k).indices)
        self.weights.copy_(torch.rand_like(self.weights))
        self.hidden.copy_(torch.randn_like(self.hidden, dtype=torch.float32))
        demand, coming = self.demanded(self.ids), self.demanded(self.next_ids)
        self.asked += demand.sum()
        n = min(HORIZON, self.layers)
        true = torch.cat([coming[:n], demand[n:]])
        chance = (torch.rand(2, *true.shape, device=self.device) * PROB_ONE).int()
        mode = (torch.rand(1, device=self.device) * 4).int() if self.mode is None else self.mode * torch.ones_like(self.ids[0, 0, :1])
        sure = torch.where(mode == ADVERSARIAL, ~true, true).int() * PROB_ONE
        for prob, drawn in ((self.prob, chance[0]), (self.nearer, chance[1])):
            prob[: self.layers] = torch.where(mode == RANDOM, drawn, torch.where(mode == EMPTY, -1, sure))
        # What is said of the first layers is said for the next step; of this one their nearer forecast speaks.
        self.nearer[:n] = torch.where(mode == EMPTY, -1, torch.where(mode == ADVERSARIAL, ~demand[:n], demand[:n]).int() * PROB_ONE)
        self.device_experts.next_NE.copy_(self.prob[:n])

    def forecast(self, layer: int) -> torch.Tensor:
        """[2, E]: of the next layer and the one after."""
        return torch.stack([self.nearer[layer + 1], self.prob[layer + 2]])


class Decode(Traffic):
    """`wrong` counts numbers that differ from all-resident in any bit. `ranks` share the home, each with as many of the experts."""

    def __init__(self, home: Home, device: str, *, layers: int = 26, experts: int = 16, slots: int = 6, tokens: int = 4, top_k: int = 2,
                 form: Form | None = None, mode: int | None = None, link_E: tuple[int, ...] | None = None, ranks: int = 1,
                 **more: Any) -> None:
        self.form = form or Form("bfloat16", 256, 128)
        self.source = lambda version: RandomSource(self.form, layers, experts // ranks, version * ranks + home.rank)
        self.store = MemoryStore(self.source(0), home, REAL)
        self.resident = MemoryStore(CopySource(self.store), LocalHome(device, REAL), REAL)
        self.resident_LE = torch.tensor([[self.resident.address(n, e) for e in range(experts)] for n in range(layers)], device=device)
        link_E = link_E or ((0,) * experts if ranks == 1 else None)
        behind = DeviceExperts(self.store, device, REAL, slots, link_E=link_E, **more)
        super().__init__(behind, device, self.form.hidden, tokens, top_k, mode)
        self.wrong, self.out = torch.zeros_like(self.asked), torch.zeros_like(self.hidden)

    def step(self) -> None:
        self.draw()
        x, d = self.hidden, self.device_experts
        for layer in range(self.layers):
            d.forecast(layer, self.forecast(layer))
            y = d.experts(layer, x, self.ids[layer], self.weights[layer])
            want = self.eager(layer, x)
            self.wrong += (y.view(torch.int16) != want.view(torch.int16)).sum()
            x = torch.nn.functional.rms_norm(x + y, (x.shape[1],))
        self.out.copy_(x)
        d.step_end()

    def eager(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The layer with every expert in this memory."""
        records = () if x.is_cuda else [self.resident.buffer(layer, e) for e in range(self.num_experts)]
        return expert_mlp(x, self.ids[layer], self.weights[layer], self.resident_LE[layer], self.form, records=records)

    def alone(self) -> torch.Tensor:
        """What the last step gives when all experts are in this memory, launched one by one."""
        x = self.hidden
        for layer in range(self.layers):
            x = torch.nn.functional.rms_norm(x + self.eager(layer, x), (x.shape[1],))
        return x
