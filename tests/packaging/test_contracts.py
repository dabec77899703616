"""The import contracts hold, and each of them turns red when it is broken on purpose."""
from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("moe_prefetch", "integrations", "model_configs")
NO_CACHE = shutil.ignore_patterns("__pycache__")

# (contract, file, line): each line is imported nowhere in that file today, and breaks that contract alone or with others.
VIOLATIONS = [
    ("Imports go down only", "moe_prefetch/types.py", "from moe_prefetch import session"),
    ("Imports go down only", "moe_prefetch/experts/planner.py", "import moe_prefetch.session"),
    ("Imports go down only", "moe_prefetch/kv/format.py", "import moe_prefetch.experts.slots"),
    ("Imports go down only", "moe_prefetch/unlisted.py", ""),
    ("Nobody imports an integration", "moe_prefetch/session.py", "import moe_prefetch.integrations.transformers"),
    ("Deciding code knows neither torch nor the runtime", "moe_prefetch/experts/planner.py", "import torch"),
    ("Deciding code knows neither torch nor the runtime", "moe_prefetch/kv/format.py", "def f():\n    import moe_prefetch.runtime"),
    ("Host frameworks are known to integrations only", "moe_prefetch/session.py", "def f():\n    import transformers.models"),
    ("Triton stays in the fused files of kernels", "moe_prefetch/kernels/expert_mlp/naive.py", "import triton.language"),
    ("Only checkpoint opens artefacts", "moe_prefetch/probes/probe.py", "from safetensors.torch import load_file"),
    ("No pickle, no shell, no socket", "moe_prefetch/observe/env.py", "import subprocess"),
    ("No pickle, no shell, no socket", "integrations/smolmoe.py", "import pickle"),
]


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, ROOT / "scripts/lint_imports.py", root], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_contracts_hold() -> None:
    code, said = check(ROOT)
    assert code == 0, said


@pytest.mark.parametrize(("contract", "file", "line"), VIOLATIONS)
def test_a_planted_violation_turns_its_contract_red(contract: str, file: str, line: str, tmp_path: Path) -> None:
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=NO_CACHE)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    with open(tmp_path / file, "a") as f:
        f.write(f"\n{line}\n")
    code, said = check(tmp_path)
    assert code != 0
    assert any(row.startswith(contract) and "BROKEN" in row for row in said.splitlines()), said


# Calls that run text as code, open a shell, or unpickle; imports are the contracts' business.
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    "os": {"system", "popen", "execv", "execve", "spawnv", "spawnl", "posix_spawn", "fork"}, "torch": {"load", "save"},
    "yaml": {"load", "load_all", "unsafe_load", "full_load", "UnsafeLoader", "FullLoader", "Loader"}, "numpy": {"load"}, "np": {"load"},
    "importlib": {"import_module"}, "builtins": {"eval", "exec"}}
# Why each is sound: the seam, the demo, the benchmarks and the jobs import our own and their hosts' modules by constant names, the
# trainer looks for NVIDIA's apex, packages' front doors import what their table lists; the configuration's loader is a SafeLoader; traces
# of expert ids in .npz are read with pickles refused.
ALLOWED = {
    "moe_prefetch/seam.py": {"importlib.import_module"}, "moe_prefetch/demo.py": {"importlib.import_module"},
    "moe_prefetch/__init__.py": {"importlib.import_module"}, "moe_prefetch/kv/__init__.py": {"importlib.import_module"},
    "moe_prefetch/probes/jobs.py": {"importlib.import_module"}, "moe_prefetch/bench/kv_quality.py": {"importlib.import_module"},
    "moe_prefetch/probes/trainer.py": {"importlib.import_module"},
    "moe_prefetch/config.py": {"yaml.load"}, "moe_prefetch/checkpoint.py": {"np.load"}}


def unsafe_calls(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
            found.append(node.func.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in FORBIDDEN_ATTRIBUTES.get(node.value.id, ()):
                found.append(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "trust_remote_code") and not (
                isinstance(node.value, ast.Constant) and node.value.value is False):
            found.append(f"{node.arg}=")
    return found


def test_shipped_code_evaluates_nothing_and_unpickles_nothing() -> None:
    files = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 10
    found = {name: set(unsafe_calls(path.read_text())) - ALLOWED.get(name, set())
             for path in files if (name := str(path.relative_to(ROOT)))}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize("source", [
    "eval('1')", "import os\nos.system('ls')", "torch.load('x')", "yaml.load(text, Loader=yaml.UnsafeLoader)", "f(shell=True)",
    "np.load('x', allow_pickle=True)", "importlib.import_module(name)", "from_pretrained(x, trust_remote_code=flag)"])
def test_the_search_for_unsafe_calls_finds_them(source: str) -> None:
    assert unsafe_calls(source)
    assert not unsafe_calls("yaml.safe_load(text)\nf(shell=False)\nre.compile('x')\nmodel.eval()")


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for folder in (*SHIPPED, "scripts") for path in (ROOT / folder).rglob("*.py")
            if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}
