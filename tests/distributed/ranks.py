"""Process groups for tests: gloo on this machine. A fresh process imports once and forks a group per entry of a plan.

Each case is a function `case(rank, world, folder)` of a test module's companion; what it returns (JSON) comes back for every rank.
"""
from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GROUP_SECONDS = 600


def _rank(rank: int, world: int, module: str, cases: list[str], folder: str, number: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    code = importlib.import_module(module)
    if world > 1 or getattr(code, "ALONE", False):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{number}", rank=rank, world_size=world,
                                timeout=timedelta(seconds=300))
    for case in cases:
        name, *words = case.split()
        out = Path(folder, f"{number}.{case}.{rank}")
        try:
            torch.manual_seed(0)
            out.write_text(json.dumps({"result": getattr(code, name)(rank, world, *words)}))
        except BaseException:  # noqa: BLE001 (a test shows it)
            out.write_text(json.dumps({"error": traceback.format_exc()}))
            break
    os._exit(0)  # gloo's threads end with the process


def main() -> None:
    module, plan, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    for number, (world, cases) in enumerate(plan):
        ranks = [fork.Process(target=_rank, args=(r, world, module, cases, folder, number)) for r in range(world)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join(GROUP_SECONDS)
            if p.is_alive():
                p.kill()


def run(module: str, plan: list[tuple[int, list[str]]], env: dict[str, str] | None = None) -> dict[tuple[int, str], list[Any]]:
    """(world, case) -> what `module.<case>(rank, world, *words)` returned on each rank; a rank that failed gives its traceback, a str."""
    with tempfile.TemporaryDirectory() as folder:
        code = "from tests.distributed.ranks import main; main()"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **(env or {})}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(ROOT)]))
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, module, json.dumps(plan), folder], cwd=ROOT, env=env,
                              capture_output=True, text=True, check=False)
        out: dict[tuple[int, str], list[Any]] = {}
        for number, (world, cases) in enumerate(plan):
            for case in cases:
                files = [Path(folder, f"{number}.{case}.{r}") for r in range(world)]
                said = [json.loads(f.read_text()) if f.exists() and f.stat().st_size else {} for f in files]
                lost = f"not reached\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
                out[world, case] = [s["result"] if "result" in s else s.get("error", lost) for s in said]
        return out
