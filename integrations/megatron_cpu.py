"""Megatron-core on a machine without a GPU: for tests, and for trying an example before it is sent to a cluster.

Megatron-core takes a CUDA device for granted. `install` answers its questions for this process as a CPU would: device arguments become
"cpu", streams and events become empty, collectives go through gloo. It changes torch for the whole process, once, and only where no GPU is.
"""
from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moe_prefetch.errors import SessionError

_CPU = torch.device("cpu")


class _Nothing:
    """A stream or an event: everything has happened already."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _none(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_event = wait_stream = _none

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Nothing()

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None: ...


def _here(value: Any) -> Any:
    """A CUDA device as the CPU; everything else as it is. An integer is no device: it may be a size."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and value.startswith("cuda") else value


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_here(a) for a in args)
        out = func(*args, **kwargs)
        # Clipping and the optimiser ask for the type by this name.
        return out.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(out, str) else out


_MODE: list[_OnCPU] = []


def install() -> None:
    """Make `megatron.core` run on the CPU in this process. Call it before the model is built; a second call does nothing. Raises
    SessionError where a GPU is: there Megatron-core runs as it is."""
    if torch.cuda.is_available():
        raise SessionError("this machine has a GPU", where="megatron_cpu.install", do="leave the call out")
    if _MODE:
        return
    # Megatron compiles small functions; a compiler that reads the names replaced below loses its way.
    torch.compiler.set_stance("force_eager")
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    cuda.device_count = lambda: 1
    cuda.Stream = cuda.Event = _Nothing  # type: ignore[misc, assignment]
    # A function of its own for every name: the compiler keeps a table of functions, each under one name.
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *a, **k: _Nothing())
    cuda.stream = lambda *a, **k: contextlib.nullcontext()  # type: ignore[assignment]
    for where, names in ((cuda, ("synchronize", "set_device", "set_stream")), (cuda.nvtx, ("range_push", "range_pop"))):
        for name in names:
            setattr(where, name, lambda *a, **k: None)
    get_state, set_state = lambda *a, **k: torch.get_rng_state(), lambda state, *a, **k: torch.set_rng_state(state)
    cuda.get_rng_state = cuda.random.get_rng_state = get_state  # type: ignore[assignment]
    cuda.set_rng_state = cuda.random.set_rng_state = set_state  # type: ignore[assignment]
    cuda.get_device_properties = lambda *a, **k: type("Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 1})()
    cuda.get_device_capability = lambda *a, **k: (9, 0)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    _MODE.append(_OnCPU())
    _MODE[0].__enter__()
    _patch_megatron()


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Names that are used without Transformer Engine but defined only with it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = type("Off", (), {"is_fp8_enabled": staticmethod(lambda: False)})
        random.activation_recompute_forward = random.fp8_autocast = lambda *a, **k: contextlib.nullcontext()
    moved = moe_utils.maybe_move_tensor_to_cpu

    def counts(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # On a GPU the move itself turns split sizes into numbers; here nothing moves.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else moved(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = counts


def seed(value: int) -> None:
    """The random streams of tensor, pipeline and expert ranks, as `model_parallel_cuda_manual_seed` makes them on GPUs."""
    from megatron.core.tensor_parallel import random as streams

    torch.manual_seed(value)
    streams.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
