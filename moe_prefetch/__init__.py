"""moe_prefetch: Mixture-of-Experts inference without waiting for experts or for the KV cache.

    with moe_prefetch.attach(model, "config.yaml") as session:
        model.generate(**inputs)

Nothing heavy is imported until it is used, so that `moe-prefetch env` works where torch does not.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .errors import MoEPrefetchError
    from .session import Session, attach

__version__ = "0.1.0"
__all__ = ["Config", "MoEPrefetchError", "Session", "attach"]

# Imported from a checkout's folder, which goes before what is installed: `integrations` and `model_configs` lie beside the package there.
if not Path(__file__).with_name("integrations").exists():
    __path__.append(str(Path(__file__).parents[1]))

_HOME = {"attach": "session", "Session": "session", "Config": "config", "MoEPrefetchError": "errors"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
