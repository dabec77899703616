"""Tensors around the pure parts: calibration sums, codebooks on a device, and their artefact."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoint import check_own, json_bytes, load_tensors, read_json, tensors_bytes, write_together
from ..errors import ArtefactError, ShapeError
from ..kernels.kv_encode.records import Book, arranged, book_shares, neutral_book
from ..runtime import REAL, Runtime
from .basis import Axes, Basis, canonical_axes, felt, spread
from .format import KVFormat, PageLayout
from .outliers import Choice, LayerStats, Policy, choose

STATS_VERSION = 2
KIND = "kv-calibration"
_MOMENTS = ("q2", "k1", "k2", "ka", "v2")


class StatsCollector:
    """Running sums of one layer in FP64. Padding must be cut off before: `add` counts every token it is given.

    axes  look for canonical axes of the keys, too
    """

    def __init__(self, axes: bool = False) -> None:
        self.tokens, self.axes = 0, axes
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, q_HTd: torch.Tensor, k_NTd: torch.Tensor, v_NTd: torch.Tensor, skip: int = 0) -> None:
        """Queries [H, T, d] (or of the last tokens only), keys [N, T, d], both after RoPE, and values [N, T, dv] of the first T tokens of a
        sequence; `skip` of them are not counted. Not finite: ShapeError."""
        heads = k_NTd.shape[0]
        unseen = max(0, skip - k_NTd.shape[1] + q_HTd.shape[1])
        q, k, v = q_HTd[:, unseen:].double(), k_NTd[:, skip:].double(), v_NTd[:, skip:].double()
        if not all(bool(x.isfinite().all()) for x in (q, k, v)):
            raise ShapeError(
                "calibration saw Inf or NaN",
                where="attention inputs",
                expected="finite values",
                do="calibrate on text that the model can run",
            )
        new = {
            "q2": q.pow(2).mean(1).unflatten(0, (heads, -1)).mean(1) * k.shape[1],
            "k1": k.sum(1),
            "k2": k.pow(2).sum(1),
            "ka": k.abs().sum(1),
            "v2": v.pow(2).sum(1),
        }
        if self.axes:
            by_query, by_key = felt(q_HTd, k_NTd, v_NTd, skip)
            by_query, by_key = by_query[:, :, unseen:].flatten(1)[..., None], by_key[:, skip:, None]
            rows = q.unflatten(0, (heads, -1)).flatten(1, 2)
            new |= {"qq": rows.mT @ (rows * by_query), "kk": k.mT @ (k * by_key), "kw": (k * by_key).sum(1)}
            new |= {"q_felt": by_query.sum(1), "k_felt": by_key.sum(1)}
        for name, value in new.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.tokens += k.shape[1]

    def stats(self) -> LayerStats:
        if not self.tokens:
            raise ShapeError("no token was seen", where="calibration", expected="at least one token", do="run text through the model first")
        sums, axes = {m: x.cpu() for m, x in self.sums.items()}, None
        if self.axes:
            q_felt, k_felt = sums["q_felt"], sums["k_felt"]
            axes = canonical_axes(sums["qq"] / q_felt[..., None], sums["kk"] / k_felt[..., None], sums["kw"] / k_felt, self.tokens)
        return LayerStats(self.tokens, **{m: (sums[m] / self.tokens).tolist() for m in _MOMENTS}, axes=axes)


@dataclass(frozen=True)
class OutlierStats:
    """Calibration of a model: `layers` maps the decoder layer's number to its moments, `keys` to a hash of what makes its keys, where that
    was found (`transformers_attention.key_hashes`): whose calibration it is."""

    layers: dict[int, LayerStats]
    keys: dict[int, str] = field(default_factory=dict)

    def save(self, path: Path, runtime: Runtime = REAL) -> None:
        """Write `<path>/stats.safetensors` and `<path>/manifest.json` together (`checkpoint.write_together`). Raises ArtefactError:
        files of these names are something else's there."""
        path = Path(path)
        check_own(path, ("stats.safetensors", "manifest.json"), {"kind": KIND})
        tensors = {f"{n}.{m}": torch.tensor(getattr(s, m), dtype=torch.float64) for n, s in self.layers.items() for m in _MOMENTS}
        tensors |= {f"{n}.{m}": t for n, s in self.layers.items() if s.axes for m, t in s.axes._asdict().items()}
        data = tensors_bytes(tensors)
        manifest = {
            "kind": KIND,
            "version": STATS_VERSION,
            "tokens": {str(n): s.tokens for n, s in self.layers.items()},
            # null: the key projection was not found, any model's is taken for it.
            "keys": {str(n): self.keys.get(n) for n in self.layers},
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        write_together({path / "stats.safetensors": data, path / "manifest.json": json_bytes(manifest)}, runtime)

    @classmethod
    def load(cls, path: Path) -> OutlierStats:
        """Raises ArtefactError when it is missing, altered, of another kind or version, or holds what is not finite."""
        path = Path(path)
        manifest = read_json(path / "manifest.json")
        if not isinstance(manifest, dict) or manifest.get("kind") != KIND or manifest.get("version") != STATS_VERSION:
            raise ArtefactError(
                "not a KV calibration of this version",
                where=str(path),
                expected=f"kind {KIND}, version {STATS_VERSION}",
                do="calibrate again",
            )
        # A calibration of no layers (MLA) has no tensors, and safetensors can't read what it writes then.
        empty = manifest.get("tokens") == {}
        tensors = {} if empty else load_tensors(path / "stats.safetensors", sha256=str(manifest.get("sha256")), cap=1 << 30)
        layers = {}
        try:
            for name, tokens in manifest["tokens"].items():
                rows = {m: tensors[f"{name}.{m}"] for m in _MOMENTS}
                if (
                    not all(bool(t.isfinite().all()) and t.dim() == 2 for t in rows.values())
                    or len({t.shape for m, t in rows.items() if m != "v2"}) != 1
                ):
                    raise ArtefactError(
                        f"layer {name} is malformed", where=str(path), expected="finite [N, d] moments", do="calibrate again"
                    )
                layers[int(name)] = LayerStats(int(tokens), **{m: t.tolist() for m, t in rows.items()}, axes=_axes(tensors, name, path))
            keys = {int(n): x for n, x in manifest.get("keys", {}).items() if x is not None}
            if not all(n in layers and isinstance(x, str) for n, x in keys.items()):
                raise ValueError("its keys are not those of its layers")
        except (KeyError, ValueError, TypeError, AttributeError) as e:
            raise ArtefactError(f"the manifest does not fit its tensors: {e}", where=str(path), do="calibrate again") from e
        return cls(layers, keys)


def _axes(tensors: dict[str, torch.Tensor], name: str, path: Path) -> Axes | None:
    found = {m: tensors[f"{name}.{m}"] for m in Axes._fields if f"{name}.{m}" in tensors}
    if not found:
        return None
    shape = tensors[f"{name}.k1"].shape
    whole = len(found) == 3 and tuple(found["into"].shape) == (*shape, shape[1]) and found["power"].shape == found["mean"].shape == shape
    if not whole or not all(bool(x.isfinite().all()) for x in found.values()) or bool(torch.linalg.inv_ex(found["into"]).info.any()):
        raise ArtefactError(
            f"the axes of layer {name} are malformed", where=str(path), expected="[N, d, d], with an inverse", do="calibrate again"
        )
    return Axes(**found)


def book_of(choice: Choice, layout: PageLayout, device: torch.device | str = "cpu") -> Book:
    """The codebook a layer's pages are written and read with. Raises ShapeError when the choice is for another layout."""
    channels = torch.tensor(choice.channels, dtype=torch.int32, device=device).reshape(len(choice.channels), -1)
    rows = [
        torch.tensor(x, dtype=torch.float32, device=device)
        for x in (choice.k_mean, choice.k_gain, choice.k_weight, choice.v_gain, choice.v_weight)
    ]
    if channels.shape[1] != layout.outliers or rows[0].shape[1] != layout.k_dim or rows[3].shape[1] != layout.v_dim:
        raise ShapeError(
            f"a choice of {channels.shape[1]} outliers, head dims {rows[0].shape[1]} and {rows[3].shape[1]}",
            where=layout.format.name,
            expected=f"{layout.outliers}, {layout.k_dim} and {layout.v_dim}",
            do="calibrate the model that is being run",
        )
    k_mean, k_gain, k_weight, v_gain, v_weight = rows
    channels = arranged(channels, layout)
    k_weight, v_weight = book_shares(channels, k_weight, v_weight, layout)
    return channels, k_mean, k_gain, k_weight, v_gain, v_weight


class Coding(NamedTuple):
    """How a layer's pages are written and read: the codebook, the basis that its keys are turned into (None: as they are), and what was
    chosen (None: nothing)."""

    book: Book
    basis: Basis | None
    choice: Choice | None


def turns_keys(stats: LayerStats | None, format: KVFormat, policy: Policy) -> bool:
    """Whether a layer keeps its keys in the calibration's axes, and so a basis beside its codebook: what bits count it by."""
    return stats is not None and stats.axes is not None and policy == "importance" and format.max_bits is not None


def make_coding(
    stats: LayerStats | None, layout: PageLayout, heads: int, policy: Policy, device: torch.device | str = "cpu"
) -> Coding:
    """From calibration; without it, or for a format that has none, the neutral codebook; in a pair the sides have theirs. Policy
    `importance` turns keys into the calibration's axes, where it has them."""
    neutral = neutral_book(layout, heads, device)
    if stats is None or not layout.format.has_book:
        return Coding(neutral, None, None)
    basis = None
    if turns_keys(stats, layout.format, policy):
        basis, power = spread(stats.axes, layout.outliers)
        k1 = (basis.into.double() @ stats.axes.mean[..., None])[..., 0]
        stats = replace(stats, q2=power.tolist(), k1=k1.tolist(), k2=(power + k1.square()).tolist())
        basis = Basis(*(t.to(device) for t in basis))
    choice = choose(stats, policy, layout.outliers)
    book = book_of(choice, layout, device)
    if layout.format.max_bits is None:
        book = (*neutral[:4], *book[4:])
    if layout.format.v.max_bits is None:
        book = (*book[:4], *neutral[4:])
    return Coding(book, basis, choice)


def prompt_book(
    layout: PageLayout, heads: int, policy: Policy, device: torch.device | str = "cpu", first: int | None = None
) -> Callable[[torch.Tensor, torch.Tensor], Book]:
    """Makes a sequence's own codebook from its first tokens, k [N, T, dk] and v [N, T, dv]: what a `LayerStore` calls without calibration.

    first  tokens to look at (None: all that are given)
    The query is not known there: its weights are 1, and `importance` falls back to Var[k]. A cache that has it can be pickled and copied.
    """
    return partial(_book_of_prompt, layout, heads, policy, device, first)


def _book_of_prompt(
    layout: PageLayout, heads: int, policy: Policy, device: torch.device | str, first: int | None, k_NTd: torch.Tensor, v_NTd: torch.Tensor
) -> Book:
    seen, k = StatsCollector(), k_NTd[:, :first, : layout.k_dim]
    seen.add(torch.ones_like(k), k, v_NTd[:, :first])
    return make_coding(seen.stats(), layout, heads, policy, device).book
