"""Modules that are not called while something serves in their place: what a call of them would do beside their class's `forward`, at first
and later."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import contains, is_

from torch import nn
from torch.nn.modules import module as every


def beside(root: nn.Module) -> str:
    """What a call of a module, or of one within it, does beside its class's `forward`, for a sentence; empty: nothing. Hooks that only
    look count: they would not be called."""
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return "every module has hooks"
    for path, module in root.named_modules():
        whose = f"its {path}" if path else "it"
        # Of accelerate, which also replaces `forward`.
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return f"{whose} has hooks"
        if "forward" in vars(module):
            return f"{whose} has a forward of its own, set on the instance"
    return ""


class Watch:
    """Asked at each step, so without a walk over modules: has anything of this come to `roots` since?"""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = [m for root in roots for m in root.modules()]
        self._hooks = [every._global_forward_hooks, every._global_forward_pre_hooks]
        self._hooks += [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        # One that is there by now is the server's own.
        self._own = [vars(m) for m in modules if "forward" not in vars(m)]
        children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self._parents, self._names, self._children = ([c[i] for c in children] for i in range(3))

    def unchanged(self) -> bool:
        return not any(self._hooks) and not any(map(contains, self._own, repeat("forward"))) and all(
            map(is_, map(dict.get, self._parents, self._names), self._children))
