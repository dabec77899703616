"""Traces of hidden states and router decisions: written in shards, read from three formats.

Ours is a folder: `trace.json` (the manifest) and `shard-NNNNN.safetensors`. A shard is written whole, then the manifest that names it
and its hash, each atomically; so an interruption at any moment costs the shard that was being filled, and a damaged shard is named. The
manifest may hold `text_hash`, of the sequences recorded so far.

    residual, moe_input  bfloat16 [L, T, D]      ids    int16 [T, L, K]
    logits               float32 [L, T, E]       start  bool [T], True at a sequence's first token

Also read: Megatron-core 0.19's router trace (`router_trace_rank<r>.jsonl` with bf16 side files, `--moe-routing-trace-path`) and plain
expert ids (.npz with expert_ids [T, L, K] and seq_lens).
"""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import (
    check_own,
    contained,
    exclusive,
    load_arrays,
    load_tensors,
    read_json,
    read_jsonl,
    read_span,
    save_tensors,
    sha256_file,
    write_json,
)
from ..errors import ArtefactError, BudgetError, ProbeMismatchError
from ..runtime import REAL, Runtime
from .baselines import Routing
from .collect import Step
from .probe import GateSpec, gate_hash
from .targets import Taps

log = logging.getLogger(__name__)

FORMAT, VERSION = "moe_prefetch.trace", 2
MANIFEST = "trace.json"
MAX_SHARD = 8 << 30


def _step_bytes(layers: int, experts: int, hidden: int, top_k: int) -> int:
    """Bytes of one token."""
    return layers * (2 * 2 * hidden + 4 * experts + 2 * top_k) + 1


def _shard(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def hash_of_first(windows_NT: torch.Tensor) -> Callable[[int], str]:
    """What `TraceWriter` takes as `text_hash`: the hash of the first n rows of token ids int64 [N, T]. Asked for growing n, it reads each
    row once."""
    found, read = hashlib.sha256(f"{windows_NT.shape[1]}:".encode()), 0

    def first(n: int) -> str:
        nonlocal found, read
        if n < read:
            found, read = hashlib.sha256(f"{windows_NT.shape[1]}:".encode()), 0
        found.update(windows_NT[read:n].contiguous().numpy().tobytes())
        read = n
        return found.hexdigest()

    return first


def check_folder(folder: Path) -> None:
    """Whether a trace can be recorded into `folder`: one goes on, and nothing else is replaced. Raises ArtefactError."""
    shards = sorted(p.name for p in folder.glob("shard-" + 5 * "[0-9]" + ".safetensors"))
    check_own(folder, [*shards[:1], MANIFEST], {"format": FORMAT})


class TraceWriter:
    """Appends to a trace folder; opening an existing one continues it.

    `position` counts the sequences that are safely stored: a caller that feeds a fixed list of texts skips that many. `full` turns True
    when the next shard would exceed `cap_bytes`; from then on `add` drops. `text_hash(n)` is a hash of the first n sequences of that list:
    with it, a trace of another text is refused (one that does not say what its text was goes on with a warning). Of two
    writers in one folder the first to store a shard goes on; the other's next `flush` raises ArtefactError and writes nothing. Raises
    ProbeMismatchError when the folder holds a trace of another model, BudgetError when the cap can't hold one shard, ArtefactError when
    its manifest is damaged, its text is another, or it holds shards and no manifest: they are somebody else's.
    """

    def __init__(self, folder: Path | str, gates: Sequence[GateSpec], *, cap_bytes: int = 1 << 30, shard_tokens: int = 2048,
                 text_hash: Callable[[int], str] | None = None, runtime: Runtime = REAL) -> None:
        self.folder, self.cap_bytes, self.shard_tokens, self.runtime = Path(folder), cap_bytes, shard_tokens, runtime
        first = gates[0]
        per_token = _step_bytes(len(gates), first.experts, first.hidden, first.top_k)
        if cap_bytes < per_token * shard_tokens:
            raise BudgetError(f"{cap_bytes} bytes are less than one shard", where=str(self.folder),
                              expected=f"at least {per_token * shard_tokens} bytes ({-(-per_token * shard_tokens // 10**6)} MB) for "
                              f"{shard_tokens} tokens", do="raise the cap")
        check_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = {"format": FORMAT, "version": VERSION, "layers": len(gates), "experts": first.experts, "hidden": first.hidden,
                 "top_k": first.top_k, "gate_hash": gate_hash(gates), "position": 0, "shards": []}
        found = read_manifest(self.folder) if (self.folder / MANIFEST).exists() else fresh
        self.manifest = found if found["shards"] else fresh
        if self.manifest["gate_hash"] != fresh["gate_hash"]:
            raise ProbeMismatchError("the folder holds a trace of another model", where=str(self.folder), expected="this model's gates",
                                     do="choose another folder")
        if self.position and text_hash is not None:
            if "text_hash" not in self.manifest:
                log.warning("%s does not say what text it holds: going on as if its first %d sequences were this text's", self.folder,
                            self.position)
                # What was never compared is not vouched for later.
                text_hash = None
            elif self.manifest["text_hash"] != text_hash(self.position):
                raise ArtefactError("the folder holds a trace of another text", where=str(self.folder),
                                    expected=f"the text it was begun with, for its first {self.position} sequences",
                                    do="choose another folder, or give the same text again")
        self._text_hash = text_hash
        with exclusive(self.folder, runtime):
            if not (self.folder / MANIFEST).exists():
                check_folder(self.folder)
                # From here on the shard below is ours.
                write_json(self.folder / MANIFEST, fresh, runtime)
            # A shard without an entry was cut off between its own write and the manifest's: it is written again.
            name = _shard(len(read_manifest(self.folder)["shards"]))
            for path in (self.folder / name, *self.folder.glob(f".{name}.*.tmp")):
                path.unlink(missing_ok=True)
        self.full = False
        self._steps: list[Step] = []

    @property
    def position(self) -> int:
        return int(self.manifest["position"])

    @property
    def tokens(self) -> int:
        return sum(s["tokens"] for s in self.manifest["shards"])

    def add(self, step: Step) -> None:
        """Take one forward pass; writes a shard when enough tokens have come together."""
        if self.full:
            return
        self._steps.append(Step(step.taps.map(torch.Tensor.cpu), step.ids_TLK.cpu(), step.start_T.cpu()))
        if sum(s.start_T.shape[0] for s in self._steps) >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard of its own."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        shards = self.manifest["shards"]
        name = _shard(len(shards))
        tensors = {"residual": torch.cat([s.taps.residual_LTD for s in steps], 1).bfloat16(),
                   "moe_input": torch.cat([s.taps.moe_input_LTD for s in steps], 1).bfloat16(),
                   "logits": torch.cat([s.taps.logits_LTE for s in steps], 1).float(),
                   "ids": torch.cat([s.ids_TLK for s in steps]).to(torch.int16), "start": torch.cat([s.start_T for s in steps])}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if sum(s["bytes"] for s in shards) + size > self.cap_bytes:
            self.full = True
            return
        with exclusive(self.folder, self.runtime):
            now = read_manifest(self.folder)["shards"] if (self.folder / MANIFEST).exists() else []
            if now != shards:
                raise ArtefactError("another process records into the folder", where=str(self.folder),
                                    expected=f"the {len(shards)} shards this one knows of", do="give each process a folder of its own")
            save_tensors(self.folder / name, tensors, {"format": FORMAT}, self.runtime)
            entry = {"file": name, "sha256": sha256_file(self.folder / name), "tokens": int(tensors["start"].shape[0]), "bytes": size}
            manifest = {**self.manifest, "shards": [*shards, entry], "position": self.position + int(tensors["start"].sum())}
            manifest.pop("text_hash", None)
            if self._text_hash is not None:
                manifest["text_hash"] = self._text_hash(manifest["position"])
            write_json(self.folder / MANIFEST, manifest, self.runtime)
        self.manifest = manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest. Raises ArtefactError."""
    path = contained(Path(folder), MANIFEST)
    m = read_json(path)
    try:
        if m["format"] != FORMAT or m["version"] != VERSION:
            raise ArtefactError("not a trace of this version", where=str(path), expected=f"{FORMAT}, version {VERSION}",
                                do="record it again")
        numbers = [m[k] for k in ("layers", "experts", "hidden", "top_k", "position")]
        numbers += [s[k] for s in m["shards"] for k in ("tokens", "bytes")]
        names = [s[k] for s in m["shards"] for k in ("file", "sha256")] + [m["gate_hash"], m.get("text_hash", "")]
    except (KeyError, TypeError) as e:
        raise ArtefactError(f"the manifest lacks {e}", where=str(path), do="record the trace again") from e
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or not all(isinstance(n, str) for n in names):
        raise ArtefactError("the manifest holds values of the wrong kind", where=str(path), do="record the trace again")
    files = [s["file"] for s in m["shards"]]
    if twice := sorted({f for f in files if files.count(f) > 1}):
        raise ArtefactError(f"the manifest names {', '.join(twice)} twice", where=str(path), do="record the trace again")
    return m


class Trace:
    """A trace of ours, read shard by shard. Raises ArtefactError naming the shard that is missing, cut short or altered, and
    ProbeMismatchError when `gates` are another model's."""

    def __init__(self, folder: Path | str, gates: Sequence[GateSpec] | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if gates is not None and self.manifest["gate_hash"] != gate_hash(gates):
            raise ProbeMismatchError("the trace was recorded from another model", where=str(self.folder), expected="this model's gates",
                                     do="record a trace of this model")

    def __len__(self) -> int:
        return len(self.manifest["shards"])

    @property
    def tokens(self) -> int:
        return sum(s["tokens"] for s in self.manifest["shards"])

    @property
    def identity(self) -> str:
        return " ".join(s["sha256"] for s in self.manifest["shards"])

    def shard(self, index: int) -> Step:
        m, entry = self.manifest, self.manifest["shards"][index]
        path = contained(self.folder, entry["file"])
        t = load_tensors(path, sha256=entry["sha256"], cap=MAX_SHARD)
        tokens, layers = entry["tokens"], m["layers"]
        stream = (layers, tokens, m["hidden"])
        want = {"residual": stream, "moe_input": stream, "logits": (layers, tokens, m["experts"]),
                "ids": (tokens, layers, m["top_k"]), "start": (tokens,)}
        wrong = [k for k, shape in want.items() if k not in t or tuple(t[k].shape) != shape]
        if wrong:
            raise ArtefactError(f"{', '.join(wrong)} do not have the manifest's shape", where=str(path), do="record the trace again")
        return Step(Taps(t["residual"], t["moe_input"], t["logits"]), t["ids"].long(), t["start"])

    def all(self, limit: int | None = None) -> Step:
        """Everything (or the first shards that hold `limit` tokens) as one step, in memory."""
        steps, tokens = [], 0
        for i in range(len(self)):
            if limit is not None and tokens >= limit:
                break
            steps.append(self.shard(i))
            tokens += steps[-1].start_T.shape[0]
        if not steps:
            raise ArtefactError("the trace is empty", where=str(self.folder), do="record some text first")
        return Step(Taps.join([s.taps for s in steps]), torch.cat([s.ids_TLK for s in steps]), torch.cat([s.start_T for s in steps]))

    def routing(self) -> Routing:
        step = self.all()
        return Routing(step.ids_TLK, step.start_T, self.manifest["experts"])


def read_ids(path: Path | str, experts: int) -> Routing:
    """Plain expert ids: .npz with `expert_ids` [T, L, K] and `seq_lens`. Raises ArtefactError, ShapeError."""
    arrays = load_arrays(Path(path))
    if not {"expert_ids", "seq_lens"} <= set(arrays):
        raise ArtefactError("no expert_ids and seq_lens", where=str(path), expected="a trace of expert ids", do="check the file")
    return Routing.from_lengths(arrays["expert_ids"], arrays["seq_lens"], experts)


def read_megatron(folder: Path | str, gates: Sequence[GateSpec] | None, experts: int, rank: int = 0) -> Iterator[Step]:
    """Steps of one rank's Megatron-core 0.19 router trace. MTP records are left out; decoder layers in order are the MoE layers.

    The side file holds the router's *input*, after that layer's norm. Dividing by its norm weight (from `gates`) gives the stream up to a
    positive factor per token, which every probe's own RMSNorm removes, so horizons 1 and 2 can be fitted; there is no tap for horizon 0,
    and its entries are NaN. Without side files, or without gates, taps are empty and only ids come. Every step counts as one sequence.
    Raises ArtefactError naming the line or side file, and ProbeMismatchError for gates whose taps hold a shared expert's output: the trace
    has none.
    """
    folder = Path(folder)
    if gates and any(g.shared for g in gates):
        raise ProbeMismatchError("this model's taps hold the shared expert's output, a Megatron trace does not", where=str(folder),
                                 expected="a model without shared experts", do="record with moe-prefetch trace, or fit in training")
    path = contained(folder, f"router_trace_rank{rank}.jsonl")
    step: int | None = None
    records: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(path):
        try:
            if record["stage"] != "pre_dispatch" or record["block"] != "decoder":
                continue
            now, layer = int(record["step"]), int(record["layer"])
        except (KeyError, TypeError, ValueError) as e:
            raise ArtefactError(f"a record lacks {e}", where=str(path), do="check that this is a router trace") from e
        if step is not None and (now != step or layer in records):
            yield _megatron_step(folder, records, gates, experts, rank)
            records = {}
        step, records[layer] = now, record
    if records:
        yield _megatron_step(folder, records, gates, experts, rank)


def _megatron_step(folder: Path, records: dict[int, dict[str, Any]], gates: Sequence[GateSpec] | None, experts: int, rank: int) -> Step:
    ordered = [records[layer] for layer in sorted(records)]
    where = f"{folder}, step {ordered[0].get('step')}"
    try:
        ids = torch.tensor([r["top_indices"] for r in ordered], dtype=torch.int64).transpose(0, 1)
        tokens = ids.shape[0]
        start = torch.zeros(tokens, dtype=torch.bool)
        start[:1] = True
        Routing(ids, start, experts)  # refuses ids out of range
        empty = torch.zeros(len(ordered), tokens, 0)
        if gates is None or not all("hs_offset" in r and "logit_offset" in r for r in ordered):
            return Step(Taps(empty, empty, empty), ids, start)
        if len(gates) != len(ordered):
            raise ArtefactError(f"{len(ordered)} MoE layers", where=where, expected=f"{len(gates)}",
                                do="record all layers on one rank (no pipeline)")

        def side(record: dict[str, Any], kind: str, head: str, width: int) -> torch.Tensor:
            file = contained(folder, f"{kind}_rank{rank}.bin")
            shape = tuple(int(n) for n in record[f"{head}_shape"])
            if shape != (tokens, width) or record[f"{head}_bytes"] != 2 * tokens * width:
                raise ArtefactError(f"{kind} of shape {shape}", where=where, expected=str((tokens, width)), do="record the trace again")
            data = read_span(file, int(record[f"{head}_offset"]), 2 * tokens * width)
            return torch.frombuffer(data, dtype=torch.bfloat16).view(tokens, width)

        hidden = []
        for gate, record in zip(gates, ordered):
            weight = gate.norm_D.float().cpu()
            normed = side(record, "hidden_states", "hs", gate.hidden).float()
            # A channel that the norm removes can't be known; zero is what it contributes.
            hidden.append(torch.where(weight == 0, torch.zeros(()), normed / torch.where(weight == 0, torch.ones(()), weight)))
        logits = torch.stack([side(r, "logits", "logit", experts).float() for r in ordered])
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise ArtefactError(f"a record does not fit: {e}", where=where, do="record the trace again") from e
    moe_input = torch.stack(hidden)
    return Step(Taps(torch.full_like(moe_input, float("nan")), moe_input, logits), ids, start)
