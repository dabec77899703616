"""What the expert tests share: forward passes, a picture of a model's state, and a runtime that fails on request."""
from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from moe_prefetch.integrations import transformers as integration
from moe_prefetch.runtime import Runtime
from tests.tiny import tiny

DISK = {"experts": {"home": "disk", "resident": 2, "threads": 2}}


def small(family: str = "qwen2_moe", **change: Any) -> Any:
    """tiny-moe, smaller still: 2 layers of 4 experts; for loops over every call of something."""
    return tiny(family, **{"layers": 2, "experts": 4, "hidden": 32, "expert_width": 16, "query_heads": 2, "kv_heads": 1, "vocabulary": 64,
                           **change})


def logits_of(model: Any, ids_BS: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Logits of a prompt and of greedy decode steps, concatenated."""
    out, cache, inputs = [], None, ids_BS
    with torch.no_grad():
        for _ in range(steps):
            result = model(inputs, past_key_values=cache, use_cache=True)
            out.append(result.logits)
            cache, inputs = result.past_key_values, result.logits[:, -1:].argmax(-1)
    return torch.cat(out, 1)


def prompt(batch: int = 1, length: int = 7, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(5))


def picture(model: Any) -> dict[str, Any]:
    """Everything that a session must leave as it was: parameters (identity, place, bits), hooks, configuration."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
             "_forward_pre_hooks_with_kwargs",
             "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return {
        "parameters": [(n, id(p), p.requires_grad, p.dtype, p.device, tuple(p.shape), p.stride(), p.is_inference(),
                        p.detach().contiguous().view(torch.uint8).numpy().tobytes()) for n,
                        p in model.named_parameters(remove_duplicate=False)],
        "hooks": [(n, h, len(getattr(m, h))) for n, m in model.named_modules() for h in hooks],
        "modules": [(n, id(m), sorted(m.__dict__)) for n, m in model.named_modules()],
        "config": (model.config.to_json_string(use_diff=False), model.config._experts_implementation),
        "configs": [id(m.config) for m in model.modules() if hasattr(m, "config")],
        "served": len(integration._SERVED),
    }


def movers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("moe-prefetch")]


def open_files() -> set[str]:
    """Record files that this process holds open."""
    out = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "records-" in name:
            out.add(name)
    return out


def settled(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` holds within `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if condition():
            return True
        time.sleep(0.002)
    return condition()


class FaultyRuntime(Runtime):
    """Counts calls per door and, for the doors in `fail`, raises at call N (1-based) or from it on."""

    def __init__(self, door: str = "", nth: int = 0, error: Callable[[], BaseException] = lambda: OSError(5, "Input/output error"), *,
                 ever_after: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.door, self.nth, self.error, self.ever_after = door, nth, error, ever_after
        self.armed = True
        self._count = threading.Lock()

    def _knock(self, door: str) -> None:
        with self._count:
            self.calls[door] += 1
            n = self.calls[door]
        if self.armed and door == self.door and (n == self.nth or (self.ever_after and n > self.nth)):
            raise self.error()

    def allocate(self, nbytes):
        self._knock("allocate")
        return super().allocate(nbytes)

    def start_thread(self, target, name):
        self._knock("start_thread")
        return super().start_thread(target, name)

    def open_read(self, path):
        self._knock("open_read")
        return super().open_read(path)

    def pread_into(self, fd, buffer, offset, where):
        self._knock("pread_into")
        super().pread_into(fd, buffer, offset, where)

    def write(self, fd, data):
        self._knock("write")
        super().write(fd, data)

    def fsync(self, fd):
        self._knock("fsync")
        super().fsync(fd)

    def replace(self, src, dst):
        self._knock("replace")
        super().replace(src, dst)


class GateRuntime(Runtime):
    """Reads stop at a gate: `shut()` holds every read from now on, `open()` lets them go on."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        self._gate.set()
        self.waiting = 0

    def shut(self) -> None:
        self._gate.clear()

    def open(self) -> None:
        self._gate.set()

    def pread_into(self, fd, buffer, offset, where):
        if not self._gate.is_set():
            self.waiting += 1
            self._gate.wait(20)
        super().pread_into(fd, buffer, offset, where)
