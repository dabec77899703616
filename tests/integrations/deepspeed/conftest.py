"""DeepSpeed on this machine's processors, where there is no GPU."""
from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        for item in items:
            if "integrations/deepspeed" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs DeepSpeed"))
