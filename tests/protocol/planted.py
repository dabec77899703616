"""The library's own kernels with a delay put in or one thing changed: their text, changed where it must be found exactly once.

The library has no switch for any of this. A change that no longer applies is an error, so the planted violations follow the kernels.
"""
from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from moe_prefetch.kernels import move, plan, settle

Change = tuple[str, str, str]  # kernel, text, what stands there instead
FOLDERS = {"plan": plan, "move": move, "settle": settle}
# Records of these tests are small: they still have pieces.
SMALL: Change = ("move", "PIECE, TILE, WARPS = 512 << 10, 64 << 10, 16", "PIECE, TILE, WARPS = 4 << 10, 2 << 10, 4")
_made: dict[tuple[Change, ...], ModuleType] = {}


def text_of(kernel: str, changes: tuple[Change, ...]) -> str:
    """Raises ValueError: a text is not there, or more than once."""
    text = (Path(FOLDERS[kernel].__path__[0]) / "fused.py").read_text()
    for where, old, new in changes:
        if where == kernel:
            if text.count(old) != 1:
                raise ValueError(f"{text.count(old)} times in {kernel}: {old!r}")
            text = text.replace(old, new)
    head, mark, rest = text.partition("from ..protocol import")
    return f"{head}from tests.protocol.delays import hold, maybe  # noqa: F401\n{mark}{rest}"


def module(kernel: str, changes: tuple[Change, ...]) -> ModuleType:
    """`moe_prefetch.kernels.<kernel>.fused` with the changes that are meant for it."""
    mine = tuple(c for c in changes if c[0] == kernel)
    key = (*mine, (kernel, "", ""))
    if key not in _made:
        # Triton reads a kernel's text from its file.
        file = Path(tempfile.mkdtemp(prefix="planted-")) / "fused.py"
        file.write_text(text_of(kernel, mine))
        spec = importlib.util.spec_from_file_location(f"{FOLDERS[kernel].__name__}.planted{len(_made)}", file)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made
        spec.loader.exec_module(made)
        _made[key] = made
    return _made[key]
