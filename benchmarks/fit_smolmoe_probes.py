#!/usr/bin/env python3
"""Fit SmolMoE's probes `mixed` and `cross` on one GPU, in minutes, and write them with cards and figures.

Tokens (from `gather_text.py`) run through the model in float32 with TF32 products; the taps stay on the GPU as a pool that is refilled
while the probes train, so that most tokens are seen once or twice and nothing is learnt by heart. A share of the pool is text that the
model samples itself from prefixes of the training text. The table of variants (`--explore`) is judged, like everything else that is
chosen here, on the end of the *training* domain; WikiText-2 validation's last fifth is only reported; its test split is not used.

usage: fit_smolmoe_probes.py --model CHECKPOINT --tokens tokens.npz.xz --out DIR [--explore] [--final] --minutes 8
       (a trial on a CPU: --pool 4096 --round 1024 --batch 512 --generate 64 --max-steps 20 --window 128)
"""
from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.integrations.moe import ExpertsInterface

from moe_prefetch.integrations.transformers import gates, observe
from moe_prefetch.probes import metrics
from moe_prefetch.probes.calibrate import calibrate, margin_and_truth, reliability_plot
from moe_prefetch.probes.collect import recent_past
from moe_prefetch.probes.probe import HORIZONS, GateSpec, RoutingProbe
from moe_prefetch.probes.targets import FitConfig, Taps, unit_rms
from moe_prefetch.probes.trainer import Trainer

START = time.monotonic()
HELD_OUT = 0.04  # of every source, its end: never trained on, decides between variants and sets temperatures
# Shares of each stream in the pool; what is not named shares the rest by size.
SHARES = {
    "mixed": {"encyc/wikitext": 0.22, "encyc/wikipedia": 0.34, "generated": 0.16, "encyc/*": 0.08, "cross/*": 0.20},
    "cross": {"cross/*-tokenised": 0.50, "generated": 0.10, "cross/*": 0.40},
}

# Horizon 0, and horizons 1 and 2; together just under 12 MB as stored (int8).
RANK = {"mixed": (108, 312), "cross": (34, 40)}


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f}s] {text}", flush=True)


def dense_experts(module: torch.nn.Module, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """All experts as one dense product with zero weight for those not chosen: the same sum, and with 32 experts of 32 neurons faster."""
    e, width, d = module.gate_up_proj.shape
    gate, up = (hidden_TD @ module.gate_up_proj.reshape(e * width, d).T).unflatten(-1, (e, width)).chunk(2, -1)
    weight_TE = hidden_TD.new_zeros(hidden_TD.shape[0], e).scatter_(1, ids_TK, weights_TK.to(hidden_TD.dtype))
    inner = F.silu(gate) * up * weight_TE.unsqueeze(-1)
    return inner.flatten(1) @ module.down_proj.transpose(1, 2).reshape(-1, d)


ExpertsInterface.register("probe_fit_dense", dense_experts)


class Pool:
    """Taps of `size` tokens on the device, written as a ring; also the listener that writes them."""

    def __init__(self, specs: list[GateSpec], size: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        n, e, d = len(specs), specs[0].experts, specs[0].hidden
        self.taps = Taps(torch.zeros(n, size, d, dtype=dtype, device=device), torch.zeros(n, size, d, dtype=dtype, device=device),
                         torch.zeros(n, size, e, device=device), torch.zeros(n, size, d, dtype=dtype, device=device))
        self.size, self.at, self.filled, self.eps = size, 0, 0, specs[0].norm_eps

    def step_begin(self, batch: int, tokens: int) -> None:
        self.now = min(tokens, self.size - self.at)
        self.start_T = torch.zeros(self.now, dtype=torch.bool, device=self.taps.logits_LTE.device)
        self.start_T[:: max(1, tokens // batch)] = True

    def residual(self, layer: int, hidden_TD: torch.Tensor) -> None:
        hidden_TD, to = hidden_TD[: self.now], slice(self.at, self.at + self.now)
        self.taps.residual_LTD[layer, to].copy_(hidden_TD)
        assert self.taps.past_LTD is not None
        self.taps.past_LTD[layer, to].copy_(recent_past(unit_rms(hidden_TD, self.eps), self.start_T))

    def moe_input(self, layer: int, hidden_TD: torch.Tensor) -> None:
        self.taps.moe_input_LTD[layer, self.at : self.at + self.now].copy_(hidden_TD[: self.now])

    def routed(self, layer: int, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> None:
        self.taps.logits_LTE[layer, self.at : self.at + self.now].copy_(logits_TE[: self.now])

    def step_end(self) -> None:
        self.filled = max(self.filled, self.at + self.now)
        self.at = (self.at + self.now) % self.size


class Streams:
    """Random windows of the sources of one probe, in fixed shares."""

    def __init__(self, streams: dict[str, np.ndarray], shares: dict[str, float], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.data = {k: v[: int(len(v) * (1 - HELD_OUT))] if k != "generated" else v for k, v in streams.items()}
        weight: dict[str, float] = {}
        for pattern, share in shares.items():
            head, star, tail = pattern.partition("*")
            names = [k for k in self.data if k not in weight and k not in shares and star and k.startswith(head) and k.endswith(tail)]
            names += [pattern] if pattern in self.data else []
            total = sum(len(self.data[k]) for k in names)
            weight |= {k: share * len(self.data[k]) / total for k in names}
        self.names = list(weight)
        self.weight = np.array(list(weight.values())) / sum(weight.values())

    def windows(self, count: int, length: int) -> torch.Tensor:
        rows = []
        for name in self.rng.choice(self.names, count, p=self.weight):
            data = self.data[name]
            at = int(self.rng.integers(0, max(1, len(data) - length)))
            rows.append(np.resize(data[at : at + length], length))
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def held_out_windows(streams: dict[str, np.ndarray], names: list[str], length: int, limit: int) -> torch.Tensor:
    rows = []
    for name in names:
        data = streams[name][int(len(streams[name]) * (1 - HELD_OUT)) :]
        rows += [data[i : i + length] for i in range(0, len(data) - length + 1, length)]
    keep = np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int)
    return torch.from_numpy(np.stack([rows[i] for i in keep]).astype(np.int64))


class Fit:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        torch.set_float32_matmul_precision("high")
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(self.device).eval()
        self.specs = [g.to(self.device) for g in gates(self.model)]
        self.model.set_experts_implementation("probe_fit_dense")
        arrays = np.load(io.BytesIO(lzma.decompress(args.tokens.read_bytes())))
        self.streams = {k: arrays[k] for k in arrays.files}
        log(f"model on {self.device}, {sum(map(len, self.streams.values())):,} tokens in {len(self.streams)} sources")
        evaluation = self.streams.pop("eval/wikitext")
        w = args.window
        rows = min(len(evaluation) // w, args.eval_tokens // w)
        self.eval_ids = torch.from_numpy(evaluation[: rows * w].astype(np.int64)).view(rows, w)

    def left(self) -> float:
        return self.args.minutes * 60 - (time.monotonic() - START)

    @torch.inference_mode()
    def record(self, pool: Pool, windows: torch.Tensor) -> None:
        per = max(1, self.args.forward // windows.shape[1])
        with observe(self.model, pool):
            for part in windows.split(per):
                self.model.model(input_ids=part.to(self.device), use_cache=False)

    def taps_of(self, windows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Taps:
        pool = Pool(self.specs, windows.numel(), self.device, dtype)
        self.record(pool, windows)
        return pool.taps

    @torch.inference_mode()
    def generate(self, prefixes: torch.Tensor, length: int, temperature: float = 0.9) -> np.ndarray:
        """Sample continuations [B, P + length] of the prefixes [B, P]."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        cache = DynamicCache(config=self.model.config)
        ids = prefixes.to(self.device)
        out = [ids]
        for _ in range(length):
            logits = self.model(input_ids=out[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            # The largest of p / exponential noise is a sample of p: cheaper than multinomial over a large vocabulary.
            p = torch.softmax(logits.float() / temperature, -1)
            out.append((p / torch.empty_like(p).exponential_(1.0)).argmax(-1, keepdim=True))
        return torch.cat(out, 1).cpu().numpy().astype(np.uint16).reshape(-1)

    def add_generated(self, domain: str) -> None:
        """Text of the model's own, from prefixes of this probe's training text."""
        a = self.args
        if not a.generate:
            return
        self.streams.pop("generated", None)
        source = self.source(domain, 77)
        parts = []
        for _ in range(a.generate_rounds):
            prefixes = source.windows(a.generate, min(32, a.window // 4))
            parts.append(self.generate(prefixes, a.window // 2 - prefixes.shape[1]))
        self.streams["generated"] = np.concatenate(parts)
        log(f"sampled {len(self.streams['generated']):,} tokens of the model's own for {domain}")

    def source(self, domain: str, seed: int) -> Streams:
        names = {k: v for k, v in self.streams.items() if domain == "mixed" or not k.startswith("encyc/")}
        shares = {k: v for k, v in SHARES[domain].items() if k != "generated" or "generated" in names}
        return Streams(names, shares, seed)

    def dev_windows(self, domain: str) -> torch.Tensor:
        """The end of the training domain: for `mixed` its encyclopaedic part, for `cross` the tokenised books."""
        names = ["encyc/wikitext", "encyc/wikipedia"] if domain == "mixed" else [k for k in self.streams if k.endswith("-tokenised")]
        return held_out_windows(self.streams, names, self.args.window, max(2, self.args.eval_tokens // self.args.window))

    def fill(self, pool: Pool, source: Streams, tokens: int) -> None:
        w = self.args.window
        # Half of the windows whole, half cut in four: short contexts are what decoding starts from.
        whole = max(1, tokens // (2 * w))
        self.record(pool, source.windows(whole, w))
        self.record(pool, source.windows(4 * max(0, tokens // w - whole), max(16, w // 4)))

    def trainer(self, pool: Pool, config: FitConfig) -> Trainer:
        trainer = Trainer(self.specs, config, self.device)
        # The moments in full precision: TF32 made a covariance of them indefinite.
        torch.set_float32_matmul_precision("highest")
        for start in range(0, min(pool.filled, self.args.moment_tokens), self.args.batch):
            trainer.accumulate(pool.taps.slice(start, min(start + self.args.batch, pool.filled)))
        trainer.start()
        torch.set_float32_matmul_precision("high")
        return trainer

    def batch(self, pool: Pool, generator: torch.Generator, size: int) -> Taps:
        return pool.taps.take(torch.randint(0, pool.filled, (size,), generator=generator, device=self.device))

    # exploring -------------------------------------------------------------------------------------------------------
    def explore(self, seconds: float) -> None:
        """Each variant trains on one full pool for the same number of steps; figures: development text and evaluation text."""
        a, stop = self.args, time.monotonic() + seconds
        if a.explore_generated:
            self.add_generated("mixed")
        pool = Pool(self.specs, a.pool, self.device)
        t = time.monotonic()
        self.fill(pool, self.source("mixed", 1), a.pool)
        self.sync()
        log(f"pool of {pool.filled:,} tokens in {time.monotonic() - t:.1f} s")
        dev, test = self.taps_of(self.dev_windows("mixed")), self.taps_of(self.eval_ids)
        base = FitConfig(rank=RANK["mixed"], steps=a.explore_steps, batch=a.batch, lr=3e-3, past=True)
        variants = [
            ("base", base),
            ("without the past", replace(base, past=False)),
            ("lr 6e-3", replace(base, lr=6e-3)),
        ]
        for name, config in variants:
            t = time.monotonic()
            if t > stop:
                log("out of time for further variants")
                return
            trainer = self.trainer(pool, config)
            first = show(trainer.evaluate(test, a.batch), 3)
            generator = torch.Generator(self.device).manual_seed(0)
            for _ in range(config.steps):
                loss = trainer.step(self.batch(pool, generator, config.batch))
                if time.monotonic() > stop + 20:
                    break
            train, found, held = (show(trainer.evaluate(x, a.batch)) for x in (self.batch(pool, generator, a.batch), dev, test))
            log(f"{name:32s} loss {float(loss):.4f} train {train} dev {found} eval {held} (ridge {first}) {time.monotonic() - t:.1f} s")
            del trainer

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # the real thing --------------------------------------------------------------------------------------------------
    def final(self, domain: str, seconds: float) -> None:
        a, stop = self.args, time.monotonic() + seconds
        self.streams.pop("generated", None)
        self.add_generated(domain)
        source = self.source(domain, 5)
        pool = Pool(self.specs, a.pool, self.device)
        t = time.monotonic()
        self.fill(pool, source, a.pool)
        self.sync()
        fill_s = time.monotonic() - t
        dev, test = self.taps_of(self.dev_windows(domain)), self.taps_of(self.eval_ids)
        config = FitConfig(rank=a.rank or RANK[domain], past=True, batch=a.batch, lr=a.lr, rank_weight=a.rank_weight, tau=a.tau,
                           weight_decay=a.weight_decay, ema=a.ema)
        generator = torch.Generator(self.device).manual_seed(11)
        # Time a few steps, then set the length of the schedule to what fits: training and refilling alternate.
        trial = self.trainer(pool, config)
        for i in range(6):
            if i == 2:
                self.sync()
                t = time.monotonic()
            trial.step(self.batch(pool, generator, a.batch))
        self.sync()
        step_s = (time.monotonic() - t) / 4
        del trial
        per_round = max(1, int(a.visits * a.round / a.batch))
        round_s = per_round * step_s + fill_s * a.round / a.pool
        rounds = max(1, int((stop - time.monotonic() - 20 * (self.device.type == "cuda")) / round_s))
        steps = min(a.max_steps, rounds * per_round)
        log(f"{domain}: pool in {fill_s:.1f} s, {step_s * 1e3:.1f} ms a step, {steps} steps, {a.round:,} new tokens each {per_round}")
        config = replace(config, steps=steps)
        trainer = self.trainer(pool, config)
        log(f"{domain}: ridge start: dev {show(trainer.evaluate(dev, a.batch))} eval {show(trainer.evaluate(test, a.batch))}")
        seen = pool.filled
        loss = torch.zeros(())
        while trainer.done < steps and time.monotonic() < stop:
            loss = trainer.step(self.batch(pool, generator, a.batch))
            if trainer.done % per_round == 0 and trainer.done < steps - per_round:
                self.fill(pool, source, a.round)
                seen += a.round
            if trainer.done % max(1, steps // 8) == 0:
                log(f"{domain}: step {trainer.done} loss {float(loss):.4f} dev {show(trainer.evaluate(dev, a.batch))} "
                    f"eval {show(trainer.evaluate(test, a.batch))}")
        probe = trainer.probe()
        torch.set_float32_matmul_precision("highest")
        calibrate(probe, dev)
        torch.set_float32_matmul_precision("high")
        del pool, trainer, test
        self.write(domain, probe, config, seen)

    def write(self, domain: str, probe: RoutingProbe, config: FitConfig, seen: int) -> None:
        """Store, load again, and judge what was loaded, in float32, on the evaluation text."""
        folder = self.args.out / domain
        probe.to("cpu").save_pretrained(folder)
        torch.set_float32_matmul_precision("highest")
        loaded, stale = RoutingProbe.from_pretrained(folder, self.specs).to(self.device), RoutingProbe(self.specs)
        test = self.taps_of(self.eval_ids, torch.float32)
        rows, lines, curves = [], [], {}
        for h in HORIZONS:
            table: dict[str, list[float]] = {}
            truths, probs = [], []
            for layer in range(h, loaded.layers):
                margin, true = margin_and_truth(loaded, test, layer, h)
                r = loaded.residuals[h]
                assert r is not None
                prob = torch.sigmoid(margin / float(r.temperature_L[layer]))
                got = metrics.table(prob, true, probability=True, candidates=6)
                got["stale_recall_at_k"] = metrics.recall(margin_and_truth(stale, test, layer, h)[0], true)
                for k, v in got.items():
                    table.setdefault(k, []).append(v)
                if layer % 5 == 0:
                    truths.append(true)
                    probs.append(prob)
            curves[f"h{h}"] = (torch.cat(probs).cpu(), torch.cat(truths).cpu())
            for name, values in table.items():
                rows.append({"case": f"smolmoe_{domain}_h{h}", "metric": name, "value": sum(values) / len(values), "worst": min(values)})
            below = [i + h for i, (v, s) in enumerate(zip(table["recall_at_k"], table["stale_recall_at_k"])) if v < s]
            lines.append(f"| h{h} | " + " | ".join(f"{sum(table[k]) / len(table[k]):.4f}" for k in
                                                   ("recall_at_k", "stale_recall_at_k", "recall_at_6", "exact_set", "ece")) +
                         f" | {min(table['recall_at_k']):.3f} | {len(below)} |")
            log(f"{domain} h{h}: " + ", ".join(f"{k} {sum(v) / len(v):.4f}" for k, v in table.items()))
        texts = sorted(self.source(domain, 0).names)
        card = "\n".join([
            f"# SmolMoE routing probe: {domain}", "",
            f"Rank {config.rank} by horizon ({config.linear} linear); horizon 0 sees the recent past. "
            f"{seen:,} tokens, {config.steps} steps of {config.batch}, "
            f"lr {config.lr:g}, boundary term {config.rank_weight:g} at {config.tau:g}.", "",
            "Evaluation: last fifth of WikiText-2 validation, teacher-forced, windows of "
            f"{self.args.window} tokens, mean over all layers where the horizon exists, before any fallback, as stored.", "",
            "| horizon | recall@4 | stale gate | recall@6 | exact set | calibration error | worst layer | layers below the stale gate |",
            "|---|---|---|---|---|---|---|---|", *lines, "",
            "Training text (see benchmarks/gather_text.py): " + ", ".join(texts) + ".",
            "No encyclopaedic text." if domain == "cross" else "WikiText-2 validation: first four fifths only.",
            "`generated` is sampled from SmolMoE itself, from prefixes of the texts named. `-tokenised` texts have spaces around "
            "punctuation and <unk> for rare words, as tokenised corpora do.", ""])
        probe.save_pretrained(folder, card=card, extra={"figures": rows, "tokens": seen})
        reliability_plot(folder / "reliability.png", curves)
        machine = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine()
        (self.args.out / f"{domain}.json").write_text(json.dumps({
            "rows": rows, "machine": machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}, indent=1))
        size = (folder / "model.safetensors").stat().st_size
        torch.set_float32_matmul_precision("high")
        log(f"{domain}: wrote {folder} ({size / 1e6:.2f} MB)")


def show(values: list[list[float]], digits: int = 4) -> str:
    return "/".join(f"{sum(v) / len(v):.{digits}f}" for v in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--explore", action="store_true")
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--only", choices=("mixed", "cross"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run, the model's loading included")
    for name, default in {"pool": 1 << 20, "round": 1 << 18, "batch": 1 << 14, "forward": 1 << 15, "window": 1024, "eval-tokens": 1 << 16,
                          "moment-tokens": 1 << 18, "generate": 0, "generate-rounds": 1, "max-steps": 1 << 30, "explore-steps": 500,
                          "rank": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in {"lr": 4e-3, "rank-weight": 0.3, "tau": 0.1, "weight-decay": 0.01, "ema": 0.998, "visits": 3.0}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--explore-generated", action="store_true")
    args = parser.parse_args()
    fit = Fit(args)
    if args.explore:
        fit.explore(fit.left() * (0.4 if args.final else 0.95))
    if args.final:
        domains = [args.only] if args.only else ["mixed", "cross"]
        for i, domain in enumerate(domains):
            # The larger probe first, with two thirds of the time.
            fit.final(domain, fit.left() * (2 / 3 if i + 1 < len(domains) else 1) - 5)
    log("done")


if __name__ == "__main__":
    main()
