"""Mode gather on GPUs, of which there need be one: `benchmarks/dispatch_gpu.py` in short. And what a rank must have to share its memory."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_prefetch.distributed import symmetric
from moe_prefetch.distributed.groups import Group
from moe_prefetch.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", [["streams,correct", "--ranks", "2,3", "--count", "5"],
                                  ["streams,correct", "--ranks", "2", "--count", "2", "--planes"],
                                  ["streams,replays", "--ranks", "2", "--replays", "300", "--seconds", "20"],
                                  ["faults", "--ranks", "3", "--trials", "1"]], ids=["correct", "planes", "replays", "faults"])
def test_on_gpus(what):
    done = subprocess.run([sys.executable, "-W", "ignore", ROOT / "benchmarks" / "dispatch_gpu.py", "--what", *what], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "right" in done.stdout and "WRONG" not in done.stdout, done.stdout + done.stderr[-2000:]


class Told(Group):
    """A group whose ranks have these GPUs."""

    def __init__(self, gpus: str) -> None:
        super().__init__("ep", range(len(gpus)), 0)
        self.gpus = gpus

    def gather(self, word: bytes, deadline: float = 0.0) -> list[bytes]:
        return [g.encode() for g in self.gpus]


def test_ranks_on_one_gpu_are_refused_by_name_unless_it_is_meant(monkeypatch):
    monkeypatch.delenv(symmetric.SHARED_GPU, raising=False)
    symmetric._own_gpu(Told("abc"), (0, 1, 2), "a", 1.0)
    # Another host's GPUs are others, whatever their names.
    symmetric._own_gpu(Told("aba"), (0, 1), "a", 1.0)
    with pytest.raises(ConfigError, match="ranks 0, 2 share a GPU") as e:
        symmetric._own_gpu(Told("aba"), (0, 1, 2), "a", 1.0)
    assert symmetric.SHARED_GPU in str(e.value)
    monkeypatch.setenv(symmetric.SHARED_GPU, "1")
    symmetric._own_gpu(Told("aba"), (0, 1, 2), "a", 1.0)
