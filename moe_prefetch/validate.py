"""Everything that is wrong with a configuration, as far as it can be seen without a model or a GPU."""
from __future__ import annotations

from pathlib import Path

from . import config as config_module
from . import deepspeed_file
from .errors import MoEPrefetchError
from .experts.store import MANIFEST, read_manifest
from .kv.codec import OutlierStats
from .probes.probe import read_folder
from .runtime import REAL, Runtime


def check(path: Path | str, runtime: Runtime = REAL) -> list[str]:
    """Every problem of a config file, one line each, none when it is sound: its syntax, its keys, their values and how they fit
    together (in a DeepSpeed file also with DeepSpeed's), and what they name on the drive (a probe, a KV calibration, a record folder).
    Raises nothing for a bad file."""
    config, problems = config_module.examine(Path(path))
    if config is None:
        return problems
    if Path(path).suffix == ".json" and deepspeed_file.SECTION in (whole := config_module.parse_file(Path(path))):
        stock = {key: value for key, value in whole.items() if key != deepspeed_file.SECTION}
        problems += deepspeed_file.misspelt(stock) + deepspeed_file.contradictions(stock, config)
    if config.probe.path is not None:
        problems += _trial("probe.path", lambda: read_folder(config.probe.path))
    if config.kv.calibration is not None:
        problems += _trial("kv.calibration", lambda: OutlierStats.load(config.kv.calibration))
    if config.experts.path is not None:
        problems += _record_folder(config.experts.path, runtime)
    return problems


def _trial(key: str, act) -> list[str]:  # type: ignore[no-untyped-def]
    try:
        act()
    except MoEPrefetchError as e:
        return [f"{key}: {e}"]
    return []


def _record_folder(folder: Path, runtime: Runtime) -> list[str]:
    """A folder with records needs to be read only; otherwise they must be written there, or where the folder will be made."""
    if (folder / MANIFEST).exists():
        return _trial("experts.path", lambda: read_manifest(folder))
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return [f"experts.path: {there} is no folder. What to do: name another one."]
    if not runtime.writable(there):
        return [f"experts.path: {there} can't be written to. What to do: name another folder, or give the permission."]
    return []
