"""Modules that are not called while something serves in their place: what a call of them would do beside their class's `forward`, at first
and later."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import contains, is_
from types import MethodType

import torch
from torch import nn
from torch.nn.modules import module as every

from moe_prefetch.errors import SessionError

log = logging.getLogger(__name__)


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


class Still:
    """While weights of `root` are on `meta`: whoever moves or empties `root`, or a part that holds some of them, is refused before anything
    is touched. What changes nothing passes, and a dtype is taken on. `home`: the device where those weights belong."""

    def __init__(self, root: nn.Module, home: torch.device) -> None:
        def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            like = torch.empty(1, dtype=next((p.dtype for p in module.parameters() if p.is_meta), None), device=home)
            to = fn(like)
            if to is not like and (to.dtype == like.dtype or to.device != home):
                raise SessionError("the experts of an attached model are not in memory", where=type(module).__name__,
                                   do="detach before you move or empty its weights")
            return type(module)._apply(module, lambda t: t.to(to.dtype) if t.is_meta else fn(t), recurse)

        self._held = [m for m in root.modules() if any(p.is_meta for p in m.parameters())]
        for m in self._held:
            # Bound to the module, so that a copy's is bound to the copy.
            m._apply = MethodType(apply, m)

    def remove(self) -> None:
        for m in self._held:
            vars(m).pop("_apply", None)


def set_meanwhile(model: nn.Module, name: str, now: nn.Parameter, own: nn.Parameter) -> bool:
    """Whether somebody set a parameter while its stand-in was on `meta`, which is logged. A module that layers share has its own back
    when it is asked again."""
    found = not now.is_meta and now is not own
    if found:
        log.warning("%s was set while %s was attached; what it was before comes back", name, type(model).__name__)
    return found


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
