"""A rank is killed or stopped in the middle of it: what the others report, and when. `test_faults.py` runs this."""
from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from moe_prefetch.distributed.groups import Group
from moe_prefetch.errors import MoEPrefetchError
from tests.distributed.dispatch_cases import SHAPES, Batch, Model
from tests.distributed.group_cases import Hosts


def _member(rank: int, world: int, mode: str, hosts: str, deadline: float, victim: int, how: str, delay: float, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=300))
    model = Model(Group.of(runtime=Hosts(*hosts)), SHAPES[0])
    dispatch = model.open(mode, deadline=deadline)
    batches = [Batch(model, [(n + r) % 4 for r in range(world)], "random", n) for n in range(8)]

    def strike() -> None:
        time.sleep(delay)
        (folder / "struck").write_text(repr(time.perf_counter()))
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    n, began = 0, 0.0
    try:
        for n in range(1_000_000):
            if n == 5:
                model.group.gather(b"running")
                if rank == victim:
                    threading.Thread(target=strike, daemon=True).start()
            began = time.perf_counter()
            dispatch(n % 8, *batches[n % 8].of(rank))
    except MoEPrefetchError as e:
        now = time.perf_counter()
        said = {"kind": type(e).__name__, "ranks": list(getattr(e, "ranks", ())), "at": now, "waited": now - began, "n": n, "said": str(e)}
        (folder / f"new.{rank}").write_text(json.dumps(said))
        os.rename(folder / f"new.{rank}", folder / f"said.{rank}")
    os._exit(0)


def trial(world: int, mode: str, hosts: str, deadline: float, victim: int, how: str, delay: float) -> list[dict[str, Any]]:
    """What each survivor said; `after`: seconds from the strike to its report."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = [fork.Process(target=_member, args=(r, world, mode, hosts, deadline, victim, how, delay, folder)) for r in range(world)]
        for m in members:
            m.start()
        end = time.perf_counter() + 60 + 5 * deadline
        survivors = [r for r in range(world) if r != victim]
        while time.perf_counter() < end and not all((folder / f"said.{r}").exists() for r in survivors):
            time.sleep(0.01)
        for m in members:
            m.kill()
            m.join()
        if not all((folder / f"said.{r}").exists() for r in survivors):
            return [{"kind": "silence", "ranks": [], "after": float("inf"), "waited": float("inf")}]
        struck = float((folder / "struck").read_text())
        found = [json.loads((folder / f"said.{r}").read_text()) for r in survivors]
        return [{**f, "after": f["at"] - struck} for f in found]


def trials(rank: int, world_: int, count: str, world: str, mode: str, hosts: str, deadline: str, how: str) -> Any:
    rng = random.Random(int(count))
    return [trial(int(world), mode, hosts, float(deadline), int(world) // 2, how, rng.random() * 0.2) for _ in range(int(count))]
