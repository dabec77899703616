"""Everything that is wrong with a configuration, as far as it can be seen without a model or a GPU."""
from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import config as config_module
from . import deepspeed_file
from .errors import ConfigError, MoEPrefetchError

if TYPE_CHECKING:
    from .runtime import Runtime


def check(path: Path | str, runtime: Runtime | None = None) -> list[str]:
    """Every problem of a config file, one line each, none when it is sound: its syntax, its keys, their values and how they fit
    together (in a DeepSpeed file also with DeepSpeed's), and what they name on the drive (a probe, the folder of one to come, a KV
    calibration, a record folder). Raises nothing for a bad file."""
    config, problems = config_module.examine(Path(path))
    whole: dict[str, Any] = {}
    if Path(path).suffix == ".json":
        with suppress(ConfigError):
            whole = config_module.parse_file(Path(path))
    problems += deepspeed_file.misspelt(whole)
    if config is None:
        return problems
    if deepspeed_file.SECTION in whole:
        problems += deepspeed_file.contradictions({key: whole[key] for key in whole if key != deepspeed_file.SECTION}, config)
    if config.probe.path is not None:
        problems += _trial("probe.path", lambda: _probe(config.probe.path))
    if config.fit is not None:
        problems += _trial("fit.out", lambda: _probe_folder(config.fit.out)) or _place("fit.out", config.fit.out, runtime)
    if config.kv.calibration is not None:
        problems += _trial("kv.calibration", lambda: _calibration(config.kv.calibration))
    if config.experts.path is not None:
        problems += _record_folder(config.experts.path, runtime)
    return problems


# What is named on the drive needs torch to be looked into; the rest of a file does not.
def _probe(folder: Path) -> None:
    from .probes.probe import read_folder

    read_folder(folder)


def _probe_folder(folder: Path) -> None:
    from .probes.probe import check_folder

    check_folder(folder)


def _calibration(path: Path) -> None:
    from .kv.codec import OutlierStats

    OutlierStats.load(path)


def _trial(key: str, act: Callable[[], object]) -> list[str]:
    try:
        act()
    except MoEPrefetchError as e:
        return [f"{key}: {e}"]
    except ModuleNotFoundError as e:
        return [f"{key}: can't be looked into without {e.name}. What to do: install it, or validate where it is."]
    return []


def _record_folder(folder: Path, runtime: Runtime | None) -> list[str]:
    """A folder with records needs to be read only; otherwise they must be written there, or where the folder will be made."""
    if (folder / "manifest.json").exists():
        def read() -> None:
            from .experts.store import read_manifest

            read_manifest(folder)

        return _trial("experts.path", read)
    return _place("experts.path", folder, runtime)


def _place(key: str, folder: Path, runtime: Runtime | None) -> list[str]:
    """Whether a folder can be written to, or made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return [f"{key}: {there} is no folder. What to do: name another one."]
    if not (os.access(there, os.W_OK | os.X_OK) if runtime is None else runtime.writable(there)):
        return [f"{key}: {there} can't be written to. What to do: name another folder, or give the permission."]
    return []
