"""SmolMoE in Megatron-core: what it computes, and what probes fitted beside its training are worth."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module

from moe_prefetch.integrations import megatron, megatron_cpu, smolmoe, transformers
from moe_prefetch.integrations.megatron_fit import ProbeFit
from moe_prefetch.integrations.megatron_smolmoe import convert
from moe_prefetch.probes.batches import Memory
from moe_prefetch.probes.collect import Collector, Step
from moe_prefetch.probes.fit import fit
from moe_prefetch.probes.jobs import builtin_texts, text_windows
from moe_prefetch.probes.probe import gate_hash
from moe_prefetch.probes.trainer import FitConfig, Taps
from tests.integrations.megatron import harness
from tests.integrations.megatron.cases import case

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of", "Once upon a time there was a",
           "The three primary colours are")


def run(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    length = ids_BS.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return model(ids_BS, torch.arange(length).expand_as(ids_BS), mask)


@case(1)
@torch.no_grad()
def smolmoe_logits(folder: Path) -> Any:
    harness.groups()
    megatron_cpu.seed(1)
    hf, tokenizer = smolmoe.load(progress=False)
    mine = convert(hf).eval()
    texts, worst, same = [], 0.0, []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = hf.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
        texts.append(out)
        logits, want = run(mine, out), hf(out).logits
        worst = max(worst, float((logits - want).abs().max()))
        # One pass over what transformers chose: if every choice is ours too, greedy decoding would have made the same text.
        same.append(bool((logits[0, ids.shape[1] - 1 : -1].argmax(-1) == out[0, ids.shape[1] :]).all()))
    ids = texts[0]
    want = hf(ids).logits
    half = convert(hf.to(torch.bfloat16)).eval()
    theirs, ours = hf(ids).logits.float(), run(Float16Module(half.config, half), ids).float()
    return {"worst": worst, "same": same, "tokens": [int(t.shape[1]) for t in texts], "rounding": float((theirs - want).abs().mean()),
            "rounding_ours": float((ours - want).abs().mean()), "apart": float((ours - theirs).abs().mean())}


@case(1)
def smolmoe_taps(folder: Path) -> Any:
    """A trace of the model is the same from both frameworks, and so are the routers that a probe is made for."""
    harness.groups()
    megatron_cpu.seed(1)
    hf, tokenizer = smolmoe.load(progress=False)
    mine = convert(hf).eval()
    ids = torch.stack([tokenizer(p, return_tensors="pt").input_ids[0, :4] for p in PROMPTS[:2]])
    steps: list[Step] = []
    with torch.no_grad(), transformers.observe(hf, Collector(30, steps.append)):
        hf(ids)
    with torch.no_grad(), megatron.observe(mine, Collector(30, steps.append)):
        run(mine, ids)
    a, b = steps
    far = {k: float(((x := getattr(a.taps, k)) - getattr(b.taps, k)).abs().max() / x.abs().max()) for k in
           ("residual_LTD", "moe_input_LTD", "logits_LTE")}
    return {"far": far, "ids": float((a.ids_TLK.sort(-1).values == b.ids_TLK.sort(-1).values).float().mean()),
            "starts": bool(torch.equal(a.start_T, b.start_T)), "hash": gate_hash(transformers.gates(hf)) == gate_hash(megatron.gates(mine))}


@case(1, asked=True)
def smolmoe_200_steps(folder: Path) -> Any:
    """Fine-tune for 200 steps with probes alongside, then fit probes to a trace of the result on the same tokens: recall on other text."""
    harness.groups()
    megatron_cpu.seed(1)
    hf, tokenizer = smolmoe.load(progress=False)
    windows = text_windows(tokenizer, builtin_texts(), 128)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    train, held = windows[:200], windows[200:240]
    model = convert(hf)
    beside = ProbeFit(model, FitConfig(rank=64, linear=32, steps=200, lr=3e-4), tokens=128, moment_tokens=1 << 13, held_out_every=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    losses = []
    for i, window in enumerate(train):
        optimizer.zero_grad()
        logits = run(model.train(), window[None])
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], window[1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        say(f"step {i}, loss {losses[-1]:.3f}")
    probe = beside.save_pretrained(folder / "beside", force=True)
    beside.close()
    model.eval()

    def taps(rows: torch.Tensor) -> list[Step]:
        steps: list[Step] = []
        with torch.no_grad(), megatron.observe(model, Collector(30, steps.append, dtype=torch.bfloat16)):
            for row in rows:
                run(model, row[None])
        return steps

    kept = Taps.join([s.taps for s in taps(held)])
    say(f"beside {recalls(probe, kept)}")
    trace = fit(megatron.gates(model), Memory(taps(train)), {"kept": kept}, folder / "trace",
                FitConfig(rank=64, linear=32, steps=200, batch=512), moment_tokens=1 << 17, force=True,
                progress=lambda done, steps: say(f"fit {done}/{steps}"))
    return {"beside": recalls(probe, kept), "trace": recalls(trace, kept), "losses": [sum(losses[:40]) / 40, sum(losses[-40:]) / 40]}


def say(line: str) -> None:
    """Progress of a long case, for whoever waits for it."""
    print(line, file=sys.stderr, flush=True)


def recalls(probe: Any, taps: Taps) -> list[float]:
    """Mean over layers per horizon."""
    from moe_prefetch.probes import metrics
    from moe_prefetch.probes.calibrate import margin_and_truth

    out = []
    for h in (0, 1, 2):
        found = [metrics.recall(*margin_and_truth(probe, taps, t, h)) for t in range(h, probe.layers)]
        out.append(sum(found) / len(found))
    return out
