"""The bug-report block must print exactly where everything else fails."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_prefetch.observe import env

ROOT = Path(__file__).resolve().parents[2]
HEADS = ["[system]", "[gpu driver]", "[python]", "[packages]", "[variables]", "[torch]", "[loaded libraries]"]


def run_block(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m moe_prefetch.observe.env` with the packages in `folder` found before the real ones."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run([sys.executable, "-m", "moe_prefetch.observe.env"], capture_output=True, text=True, timeout=60, check=False,
                          env=os.environ | {"PYTHONPATH": path, **variables})


def plant(folder: Path, name: str, source: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


def test_a_sound_machine(tmp_path: Path) -> None:
    import torch

    done = run_block(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == HEADS
    assert f"torch: {torch.__version__} from" in done.stdout
    assert f"executable: {sys.executable}".replace(os.path.expanduser("~"), "~") in done.stdout
    assert "could not be read" not in done.stdout


@pytest.mark.parametrize(("source", "told"), [
    ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13: cannot open"),
    ("import no_such_module_of_ours", "ModuleNotFoundError: No module named 'no_such_module_of_ours'"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("this is no python", "SyntaxError"),
    ("__version__ = '9'", "AttributeError"),
    ("raise RuntimeError('a\\nb' * 5000)", "RuntimeError: a b"),
])
def test_torch_that_cannot_be_imported(tmp_path: Path, source: str, told: str) -> None:
    plant(tmp_path, "torch", source)
    done = run_block(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == HEADS
    torch_part = done.stdout.split("[torch]")[1].split("[loaded libraries]")[0]
    assert told in torch_part
    assert max(map(len, done.stdout.splitlines())) < 2000


def test_torch_that_ends_the_process_costs_only_its_own_part(tmp_path: Path) -> None:
    plant(tmp_path, "torch", "import os; os._exit(7)")
    done = run_block(tmp_path)
    assert done.returncode == 7
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == HEADS[:-1]


def test_every_dependency_broken(tmp_path: Path) -> None:
    for name in ("torch", "numpy", "safetensors", "einops", "pydantic", "yaml", "typer", "rich", "transformers"):
        plant(tmp_path, name, f"raise ImportError('{name} is broken')")
    done = run_block(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "could not be read: ImportError: torch is broken" in done.stdout


def test_the_command_works_where_torch_is_broken(tmp_path: Path) -> None:
    for name in ("torch", "numpy", "safetensors", "pydantic", "yaml"):
        plant(tmp_path, name, f"raise ImportError('{name} is broken')")
    code = "import sys; sys.argv = ['moe-prefetch', 'env']; from moe_prefetch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert done.returncode == 0, done.stderr
    assert "ImportError: torch is broken" in done.stdout


def test_no_secret_and_no_home(tmp_path: Path) -> None:
    done = run_block(tmp_path, HOME="/home/somebody", NCCL_AUTH_TOKEN="hunter2", TORCH_HOME="/home/somebody/torch", MY_PASSWORD="hunter3",
                     MOE_PREFETCH_SMOLMOE="https://user:hunter4@host/", TRITON_CACHE_DIR="/home/somebodyelse")
    assert "hunter" not in done.stdout
    assert "NCCL_AUTH_TOKEN: (set, not shown)" in done.stdout
    assert "TORCH_HOME: ~/torch" in done.stdout
    assert "TRITON_CACHE_DIR: /home/somebodyelse" in done.stdout


def test_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_read", lambda path: "")
    text = env.collect()
    assert [line for line in text.splitlines() if line.startswith("[")] == HEADS
    assert "NVIDIA driver: none loaded" in text
    assert "could not be read" not in text


def test_a_failing_probe_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> env.Rows:
        yield "first", "1"
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(env, "SECTIONS", (("one", broken), ("two", lambda: iter([("second", "2")]))))
    assert env.collect() == "[one]\nfirst: 1\ncould not be read: ZeroDivisionError: planted\n[two]\nsecond: 2"


def test_ctrl_c_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> env.Rows:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(env, "SECTIONS", (("one", interrupted),))
    with pytest.raises(KeyboardInterrupt):
        env.collect()
