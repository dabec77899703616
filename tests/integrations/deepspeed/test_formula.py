"""Experts of `deepspeed.moe` are served as what they compute, or refused by name: whatever an expert does beyond the formula."""
from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from moe_prefetch.config import load
from moe_prefetch.errors import SessionError, UnsupportedModelError
from moe_prefetch.integrations.deepspeed_models import AutoEPModel, MoEModel
from moe_prefetch.runtime import REAL
from moe_prefetch.session import Session
from tests.integrations.deepspeed.serving import HALF, picture_of

pytestmark = pytest.mark.framework

HIDDEN, WIDTH, EXPERTS = 16, 24, 4


class Expert(nn.Module):
    def __init__(self, act=F.silu, bias=False):
        super().__init__()
        self.act = act
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=bias), nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Net(nn.Module):
    """Two MoE layers' experts, called as DeepSpeed's dispatch calls them; without its groups, and without a router's choice."""

    def __init__(self, expert=None):
        super().__init__()
        torch.manual_seed(0)
        self.moes = nn.ModuleList([MoE(HIDDEN, expert or Expert(), num_experts=EXPERTS, k=2) for _ in range(2)])

    def forward(self, x):
        for moe in self.moes:
            x = x + moe.deepspeed_moe.experts(x)
        return x


def one_of(net):
    return net.moes[1].deepspeed_moe.experts.deepspeed_experts[2]


def rows(scale=3.0):
    return scale * torch.randn(1, EXPERTS, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def attach(net, **section):
    return Session(MoEModel(net), load(section), None, None, REAL, None)


# served ------------------------------------------------------------------------------------------------------------------
class Tuple(Expert):
    def forward(self, x):
        return super().forward(x), None


class OwnShape(Expert):
    def forward(self, x):
        return super().forward(x.view(-1, HIDDEN)).view(x.shape)


class Single(Expert):
    """Insists on FP32, before its matrices."""

    def forward(self, x):
        return super().forward(x.float())


class Upcast(Expert):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x).float()).to(x.dtype) * self.up_proj(x))


class Dropping(Expert):
    def forward(self, x):
        return self.down_proj(F.dropout(F.silu(self.gate_proj(x)), 0.5, self.training) * self.up_proj(x))


SERVED = {
    "silu": Expert(), "gelu": Expert(F.gelu), "tanh-GELU": Expert(lambda x: F.gelu(x, approximate="tanh")), "relu": Expert(F.relu),
    "module": Expert(nn.GELU(approximate="tanh")), "written out": Expert(lambda x: x * torch.sigmoid(x)), "tuple": Tuple(),
    "its own shape": OwnShape(), "FP32 alone": Single(), "FP32 within": Upcast(), "dropout": Dropping(),
    "a clamp that never acts": Expert(lambda x: F.relu(x.clamp(min=-7))),
}


@pytest.mark.parametrize("name", SERVED)
def test_served_experts_are_within_rounding_of_stock(name):
    net = Net(SERVED[name]).eval()
    x = rows()
    with torch.no_grad():
        want, before, drawn = net(x), picture_of(net), torch.get_rng_state()
        for section in ({}, HALF):
            session = attach(net, **section)
            assert torch.equal(torch.get_rng_state(), drawn)
            got = net(x)
            session.detach()
            # Far below what tells one activation from another (1e-4).
            assert float((got - want).abs().max() / want.abs().max()) < 2e-6
            assert picture_of(net) == before and torch.equal(net(x), want)


def test_layers_may_have_different_activations():
    net = Net().eval()
    for expert in net.moes[1].deepspeed_moe.experts.deepspeed_experts:
        expert.act = F.relu
    with torch.no_grad():
        want = net(rows())
        session = attach(net, **HALF)
        assert torch.allclose(net(rows()), want, rtol=1e-5, atol=1e-5)
        session.detach()


# refused -----------------------------------------------------------------------------------------------------------------
class Adapter(nn.Module):
    """As a LoRA library wraps a projection."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Linear8(nn.Linear):
    pass


class Coded(torch.Tensor):
    pass


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Mixing(Expert):
    def forward(self, x):
        return super().forward(x) - super().forward(x).mean(-2, keepdim=True)


class Residual(Expert):
    def forward(self, x):
        return x + super().forward(x)


class ClampedUp(Expert):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x).clamp(-100, 100))


class Noisy(Expert):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class Cached(Expert):
    """Computes with a copy of its weights."""

    def __init__(self):
        super().__init__()
        self.copy = self.gate_proj.weight.detach().clone()

    def forward(self, x):
        return self.down_proj(F.silu(F.linear(x, self.copy.to(x.dtype))) * self.up_proj(x))


class Failing(Expert):
    def forward(self, x):
        raise ValueError("only with its tokenizer")


def as_class(kind):
    """One expert becomes another class's, its modules staying as they are."""
    return lambda e: setattr(e, "__class__", kind)


def own_forward(module):
    was = module.forward
    module.forward = lambda x: was(x) * 2


def coded(e):
    e.up_proj.weight = nn.Parameter(e.up_proj.weight.data.as_subclass(Coded))


def hook_on(act, e):
    e.act = act
    act.register_forward_hook(lambda m, a, o: o)


REFUSED = {
    "gate clamped at 7": (lambda e: setattr(e, "act", lambda x: F.silu(x.clamp(max=7))), "silu, the nearest, is off"),
    "gate clamped at 100,000": (lambda e: setattr(e, "act", lambda x: F.silu(x.clamp(max=1e5))), "silu, the nearest"),
    "up clamped": (as_class(ClampedUp), "silu, the nearest"),
    "quick GELU": (lambda e: setattr(e, "act", lambda x: x * torch.sigmoid(1.702 * x)), "gelu, the nearest"),
    "squared relu": (lambda e: setattr(e, "act", lambda x: F.relu(x) ** 2), "something else"),
    "no activation": (lambda e: setattr(e, "act", lambda x: x), "something else"),
    "a NaN": (lambda e: setattr(e, "act", lambda x: F.silu(x) * float("nan")), "something else"),
    "another activation than the others": (lambda e: setattr(e, "act", F.relu), "expert 2 has relu, expert 0 silu"),
    "almost the others' activation": (lambda e: setattr(e, "act", nn.GELU()), "expert 2 has gelu"),
    "tokens that mix": (as_class(Mixing), "something else"),
    "a residual": (as_class(Residual), "something else"),
    "noise": (as_class(Noisy), "something else"),
    "another expert's forward": (lambda e: setattr(e, "forward", Expert().forward), "forward of its own"),
    "an error": (as_class(Failing), "can't be run alone: ValueError: only with its tokenizer"),
    "hook": (lambda e: e.register_forward_hook(lambda m, a, o: o * 2), "it has hooks"),
    "hook that only looks": (lambda e: e.register_forward_pre_hook(lambda m, a: None), "it has hooks"),
    "hook on a projection": (lambda e: e.down_proj.register_forward_hook(lambda m, a, o: o * 2), "its down_proj has hooks"),
    "hook on its activation": (lambda e: hook_on(nn.SiLU(), e), "its act has hooks"),
    "adapter": (lambda e: setattr(e, "gate_proj", Adapter(e.gate_proj)), "its gate_proj is a Adapter"),
    "subclass of Linear": (lambda e: setattr(e.up_proj, "__class__", Linear8), "its up_proj is a Linear8"),
    "quantised weight": (coded, "weight of its up_proj is no plain parameter"),
    "parametrization": (lambda e: parametrize.register_parametrization(e.down_proj, "weight", Halved()), "ParametrizedLinear"),
    "weight norm": (lambda e: parametrizations.weight_norm(e.down_proj), "ParametrizedLinear"),
    "weight norm of old": (lambda e: weight_norm(e.down_proj), "weight of its down_proj|other parameters"),
    "pruned": (lambda e: prune.l1_unstructured(e.down_proj, "weight", 0.5), "weight of its down_proj|other parameters"),
    "bias": (lambda e: setattr(e.up_proj, "bias", nn.Parameter(torch.ones(WIDTH))), "other parameters: up_proj.bias"),
    "a parameter more": (lambda e: setattr(e, "scale", nn.Parameter(torch.ones(1))), "other parameters: scale"),
    "forward of the instance": (own_forward, "it has a forward of its own"),
    "forward of a projection": (lambda e: own_forward(e.up_proj), "its up_proj has a forward of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_else_one_expert_does_is_refused_by_name(name):
    change, word = REFUSED[name]
    net = Net().eval()
    change(one_of(net))
    before, drawn, modes = picture_of(net), torch.get_rng_state(), [m.training for m in net.modules()]
    for section in ({}, HALF):
        with pytest.raises(UnsupportedModelError, match=word) as e:
            attach(net, **section)
        assert e.value.where.startswith("MoE layer 1")
        assert picture_of(net) == before and torch.equal(torch.get_rng_state(), drawn)
        assert [m.training for m in net.modules()] == modes


def test_weights_that_are_not_what_is_computed_with():
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        attach(Net(Cached()))


def test_what_every_module_has(monkeypatch):
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: None)
    try:
        with pytest.raises(UnsupportedModelError, match="every module has hooks"):
            attach(Net())
    finally:
        handle.remove()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 2)
    with pytest.raises(UnsupportedModelError, match=r"nn\.Linear\.forward is not torch's own"):
        attach(Net())


class MyExperts(Experts):
    pass


@pytest.mark.parametrize("change", [own_forward, as_class(MyExperts)], ids=["instance", "subclass"])
def test_experts_modules_that_are_not_deepspeeds_own(change):
    net = Net()
    change(net.moes[1].deepspeed_moe.experts)
    with pytest.raises(UnsupportedModelError, match="with a forward that is not DeepSpeed's own") as e:
        attach(net, **HALF)
    assert e.value.where == "MoE layer 1"


def test_an_experts_class_that_was_patched(monkeypatch):
    monkeypatch.setattr(Experts, "forward", lambda self, x: x)
    with pytest.raises(UnsupportedModelError, match="not DeepSpeed's own"):
        attach(Net())


AUTOEP = {
    "instance": (own_forward, "a forward that is not DeepSpeed's own"),
    "parametrization": (lambda own: parametrize.register_parametrization(own, "w1", Halved()), "ParametrizedGroupedExperts with a forward"),
    "a parameter more": (lambda own: setattr(own, "scale", nn.Parameter(torch.ones(1))), "parameters w1, w2, w3, scale"),
    "quantised": (lambda own: setattr(own, "w3", nn.Parameter(own.w3.data.as_subclass(Coded))), "not plain ones"),
}


@pytest.mark.parametrize("name", AUTOEP)
def test_autoeps_experts_that_are_not_plain(name):
    host = object.__new__(AutoEPModel)
    host._experts = [GroupedExperts(HIDDEN, WIDTH, 2, use_grouped_mm=False) for _ in range(2)]
    host.check_experts()
    change, word = AUTOEP[name]
    change(host._experts[1])
    with pytest.raises(UnsupportedModelError, match=word) as e:
        host.check_experts()
    assert e.value.where == "MoE layer 1"


# while served ------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def hooked(module):
    handle = module.register_forward_hook(lambda m, a, o: o * 2)
    yield
    handle.remove()


@contextlib.contextmanager
def wrapped(expert):
    own = expert.gate_proj
    expert.gate_proj = Adapter(own)
    yield
    expert.gate_proj = own


@contextlib.contextmanager
def replaced(module):
    module.forward = lambda x: x
    yield
    del module.forward


LATER = {
    "a hook": (hooked, "it has hooks"), "a hook on a projection": (lambda e: hooked(e.up_proj), "its up_proj has hooks"),
    "an adapter": (wrapped, "its gate_proj is a Adapter"), "a forward": (replaced, "it has a forward of its own"),
    "a projection's forward": (lambda e: replaced(e.down_proj), "its down_proj has a forward"),
}


@pytest.mark.parametrize("section", [{}, HALF], ids=["local", "disk"])
def test_what_comes_to_an_expert_later_is_said_at_the_next_step(section):
    net = Net().eval()
    with torch.no_grad():
        session = attach(net, **section)
        want = net(rows())
        for change, word in LATER.values():
            with change(one_of(net)), pytest.raises(SessionError, match=word) as e:
                net(rows())
            assert e.value.where == "MoE layer 1, expert 2"
            assert torch.equal(net(rows()), want)
        handle = nn.modules.module.register_module_forward_pre_hook(lambda m, a: None)
        try:
            with pytest.raises(SessionError, match="every module has hooks since"):
                net(rows())
        finally:
            handle.remove()
        session.detach()


def test_experts_that_drop_in_training_are_served_in_evaluation_only():
    steady, dropping = Net(), Net(Dropping())
    for net in (steady, dropping):
        net.train()
        session = attach(net, **HALF)
        with torch.no_grad():
            if net is dropping:
                with pytest.raises(SessionError, match="something else in training"):
                    net(rows())
            else:
                net(rows())
            net.eval()
            net(rows())
        session.detach()
        # What was set while stand-ins were there holds for what comes back.
        assert not any(m.training for m in net.modules())
