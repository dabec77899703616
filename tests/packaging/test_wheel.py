"""What a user installs: the wheel (built from the sdist) and the editable install, each in an environment of its own."""
from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"moe_prefetch": "moe_prefetch", "moe_prefetch/integrations": "integrations", "moe_prefetch/model_configs": "model_configs"}
IMPORTS = ("import moe_prefetch, moe_prefetch.integrations, moe_prefetch.integrations.transformers, moe_prefetch.model_configs as configs;"
           "from importlib.resources import files;"
           "print(moe_prefetch.__file__, sorted(p.name for p in files(configs).iterdir() if p.name.endswith('.yaml')))")


def run(*command: object, **kw: object) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=110, check=False, env=env, **kw)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would hand out of the checkout's package, so that builds leave no trace here."""
    target = tmp_path_factory.mktemp("source") / "moe_prefetch"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)  # sdist first, the wheel from it
    (path,) = out.glob("*.whl")
    return path


def environment(folder: Path) -> Path:
    """Python of a new environment that sees this one's packages but not its editable install (nested .pth files are not read)."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    site = Path(run(folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


def pip_install(python: Path, *what: object) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", *what)


def yaml_names() -> list[str]:
    return sorted(p.name for p in (ROOT / "model_configs").glob("*.yaml"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"moe_prefetch", "moe_prefetch-0.1.0.dist-info"}
    wanted = {f"{inside}/{path.relative_to(ROOT / folder)}" for inside, folder in FOLDERS.items()
              for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml") or path.name == "py.typed"}
    assert {name for name in names if ".dist-info" not in name} == wanted
    assert "moe_prefetch/py.typed" in names
    assert "moe_prefetch-0.1.0.dist-info/licenses/LICENSE" in names


def test_the_list_of_packages_is_complete() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    on_disk = {f"{inside}/{path.parent.relative_to(ROOT / folder)}".replace("/.", "").replace("/", ".")
               for inside, folder in FOLDERS.items() for path in (ROOT / folder).rglob("__init__.py")}
    assert sorted(setup["options"]["packages"].split()) == sorted(on_disk)


def test_the_wheel_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    pip_install(python, wheel)
    said = run(python, "-c", IMPORTS, cwd=tmp_path)
    assert said.startswith(str(tmp_path))
    assert said.strip().endswith(str(yaml_names()))
    assert "[packages]" in run(tmp_path / "env/bin/moe-prefetch", "env", cwd=tmp_path)
    no_delta = "from moe_prefetch.integrations import smolmoe\ntry: smolmoe.build()\nexcept Exception as e: print(e)"
    assert "clone the moe_prefetch repository" in run(python, "-c", no_delta, cwd=tmp_path)


def test_the_editable_install_sees_the_mapped_folders(source: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    pip_install(python, "--no-build-isolation", "--editable", source)
    said = run(python, "-c", IMPORTS, cwd=tmp_path)
    assert said.startswith(str(source / "moe_prefetch"))
    assert said.strip().endswith(str(yaml_names()))


def test_extras_name_what_the_issue_of_support_needs_and_never_apex() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    assert {"hf", "megatron", "deepspeed", "triton", "report", "metrics", "dev"} <= set(extras)
    everything = " ".join([setup["options"]["install_requires"], *extras.values()])
    assert "apex" not in everything
    assert "torch>=2.6,<2.15" in everything
    assert "transformers>=5.17,<5.25" in extras["hf"]
