"""The KV wing: formats, outlier channels, pages, codec, attention and the quality gate.

Public names are imported on first use, so that the pure files need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .format import FORMATS, KVFormat, PageLayout, format_of, layout_for
    from .sketch import SparseFP4, dynamic_fp4_kv_dequantize, dynamic_fp4_kv_quantize

__all__ = [
    "FORMATS",
    "KVFormat",
    "PageLayout",
    "SparseFP4",
    "dynamic_fp4_kv_dequantize",
    "dynamic_fp4_kv_quantize",
    "format_of",
    "layout_for",
]

_HOME = {
    "FORMATS": "format",
    "KVFormat": "format",
    "PageLayout": "format",
    "format_of": "format",
    "layout_for": "format",
    "SparseFP4": "sketch",
    "dynamic_fp4_kv_dequantize": "sketch",
    "dynamic_fp4_kv_quantize": "sketch",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
