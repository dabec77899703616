"""The test fixtures do what they say; each case here was red with the fixture switched off."""
from __future__ import annotations

import socket
import types

import pytest
import torch

SOURCE = """
import torch
def make(dtype):
    base = torch.zeros(2, dtype=dtype)
    return [torch.empty(3, dtype=dtype), torch.empty_like(base), torch.empty_strided((2,), (1,), dtype=dtype),
            base.new_empty(2), base.new_empty_strided((2,), (1,))]
"""


def library_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(SOURCE, module.__dict__)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_born_in_the_library_are_nan(dtype: torch.dtype) -> None:
    for tensor in library_module("moe_prefetch.planted").make(dtype):
        assert tensor.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_born_in_the_library_are_0xcd(dtype: torch.dtype) -> None:
    for tensor in library_module("moe_prefetch.planted").make(dtype):
        assert (tensor.view(torch.uint8) == 0xCD).all()


def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ask for the block that was just freed: the allocator hands the same bytes out again often enough to see that nobody filled them.
    seen_other = False
    for _ in range(50):
        torch.zeros(3)
        seen_other |= not torch.empty(3).isnan().any()
    assert seen_other


def test_meta_tensors_and_empty_ones_pass() -> None:
    module = types.ModuleType("moe_prefetch.planted")
    exec("import torch\ndef make(): return torch.empty(4, device='meta'), torch.empty(0)", module.__dict__)
    on_meta, of_nothing = module.make()
    assert on_meta.is_meta
    assert of_nothing.numel() == 0


def test_the_network_is_closed() -> None:
    with socket.socket() as s, pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        s.connect(("192.0.2.1", 80))
