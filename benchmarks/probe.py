#!/usr/bin/env python3
"""Every predictor in one table, on any text or on plain expert ids; rows for `benchmarks/results/probe.csv`.

    probe.py --text FILE --train FILE [--probe examples/smolmoe/probes/mixed] [--tokens N] [--train-tokens N] [--window 1024]
        SmolMoE runs over the text, teacher-forced. The probe is judged beside popularity, previous token, recent load, routing-ids ridge,
        stale gate and oracle; what needs a fit (popularity, ridge) gets it from the first `--train-tokens` of --train. Means over all
        layers where the horizon exists, before any fallback (horizons 1 and 2; at 0 those from layer 1 on for the ids ridge).
    probe.py --ids FOLDER
        DeepSeek-V2-Lite's published routing on two tasks (law_topk_ids.npz, translation_topk_ids.npz): fitted on one, judged on the
        other, both directions, mean over all 26 layers where the horizon exists.

Both print a table; --out FILE.csv also writes rows (--commit names the commit).
"""
from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch

from moe_prefetch.bench.rows import Row, append_rows, check_rows
from moe_prefetch.probes import baselines, metrics
from moe_prefetch.probes.baselines import Routing
from moe_prefetch.probes.calibrate import margin_and_truth
from moe_prefetch.probes.collect import Step
from moe_prefetch.probes.jobs import load_model, record, text_windows
from moe_prefetch.probes.probe import HORIZONS, RoutingProbe
from moe_prefetch.probes.traces import read_ids
from moe_prefetch.seam import open_model

Rows = list[tuple[str, str, float]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ids_table(folder: Path) -> Rows:
    traces = {name: read_ids(folder / f"{name}_topk_ids.npz", 64) for name in ("law", "translation")}
    rows: Rows = []
    for horizon in (1, 2):
        found: dict[str, list[float]] = {}
        for learn, judge in (("law", "translation"), ("translation", "law")):
            train, test = traces[learn], traces[judge]
            makers = {"ids predictor": baselines.ids_context(train), "ids ridge, tap layer": baselines.ids_ridge(train),
                      "ids ridge, 8 layers": baselines.ids_ridge(train, window=8), "popularity": baselines.popularity(train),
                      "previous token": baselines.previous_token(train), "recent load": baselines.recent_load(train)}
            for name, predict in makers.items():
                got = [metrics.recall(predict(test, layer, horizon), test.ids_TLK[:, layer]) for layer in range(horizon, test.layers)]
                found.setdefault(name, []).append(mean(got))
                print(f"h{horizon} {learn} -> {judge}: {name} {mean(got):.4f}", flush=True)
        case = f"v2lite_ids_h{horizon}"
        rows += [(case, "recall_at_k", mean(found["ids predictor"])), (case, "ridge_recall_at_k", mean(found["ids ridge, 8 layers"])),
                 (case, "tap_ridge_recall_at_k", mean(found["ids ridge, tap layer"]))]
    return rows


def text_table(args: argparse.Namespace) -> Rows:
    model, tokenizer = load_model("smolmoe")
    gates = open_model(model).gates
    probe, stale = RoutingProbe.from_pretrained(args.probe, gates), RoutingProbe(gates)

    def steps(path: Path, tokens: int, where: str) -> list[Step]:
        out: list[Step] = []
        windows = text_windows(tokenizer, [path.read_text("utf-8")], args.window)[: max(1, tokens // args.window)]
        record(model, windows, out.append, progress=lambda done, total: print(f"\r{where} {done}/{total}", end="", flush=True))
        print()
        return out

    def routing(parts: list[Step]) -> Routing:
        return Routing(torch.cat([s.ids_TLK for s in parts]), torch.cat([s.start_T for s in parts]), gates[0].experts)

    train, test = routing(steps(args.train, args.train_tokens, "train")), steps(args.text, args.tokens, "text")
    r, seen = routing(test), [s.taps_with_past(gates[0].norm_eps) for s in test]
    ids = {"popularity": baselines.popularity(train),
           "previous token": baselines.previous_token(train),
           "recent load": baselines.recent_load(train), "ids ridge": baselines.ids_ridge(train),
           "ids predictor": baselines.ids_context(train), "oracle": baselines.oracle()}
    rows: Rows = []
    for h in HORIZONS:
        table: dict[str, dict[str, list[float]]] = {}

        def judge(name: str, score: torch.Tensor, true: torch.Tensor, probability: bool, table: dict = table) -> None:
            for metric, value in metrics.table(score, true, probability=probability, candidates=gates[0].top_k + 2).items():
                table.setdefault(name, {}).setdefault(metric, []).append(value)

        for layer in range(h, probe.layers):
            for name, p in (("probe", probe), ("stale gate", stale)):
                parts = [margin_and_truth(p, taps, layer, h) for taps in seen]
                margin, true = torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])
                residual = p.residuals[h]
                heat = 1.0 if residual is None else float(residual.temperature_L[layer])
                judge(name, torch.sigmoid(margin / heat), true, name == "probe")
            for name, predict in ids.items():
                if layer >= max(h, 1) or not name.startswith("ids"):
                    judge(name, predict(r, layer, h), r.ids_TLK[:, layer], False)
        for name, columns in table.items():
            print(f"h{h} {name:16s} " + "  ".join(f"{m} {mean(v):.4f}" for m, v in columns.items()), flush=True)
            rows += [(f"smolmoe_{args.probe.name}_h{h}", ("" if name == "probe" else name.replace(" ", "-") + "_") + m, mean(v))
                     for m, v in columns.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "train", "ids", "out"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--probe", type=Path, default=Path("examples/smolmoe/probes/mixed"))
    parser.add_argument("--commit", default="")
    for name, default in (("tokens", 1 << 14), ("train-tokens", 1 << 14), ("window", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.ids is None and (args.text is None or args.train is None):
        parser.error("give --ids FOLDER, or --text FILE and --train FILE")
    if args.out:
        check_rows(args.out)
    rows = ids_table(args.ids) if args.ids else text_table(args)
    if args.out:
        checked = "tests/probes/test_baselines.py" if args.ids else "tests/probes/test_probe.py"
        machine = platform.machine() + " CPU"
        append_rows(args.out, "probe", [Row(*row, "share") for row in rows], machine=machine, commit=args.commit, checked=checked)


if __name__ == "__main__":
    main()
