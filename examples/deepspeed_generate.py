"""Generate with DeepSpeed and the section of ours in its JSON; on request, next to DeepSpeed alone.

    python examples/deepspeed_generate.py                                   SmolMoE on the CPU, half of the experts on the drive
    torchrun --nproc-per-node 2 examples/deepspeed_generate.py --random 16 --dtype bf16 --home local --compare rows.csv
                                                                            two GPUs, a random Qwen3-MoE with layers of real size

Under several processes attention is split by AutoTP. `--compare` times both in turns on the same engine: attached, and detached, when it
is DeepSpeed's alone again.
"""
# ruff: noqa: E402 (DeepSpeed reads the environment when it is imported)
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# What the `deepspeed` launcher sets and torchrun does not; its CPU collectives count by it.
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_prefetch
from moe_prefetch.bench.rows import Row, append_rows, check_rows
from moe_prefetch.integrations import deepspeed as mpd
from moe_prefetch.integrations import smolmoe
from moe_prefetch.integrations.transformers_cache import make_cache


def random_model(layers: int, dtype: torch.dtype, device: str) -> Any:
    """Qwen3-30B-A3B's layers (128 experts of 768, top 8, hidden 2048), fewer of them, with random weights."""
    config = Qwen3MoeConfig(vocab_size=32000, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
                            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144,
                            norm_topk_prob=True, max_position_embeddings=40960, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def generate(engine: Any, ids_BS: torch.Tensor, tokens: int) -> torch.Tensor:
    """New tokens [B, tokens], greedy."""
    with torch.no_grad():
        out = engine.generate(input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=tokens, min_new_tokens=tokens,
                              do_sample=False)
    return out[:, ids_BS.shape[1]:]


def timed(engine: Any, ids_BS: torch.Tensor, tokens: int) -> float:
    wait = torch.cuda.synchronize if ids_BS.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    generate(engine, ids_BS, tokens)
    wait()
    return 1e3 * (time.perf_counter() - start)


def compare(engine: Any, section: dict[str, Any], ids_BS: torch.Tensor, tokens: int, rounds: int) -> dict[str, tuple[float, str]]:
    """Medians over rounds in which both are timed once; a decode step is (tokens) against (1 token)."""
    found: dict[str, list[float]] = {"prefill_ms_deepspeed": [], "prefill_ms_ours": [], "decode_ms_deepspeed": [], "decode_ms_ours": []}
    said = {}
    for turn in range(rounds + 1):
        for name in ("deepspeed", "ours"):
            session = moe_prefetch.attach(engine, section) if name == "ours" else None
            said[name] = generate(engine, ids_BS, tokens if turn == 0 else 1)
            one, every = timed(engine, ids_BS, 1), timed(engine, ids_BS, tokens)
            if session is not None:
                session.detach()
            if turn:
                found[f"prefill_ms_{name}"].append(one)
                found[f"decode_ms_{name}"].append((every - one) / (tokens - 1))
        if turn == 0:
            same = float((said["ours"] == said["deepspeed"]).float().mean())
    out = {k: (statistics.median(v), "ms") for k, v in found.items()}
    out["speedup_vs_deepspeed"] = (out["decode_ms_deepspeed"][0] / out["decode_ms_ours"][0], "ratio")
    out["same_tokens"] = (same, "share")
    return out


def kv_share(model: Any, section: dict[str, Any], length: int) -> float:
    """Bytes of our cache over those of 16-bit K and V, for one sequence of `length` tokens."""
    kv = moe_prefetch.Config.model_validate(section).kv
    text = model.config
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    plain = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * dim * length
    if kv.format == "fp16" and not kv.layers:
        return 1.0
    cache = make_cache(model.config, kv)
    for layer in cache.layers:
        k, v = (torch.randn(1, text.num_key_value_heads, length, dim) for _ in "kv")
        layer.update(k, v)
        break
    return cache.held_bytes() * text.num_hidden_layers / plain


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    ap.add_argument("--random", type=int, default=0, metavar="LAYERS", help="a random model of so many layers in place of SmolMoE")
    ap.add_argument("--dtype", help="in place of the file's dtype")
    ap.add_argument("--home", choices=("local", "disk"), help="local: in place of the file's experts and probe")
    ap.add_argument("--kv", nargs="+", help="in place of the file's kv.format; --compare takes each in turn")
    ap.add_argument("--attention", choices=("auto", "pages", "tensors"), default="auto", help="kv.attention of the formats of --kv")
    ap.add_argument("--batch", type=int, default=1)
    ap.add_argument("--prompt", type=int, default=0, help="random prompt of so many tokens in place of a sentence")
    ap.add_argument("--tokens", type=int, default=32)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--compare", type=Path, metavar="CSV", help="time DeepSpeed alone as well, and append rows")
    ap.add_argument("--commit", default="unknown")
    a = ap.parse_args()
    if a.compare:
        check_rows(a.compare)

    whole = json.loads(a.config.read_text())
    section = whole["moe_prefetch"]
    if "path" in section.get("probe", {}):
        section["probe"]["path"] = str(a.config.parent / section["probe"]["path"])
    if a.random or a.home == "local":
        section.pop("probe", None)  # it was fitted for SmolMoE
    if a.home == "local":
        section.pop("experts", None)
    if a.kv:
        section["kv"] = kv_section(a.kv[0], a.attention)
    whole |= {"dtype": a.dtype} if a.dtype else {}
    whole |= {"tensor_parallel": {"tp_size": WORLD}} if WORLD > 1 else {}
    if WORLD > 1:
        deepspeed.init_distributed()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)

    if a.random:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(whole["dtype"], torch.float32)
        model, tokenizer = random_model(a.random, dtype, device), None
        ids = torch.randint(0, 32000, (a.batch, a.prompt or 64), generator=torch.Generator().manual_seed(1))
    else:
        model, tokenizer = smolmoe.load(progress=RANK == 0)
        ids = tokenizer(["The old bridge over the river was built"] * a.batch, return_tensors="pt").input_ids
    engine = mpd.init_inference(model, whole, max_out_tokens=max(1024, ids.shape[1]))
    ids = ids.to(device)
    new = generate(engine, ids, a.tokens)
    report = engine.moe_prefetch.report()
    engine.moe_prefetch.detach()
    if RANK == 0:
        print(tokenizer.decode(new[0]) if tokenizer else f"first tokens: {new[0, :8].tolist()}")
        if a.home != "local":
            for table in report.tables[:1]:
                print(table.title, *[dict(zip(table.columns, row)) for row in table.text()], sep="\n")
    if a.compare:
        for kv in a.kv or ["file"]:
            section |= {"kv": kv_section(kv, a.attention)} if a.kv else {}
            found = compare(engine, section, ids, a.tokens, a.rounds)
            found["kv_bytes_vs_16bit"] = (kv_share(model, section, ids.shape[1] + a.tokens), "share")
            if RANK == 0:
                save(a, kv, found, ids)
    if WORLD > 1:
        torch.distributed.destroy_process_group()
    return 0


def kv_section(name: str, attention: str) -> dict[str, str]:
    return {} if name == "fp16" else {"format": name, "attention": attention}


def save(a: argparse.Namespace, kv: str, found: dict[str, tuple[float, str]], ids_BS: torch.Tensor) -> None:
    machine = f"{WORLD} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else os.uname().machine
    case = f"{f'qwen3moe{a.random}' if a.random else 'smolmoe'}_tp{WORLD}_b{ids_BS.shape[0]}_t{ids_BS.shape[1]}_kv-{kv}"
    case += "" if kv == "fp16" else f"-{a.attention}"
    checked = f"tests/integrations/deepspeed/test_serving.py, deepspeed {deepspeed.__version__}"
    for metric, (value, unit) in found.items():
        print(f"{case} {metric} {value:.4g} {unit}")
    rows = [Row(case, metric, value, unit) for metric, (value, unit) in found.items()]
    append_rows(a.compare, "deepspeed", rows, machine=machine, commit=a.commit, checked=checked)


if __name__ == "__main__":
    sys.exit(main())
