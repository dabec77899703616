"""Process groups for the DeepSpeed tests: gloo on this machine, no compiler, no GPU.

One fresh process imports everything once and forks a group per world size; a group runs its cases one after the other. (Importing costs
more than the cases, and a process in which autograd has run can't be forked.)
"""
from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
GROUP_SECONDS = 900


def environment(rank: int, world: int) -> dict[str, str]:
    """What `deepspeed --num_gpus world` sets. Its CPU accelerator counts devices by LOCAL_SIZE."""
    return {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world)}


def _rank(rank: int, world: int, module: str, cases: list[str], folder: str) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist

    os.environ.update(environment(rank, world))
    # Its shared-memory collectives are compiled at the first use; gloo needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=600))
    deepspeed.init_distributed()
    found: dict[str, Any] = {}
    for case in cases:
        name, *arguments = case.split()
        try:
            torch.manual_seed(0)
            found[case] = getattr(importlib.import_module(module), name)(rank, world, *arguments)
        except Exception:  # noqa: BLE001 (reported by the test)
            found[case] = traceback.format_exc()
            break  # the others may be waiting for this rank in a collective
    Path(folder, f"{world}-{rank}.pickle").write_bytes(pickle.dumps(found))
    os._exit(0)  # gloo's threads end with the process


def main() -> None:
    module, groups, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    os.environ.update(environment(0, 1))
    importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    for world, cases in groups:
        ranks = [fork.Process(target=_rank, args=(r, world, module, cases, folder)) for r in range(world)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join(GROUP_SECONDS)
            if p.is_alive():
                p.kill()


def run(module: str, groups: list[tuple[int, list[str]]]) -> dict[tuple[int, str], list[Any]]:
    """(world, case) -> what `module.<case>(rank, world, *words)` returned on each rank; a str tells what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        code = "from tests.integrations.deepspeed.ranks import main; main()"
        env = os.environ | environment(0, 1) | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "TMPDIR": folder}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, module, json.dumps(groups), folder], cwd=ROOT, env=env,
                              capture_output=True, text=True, check=False)
        out: dict[tuple[int, str], list[Any]] = {}
        for world, cases in groups:
            files = [Path(folder, f"{world}-{r}.pickle") for r in range(world)]
            found = [pickle.loads(f.read_bytes()) if f.exists() else {} for f in files]
            for case in cases:
                out[world, case] = [f.get(case, f"not reached\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}") for f in found]
        return out
