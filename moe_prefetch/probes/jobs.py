"""What the commands `trace` and `fit` do: a model and texts in, a trace or a probe out."""
from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import check_writable
from ..errors import ConfigError
from ..runtime import REAL, Runtime
from ..seam import open_model
from .collect import Collector, Step
from .fit import Memory, Source, fit
from .probe import RoutingProbe
from .targets import FitConfig, Taps
from .traces import Trace, TraceWriter, read_manifest

Progress = Callable[[int, int], None]
# Sized for two CPU cores and five minutes, of which recording takes the most.
QUICK = FitConfig(rank=40, linear=32, steps=30, batch=768, lr=3e-3, ema=0.9, warmup=5)
QUICK_TOKENS, QUICK_HELD_OUT, QUICK_WINDOW, QUICK_RECORD_S = 10_240, 2_048, 256, 90.0


def load_model(model: str) -> tuple[Any, Any]:
    """(model, tokenizer) of 'smolmoe' or of a local checkpoint folder. Raises ConfigError for anything else: nothing is downloaded."""
    if model == "smolmoe":
        return importlib.import_module("moe_prefetch.integrations.smolmoe").load()
    if not Path(model).is_dir():
        raise ConfigError(f"no model at {model!r}", where="--model", expected="smolmoe, or a checkpoint folder",
                          do="download the checkpoint first")
    hf = importlib.import_module("transformers")
    try:
        loaded = hf.AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True).eval()
        return loaded, hf.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"transformers can't load it: {' '.join(str(e).split())[:300]}", where=f"--model {model}",
                          expected="a folder written by save_pretrained, with its tokenizer", do="download all of the checkpoint") from e


def text_windows(tokenizer: Any, texts: Sequence[str], window: int) -> torch.Tensor:
    """Token windows int64 [N, window] of all texts in order, each text's shorter rest dropped. Raises ConfigError when none is left."""
    rows = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        rows += [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]
    if not rows:
        raise ConfigError(f"the texts are shorter than one window of {window} tokens", where="--text",
                          do="give more text, or a smaller --window")
    return torch.tensor(rows)


def builtin_texts() -> list[str]:
    """Python's own documentation: on every machine that runs this."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return ["\n\n".join(topics[k] for k in sorted(topics))]


def read_texts(paths: Sequence[Path]) -> list[str]:
    out = []
    for path in paths:
        try:
            out.append(Path(path).read_text("utf-8", "replace"))
        except OSError as e:
            raise ConfigError(f"can't be read: {e.strerror}", where=str(path), do="check the path") from e
    return out


def record(model: Any, windows: torch.Tensor, consume: Callable[[Step], None], *, batch: int = 1, stop: Callable[[], bool] = lambda: False,
           progress: Progress | None = None) -> None:
    """Run the windows through the model, teacher-forced, handing every pass's taps to `consume`."""
    host = open_model(model)
    device = next(model.parameters()).device
    with host.observe(Collector(host.num_layers, consume, dtype=torch.bfloat16)), torch.inference_mode():
        for start in range(0, windows.shape[0], batch):
            if stop():
                return
            model.base_model(input_ids=windows[start : start + batch].to(device), use_cache=False)
            if progress is not None:
                progress(min(start + batch, windows.shape[0]), windows.shape[0])


def run_trace(model: str, out: Path, *, texts: Sequence[Path] = (), cap_mb: float = 1024.0, tokens: int | None = None, window: int = 512,
              batch: int = 1, shard_tokens: int = 2048, progress: Progress | None = None, runtime: Runtime = REAL) -> Trace:
    """Command `trace`: record hidden states and router decisions of `texts` (Python's documentation by default) into `out`, at most
    `cap_mb` megabytes and `tokens` tokens. Started again on the same folder with the same texts it goes on where it stopped."""
    words = read_texts(texts) or builtin_texts()
    check_writable(out)
    loaded, tokenizer = load_model(model)
    writer = TraceWriter(out, open_model(loaded).gates, cap_bytes=int(cap_mb * 1e6), shard_tokens=shard_tokens, runtime=runtime)
    windows = text_windows(tokenizer, words, window)
    if tokens is not None:
        windows = windows[: max(1, tokens // window)]
    record(loaded, windows[writer.position :], writer.add, batch=batch, stop=lambda: writer.full, progress=progress)
    writer.flush()
    return Trace(out)


class _Split:
    """Some shards of several traces as one source."""

    def __init__(self, parts: Sequence[tuple[Trace, int]]) -> None:
        self.parts = list(parts)

    def __len__(self) -> int:
        return len(self.parts)

    def shard(self, index: int) -> Step:
        trace, i = self.parts[index]
        return trace.shard(i)

    @property
    def tokens(self) -> int:
        return sum(trace.manifest["shards"][i]["tokens"] for trace, i in self.parts)


def split(traces: Sequence[Trace], held_out: Sequence[Trace], past_eps: float | None = None) -> tuple[Source, dict[str, Taps]]:
    """Training shards and held-out taps per domain (a trace is a domain, named by its folder), with the recent past where `past_eps` is
    given. Without traces for it, the last tenth of every trace's shards is held out. Raises ConfigError when a trace has a single
    shard."""
    parts: list[tuple[Trace, int]] = []
    held = {t.folder.name: t.all().taps_with_past(past_eps) for t in held_out}
    for trace in traces:
        keep = 0 if held_out else max(1, len(trace) // 10)
        if keep >= len(trace):
            raise ConfigError("the trace has too few shards to hold one out", where=str(trace.folder), do="record more, or give --held-out")
        parts += [(trace, i) for i in range(len(trace) - keep)]
        if keep:
            steps = [trace.shard(i).taps_with_past(past_eps) for i in range(len(trace) - keep, len(trace))]
            held[trace.folder.name] = Taps.join(steps)
    return _Split(parts), held


def run_fit(model: str, out: Path, *, traces: Sequence[Path] = (), held_out: Sequence[Path] = (), quick: bool = False,
            config: FitConfig | None = None, past: bool = False, device: str | None = None, force: bool = False, watch: Any = None,
            progress: Progress | None = None, stage: Callable[[str], None] = lambda text: None, runtime: Runtime = REAL) -> RoutingProbe:
    """Command `fit`: from recorded `traces`, or `quick`: record a little of Python's documentation and fit on it (SmolMoE on two CPU
    cores: under five minutes). `past` gives horizon 0 the recent past as a second input. Under torchrun (WORLD_SIZE > 1) the ranks share
    the shards. `stage` is told what is going on."""
    if not traces and not quick:
        raise ConfigError("nothing to learn from", where="fit", expected="--trace FOLDER or --quick",
                          do="record a trace first: moe-prefetch trace")
    for folder in (*traces, *held_out):
        read_manifest(folder)
    check_writable(out)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    started = False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        started = True
    try:
        loaded, tokenizer = load_model(model)
        gates = open_model(loaded).gates
        config = config or (QUICK if quick else FitConfig(past=past))
        past_eps = gates[0].norm_eps if config.past else None
        if quick:
            stage("recording")
            windows = text_windows(tokenizer, builtin_texts(), QUICK_WINDOW)
            # Spread over the whole text, so that the held-out windows at the end are of other chapters.
            pick = torch.linspace(0, windows.shape[0] - 1, (QUICK_TOKENS + QUICK_HELD_OUT) // QUICK_WINDOW).long().unique()
            steps: list[Step] = []
            deadline = runtime.now() + QUICK_RECORD_S
            kept = max(1, QUICK_HELD_OUT // QUICK_WINDOW)
            record(loaded, windows[pick[-kept:]], steps.append, progress=progress)
            held, steps = {"documentation": Taps.join([s.taps_with_past(past_eps) for s in steps])}, []
            record(loaded, windows[pick[:-kept]], steps.append, progress=progress,
                   stop=lambda: runtime.now() > deadline and len(steps) >= 16)
            source: Source = Memory(steps)
        else:
            source, held = split([Trace(p, gates) for p in traces], [Trace(p, gates) for p in held_out], past_eps)
            config = replace(config, batch=min(config.batch, max(64, source.tokens // 4)))
        stage("fitting")
        return fit(gates, source, held, out, config, device=device, force=force, watch=watch, progress=progress, runtime=runtime)
    finally:
        if started:
            dist.destroy_process_group()

