"""KV quality: what each format does to answers, next to the quantisers people use today, on the same text in the same run.

Ours: encode, pages and attention as decode uses them (`attend_as_decoded`; a test holds it against stepwise decode), calibrated on the end
of the text, measured on its start. Peers: over all of K and V. Bits count codes, scales and zero points, and for ours all else that a
sequence of 32k tokens holds. Perplexity and KL (nats per token, against the same model with an exact cache) are teacher-forced.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import KVConfig
from ..errors import ConfigError
from ..kv.codec import STATS_VERSION, turns_keys
from ..kv.format import LAYOUT_VERSION, PageLayout, capacity, format_of
from ..kv.gate import Drift, drift
from ..kv.outliers import POLICIES, Policy
from ..observe.report import Figure, Report, Table
from ..probes.jobs import load_model
from .rows import Journal, Row, checkpoint_id

CHECKED = "tests/kv/test_attention.py::test_one_pass_equals_stepwise_decode"
SINKS = 4
# Where a scheme does not say otherwise, drift is measured as if each token left the window at once, and bits are counted as if the last
# ones had not: the worse of both.
LATE = KVConfig().settle - 1
# Said often enough that a model of 135 million parameters knows each digit at 0.8 and more: what it only guesses tells nothing.
SAY = 2 * ("The", "Remember: the", "Again: the", "I repeat: the", "Do not forget: the")
PARTS = 8  # of a text, for drift by position


class Scheme(NamedTuple):
    """One way to keep a cache: format, outlier policy, FP16 window in tokens; `pinned`: measured with the exact run's routing (MoE);
    `settle`: tokens leave the window so many at a time, as `kv.settle` has it in generation.
    """

    format: str
    policy: Policy = "importance"
    window: int = 64
    pinned: bool = False
    settle: int = 1

    @property
    def most(self) -> int:
        """Tokens that may be in the window: what bits are counted with."""
        return self.window + max(LATE, self.settle - 1)

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """From a name such as `fp4-quality`, `fp4-quality_topn_w128`, `fp8+fp4-72_w128` or `fp4-72_nowindow_s32`. Raises ConfigError."""
        fmt, policies = format_of(name.split("_")[0]), "|".join(POLICIES)
        # One name for each scheme: journals and rows go by it.
        found = re.fullmatch(rf"[^_]+(?:_({policies}))?(?:_(nowindow|w\d{{1,5}}))?(?:_s([1-9]\d{{0,2}}))?(_pinned)?", name)
        policy, window, settle, pinned = found.groups() if found else ("", "", "0", "")
        if not 1 <= int(settle or 1) <= 128:
            raise ConfigError(
                f"{name!r} is no scheme",
                where="--only",
                expected=f"FORMAT, then _{' _'.join(POLICIES)}, then _nowindow or _w128, then _s1 to _s128, then _pinned",
                do="correct the name",
            )
        recent = fmt.window if window is None else 0 if window == "nowindow" else int(window[1:])
        return cls(fmt.name, policy or ("importance" if fmt.has_book else "none"), recent, pinned is not None, int(settle or 1))


PEERS = ("peer-fp8-cast", "peer-quanto-int4-k0v0", "peer-quanto-int4-k1v0", "peer-hqq4-g64", "peer-hqq4-g32")
EVERY = (
    "fp16", "fp8", "fp4-72", "fp4-quality", "fp4-72_nowindow", "fp4-quality_nowindow", "fp4-72_w256", "fp4-quality_w64",
    "fp4-quality_topn_w64", "fp4-quality_sigma_w64", "fp4-quality_none_w64", "nvfp4_nowindow", "mxfp4_nowindow", *PEERS,
)  # fmt: skip
SHORT = ("fp8", "fp4-quality", "fp4-72", "fp4-72_nowindow", "peer-fp8-cast", "peer-quanto-int4-k0v0", "peer-quanto-int4-k1v0")
EXACT = "exact"  # the model's own cache and precision
Tick = Callable[[str, int, int], None]
Wanted = dict[str, list[int]]  # scheme -> texts
Found = Iterator[tuple[str, int, dict[str, Any]]]  # scheme, text, figures


@dataclass(frozen=True)
class Job:
    """What is measured.

    text     plain text: its first `texts` x `length` tokens are measured, its last `calibration` tokens calibrate
    model    smollm2, smolmoe, or a checkpoint folder
    span     context that the calibration is spread over (default: `length`)
    passkey  instead of drift: this many keys hidden in `length` tokens each, and whether greedy decoding repeats them
    together texts in one pass (memory: their log-probabilities)
    """

    text: str
    model: str = "smollm2"
    texts: int = 24
    length: int = 2048
    schemes: tuple[str, ...] = SHORT
    calibration: int = 8192
    span: int | None = None
    passkey: int = 0
    device: str = "cpu"
    together: int = 1

    def __post_init__(self) -> None:
        for scheme in (Scheme.parse(name) for name in self.schemes if name not in PEERS):
            step = LATE + 1 if self.passkey else scheme.settle
            if self.length <= (kept := SINKS + scheme.window + step):
                together = f", {step} at a time" if step > 1 else ""
                raise ConfigError(
                    f"{self.length} tokens never leave a window of {scheme.window}{together}: {scheme.format} would be measured as FP16",
                    where="--length",
                    expected=f"more than {kept}",
                    do=f"give more, or name a smaller window, such as {scheme.format}_w{self.length // 4}",
                )
        if self.passkey and (bad := [x for x in self.schemes if x in PEERS or Scheme.parse(x).pinned or re.search(r"_s\d", x)]):
            raise ConfigError(
                f"{bad[0]} is no cache to hide a key in", where="--only", expected="schemes of ours, without _s32 and _pinned",
                do="leave it or --passkey out",
            )  # fmt: skip
        if self.length < 64 or self.texts < 1:
            raise ConfigError(
                f"{self.texts} texts of {self.length} tokens", where="--texts, --length", expected="one of at least 64", do="give more"
            )

    def key(self, scheme: str, number: int) -> dict[str, Any]:
        """Names one measurement in a journal: all that its figures depend on."""
        text = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        span = self.span or self.length
        kind = f"passkey x{len(SAY)} asked of a stored text" if self.passkey else "drift"
        window = None if scheme == EXACT or scheme in PEERS else Scheme.parse(scheme).window
        return checkpoint_id(self.model) | {
            "kind": kind, "model": self.model, "scheme": scheme, "window": window, "length": self.length, "number": number,
            "text": text, "calibration": self.calibration, "span": span, "layout": LAYOUT_VERSION, "stats": STATS_VERSION,
        }  # fmt: skip


class Bench:
    """A model on a device with its calibration; loaded when the first measurement is missing."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.attention: dict[str, Any] = {}
        self.layouts: dict[str, dict[int, PageLayout]] = {}
        self.counted: dict[str, list[float]] = {}

    @cached_property
    def quality(self) -> Any:
        return importlib.import_module("moe_prefetch.integrations.transformers_quality")

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        if self.job.model == "smollm2":
            model, tokenizer = importlib.import_module("moe_prefetch.integrations.smolmoe").dense_base()
        else:
            model, tokenizer = load_model(self.job.model)
        torch.backends.cuda.matmul.allow_tf32 = False
        return model.to(self.job.device), tokenizer

    @property
    def model(self) -> Any:
        return self.loaded[0]

    def encode(self, text: str) -> list[int]:
        return self.loaded[1](text, add_special_tokens=False)["input_ids"]

    @cached_property
    def ids(self) -> torch.Tensor:
        """Token ids of the whole text. Raises ConfigError when there are too few."""
        job, ids = self.job, torch.tensor(self.encode(self.job.text), device=self.job.device)
        need = job.calibration + (job.length if job.passkey else job.texts * job.length)
        if len(ids) < need:
            raise ConfigError(
                f"the text has {len(ids):,} tokens", where="--text", expected=f"{need:,}", do="give a longer text, or fewer --texts"
            )
        return ids

    @cached_property
    def stats(self) -> Any:
        job, chunk = self.job, min(1024, self.job.length, self.job.calibration)
        rows = self.ids[-(job.calibration // chunk) * chunk :].view(-1, chunk)
        caches = importlib.import_module("moe_prefetch.integrations.transformers_cache")
        return caches.calibrate(self.model, rows, span=max(chunk, job.span or job.length))

    def attend(self, name: str) -> Any:
        """The attention of one scheme. Raises ImportError for a peer whose package is missing."""
        if name not in self.attention:
            self.layouts[name], self.counted[name] = {}, []
            if name not in PEERS:
                scheme = Scheme.parse(name)
                layers = range(self.model.config.get_text_config(decoder=True).num_hidden_layers)
                self.attention[name] = self.quality.decoded(
                    self.stats, dict.fromkeys(layers, scheme.format), policy=scheme.policy, sinks=SINKS, window=scheme.window,
                    settle=scheme.settle, seen=self.layouts[name],
                )  # fmt: skip
            else:
                peers = importlib.import_module("moe_prefetch.integrations.transformers_peers")
                self.attention[name] = self.quality.through(peers.PEERS[name](self.counted[name]))
        return self.attention[name]

    def bits(self, name: str) -> float:
        """Bits per element of a scheme that has run: ours at 32k with everything counted, as if for one sequence alone."""
        if name in PEERS:
            return sum(self.counted[name]) / len(self.counted[name])
        layouts, scheme, seen = self.layouts[name], Scheme.parse(name), self.stats.layers
        turned = {n: turns_keys(seen.get(n), x.format, scheme.policy) for n, x in layouts.items()}
        total = sum(x.bits_per_element(32768, SINKS, scheme.most, turned[n]) * x.element_count for n, x in layouts.items())
        return total / sum(x.element_count for x in layouts.values())

    def capacity(self, name: str) -> dict[str, float]:
        """How many sequences of half the model's context fit in 1 GiB: two figures; empty for peers, whose metadata we do not hold."""
        if name in PEERS:
            return {}
        text = self.model.config.get_text_config(decoder=True)
        longest = text.max_position_embeddings
        return capacity(
            list(self.layouts[name].values()), text.num_key_value_heads, budget_bytes=1 << 30, tokens=longest // 2, reserved=longest,
            sinks=SINKS, window=Scheme.parse(name).most,
        )  # fmt: skip

    def log_probs(self, name: str, ids_BS: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """FP32 [B, S, vocab] under a scheme. Peers see one text at a time: some of them scale over the whole tensor."""
        if name in PEERS:
            return torch.stack([self.quality.log_probs(self.model, ids, self.attend(name), keep) for ids in ids_BS])
        if name != EXACT and Scheme.parse(name).pinned:
            return self.quality.log_probs_pinned(self.model, ids_BS, self.attend(name), keep)
        return self.quality.log_probs(self.model, ids_BS, None if name == EXACT else self.attend(name), keep)

    def drift_of(self, wanted: Wanted) -> Found:
        numbers = sorted({n for todo in wanted.values() for n in todo})
        texts = {n: self.ids[n * self.job.length : (n + 1) * self.job.length] for n in numbers}
        exact = dict(zip(numbers, self.log_probs(EXACT, torch.stack(list(texts.values()))), strict=True))
        for name, todo in wanted.items():
            got = self.log_probs(name, torch.stack([texts[n] for n in todo]))
            for n, row in zip(todo, got, strict=True):
                yield name, n, {**asdict(drift([exact[n]], [row], [texts[n]], PARTS)), "bits": self.bits(name), **self.capacity(name)}

    def passkey_of(self, wanted: Wanted) -> Found:
        """Hidden five-digit keys, and whether greedy decoding would repeat them. As when a user asks about a document that a chat already
        holds: the text is prefilled by the model itself, its K and V go into a scheme's cache, the question reads them from there.
        """
        for n in sorted({n for todo in wanted.values() for n in todo}):
            ids, asked, answer = self.hide(n)
            caches = {name: self.cache(name) for name, todo in wanted.items() if n in todo}
            for name, logits in self.quality.ask(self.model, ids, asked, caches):
                yield name, n, {"hit": int(torch.equal(logits[-answer - 1 : -1].argmax(-1), ids[-answer:]))}

    def cache(self, name: str) -> Any:
        """A scheme's cache, as `generate` takes it; None for the model's own."""
        if name == EXACT:
            return None
        scheme = Scheme.parse(name)
        kv = KVConfig(format=scheme.format, outliers=scheme.policy, sinks=SINKS, window=scheme.window)
        return importlib.import_module("moe_prefetch.integrations.transformers_cache").make_cache(self.model.config, kv, self.stats)

    def hide(self, number: int) -> tuple[torch.Tensor, int, int]:
        """(ids [S] of a text with a key hidden in it, asked for and answered at the end; tokens of question and answer; of the answer)."""
        rng = random.Random(number)
        key = str(rng.randrange(10000, 99999))
        note = self.encode("\n" + " ".join(f"{say} secret number is {key}." for say in SAY) + "\n")
        ask, answer = self.encode("\nRemember: the secret number is"), self.encode(f" {key}")
        room = self.job.length - len(note) - len(ask) - len(answer)
        if room < 1:
            need = self.job.length - room
            raise ConfigError(f"{self.job.length} tokens can't hide a key", where="--length", expected=f"more than {need}", do="give more")
        depth, start = rng.randrange(room), rng.randrange(len(self.ids) - room)
        body = self.ids[start : start + room].tolist()
        ids = torch.tensor(body[:depth] + note + body[depth:] + ask + answer, device=self.job.device)
        return ids, len(ask) + len(answer), len(answer)


def run(job: Job, journal: Journal, tick: Tick = lambda what, done, total: None) -> dict[str, str]:
    """Measure what the journal lacks. Returns the schemes that can't be measured here, with the reason."""
    bench, missing = Bench(job), {}
    count, schemes = (job.passkey, (EXACT, *job.schemes)) if job.passkey else (job.texts, job.schemes)
    for first in range(0, count, job.together):
        group = range(first, min(count, first + job.together))
        tick(f"text {first + 1}", first, count)
        wanted = {s: todo for s in schemes if s not in missing and (todo := [n for n in group if journal.get(job.key(s, n)) is None])}
        for name in list(wanted):
            try:
                if name != EXACT:
                    bench.attend(name)
            except ImportError as e:
                if name not in PEERS:
                    raise
                missing[name] = str(e).strip().splitlines()[0]
                del wanted[name]
        if wanted:
            for name, number, found in (bench.passkey_of if job.passkey else bench.drift_of)(wanted):
                journal.put(job.key(name, number), found)
                tick(f"text {number + 1}, {name}", first, count)
    return missing


def drifts(job: Job, journal: Journal) -> dict[str, tuple[Drift, float, int]]:
    """Scheme -> mean drift over the texts measured so far, bits per element, how many texts."""
    out = {}
    for name in job.schemes:
        found = [f for f in (journal.get(job.key(name, n)) for n in range(job.texts)) if f]
        if found:
            n = len(found)
            mean = lambda get, found=found, n=n: math.fsum(get(f) for f in found) / n  # noqa: E731
            d = Drift(
                mean(lambda f: f["kl"]),
                mean(lambda f: f["top1"]),
                math.exp(mean(lambda f: math.log(f["ppl"]))),
                math.exp(mean(lambda f: math.log(f["ppl_fp16"]))),
                sum(f["tokens"] for f in found),
                tuple(mean(lambda f, i=i: f["kl_by_position"][i]) for i in range(PARTS)),
            )
            out[name] = d, found[0]["bits"], n
    return out


def retrieval(job: Job, journal: Journal) -> dict[str, tuple[float, int]]:
    """Scheme -> share of keys repeated, how many were hidden; `exact` is the model's own cache."""
    out = {}
    for name in (EXACT, *job.schemes):
        if hits := [f["hit"] for f in (journal.get(job.key(name, n)) for n in range(job.passkey)) if f]:
            out[name] = sum(hits) / len(hits), len(hits)
    return out


def rows_of(job: Job, journal: Journal) -> list[Row]:
    """Rows for `benchmarks/results/kv-quality.csv`. Only 24 x 2,048 tokens go without their size in the case's name."""
    model, rows = Path(job.model).name, []
    if job.passkey:
        for name, (share, n) in retrieval(job, journal).items():
            rows.append(Row(f"{model}_{name}_passkey_{n}x{job.length}", "retrieval", share, "share"))
        return rows
    for name, (d, bits, n) in drifts(job, journal).items():
        case = f"{model}_{name}" + ("" if (n, job.length) == (24, 2048) else f"_{n}x{job.length}")
        rows += [Row(case, "kl", d.kl, "nats"), Row(case, "ppl_ratio", d.ppl_ratio, "ratio"), Row(case, "top1", d.top1, "share")]
        rows += [Row(case, "bits_per_element", bits, "bits")]
        rows += [Row(case, f"kl_part{i + 1}of{PARTS}", v, "nats") for i, v in enumerate(d.kl_by_position)]
    return rows


def report_of(job: Job, journal: Journal, missing: dict[str, str]) -> Report:
    """Table and figures of what the journal holds."""
    left_out = "".join(f" Left out: {n} ({why})." for n, why in missing.items())
    if job.passkey:
        found = retrieval(job, journal)
        table = Table(
            f"Keys found in {job.length:,} tokens, {job.model}", ("scheme", "found", "of"),
            [(n, f"{share:.1%}", count) for n, (share, count) in found.items()],
            "exact is the model's own cache: what it can't find, no format can." + left_out,
        )  # fmt: skip
        return Report("KV cache: retrieval", tables=[table], data={n: v[0] for n, v in found.items()})
    found = drifts(job, journal)
    table = Table(
        f"Quality of KV formats, {job.model}, {job.length:,}-token texts",
        ("scheme", "bits per element", "logit KL", "perplexity", "same top token", "texts"),
        [(n, bits, d.kl, f"{100 * (d.ppl_ratio - 1):+.2f} %", f"{d.top1:.1%}", k) for n, (d, bits, k) in found.items()],
        "KL in nats per token against an exact cache; perplexity against the exact one. Ours: with everything that a sequence of 32k "
        "tokens holds counted; peers: over all of K and V, codes, scales and zero points counted." + left_out,
    )  # fmt: skip

    known = {n: next(f for f in (journal.get(job.key(n, i)) for i in range(job.texts)) if f) for n in found}
    fits = Table(
        "How many sequences of half the model's context fit in 1 GiB",
        ("scheme", "bytes per token", "FP16", "sequences", "paged FP16", "FP16 reserved", "x paged", "x reserved"),
        [
            (n, round(f["bytes_per_token"]), round(f["fp16_bytes_per_token"]), int(f["sequences"]), int(f["sequences_paged_fp16"]),
             int(f["sequences_reserved_fp16"]), f["ratio_vs_paged_fp16"], f["ratio_vs_reserved_fp16"])
            for n, f in known.items()
            if "sequences" in f
        ],
        "Two claims, never one for the other: against FP16 in pages (the saving of the format), and against FP16 reserved for the model's "
        "whole context (the saving of format and pages together). Sinks, window, padding and block tables counted.",
    )  # fmt: skip

    def by_bits(axes: Any) -> None:
        for name, (d, bits, _) in found.items():
            axes.scatter([bits], [max(d.kl, 1e-6)], marker="x" if name in PEERS else "o")
            axes.annotate(name.removeprefix("peer-"), (bits, max(d.kl, 1e-6)), textcoords="offset points", xytext=(5, 3), fontsize=7)
        axes.set(xlabel="bits per element at 32k tokens", ylabel="logit KL (nats per token)", yscale="log")

    def by_position(axes: Any) -> None:
        middle = [(i + 0.5) * job.length / PARTS for i in range(PARTS)]
        for name, (d, _, _) in found.items():
            axes.plot(middle, d.kl_by_position, marker=".", label=name.removeprefix("peer-"))
        axes.set(xlabel="position in the text (tokens)", ylabel="logit KL (nats per token)", yscale="log")
        axes.legend(fontsize=7)

    figures = [Figure("kl-by-bits", "Logit KL by bits: ours (dots), peers (crosses)", by_bits),
               Figure("kl-by-position", "Logit KL by position in the text", by_position)]  # fmt: skip
    tables, data = [table, fits] if fits.rows else [table], {n: asdict(v[0]) for n, v in found.items()}
    return Report("KV cache: quality", tables=tables, figures=figures if found else [], data=data)

