"""Importing the library is cheap, touches no GPU and pulls in no framework."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
                          env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_bare_import_needs_no_dependency() -> None:
    heavy = python("import sys, moe_prefetch; print([m for m in ('torch', 'pydantic', 'yaml', 'typer', 'numpy') if m in sys.modules])")
    assert heavy == "[]"


def test_using_the_library_pulls_in_no_framework_and_no_cuda() -> None:
    frameworks = ("transformers", "megatron", "deepspeed", "triton", "typer", "rich", "matplotlib", "prometheus_client")
    said = python("import sys, torch; before = set(sys.modules); import moe_prefetch; moe_prefetch.attach, moe_prefetch.Config;"
                  f"print([m for m in {frameworks} if m in set(sys.modules) - before], torch.cuda.is_initialized())")
    assert said == "[] False"


def test_it_costs_under_half_a_second_over_torch() -> None:
    # Processor time, not wall-clock: the bound is about our work, whatever else the machine does. A second look where the first is slow.
    code = ("import time, torch; start = time.process_time(); import moe_prefetch; moe_prefetch.attach, moe_prefetch.Config;"
            "print(time.process_time() - start)")
    assert float(python(code)) < 0.5 or float(python(code)) < 0.5


def test_a_checkouts_folder_has_all_of_the_package() -> None:
    """Python's path begins with the folder one is in; what is installed comes behind it, and its finders are left out here."""
    said = python("import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')];"
                  "import moe_prefetch.integrations, moe_prefetch.model_configs; print(moe_prefetch.integrations.__file__)")
    assert Path(said) == ROOT / "integrations" / "__init__.py"
