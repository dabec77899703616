#!/usr/bin/env python3
"""Check mode gather on GPUs: `Gather` against the single-process layer; write rows for `benchmarks/results/dispatch.csv`.

Ranks are processes, a GPU each where there are as many; where there are fewer they share them, and a GPU that processes share runs one at a
time, so a wait takes milliseconds. Ranks as `streams` of one process share a GPU without that.

correct   every pattern, sizes that nothing divides, two rounds, zero tokens: bitwise in deterministic mode (also against mode stay), within
          rounding and repeatable without
replays   a captured step of 26 layers with changing tokens and routing, each result compared
faults    a killed and a stopped middle rank: what the survivors report, and when (deadline 2 s)

usage: python benchmarks/dispatch_gpu.py [--ranks 2,3] [--what streams,correct,replays,faults] [--replays N] [--seconds S] [--planes]
       [--out ROWS.csv]
"""
from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import argparse
import functools
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_prefetch.bench.rows import Row, append_rows, check_rows
from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.symmetric import SHARED_GPU
from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.kernels.dispatch import planes
from tests.distributed import device_cases as cases
from tests.distributed.dispatch_cases import Batch

LAYERS = 26


def _world(name: str, ranks: int, rank: int, deadline: float = 30.0, cpu: bool = False) -> cases.World:
    """Rank -1: all ranks as streams."""
    shape = cases.SHAPES.get(name, cases.STEP)
    device = torch.device("cpu" if cpu else f"cuda:{max(rank, 0) % max(1, torch.cuda.device_count())}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    replicas = {1: [ranks - 1]} if name != "full" else {}
    if rank < 0:
        meeting = cases.Meeting(ranks)
        groups: list[Group] = [cases.StreamGroup(meeting, r) for r in range(ranks)]
        return cases.World(shape, device, groups, lambda g: cases.StreamMemory(g, device), replicas, deadline)  # type: ignore[arg-type]
    return cases.World(shape, device, [Group.of()], lambda g: None, replicas, deadline)


def _case(what: str, ranks: int, rank: int, a: argparse.Namespace) -> Any:
    if what in cases.SHAPES:
        return cases.correct(_world(what, ranks, rank, cpu=a.cpu), a.count)
    kind, share = what.split(":")
    world = _world("step", ranks, rank, cpu=a.cpu)
    # Processes that share a GPU are no faster for more time: they wait for each other's slices.
    slow = 0.3 if rank >= 0 and not a.cpu and torch.cuda.device_count() < ranks else 1.0
    return cases.replays(world, LAYERS, a.replays, a.seconds * float(share) * slow, kind == "deterministic")


def _child(what: list[str], ranks: int, rank: int, folder: Path, a: argparse.Namespace) -> None:
    """Runs cases one after another and leaves what they return, or their traceback, in a file."""
    try:
        torch.set_num_threads(1)
        if rank >= 0:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks,
                                    timeout=timedelta(seconds=120))
        for case in what:
            found = _case(case, ranks, rank, a)
            (folder / f"{case}.{rank}").write_text(json.dumps(found))
    except BaseException:  # noqa: BLE001 (the parent shows it)
        (folder / f"error.{rank}").write_text(traceback.format_exc())
    os._exit(0)


def group(what: list[str], ranks: int, a: argparse.Namespace, streams: bool = False) -> Any:
    """Start the cases in processes; a function that waits for them and returns what each rank said, by case."""
    folder = Path(tempfile.mkdtemp())
    members = [-1] if streams else list(range(ranks))
    context = multiprocessing.get_context(a.start)
    started = [context.Process(target=_child, args=(what, ranks, r, folder, a)) for r in members]
    for p in started:
        p.start()

    def wait(seconds: float) -> dict[str, list[Any]]:
        end = time.perf_counter() + seconds
        while any(p.is_alive() for p in started) and time.perf_counter() < end and not list(folder.glob("error.*")):
            time.sleep(0.05)
        time.sleep(0.5 if list(folder.glob("error.*")) else 0.0)
        for p in started:
            p.kill()
        lost = [f.read_text() for f in folder.glob("error.*")] or ["no result in time"]
        read = lambda f: json.loads(f.read_text()) if f.exists() and f.stat().st_size else {"lost": " ".join(lost[0][-600:].split())}  # noqa: E731
        return {case: [read(folder / f"{case}.{r}") for r in members] for case in what}

    return wait


# faults ----------------------------------------------------------------------------------------------------------------------
def _member(ranks: int, rank: int, how: str, deadline: float, delay: float, folder: Path, a: argparse.Namespace) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        world = _world("step", ranks, rank, deadline, a.cpu)
        gather = world.open(False)[0]
        given = world.inputs(Batch(world, [4] * ranks, "random", 0), rank)  # type: ignore[arg-type]
        gather(0, *given)
        world.settle([gather])
        graph = torch.cuda.CUDAGraph() if not a.cpu else None
        if graph is not None:
            with torch.cuda.graph(graph, stream=world.streams[0], capture_error_mode="thread_local"):
                for n in range(LAYERS):
                    gather(n, *given)
        world.groups[0].gather(b"ready")

        def strike() -> None:
            time.sleep(delay)
            (folder / "struck").write_text(repr(time.perf_counter()))
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        took, begun, looked, gap, noticed = 0.0, 0.0, time.perf_counter(), 0.0, 0.0
        if rank == ranks // 2:
            threading.Thread(target=strike, daemon=True).start()
        try:
            for n in range(100_000_000):
                took, begun = max(took, time.perf_counter() - begun if begun else 0.0), time.perf_counter()
                if graph is None:
                    gather(n, *given)
                    gather.check()
                    continue
                with world.on(0):
                    graph.replay()
                    event = torch.cuda.Event()
                    event.record()
                while not event.query():
                    gap, looked = max(gap, time.perf_counter() - looked), time.perf_counter()
                    noticed = noticed or (looked if int(gather._failed[0]) else 0.0)
                    gather.check()
                    time.sleep(1e-3)
                looked = time.perf_counter()
                gather.check()
        except MoEPrefetchError as e:
            said = {"ranks": list(getattr(e, "ranks", ())), "at": time.perf_counter(), "said": str(e), "step": took, "gap": gap,
                    "noticed": noticed}
            (folder / f"new.{rank}").write_text(json.dumps(said))
            os.rename(folder / f"new.{rank}", folder / f"said.{rank}")
    except BaseException:  # noqa: BLE001
        (folder / f"error.{rank}").write_text(traceback.format_exc())
    os._exit(0)


def fault(ranks: int, how: str, seed: int, a: argparse.Namespace, deadline: float = 2.0) -> Any:
    """Start one trial; a function that waits for it: what each survivor said, with `after`: seconds from the strike."""
    folder, context = Path(tempfile.mkdtemp()), multiprocessing.get_context(a.start)
    delay = random.Random(seed).random() * 0.3 + 0.2
    members = [context.Process(target=_member, args=(ranks, r, how, deadline, delay, folder, a)) for r in range(ranks)]
    for m in members:
        m.start()
    survivors = [r for r in range(ranks) if r != ranks // 2]

    def wait(seconds: float) -> list[dict[str, Any]]:
        end = time.perf_counter() + seconds
        done = lambda: all((folder / f"said.{r}").exists() for r in survivors) or list(folder.glob("error.*"))  # noqa: E731
        while time.perf_counter() < end and not done():
            time.sleep(0.01)
        for m in members:
            m.kill()
            m.join()
        lost = [f.read_text()[-800:] for f in folder.glob("error.*")]
        if lost or not all((folder / f"said.{r}").exists() for r in survivors):
            return [{"ranks": [], "after": float("inf"), "step": 0.0, "said": (lost or ["nothing"])[0]}]
        struck = float((folder / "struck").read_text())
        found = [json.loads((folder / f"said.{r}").read_text()) for r in survivors]
        return [{**f, "after": f["at"] - struck, "noticed": f["noticed"] - struck} for f in found]

    return wait


def later(ranks: int, how: str, seed: int, a: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """A trial that starts when it is waited for."""
    return fault(ranks, how, seed, a)(seconds)


# everything ------------------------------------------------------------------------------------------------------------------
def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ranks", default="2,3")
    ap.add_argument("--what", default="streams,correct,replays,faults")
    ap.add_argument("--replays", type=int, default=10_000)
    ap.add_argument("--seconds", type=float, default=30.0, help="at most that long for each kind of replays")
    ap.add_argument("--count", type=int, default=10, help="batches of each shape and sum")
    ap.add_argument("--trials", type=int, default=3, help="of each fault")
    ap.add_argument("--together", action="store_true", help="all trials at once: quicker, and the ranks' steps are slower")
    ap.add_argument("--start", default="fork", choices=("fork", "spawn"))
    ap.add_argument("--planes", action="store_true", help="the kernels of large messages for small ones, too")
    ap.add_argument("--limit", type=float, default=90.0, help="seconds that a group of processes may take")
    ap.add_argument("--cpu", action="store_true", help="the same cases in Triton's interpreter, uncaptured")
    ap.add_argument("--out", type=Path)
    ap.add_argument("--commit", default="")
    a = ap.parse_args()
    if a.out:
        check_rows(a.out)
    gpus = 0 if a.cpu else torch.cuda.device_count()
    if not gpus and not a.cpu:
        ap.error("this needs a GPU")
    if a.planes:
        planes.WORDS_UP_TO = 0
    sizes, what = [int(x) for x in a.ranks.split(",")], a.what.split(",")
    if gpus and max(sizes) > gpus:
        os.environ[SHARED_GPU] = "1"
    # Not through torch: a process that has used CUDA can't be forked.
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    name_of_gpu = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()[0] if gpus else ""
    rows, fine, begun = [], True, time.perf_counter()

    def tell(case: str, good: bool, text: str, **figures: tuple[float, str]) -> None:
        nonlocal fine
        fine &= good
        print(f"{time.perf_counter() - begun:6.1f} s  {case:36s} {'right' if good else 'WRONG'}  {text}", flush=True)
        new = [Row(case, metric, *value) for metric, value in figures.items()] if good else []
        rows.extend(new)
        if a.out and new:
            where = f"{min(gpus, max(sizes))}x {name_of_gpu if gpus else 'CPU'}"
            append_rows(a.out, "dispatch", new, machine=where, commit=a.commit, checked="bits of the single-process layer")

    def name_of(r: int, streams: bool) -> str:
        return (f"{r}_streams" if streams else f"{r}_ranks_{min(r, gpus)}_gpus") + "_planes" * a.planes

    def show_correct(r: int, streams: bool, found: dict[str, list[Any]]) -> None:
        for shape, said in found.items():
            bad = [str(s.get("lost", s.get("wrong"))) for s in said if s.get("lost") or s["wrong"]]
            n = sum(s.get("compared", 0) for s in said)
            tell(f"{name_of(r, streams)}_{shape}", not bad, bad[0] if bad else f"{n} compared, without "
                 f"deterministic off by {max(s['worst'] for s in said):.1e}", layers_compared=(n, "layers"))

    def show_replays(r: int, streams: bool, found: dict[str, list[Any]]) -> None:
        for kind, said in found.items():
            bad = [str(s.get("lost", s.get("mismatches"))) for s in said if s.get("lost") or s["mismatches"]]
            s = said[0]
            tell(f"{name_of(r, streams)}_replay_{kind.split(':')[0]}", not bad, bad[0] if bad else
                 f"{s['replays']} replays of {LAYERS} layers, {s['us_a_layer']:.0f} us a layer, off by {s['worst']:.1e}",
                 **({} if bad else {"replays": (s["replays"], "replays"), "mismatches": (0, "replays")}))

    shapes = list(cases.SHAPES)
    waiting = [(r, s, group([shape], r, a, s)) for r in sizes for s in (True, False) for shape in shapes
               if ("streams" if s else "correct") in what and "correct" in what] if gpus == 1 else []
    for r, s, wait in waiting:
        show_correct(r, s, wait(a.limit))
    if not waiting and "correct" in what:
        for r in sizes:
            show_correct(r, False, group(shapes, r, a)(a.limit))
    if "replays" in what:
        kinds = ["deterministic:1", "reduced:0.2"]
        for streams in (True, False):
            if ("streams" in what or not streams) and (not streams or not a.cpu):
                show_replays(sizes[0], streams, group(kinds, sizes[0], a, streams)(a.limit + a.seconds))
    if "faults" in what:
        r = max(sizes)
        # On a GPU that is shared anyway all trials run at once.
        together = (gpus < r or a.together) and not a.cpu
        trials: dict[str, list[Any]] = {}
        for how in ("killed", "stopped"):
            for seed in range(a.trials):
                trials.setdefault(how, []).append(fault(r, how, seed, a) if together else functools.partial(later, r, how, seed, a))
        for how in trials:
            said = [s for wait in trials[how] for s in wait(a.limit)]
            # A rank is stopped while its GPU goes on with the step it has: waits begin when that is over.
            bad = [f"{s['after']:.2f} s after (a step of {s['step']:.2f} s, told by the device after {s.get('noticed', 0):.2f} s, up to "
                   f"{s.get('gap', 0):.2f} s between two looks): {s['said']}" for s in said
                   if s["ranks"] != [r // 2] or s["after"] > 2.2 + s["step"]]
            tell(f"{name_of(r, False)}_{how}", not bad, " | ".join(bad) or f"{len(said)} reports name rank {r // 2}, the last after "
                 f"{max(s['after'] for s in said):.3f} s, steps of up to {max(s['step'] for s in said):.3f} s",
                 reports=(len(said), "reports"), last_after=(max(s["after"] for s in said), "s"))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
