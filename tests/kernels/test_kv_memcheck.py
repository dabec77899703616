"""`benchmarks/kv_memcheck.py` launches every kernel of the KV cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_prefetch.kernels.kv_encode import fused

CODE = """
import json, sys
sys.path.insert(0, "benchmarks")
import kv_memcheck
from moe_prefetch.kernels.kv_attend import fused_latent
from triton.runtime.jit import JITFunction

kv_memcheck.DEVICE, seen = "cpu", set()
kv_memcheck.fused.fused_pages.programs_on = fused_latent.programs_on = lambda device: 500
JITFunction.run = lambda self, *args, **kwargs: seen.add(kv_memcheck.name_of(self))
for case in kv_memcheck.cases().values():
    try:
        case()
    except AssertionError:
        # nothing ran, so that nothing was counted or written
        pass
missing = sorted(kv_memcheck.expected() - seen)
print(json.dumps([len(seen) > 15, missing, sorted(seen - kv_memcheck.expected())]))
"""


@pytest.mark.skipif(not fused.GLUON, reason="this version of Triton has no kernel in Gluon")
def test_every_kernel_is_launched_by_a_case() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[true, [], []]"
