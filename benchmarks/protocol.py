#!/usr/bin/env python3
"""Prefetching on the device, proved on a GPU; rows for `benchmarks/results/protocol.csv`.

exact    a decode step of 26 layers with forecasts, plans, moves, publications, evictions and expert compute is one CUDA graph. It is
         replayed with other routing each time, and with perfect, random, empty and adversarial forecasts by turns, and compared bit by
         bit with the same kernels over experts that are all resident: beside each layer in the graph, and now and then launched one by
         one. Homes: the host's memory, this GPU's.
delays   10^5 steps of four layers with delays drawn at every place where another program may come between: nothing is found wrong.
warm     an expert kernel after 20 us in which HBM idles, with and without its records asked into L2 meanwhile; 1 to 8 tokens.
ranks    two GPUs, a process and a table each, homes shared over NVLink: replays as `exact`, half way both change their weights together.
cost     what the device's path adds to a layer whose experts are where they are.
faults   each violation of `tests/protocol/device_faults.py` is found, and nothing without it.

usage: python benchmarks/protocol.py --out ROWS.csv [--parts exact delays faults warm ranks cost] [--replays N] [--steps N] [--commit ID]
"""
from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_prefetch.bench.rows import Row, append_rows, check_rows, machine_name
from moe_prefetch.bench.timing import replay_us
from moe_prefetch.distributed.groups import Group
from moe_prefetch.distributed.symmetric import symmetric_memory
from moe_prefetch.experts.homes import Home, HostHome, LocalHome, PeerHome, SharedHome
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.kernels.expert_mlp.record import Form
from moe_prefetch.kernels.plan.naive import Tables
from moe_prefetch.kernels.warm.op import warm as ask
from moe_prefetch.runtime import REAL
from moe_prefetch.types import PROB_ONE
from tests.experts.decode_step import Decode

Found = tuple[str, str, float, str, str]
FORM = Form("bfloat16", 512, 256)  # a record is two pieces of a move


HOMES: dict[str, Callable[[], Home]] = {
    "host": lambda: HostHome(REAL), "local": lambda: LocalHome("cuda", REAL), "peer": lambda: PeerHome("cuda:1", "cuda:0", REAL)}


def exact(replays: int, homes: list[str]) -> Iterator[Found]:
    for home in [HOMES[name]() for name in homes]:
        began = time.perf_counter()
        decode = Decode(home, "cuda", form=FORM)
        d = decode.device_experts
        graph = d.capture(decode.step)
        torch.cuda.synchronize()
        print(f"{home.name}: made in {time.perf_counter() - began:.1f} s", flush=True)
        decode.wrong.zero_()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        spent, differ = 0.0, 0
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(replays // 10):
                graph.replay()
            torch.cuda.synchronize()
            spent += time.perf_counter() - began
            if before != torch.cuda.memory_stats()["allocation.all.allocated"]:
                raise SystemExit("a replay allocated")
            d.check()
            differ += not torch.equal(decode.out, decode.alone())
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
        said, wrong, us = d.counts(), int(decode.wrong), spent / replays * 1e6
        t = said.total
        print(f"{home.name}: {replays} replays, {us:.0f} us each, {wrong} numbers differ, {differ} of 10 steps one by one; {t.as_dict()}",
              flush=True)
        if wrong or differ or t.demanded != int(decode.asked) or min(t.hit, t.miss, t.wasted) == 0:
            raise SystemExit("not exact")
        checked = f"bits of {replays} replays as all-resident"
        for more in (("replay_us", us, "us"), ("hit_rate", t.hit_rate, "ratio"), ("differing", 0, "numbers")):
            yield (f"{home.name}_26layers", *more, checked)


def rank_of_two(rank: int, meeting: str, replays: int, device: str = "cuda") -> tuple[int, dict[str, float], float]:
    """(numbers that differ, ledger, us a replay) of one process; half of the replays before its weights change, half after."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group, cuda = Group.of(), device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    torch.manual_seed(rank)
    home = SharedHome(symmetric_memory(group, device))
    decode = Decode(home, device, form=FORM, ranks=2)
    d, store = decode.device_experts, decode.store
    step = d.capture(decode.step).replay if cuda else decode.step

    def steps() -> float:
        began = time.perf_counter()
        for n in range(replays // 2):
            step()
            if n % 500 == 499:
                d.rest()
        d.check()
        if not torch.equal(decode.out, decode.alone()):
            raise SystemExit("a step launched one by one differs")
        return time.perf_counter() - began

    def write() -> None:
        fresh = decode.source(1)
        for layer in range(decode.layers):
            for e in range(fresh.num_experts):
                at = rank * fresh.num_experts + e
                store.layout.pack(fresh.tensors(layer, e), store.buffer(layer, at), stamp=(2, layer, at))

    decode.wrong.zero_()
    took, old = steps(), decode.resident.buffer(0, 0).clone()
    d.update(write, lambda: group.gather(b"at rest"))
    for layer in range(decode.layers):
        for e in range(store.num_experts):
            decode.resident.buffer(layer, e).copy_(store.buffer(layer, e))
    if torch.equal(old, decode.resident.buffer(0, 0)):
        raise SystemExit("the other rank's new weights are not seen")
    took += steps()
    said = d.counts().total
    group.gather(b"done")
    return int(decode.wrong) + (said.demanded != int(decode.asked)), said.as_dict(), took / replays * 1e6


def ranks(replays: int) -> Iterator[Found]:
    with tempfile.TemporaryDirectory() as folder, processes(2) as pool:
        args = ((0, 1), (f"{folder}/meeting",) * 2, (replays,) * 2, ("cuda",) * 2)
        for rank, (wrong, said, us) in enumerate(pool.map(rank_of_two, *args)):
            print(f"rank {rank}: {replays} replays, {us:.0f} us each, {wrong} numbers differ; {said}", flush=True)
            if wrong or min(said[k] for k in ("hit", "miss", "wasted")) == 0:
                raise SystemExit("not exact")
            checked = f"bits of {replays} replays as all-resident, new weights half way"
            for more in (("replay_us", us, "us"), ("hit_rate", said["hit_rate"], "ratio"), ("differing", 0, "numbers")):
                yield (f"shared_26layers_rank{rank}", *more, checked)


def cost() -> Iterator[Found]:
    """What forecast, plan, settle and the ends of steps add to a layer's expert kernels, 64 experts and 32 slots, nothing to move."""
    decode = Decode(LocalHome("cuda", REAL), "cuda", layers=8, experts=64, slots=32, top_k=8, form=Form("bfloat16", 512, 256), mode=2)
    d, x, unknown = decode.device_experts, decode.hidden, torch.full((2, 64), -1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        decode.step()
    d.tables.load_LE.zero_()

    def planned() -> None:
        for layer in range(decode.layers):
            d.forecast(layer, unknown)
            d.experts(layer, x, decode.ids[layer], decode.weights[layer])
        d.step_end()
        d.tables.load_LE.zero_()

    def alone() -> None:
        for layer in range(decode.layers):
            decode.eager(layer, x)

    took = [replay_us(d.capture(step), 15) / decode.layers for step in (planned, alone)]
    d.check()
    wrong = int(decode.wrong)
    print(f"a layer of 64 experts: {took[0]:.1f} us, expert kernels alone {took[1]:.1f} us; {wrong} numbers differ", flush=True)
    if wrong:
        raise SystemExit("not exact")
    yield "e64_s32_nothing_to_move", "us", took[0] - took[1], "us a layer", "bits as all-resident"


def delayed(home: str, steps: int) -> tuple[str, list[int], dict[str, float], float]:
    from tests.protocol.device_faults import DELAYS
    from tests.protocol.device_scene import Scene, kernels

    with kernels(DELAYS):
        scene = Scene(home=home, maybe_ns=4000)
        scene.run(1)
        began = time.perf_counter()
        found = scene.run(steps)
        took = time.perf_counter() - began
    said = scene.device_experts.counts().total
    return home, found, {**said.as_dict(), "asked": int(scene.asked)}, took / steps * 1e6


def delays(steps: int) -> Iterator[Found]:
    with processes(2) as pool:
        for home, found, said, us in pool.map(delayed, ("local", "host"), (steps // 2,) * 2):
            print(f"{home}: {steps // 2} steps with delays, {us:.0f} us each, found {found}; {said}", flush=True)
            if any(found) or said["demanded"] != said["asked"] or min(said[k] for k in ("hit", "late", "miss", "cancelled", "wasted")) == 0:
                raise SystemExit("not clean")
            yield f"{home}_4layers_delays", "steps", steps // 2, "steps", "words, claimants, slots, entries, moves"


def planted(name: str) -> tuple[str, list[int], list[int], int]:
    from tests.protocol.device_faults import FAULTS

    fault = FAULTS[name]
    try:
        return name, fault.found(False), fault.found(True), fault.finding
    except Exception as e:  # noqa: BLE001 (the others still run)
        return f"{name}: {e!r}"[:300], [], [0] * 6, 0


def faults() -> Iterator[Found]:
    from tests.protocol.device_faults import FAULTS

    good = 0
    with processes(9) as pool:
        for name, clean, broken, finding in pool.map(planted, FAULTS):
            found = not any(clean) and bool(clean) and broken[finding] > 0
            good += found
            print(f"{name}: {'found' if found else 'NOT FOUND'}, without {clean}, with {broken}", flush=True)
    yield "violations", "found", good, f"of {len(FAULTS)}", "each clean without it"


# bf16: width of an expert, experts a token has; hidden 2048.
MODELS = {"qwen3-30b-a3b": (2048, 768, 8), "deepseek-v2-lite": (2048, 1408, 6)}
LAYERS, EXPERTS = 12, 32


class Warm:
    """Layers of a model whose experts lie in this memory, each after `idle_us` in which one thread is busy."""

    def __init__(self, hidden: int, width: int, top_k: int, idle_us: float = 20.0) -> None:
        self.form, self.top_k, self.idle_us = Form("bfloat16", hidden, width), top_k, idle_us
        self.nbytes = self.form.layout().nbytes
        self.block = torch.randn(LAYERS * EXPERTS * self.nbytes // 2, dtype=torch.bfloat16, device="cuda") * 0.02
        where_LE = self.block.data_ptr() + self.nbytes * torch.arange(LAYERS * EXPERTS, device="cuda").view(LAYERS, EXPERTS)
        none, link_LE = where_LE.new_empty(0), torch.full((LAYERS, EXPERTS), -1, dtype=torch.int32, device="cuda")
        self.t = Tables(where_LE, where_LE, none, none, none, none, none, none, none, link_LE, none, none, none)
        self.side = torch.cuda.Stream()
        self.chosen = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")

    def draw(self, tokens: int) -> None:
        self.x = torch.randn(tokens, self.form.hidden, dtype=torch.bfloat16, device="cuda")
        self.ids_LTK = torch.rand(LAYERS, tokens, EXPERTS, device="cuda").topk(self.top_k).indices
        self.weights = torch.rand(tokens, self.top_k, device="cuda")
        self.prob_LE = torch.zeros(LAYERS, EXPERTS, device="cuda").scatter_(1, self.ids_LTK.flatten(1), PROB_ONE).int()

    def step(self, megabytes: int) -> list[torch.Tensor]:
        out, main = [], torch.cuda.current_stream()
        for n in range(LAYERS):
            if megabytes:
                self.side.wait_stream(main)
                with torch.cuda.stream(self.side):
                    ask(self.t, n, self.prob_LE[n], self.chosen, int(megabytes * 1e6 / self.nbytes), self.nbytes)
            torch.cuda._sleep(int(self.idle_us * 1.7e3))
            if megabytes:
                main.wait_stream(self.side)
            out.append(expert_mlp(self.x, self.ids_LTK[n], self.weights, self.t.where_LE[n], self.form))
        return out

    def measure(self, megabytes: int) -> tuple[float, list[torch.Tensor]]:
        """(us a layer, what the layers gave)."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.step(megabytes)
        with torch.cuda.graph(graph, stream=stream):
            out = self.step(megabytes)
        return replay_us(graph, 15) / LAYERS, out


def warm() -> Iterator[Found]:
    for model, shape in MODELS.items():
        case = Warm(*shape)
        for tokens in (1, 2, 4, 8):
            case.draw(tokens)
            took = {m: case.measure(m) for m in (0, 10, 20, 30, 40, 0)}
            same = all(torch.equal(a, b) for _, out in took.values() for a, b in zip(out, took[0][1], strict=True))
            print(f"{model} {tokens} tokens: " + ", ".join(f"{m} MB {us:.1f} us" for m, (us, _) in took.items()),
                  "same" if same else "DIFFERENT", flush=True)
            if not same:
                raise SystemExit("warm changed a bit")
            for m, (us, _) in took.items():
                yield f"{model}_t{tokens}_beside{m}mb", "us", us, "us", "bits as without"


def processes(n: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))


PARTS = {"exact": lambda args: exact(args.replays, args.homes), "delays": lambda args: delays(args.steps),
         "faults": lambda args: faults(), "ranks": lambda args: ranks(args.replays),
         "warm": lambda args: warm(), "cost": lambda args: cost()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[p for p in PARTS if p != "ranks" or torch.cuda.device_count() > 1])
    parser.add_argument("--homes", nargs="+", choices=HOMES, default=["host", "local"])
    parser.add_argument("--replays", type=int, default=10_000, help="of the graph of each home")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    check_rows(args.out)
    for part in args.parts:
        for case, metric, value, unit, checked in PARTS[part](args):
            rows = [Row(case, metric, value, unit)]
            append_rows(args.out, "protocol", rows, machine=machine_name("cuda"), commit=args.commit, checked=checked)


if __name__ == "__main__":
    main()
