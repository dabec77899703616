"""Check the import contracts of setup.cfg on the package as the wheel lays it out.

usage: lint_imports.py [ROOT]      ROOT: a checkout, by default this one

`integrations/` and `model_configs/` live outside `moe_prefetch/` in the checkout; import-linter sees them only when they are inside.
"""
from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def lay_out(root: Path, target: Path) -> None:
    """Copy the package's Python files from checkout `root` to `target/moe_prefetch`, mapped folders in their place."""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    mapped = dict(line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line)
    for package, folder in {"moe_prefetch": "moe_prefetch", **mapped}.items():
        shutil.copytree(root / folder, target / package.replace(".", "/"), ignore=shutil.ignore_patterns("__pycache__"))


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        lay_out(root, Path(folder))
        shutil.copy(root / "setup.cfg", folder)
        linter = Path(sys.executable).with_name("lint-imports")
        seen_first = os.environ | {"PYTHONPATH": folder}
        return subprocess.run([linter, "--no-cache", "--no-logo"], cwd=folder, env=seen_first, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
