"""Fixtures every test gets: fixed seeds, poisoned memory, no network; and the switch for long tests."""
from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels run under its interpreter. It is chosen when a kernel is defined, so here, before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# A shared two-core machine makes any deadline a coin toss; the same examples in every run make a red test a fact.
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the long tests too")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.getoption("--nightly") else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nightly") and not config.getoption("--nightly"):
            item.add_marker(pytest.mark.skip(reason="long: needs --nightly"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of third-party traces and texts beside the checkout; they are not part of the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("third-party data (../shared/data beside the checkout) is absent")
    return folder


@pytest.fixture(scope="session")
def smolmoe() -> tuple[Any, Any]:
    """(model in float32, tokenizer) of SmolMoE, shared: leave it as you found it. Mark the test `model`."""
    from moe_prefetch.integrations import smolmoe

    return smolmoe.load(progress=False)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this machine may be talked to."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address[0]}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what a forgotten write would show: NaN, or bytes 0xCD in integers."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    size = tensor.element_size()
    signed = torch.iinfo(tensor.dtype).min < 0
    return tensor.fill_(int.from_bytes(b"\xcd" * size, "little", signed=signed))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin, called from the library, return poison instead of whatever lay there."""

    def poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return poison(tensor) if caller.partition(".")[0] == "moe_prefetch" else tensor

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
