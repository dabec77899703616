"""Runs cases in forked groups of processes, since importing Megatron-core takes seconds and a case takes less than one.

python -m tests.integrations.megatron.worker FOLDER [case ...]      one `<case>.<rank>.json` per rank, `<case>.<rank>.error` where it failed
`-case` leaves a case out.
"""
from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE = timedelta(seconds=300)


def _rank(rank: int, world: int, meeting: Path, names: list[str], folder: Path) -> None:
    from tests.integrations.megatron.cases import CASES

    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=world, timeout=DEADLINE)
    for name in names:
        try:
            start = time.process_time()
            result = CASES[name].run(folder) | {"seconds": time.process_time() - start}
            (folder / f"{name}.{rank}.json").write_text(json.dumps(result))
        except Exception:  # noqa: BLE001 whatever it is, a test shows it
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
            # The others wait in a collective: they are ended by the parent.
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def _group(world: int, names: list[str], folder: Path) -> None:
    deaths = 0
    while names:
        try:
            # A file and not a port: one that was free a moment ago may be another suite's by now.
            meeting = folder / f"meeting.{world}.{names[0]}.{deaths}"
            mp.start_processes(_rank, args=(world, meeting, names, folder), nprocs=world, start_method="fork")
            return
        except Exception as error:
            failed = [i for i, n in enumerate(names) if list(folder.glob(f"{n}.*.error"))]
            if not failed:
                # A rank ended from outside (memory, a signal) says nothing of the cases: what is left gets one more chance, aloud.
                deaths += 1
                if deaths > 1:
                    raise
                names = [n for n in names if len(list(folder.glob(f"{n}.*.json"))) < world]
                print(f"a rank died: {error}; again from {names[0]}", file=sys.stderr)
                continue
            print(f"{names[failed[-1]]} failed: {error}".splitlines()[0], file=sys.stderr)
            names = names[failed[-1] + 1 :]


def main() -> None:
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    wanted, left_out = [n for n in asked if n[0] != "-"], [n[1:] for n in asked if n[0] == "-"]
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    from moe_prefetch.integrations import megatron_cpu

    megatron_cpu.install()
    from tests.integrations.megatron import fault_cases, model_cases, serve_cases  # noqa: F401 add their cases
    from tests.integrations.megatron.cases import CASES

    names = [n for n, c in CASES.items() if (n in wanted if wanted else not c.asked) and n not in left_out]
    for world in sorted({c.world for c in CASES.values()}):
        _group(world, [n for n in names if CASES[n].world == world], folder)


if __name__ == "__main__":
    main()
