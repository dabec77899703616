"""The main job on a real model: the same tokens with most experts out of memory, fetched ahead, and the KV cache in FP4.

Everything is measured in this process on SmolMoE (30 layers, 32 experts, top-4), on this machine's CPU, in float32.
"""
from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .config import DriveConfig, KVConfig
from .errors import MoEPrefetchError
from .experts.ledger import Totals
from .observe.report import Figure, Report, Table, bars, check_folder, size
from .probes.forecast import OracleForecaster
from .probes.jobs import builtin_texts
from .probes.probe import read_folder
from .session import Session, attach
from .types import Demand

PROMPTS = {
    "prose": "The history of the castle begins in the twelfth century, when",
    "code": "def read_lines(path):\n    \"\"\"Return the lines of a file without their line ends.\"\"\"\n",
    "shell": "To list all files in a directory, including hidden ones, use the command",
}
PLANS = ("lru", "recent", "stale", "probe", "oracle")
SHARES = ("50%", "25%")
KV_FORMATS = ("fp16", "fp8", "fp4-quality", "fp4-72")
KV_TOKENS, KV_CHUNK, KV_WINDOW = 1024, 128, 64
DRIVE = DriveConfig()

Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """One way of generating the three prompts."""

    name: str
    share: str
    tokens: list[list[int]]
    seconds: float
    decode: Totals = field(default_factory=Totals)
    prefill: Totals = field(default_factory=Totals)
    held: int = 0

    @property
    def per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def total(self) -> Totals:
        """Prefill and decode."""
        return self.decode + self.prefill

    @property
    def unmet(self) -> int:
        """Experts that had to be waited for."""
        return self.total.late + self.total.miss

    @property
    def bytes_read(self) -> int:
        return self.total.bytes_moved

    @property
    def stall_ms(self) -> float:
        """Milliseconds of waiting per token."""
        return 1e3 * self.total.stall_s / sum(map(len, self.tokens))


def generate(model: Any, tokenizer: Any, new_tokens: int, tick: Callable[[], None]) -> tuple[list[list[int]], float]:
    """Greedy continuations of the three prompts, token ids, and the seconds they took."""
    out, start = [], time.perf_counter()
    for text in PROMPTS.values():
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                                 pad_token_id=tokenizer.eos_token_id)
        out.append(new[0, ids.shape[1] :].tolist())
        tick()
    return out, time.perf_counter() - start


def expert_runs(model: Any, tokenizer: Any, probe: Path, *, new_tokens: int, drive: DriveConfig | None,
                tick: Callable[[], None]) -> list[Run]:
    """Untouched, everything resident, then every plan at every share. The first run is the reference."""
    tokens, seconds = generate(model, tokenizer, new_tokens, tick)
    runs = [Run("untouched", "100%", tokens, seconds)]
    with attach(model) as session:
        demands = session.record_demands()
        tokens, seconds = generate(model, tokenizer, new_tokens, tick)
        runs.append(_run("resident", "100%", tokens, seconds, session))
    with tempfile.TemporaryDirectory(prefix="moe_prefetch-demo-") as name:
        folder = Path(name)
        for share in SHARES:
            for plan in PLANS:
                with _attached(model, folder, share, plan, probe, drive, demands) as session:
                    tokens, seconds = generate(model, tokenizer, new_tokens, tick)
                    session.wait_idle()
                    runs.append(_run(plan, share, tokens, seconds, session))
    return runs


def _attached(model: Any, folder: Path, share: str, plan: str, probe: Path, drive: DriveConfig | None, demands: list[Demand]) -> Session:
    experts = {"home": "disk", "resident": share, "path": folder, "drive": drive.model_dump() if drive else None}
    forecaster = OracleForecaster(demands, model.config.num_experts) if plan == "oracle" else None
    return attach(model, {"experts": experts, "probe": {"path": probe}}, plan=plan, forecaster=forecaster)


def _run(name: str, share: str, tokens: list[list[int]], seconds: float, session: Session) -> Run:
    kinds = session.ledger.kinds
    decode, prefill = kinds.get("decode", Totals()), kinds.get("prefill", Totals())
    return Run(name, share, tokens, seconds, decode, prefill, session.held_bytes()["resident"])


@dataclass(frozen=True)
class KVRow:
    """One cache format on the same text: bits and bytes with everything counted, quality against FP16."""

    format: str
    bytes_per_token: float
    bits_short: float
    bits_long: float
    perplexity: float
    kl: float
    agreement: float


def kv_rows(model: Any, tokenizer: Any, tick: Callable[[], None]) -> list[KVRow]:
    """Feed a text chunk by chunk, as a long prompt is, so that later chunks attend over what is stored; compare with FP16.

    Outlier channels are calibrated once, on text that follows the measured one.
    """
    caches = importlib.import_module("moe_prefetch.integrations.transformers_cache")
    ids = tokenizer(builtin_texts()[0][: 12 * KV_TOKENS], return_tensors="pt").input_ids
    stats = caches.calibrate(model, ids[:, KV_TOKENS + 1 : 2 * KV_TOKENS + 1])
    rows, reference = [], None
    for name in KV_FORMATS:
        config = KVConfig(format=name, window=KV_WINDOW)
        cache, chunks = caches.make_cache(model.config, config, stats), []
        with torch.inference_mode():
            for start in range(0, KV_TOKENS, KV_CHUNK):
                chunks.append(model(ids[:, start : start + KV_CHUNK], past_key_values=cache, use_cache=True).logits[0].float())
        logp_TV = torch.log_softmax(torch.cat(chunks), -1)
        loss = -logp_TV.gather(-1, ids[0, 1 : KV_TOKENS + 1, None]).mean()
        if reference is None:
            reference = logp_TV
        kl = (reference.exp() * (reference - logp_TV)).sum(-1).mean()
        agree = (reference.argmax(-1) == logp_TV.argmax(-1)).float().mean()
        at_32k = [row["bits_per_element"] for row in cache.report()]
        rows.append(KVRow(name, cache.held_bytes() / KV_TOKENS, cache.bits_per_element(), sum(at_32k) / len(at_32k), float(loss.exp()),
                          float(kl), float(agree)))
        tick()
    return rows


def demo_report(runs: list[Run], kv: list[KVRow], drive: DriveConfig | None, texts: dict[str, str]) -> Report:
    """Tables and figures of the whole demonstration."""
    how = "Reads are real and not modelled (page cache included)."
    if drive:
        how = (f"Reads are real; on top of them the drive is **modelled** as {drive.bandwidth / 1e9:g} GB/s with {drive.latency * 1e6:g} us"
               " latency, because the page cache makes small real reads far faster than any drive.")
    report = Report("moe_prefetch demo: SmolMoE with most experts out of memory", how)
    reference, rows = runs[0], []
    lru = {r.share: r for r in runs if r.name == "lru"}
    for r in runs:
        same = "identical" if r.tokens == reference.tokens else "DIFFERENT"
        d = r.total
        base = lru.get(r.share)
        rows.append((r.name, r.share, same, d.hit, d.late, d.miss, f"{r.unmet / base.unmet - 1:+.0%}" if base and base.unmet else "",
                     size(d.bytes_moved), f"{r.bytes_read / base.bytes_read:.2f}x" if base and base.bytes_read else "",
                     size(d.bytes_wasted),
                     f"{r.stall_ms:.2f}", f"{r.per_second:.1f}", size(r.held) if r.held else ""))
    report.tables.append(Table(
        "Experts", ("plan", "resident", "tokens", "hit", "late", "miss", "unmet", "read", "x lru", "wasted", "stall", "tok/s", "held"),
        rows,
        "Prefill and decode together; each distinct expert of a layer and pass counts once. unmet: late + miss against lru; x lru: bytes "
        "read against lru; wasted: read ahead, thrown out unread; stall: ms per token spent waiting; held: bytes of experts in memory. "
        "`oracle` knows the future: no forecast can do better. tok/s include prefill and depend on what else this machine does; counts "
        "and bytes hardly do."))
    report.tables.append(Table(
        "KV cache",
        ("format", "bytes/token", f"bits at {KV_TOKENS}", "bits at 32k", "perplexity", "logit KL", "same top-1"),
        [(r.format, round(r.bytes_per_token), r.bits_short, r.bits_long, r.perplexity, r.kl, f"{r.agreement:.1%}") for r in kv],
        f"{KV_TOKENS} tokens of Python's documentation in chunks of {KV_CHUNK}, with a window of {KV_WINDOW} (`fp4-quality` has 1,024 of "
        "its own, which nothing this short would leave). Bits per element of K and V with everything counted: codes, scales, outliers, "
        "sinks, window, tables, and half-filled pages, which weigh most at short lengths."))
    report.tables.append(Table("Texts", ("prompt", "continuation (the same in every run)"), list(texts.items())))
    plans = [r for r in runs if r.share in SHARES]
    labels = [f"{r.name}\n{r.share}" for r in plans]

    def share(key: str) -> list[float]:
        return [getattr(r.total, key) / r.total.demanded for r in plans]

    report.figures = [
        Figure("experts", "Demanded experts that were there, late or missing, and wasted fetches, by plan and share resident",
               bars({k: share(k) for k in ("hit", "late", "miss", "wasted")}, labels, "share of demand", stacked=True)),
        Figure("bytes", "Bytes read from the drive", bars({"bytes": [r.bytes_read / 2**20 for r in plans]}, labels, "MiB", stacked=True)),
        Figure("stall", "Time spent waiting for experts",
               bars({"miss": [r.stall_ms for r in plans]}, labels, "ms per token", stacked=True)),
        Figure("kv", "What the formats cost in answers: logit KL against FP16",
               bars({"other": [r.kl for r in kv]}, [r.format for r in kv], "KL (nats)", stacked=True))]
    report.data = {"drive": drive.model_dump() if drive else None, "tokens_identical": all(r.tokens == reference.tokens for r in runs),
                   "runs": [{"plan": r.name, "resident": r.share, "seconds": r.seconds, "held_bytes": r.held, "tokens": r.tokens,
                             "decode": r.decode.as_dict(), "prefill": r.prefill.as_dict()} for r in runs],
                   "kv": [vars(r) for r in kv]}
    return report


def run(folder: Path, *, new_tokens: int, drive: DriveConfig | None, probe: Path | None, progress: Progress) -> Report:
    """The whole demonstration; writes and returns the report. `progress(what, done, of)` is called as it goes.

    Raises MoEPrefetchError (missing model parts, a probe of another model) before anything runs, and, after writing the report, when
    a run's tokens differ.
    """
    check_folder(folder)
    if probe is not None:
        read_folder(probe)
    smolmoe = importlib.import_module("moe_prefetch.integrations.smolmoe")
    steps = [0, 1 + len(PROMPTS) * (2 + len(SHARES) * len(PLANS)) + len(KV_FORMATS)]

    def tick(what: str) -> None:
        steps[0] += 1
        progress(what, steps[0], steps[1])

    # One core is left to the mover threads; the model is too small to gain from more than a few.
    torch.set_num_threads(max(1, min(4, len(os.sched_getaffinity(0)) - 1)))
    progress("building and loading SmolMoE", 0, steps[1])
    model, tokenizer = smolmoe.load()
    probe = probe or smolmoe.probe_dir("mixed")
    tick("SmolMoE is loaded")
    runs = expert_runs(model, tokenizer, probe, new_tokens=new_tokens, drive=drive, tick=lambda: tick("generating under every plan"))
    kv = kv_rows(model, tokenizer, lambda: tick("KV cache formats"))
    texts = {name: tokenizer.decode(ids) for name, ids in zip(PROMPTS, runs[0].tokens, strict=True)}
    report = demo_report(runs, kv, drive, texts)
    report.save(folder)
    if wrong := [f"{r.name} at {r.share}" for r in runs if r.tokens != runs[0].tokens]:
        raise MoEPrefetchError(f"tokens differ under {', '.join(wrong)}", where=str(folder), expected="the tokens of the untouched model",
                               do="this is a defect: please report it with the folder")
    return report
