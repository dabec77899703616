"""KV quality: what each format does to answers, teacher-forced, next to what people use today, on the same text in the same run.

    python benchmarks/kv_quality.py --text validation.txt                       # 24 x 2,048 tokens: about an hour of two cores, minutes
    of a GPU python benchmarks/kv_quality.py --text validation.txt --texts 2 --length 1024 --only fp4-quality
    python benchmarks/kv_quality.py --text validation.txt --passkey 20 --length 8192

Ours: encode, pages and attention as decode uses them (`attend_as_decoded`; a test holds it against stepwise decode), calibrated on the
end of the file, measured on its start. Peers: the quantisers that transformers' QuantizedCache calls, over all of K and V, without their
FP16 remainder. Bits count
codes, scales, zero points (16 bits each in peers) and, for ours, all else a sequence of 32k holds. Rows are appended with --out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import platform
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_prefetch.integrations import smolmoe
from moe_prefetch.integrations.transformers_cache import calibrate
from moe_prefetch.integrations.transformers_quality import decoded, log_probs, through
from moe_prefetch.kv.codec import OutlierStats
from moe_prefetch.kv.gate import Drift, drift

COLUMNS = ("bench", "case", "metric", "value", "unit", "machine", "torch", "triton", "commit", "date", "checked")
CHECKED = "tests/kv/test_attention.py::test_one_pass_equals_stepwise_decode"
OURS = {
    "fp8": ("fp8", "importance", 64),
    "fp4-72": ("fp4-72", "importance", 64),
    "fp4-quality": ("fp4-quality", "importance", 64),
    "fp4-72_nowindow": ("fp4-72", "importance", 0),
    "fp4-quality_nowindow": ("fp4-quality", "importance", 0),
    "fp4-quality_topn": ("fp4-quality", "topn", 64),
    "fp4-quality_sigma": ("fp4-quality", "sigma", 64),
    "fp4-quality_none": ("fp4-quality", "none", 64),
    "fp4-72-c64": ("fp4-72-c64", "importance", 64),
    "nvfp4_nowindow": ("nvfp4", "none", 0),
    "mxfp4_nowindow": ("mxfp4", "none", 0),
}
Bits = list[float]
Peer = Callable[[Bits], Callable]


def fp8_cast(bits: Bits) -> Callable:
    def transform(_layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits.append(8.0)
        return k.clamp(-448, 448).to(torch.float8_e4m3fn).float(), v.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    return transform


def quanto(axis_key: int, axis_value: int, group: int = 64) -> Peer:
    def peer(bits: Bits) -> Callable:
        from transformers.cache_utils import QuantoQuantizedLayer

        layer = QuantoQuantizedLayer(nbits=4, axis_key=axis_key, axis_value=axis_value, q_group_size=group)

        def one(x: torch.Tensor, axis: int) -> torch.Tensor:
            q = layer._quantize(x.contiguous(), axis)
            bits.append(4 + 16 * (q._scale.numel() + q._shift.numel()) / x.numel())
            return layer._dequantize(q)

        return lambda _layer, k, v: (one(k, axis_key), one(v, axis_value))

    return peer


def hqq(group: int) -> Peer:
    def peer(bits: Bits) -> Callable:
        from transformers.cache_utils import HQQQuantizedLayer

        layer = HQQQuantizedLayer(nbits=4, axis_key=1, axis_value=1, q_group_size=group)

        def one(x: torch.Tensor) -> torch.Tensor:
            q, meta = layer.quantizer.quantize(
                x.contiguous(), axis=1, device=str(x.device), compute_dtype=x.dtype, nbits=4, group_size=group
            )
            bits.append(4 + 16 * (meta["scale"].numel() + meta["zero"].numel()) / x.numel())
            return layer.quantizer.dequantize(q, {**meta, "compute_dtype": x.dtype}).reshape(x.shape)

        return lambda _layer, k, v: (one(k), one(v))

    return peer


PEERS: dict[str, Peer] = {
    "peer-fp8-cast": fp8_cast,
    "peer-quanto-int4-k0v0": quanto(0, 0),
    "peer-quanto-int4-k1v0": quanto(-1, 0),
    "peer-hqq4-g64": hqq(64),
    "peer-hqq4-g32": hqq(32),
}


def layer_bits(layouts: dict[int, object], window: int) -> float:
    total = [(x.bits_per_element(32768, 4, window), x.element_count) for x in layouts.values()]
    return sum(b * n for b, n in total) / sum(n for _, n in total)


def combine(parts: list[Drift]) -> Drift:
    n = len(parts)
    mean = lambda get: sum(get(p) for p in parts) / n  # noqa: E731
    return Drift(
        mean(lambda p: p.kl),
        mean(lambda p: p.top1),
        math.exp(mean(lambda p: math.log(p.ppl))),
        math.exp(mean(lambda p: math.log(p.ppl_fp16))),
        sum(p.tokens for p in parts),
        tuple(mean(lambda p, i=i: p.kl_by_position[i]) for i in range(8)),
    )


def measure(model: torch.nn.Module, texts: torch.Tensor, stats: OutlierStats, names: list[str]) -> dict[str, tuple[Drift, float]]:
    layers = range(model.config.num_hidden_layers)
    found: dict[str, list[Drift]] = {}
    bits: dict[str, float] = {}
    for i, ids in enumerate(texts):
        reference = log_probs(model, ids)
        for name in names:
            start = time.perf_counter()
            counted: Bits = []
            layouts: dict = {}
            if name in OURS:
                fmt, policy, window = OURS[name]
                attention = decoded(stats, dict.fromkeys(layers, fmt), policy=policy, window=window, seen=layouts)
            else:
                try:
                    attention = through(PEERS[name](counted))
                except ImportError as e:
                    if i == 0:
                        print(f"{name}: skipped, {e}".splitlines()[0])
                    continue
            found.setdefault(name, []).append(drift([reference], [log_probs(model, ids, attention)], [ids]))
            bits[name] = layer_bits(layouts, OURS[name][2]) if layouts else sum(counted) / len(counted)
            d = combine(found[name])
            took = time.perf_counter() - start
            moved = f"KL {d.kl:.5f} ppl {100 * (d.ppl_ratio - 1):+.2f} % top-1 {d.top1:.3f}"
            print(f"{i + 1}/{len(texts)} {name:24s} {moved} bits {bits[name]:.3f} ({took:.1f} s)", flush=True)
    return {n: (combine(p), bits[n]) for n, p in found.items()}


def passkey(
    model: torch.nn.Module, tokenizer: object, text: str, stats: OutlierStats, count: int, length: int, names: list[str]
) -> dict[str, float]:
    """Share of hidden five-digit keys that greedy decoding would repeat, FP16 first."""
    rng = random.Random(0)
    encode = lambda s: tokenizer(s, add_special_tokens=False)["input_ids"]  # noqa: E731
    filler, ask = encode(text), encode("\nWhat is the pass key? The pass key is")
    layers = range(model.config.num_hidden_layers)
    hits: dict[str, int] = {}
    for _ in range(count):
        key = str(rng.randrange(10000, 99999))
        note, answer = encode(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"), encode(f" {key}")
        room = length - len(note) - len(ask) - len(answer)
        depth, start = rng.randrange(room), rng.randrange(len(filler) - room)
        body = filler[start : start + room]
        ids = torch.tensor(body[:depth] + note + body[depth:] + ask + answer, device=model.device)
        for name in ["fp16", *names]:
            fmt, policy, window = OURS.get(name, ("", "", 0))
            attention = None if name == "fp16" else decoded(stats, dict.fromkeys(layers, fmt), policy=policy, window=window)
            got = log_probs(model, ids, attention, keep=len(answer) + 1)[:-1].argmax(-1)
            hits[name] = hits.get(name, 0) + int(torch.equal(got, ids[-len(answer) :]))
    return {n: h / count for n, h in hits.items()}


def append(out: Path, rows: list[tuple[str, str, float, str]], machine: str) -> None:
    def version(name: str) -> str:
        try:
            return str(__import__(name).__version__)
        except ImportError:
            return ""

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    new = not out.exists()
    with out.open("a", newline="") as f:
        write = csv.writer(f)
        if new:
            write.writerow(COLUMNS)
        for case, metric, value, unit in rows:
            write.writerow(
                [
                    "kv-quality",
                    case,
                    metric,
                    f"{value:.6g}",
                    unit,
                    machine,
                    torch.__version__,
                    version("triton"),
                    commit,
                    datetime.date.today().isoformat(),
                    CHECKED,
                ]
            )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", type=Path, required=True, help="plain text; its start is measured, its end calibrates")
    p.add_argument("--model", choices=("smollm2", "smolmoe"), default="smollm2")
    p.add_argument("--model-dir", type=Path, help="a checkpoint folder to load instead of building that model")
    p.add_argument("--texts", type=int, default=24)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--calibration-tokens", type=int, default=8192)
    p.add_argument("--span", type=int, help="context that the calibration is spread over; default: --length")
    p.add_argument("--only", nargs="*", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    p.add_argument("--passkey", type=int, default=0, help="instead: this many hidden keys at --length tokens")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--machine", default="", help="name in the rows; default: the GPU's or the processor's")
    p.add_argument("--out", type=Path, help="append rows to this CSV")
    a = p.parse_args(argv)
    if a.model_dir:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(a.model_dir, dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(a.model_dir),
        )
    else:
        model, tokenizer = smolmoe.load() if a.model == "smolmoe" else smolmoe.dense_base()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = model.to(a.device)
    text = a.text.read_text()
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], device=a.device)
    chunk = min(1024, a.length)
    need = a.calibration_tokens + (0 if a.passkey else a.texts * a.length)
    if len(ids) < need:
        p.error(f"the text has {len(ids)} tokens, {need} are needed")
    stats = calibrate(model, ids[-(a.calibration_tokens // chunk) * chunk :].view(-1, chunk), span=a.span or a.length)
    machine = a.machine or (torch.cuda.get_device_name() if a.device.startswith("cuda") else platform.processor() or platform.machine())
    rows: list[tuple[str, str, float, str]] = []
    if a.passkey:
        for name, share in passkey(model, tokenizer, text, stats, a.passkey, a.length, [n for n in a.only if n in OURS]).items():
            print(f"passkey at {a.length}: {name:24s} {100 * share:.1f} % of {a.passkey}")
            rows.append((f"{a.model}_{name}_passkey_{a.length}", "retrieval", share, "share"))
    else:
        for name, (d, bits) in measure(model, ids[: a.texts * a.length].view(a.texts, a.length), stats, a.only).items():
            case = f"{a.model}_{name}" + ("" if (a.texts, a.length) == (24, 2048) else f"_{a.texts}x{a.length}")
            rows += [
                (case, "kl", d.kl, "nats"),
                (case, "ppl_ratio", d.ppl_ratio, "ratio"),
                (case, "top1", d.top1, "share"),
                (case, "bits_per_element", bits, "bits"),
            ]
            rows += [(case, f"kl_part{i + 1}of8", v, "nats") for i, v in enumerate(d.kl_by_position)]
    if a.out:
        append(a.out, rows, machine)


if __name__ == "__main__":
    main()
