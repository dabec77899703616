"""Time a MoE layer over several GPUs, beside NCCL, and write rows for `benchmarks/results/dispatch.csv`.

usage: moe-prefetch bench dispatch --out ROWS.csv [--gpus N] [--cases REGEX] [--slots N] [--ids FILE] [--seconds S] [--commit ID]
       [--device cuda|cpu]

A case is a model's layer, a number of ranks, tokens on each rank and a routing: `qwen3-30b-a3b_ep2_t4_uniform`. A call is everything from
hidden states to the layer's output: router product, top-k, rows to their experts, experts, sums back. Its routing is laid down by a mask
over the router's scores. Six calls with other routings make a round, in one CUDA graph where the way can be captured; the figure is the
median over rounds of microseconds a call, of the slowest rank. `_move_us`: ids given and experts that do nothing: the way there and back.

gather, stay, host  ours (docs/dispatch.md)
ag_rs, ag_rs_packed NCCL all-gather and reduce-scatter, captured; rows, ids and weights in one launch, or in one message
a2a_padded          NCCL all-to-all of static size, captured; a2a_eager: of exact sizes, which the host reads in between
_r4                 ours with copies, four on each rank, of what its tokens choose most in these very calls: the best that a forecast can do
layer_gain          the fastest of the captured baselines over gather; move_ratio: gather's way over ag_rs's, the faster of the two
megatron_gain       the faster of Megatron-core's dispatchers over gather, where `benchmarks/dispatch_megatron.py` runs them; _kernel_gain

Everything is checked first: each way's output for up to 16 tokens of each rank against the law in FP64. A way that is wrong gets no rows.
On a CPU the same code runs over gloo with a small model, and says whether it is right: its times are no figures, so none are written.
"""
from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from ..checkpoint import load_arrays
from ..distributed.groups import Group
from ..errors import ConfigError, MoEPrefetchError, PeerError, SessionError
from ..kernels.expert_mlp.naive import moe_records
from ..kernels.expert_mlp.record import Form
from .dispatch_ways import WAYS, Bank, MakeWays, Model, Way, nothing
from .kv_attend import relative
from .rows import Row, append_rows, check_rows, choice

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
ROUTINGS = ("uniform", "zipf", "all-to-one", "real")
MODELS = {
    "qwen3-30b-a3b": Model(Form("bfloat16", 2048, 768), 128, 8),
    "deepseek-v2-lite": Model(Form("bfloat16", 2048, 1408), 64, 6),
    "mixtral-8x7b": Model(Form("bfloat16", 4096, 14336), 8, 2),
    "qwen3-235b-a22b-fp8": Model(Form("fp8", 4096, 1536, "", "bfloat16", 128), 128, 8),
}
# On a CPU: odd sizes, experts that ranks do not divide.
TINY = {"tiny": Model(Form("float32", 40, 24), 11, 3)}
DRAWS, ROUNDS, CHECKED = 6, 20, 16
MOVES = ("gather", "ag_rs", "ag_rs_packed", "a2a_padded")  # whose way there and back is timed alone
BOUND = 1.2e-2  # of BF16, with sums of ranks rounded once more


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    tokens: int
    routing: str
    slots: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}_ep{self.ranks}_t{self.tokens}_{self.routing}" + f"_r{self.slots}" * (self.slots > 0)


def cases_of(models: dict[str, Model], ranks: int, pattern: str, real: bool, slots: int = 0) -> list[Case]:
    """Models one after another, most-wanted cases first: uniform at every size, other routings at three sizes, those with copies too."""
    found = []
    for model in models:
        some = TOKENS if models is MODELS else (1, 5)
        for routing in ROUTINGS:
            if routing == "real" and not (real and models[model].top_k == 6):
                continue
            sizes = some if routing == "uniform" or len(some) < 3 else (4, 64, 1024)
            found += [Case(model, ranks, t, routing, s) for t in sizes for s in ((0, slots) if slots and routing != "uniform" else (0,))]
    wanted = choice(pattern, "bench dispatch --cases")
    return [c for c in found if wanted.search(c.name)]


def routed(case: Case, model: Model, rank: int, draw: int, ids_file: Path | None) -> torch.Tensor:
    """ids [T, K] of a rank, without repetition."""
    T, E, K = case.tokens, model.experts, model.top_k
    g = torch.Generator().manual_seed(draw * 1000 + rank)
    if case.routing == "all-to-one":
        return torch.arange(K).expand(T, K)
    if case.routing == "real":
        assert ids_file is not None
        ids_NLK = load_arrays(ids_file)["expert_ids"]
        at = (torch.arange(T) + rank * T) % len(ids_NLK)
        return ids_NLK[at, (5 * draw) % ids_NLK.shape[1]].long()
    popularity_E = torch.zeros(E)
    if case.routing == "zipf":
        # Which experts are popular is the same on all ranks and another in each draw.
        popularity_E = -torch.arange(1, E + 1).float().log()[torch.randperm(E, generator=torch.Generator().manual_seed(draw))]
    # The K largest of Gumbel variables: drawn one after another without putting back.
    gumbel_TE = -(-torch.rand(T, E, generator=g).clamp_min(1e-12).log()).log()
    return (popularity_E + gumbel_TE).topk(K).indices


def choose(x_TD: torch.Tensor, gate_ED: torch.Tensor, mask_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router: scores, top-k of those that the mask leaves, softmax over them."""
    top = (linear(x_TD, gate_ED).float() + mask_TE).topk(top_k)
    return top.indices, top.values.softmax(-1)


# one rank --------------------------------------------------------------------------------------------------------------------
class ElsewhereError(Exception):
    """Another rank could not go on."""


class Ranks:
    """Words between ranks in step. A rank that fails says so in place of its next word, and the others leave off where they hear it."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def tell(self, word: str) -> list[str]:
        """Every rank's word. Raises ElsewhereError, with the fault."""
        words = [w.decode() for w in self.group.gather(word.encode())]
        if fault := next((w for w in words if w.startswith("!")), ""):
            raise ElsewhereError(fault[1:])
        return words

    def most(self, number: float) -> float:
        return max(float(w) for w in self.tell(repr(number)))

    def try_(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What it returns, on all ranks, or {"fault": of one of them}. Raises SessionError: others wait in a collective for this one."""
        try:
            said = work()
            self.tell("done")
            return said
        except ElsewhereError as e:
            return {"fault": str(e)}
        except PeerError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, MoEPrefetchError) as e:
            fault = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
        try:
            self.tell(f"!{fault}")
        except PeerError as e:
            raise SessionError(fault, where="bench dispatch", do="see this rank's fault; the others waited for it in a collective") from e
        except ElsewhereError as e:
            return {"fault": str(e)}
        raise AssertionError("a fault was told and not heard")


class Timer:
    """Medians of rounds; every rank takes the same number."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def us(self, calls: list[Callable[[], Any]], captured: bool) -> float:
        if self.device.type == "cpu":
            for call in calls:
                call()
            return 0.0
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            torch.cuda.synchronize()
            self.ranks.tell("warm")
            run = self._captured(calls, stream) if captured else lambda: [call() for call in calls]
            run()
            torch.cuda.synchronize()
            self.ranks.tell("ready")
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
            for start, end in events:
                start.record()
                run()
                end.record()
            torch.cuda.synchronize()
        took = sorted(a.elapsed_time(b) * 1e3 / len(calls) for a, b in events)
        return self.ranks.most(took[len(took) // 2])

    def _captured(self, calls: list[Callable[[], Any]], stream: torch.cuda.Stream) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events of its own meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
        return graph.replay


def measure(case: Case, bank: Bank, ids_file: Path | None, ways: list[type[Way]]) -> dict[str, dict[str, Any]]:
    """By way: error, us, move_us; or fault, on every rank alike."""
    model, device, group, T = bank.model, bank.device, bank.group, case.tokens
    g = torch.Generator().manual_seed(7 + group.rank)
    x = torch.randn(T, model.form.hidden, generator=g).to(model.dtype).to(device)
    gate = (torch.randn(model.experts, model.form.hidden, generator=torch.Generator().manual_seed(5)) / 16).to(model.dtype).to(device)
    masks = [torch.full((T, model.experts), float("-inf")).scatter_(1, routed(case, model, group.rank, d, ids_file), 0.0).to(device)
             for d in range(DRAWS)]
    chosen = [choose(x, gate, m, model.top_k) for m in masks]
    load_RE = [[0] * model.experts] * group.size
    if case.slots:
        counts = [sum(routed(case, model, r, d, ids_file).flatten().bincount(minlength=model.experts) for d in range(DRAWS))
                  for r in range(group.size)]
        load_RE = [c.tolist() for c in counts]  # type: ignore[union-attr]
    bank.copy(load_RE)
    some = min(T, CHECKED)
    want = moe_records(x[:some], chosen[0][0][:some], chosen[0][1][:some], bank.records, model.form, dtype=torch.float64)
    ranks = Ranks(group)
    timer = Timer(ranks, device)

    def one(kind: type[Way]) -> dict[str, Any]:
        way = kind(bank, T, bank.served() if kind.ours else bank.local())
        err = max(relative(way(n, x, *chosen[0])[:some], want) for n in range(2))
        way.check()
        said = {"error": ranks.most(err)}
        if not said["error"] <= BOUND:
            return said
        said["us"] = timer.us([lambda n=n: way(n, x, *choose(x, gate, masks[n], model.top_k)) for n in range(DRAWS)], way.captured)
        way.check()
        way.close()
        if kind.name in MOVES:
            bare = kind(bank, T, nothing)
            said["move_us"] = timer.us([lambda n=n: bare(n, x, *chosen[n]) for n in range(DRAWS)], way.captured)
            bare.check()
            bare.close()
        return said

    return {kind.name: ranks.try_(functools.partial(one, kind)) for kind in ways}


def play(group: Group, device: torch.device, todo: list[Case], models: dict[str, Model], ids_file: Path | None, seconds: float,
         write: Callable[[str, Any], None], more: MakeWays | None = None) -> None:
    """All cases on one rank, as far as `seconds` go by rank 0's clock; `write(case, found)` on rank 0."""
    start, bank, at = time.perf_counter(), None, ""
    for case in todo:
        over = group.gather(b"1" if time.perf_counter() - start > seconds else b"0")[0] == b"1"
        if over:
            break
        if case.model != at:
            bank, at = None, case.model
            bank = Bank(group, models[case.model], device, max(c.slots for c in todo))
        assert bank is not None
        found = measure(case, bank, ids_file, [*WAYS, *(more(bank, case.tokens) if more else [])])
        if group.rank == 0:
            write(case.name, found)


def _rank(rank: int, folder: str, todo: list[Case], models: dict[str, Model], device_type: str, ids_file: Path | None, seconds: float,
          more: MakeWays | None) -> None:
    device = torch.device("cpu")
    try:
        torch.set_num_threads(1)
        if device_type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank,
                                world_size=todo[0].ranks, timeout=timedelta(seconds=120))

        def write(name: str, found: Any) -> None:
            with Path(folder, "found").open("a") as f:
                f.write(json.dumps([name, found]) + "\n")

        play(Group.of(), device, todo, models, ids_file, seconds, write, more)
    except BaseException as e:
        Path(folder, f"fault.{rank}").write_text(f"rank {rank}: {type(e).__name__}: {e}")
        raise
    finally:
        Path(folder, f"done.{rank}").touch()


# the command -----------------------------------------------------------------------------------------------------------------
def _results(folder: Path, processes: list[Any], limit: float) -> Iterator[tuple[str, Any]]:
    """(case, found) as they come; ends when all ranks have, one has failed, or the time is over."""
    end, read = time.perf_counter() + limit, 0
    while True:
        over = not any(p.is_alive() for p in processes) or time.perf_counter() > end or bool(list(folder.glob("fault.*")))
        lines = (folder / "found").read_text().splitlines(keepends=True) if (folder / "found").exists() else []
        for line in lines[read:]:
            if line.endswith("\n"):
                read += 1
                yield tuple(json.loads(line))
        if over:
            return
        time.sleep(0.2)


def rows_of(case: str, found: dict[str, dict[str, Any]]) -> list[Row]:
    rows = [Row(case, f"{way}{metric}", said[key], "us") for way, said in found.items()
            for key, metric in (("us", "_us"), ("move_us", "_move_us")) if key in said]
    us = {way: said["us"] for way, said in found.items() if "us" in said}
    move = {way: said["move_us"] for way, said in found.items() if "move_us" in said}
    base = [us[w] for w in ("ag_rs", "ag_rs_packed", "a2a_padded") if w in us]
    if base and "gather" in us:
        rows.append(Row(case, "layer_gain", min(base) / us["gather"], "x"))
    if "gather" in move and (base := [move[w] for w in ("ag_rs", "ag_rs_packed") if w in move]):
        rows.append(Row(case, "move_ratio", move["gather"] / min(base), "x"))
    # Of another framework's layer: with its own experts, and with our kernel in their place.
    for end in ("", "_kernel"):
        if "gather" in us and (base := [us[w] for w in us if re.fullmatch(f"megatron_(allgather|alltoall){end}", w)]):
            rows.append(Row(case, f"megatron{end}_gain", min(base) / us["gather"], "x"))
    return rows


def line_of(case: str, found: dict[str, dict[str, Any]], timed: bool) -> str:
    def one(way: str, said: dict[str, Any]) -> str:
        if "fault" in said:
            return f"{way} failed ({said['fault']})"
        if not said["error"] <= BOUND:
            return f"{way} is wrong by {said['error']:.1e}"
        return f"{way} {said['us']:.1f}" + (f"/{said['move_us']:.1f}" if "move_us" in said else "") if timed else f"{way} right"

    return f"{case}: " + ", ".join(one(*pair) for pair in found.items())


def main(argv: list[str] | None = None, say: Callable[..., None] = print, more: MakeWays | None = None) -> int:
    """Returns 0 when every way of every case was right. Raises ConfigError before anything starts."""
    ap = argparse.ArgumentParser(prog="dispatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True, type=Path)
    ap.add_argument("--gpus", type=int, default=0, help="ranks; default: all GPUs, or 2 on a CPU")
    ap.add_argument("--cases", default=".")
    ap.add_argument("--slots", type=int, default=0, help="room for copies on each rank: cases with skewed routing run again with them")
    ap.add_argument("--ids", type=Path, help=".npz with expert_ids [tokens, layers, 6] for routing `real`")
    ap.add_argument("--seconds", type=float, default=420.0, help="no case is begun later")
    ap.add_argument("--commit", default="unknown")
    ap.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    a = ap.parse_args(argv)
    cuda = a.device == "cuda"
    there = torch.cuda.device_count() if cuda else 64
    ranks = a.gpus or (max(2, there) if cuda else 2)
    if not 1 < ranks <= there:
        raise ConfigError(f"{ranks} ranks and {there} {'GPUs' if cuda else 'processes at most'}", where="bench dispatch --gpus",
                          expected=f"2 ranks or more{', a GPU for each' * cuda}",
                          do=f"pass --gpus with at most {there}" if there > 1 else "pass --device cpu: the code alone, no figures")
    models = MODELS if cuda else TINY
    todo = cases_of(models, ranks, a.cases, a.ids is not None, a.slots)
    if not todo:
        raise ConfigError(f"no case matches {a.cases}", where="bench dispatch --cases", expected="such as qwen3-30b-a3b_ep2_t4_uniform",
                          do="see --help")
    if a.ids is not None:
        load_arrays(a.ids)
    check_rows(a.out)
    machine = f"{ranks}x {torch.cuda.get_device_name(0)}" if cuda else "CPU"
    say(f"{len(todo)} cases, {ranks} ranks on {machine}; microseconds a layer" + (" / way there and back" if cuda else
        ": none, times of a CPU are no figures"))
    with tempfile.TemporaryDirectory() as name:
        folder, context = Path(name), multiprocessing.get_context("spawn")
        started = [context.Process(target=_rank, args=(r, name, todo, models, a.device, a.ids, a.seconds, more)) for r in range(ranks)]
        for p in started:
            p.start()
        wrong, seen = 0, set()
        try:
            for case, found in _results(folder, started, a.seconds + 60):
                seen.add(case)
                say(line_of(case, found, cuda))
                good = {way: said for way, said in found.items() if said.get("error", 1.0) <= BOUND}
                wrong += len(found) - len(good)
                if cuda:
                    append_rows(a.out, "dispatch", rows_of(case, good), machine=machine, commit=a.commit,
                                checked=f"error {max((s['error'] for s in good.values()), default=0):.2e}")
        finally:
            for p in started:
                p.join(5)
                if p.is_alive():
                    p.kill()
        faults = [f.read_text() for f in sorted(folder.glob("fault.*"))]
    for fault in faults:
        say(fault)
    if missing := [c.name for c in todo if c.name not in seen]:
        say(f"not run ({len(missing)}): {', '.join(missing)}")
    return 1 if faults or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
