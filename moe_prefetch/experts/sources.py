"""Where experts come from and go back to: experts modules in memory, and checkpoints that are read without loading the model.

`parts_of` knows the layouts. It gives views, never copies, so one description serves both ways: packing reads the views, unpacking writes
them. Names are those below `...experts.` in the checkpoint or of the module's parameters:

    gate_up_proj [E, 2F, D], down_proj [E, D, F]      transformers' stacked experts (Mixtral, Qwen2/3-MoE, DeepSeek-V2/V3); fp8 with
                                                      *_scale_inv [E, rows / block, columns / block]
    gate_up_proj [E, D, 2F], down_proj [E, F, D]      the same transposed; with *_bias as in gpt-oss
    *_proj_blocks [E, rows, columns / 32, 16], *_scales [E, rows, columns / 32], *_bias: gpt-oss's MXFP4
    {e}.gate_proj|up_proj|down_proj or {e}.w1|w3|w2, .weight, .bias, .weight_scale_inv: one linear layer each (Mixtral's, Qwen's and
                                                      DeepSeek's checkpoints)

gpt-oss keeps gate and up as even and odd rows (docs: https://github.com/openai/gpt-oss); in a record gate rows come first.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from .. import checkpoint
from ..errors import ArtefactError, SessionError, UnsupportedModelError
from ..kernels.expert_mlp.record import Piece, pieces
from ..seam import HostModel

_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\.(?:.*\.)?experts\.)(.+)")
_ONE = re.compile(r"(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(weight|bias|weight_scale_inv)")
_LINEARS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_FAMILIES = "stacked gate_up_proj and down_proj, or gate_proj, up_proj and down_proj of each expert"


class Tensors(Protocol):
    """The named tensors of one layer's experts."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None when there is no such tensor."""

    def get(self, name: str, row: int | None) -> torch.Tensor:
        """A tensor, or one row of its first axis."""

    def names(self) -> list[str]: ...


def experts_in(tensors: Tensors) -> int:
    """How many experts these tensors hold. Raises UnsupportedModelError: a layout that is not known."""
    stacked = tensors.shape("gate_up_proj_blocks") or tensors.shape("gate_up_proj")
    if stacked:
        return stacked[0]
    found = {int(m[1]) for n in tensors.names() if (m := _ONE.fullmatch(n))}
    if not found or found != set(range(len(found))):
        raise UnsupportedModelError("its experts are of a layout that is not known", where=", ".join(tensors.names()[:4]),
                                    expected=_FAMILIES, do="use a supported family")
    return len(found)


def parts_of(tensors: Tensors, expert: int, *, interleaved: bool | None = None) -> dict[str, Piece]:
    """One expert's parts for a record. `interleaved`: gate and up are even and odd rows; None: they are where biases or MXFP4 blocks are.

    Raises UnsupportedModelError.
    """
    if tensors.shape("gate_up_proj_blocks"):
        names = {"gate_up": "gate_up_proj_blocks", "down": "down_proj_blocks", "gate_up_scale": "gate_up_proj_scales",
                 "down_scale": "down_proj_scales"}
        return _stacked(tensors, expert, names, True if interleaved is None else interleaved, transposed=False)
    if tensors.shape("gate_up_proj"):
        names = {"gate_up": "gate_up_proj", "down": "down_proj", "gate_up_scale": "gate_up_proj_scale_inv",
                 "down_scale": "down_proj_scale_inv"}
        gate_up, down = tensors.shape("gate_up_proj"), tensors.shape("down_proj")
        if gate_up is None or down is None or len(gate_up) != 3 or len(down) != 3:
            raise UnsupportedModelError("stacked experts without a third axis, or without down_proj", where="experts", expected=_FAMILIES,
                                        do="use a supported family")
        straight, transposed = (gate_up[1], gate_up[2]) == (2 * down[2], down[1]), (gate_up[2], gate_up[1]) == (2 * down[1], down[2])
        if not straight and not transposed:
            raise UnsupportedModelError(f"gate_up_proj is {list(gate_up)}, down_proj {list(down)}", where="experts",
                                        expected="[E, 2F, D] and [E, D, F], or both transposed", do="use a supported family")
        biased = tensors.shape("gate_up_proj_bias") is not None
        return _stacked(tensors, expert, names, biased if interleaved is None else interleaved, transposed=transposed)
    return _linears(tensors, expert)


def _stacked(tensors: Tensors, expert: int, names: dict[str, str], interleaved: bool, *, transposed: bool) -> dict[str, Piece]:
    names = {**names, "gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    out: dict[str, Piece] = {}
    for part, name in names.items():
        if tensors.shape(name) is None:
            continue
        t = tensors.get(name, expert)
        if transposed and part in ("gate_up", "down"):
            t = t.mT
        # fp8's scales are per block of rows: only whole rows can be even and odd
        out[part] = (t[0::2], t[1::2]) if interleaved and part.startswith("gate_up") else t
    if interleaved and "gate_up_scale" in out and pieces(out["gate_up_scale"])[0].shape[0] != pieces(out["gate_up"])[0].shape[0]:
        raise UnsupportedModelError("block scales over rows that alternate between gate and up", where="experts",
                                    expected="gate rows, then up rows", do="use a supported family")
    return out


def _linears(tensors: Tensors, expert: int) -> dict[str, Piece]:
    for gate, up, down in _LINEARS:
        if tensors.shape(f"{expert}.{gate}.weight") is None:
            continue
        out: dict[str, Piece] = {}
        for suffix, kind in (("", "weight"), ("_scale", "weight_scale_inv"), ("_bias", "bias")):
            if tensors.shape(f"{expert}.{gate}.{kind}") is not None:
                g, u, d = (tensors.get(f"{expert}.{n}.{kind}", None) for n in (gate, up, down))
                out["gate_up" + suffix], out["down" + suffix] = (g, u), d
        return out
    raise UnsupportedModelError(f"no weights of expert {expert}", where="experts", expected=_FAMILIES, do="use a supported family")


class _Module:
    """The parameters and buffers of an experts module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        t = self.tensors.get(name)
        return None if t is None else tuple(t.shape)

    def get(self, name: str, row: int | None) -> torch.Tensor:
        t = self.tensors[name].detach()
        return t if row is None else t[row]


class LentSource:
    """Experts of a host model that gives their memory back itself, all at once: until then there are two copies of them."""

    def __init__(self, host: HostModel) -> None:
        self.num_layers, self.num_experts, self.tensors = host.num_layers, host.num_experts, host.tensors

    def held_bytes(self, layer: int) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors(layer, 0).values()) * self.num_experts

    def forget(self, layer: int) -> None:
        pass

    def recall(self, layer: int, unpack: Callable[[int, Mapping[str, Piece]], None]) -> None:
        pass


class ModuleSource:
    """Experts modules of a model, one a MoE layer. Their memory can be given back layer by layer, and put back the same way."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._layers = [_Module(m) for m in modules]
        plain = (torch.Tensor, nn.Parameter)
        for layer, m in enumerate(self._layers):
            if any(type(t) not in plain or type(t.data) is not torch.Tensor for t in m.tensors.values()):
                raise UnsupportedModelError("its expert weights are not plain tensors", where=f"layer {layer}", expected="nn.Parameter",
                                            do="load it without quantisation of the framework's own or sharding")
        owners: dict[int, int] = {}
        for layer, m in enumerate(self._layers):
            for t in m.tensors.values():
                if owners.setdefault(t.untyped_storage().data_ptr(), layer) != layer and t.numel():
                    raise UnsupportedModelError("its experts share memory with another layer's", where=f"layer {layer}",
                                                expected="weights of its own for each layer", do="leave its experts where they are")
        self.num_layers, self.num_experts = len(modules), experts_in(self._layers[0])
        self._gone: dict[int, dict[str, tuple[torch.Size, tuple[int, ...]]]] = {}

    def tensors(self, layer: int, expert: int) -> dict[str, Piece]:
        """Raises SessionError after `forget`, UnsupportedModelError: other experts than the first layer's."""
        if layer in self._gone:
            raise SessionError("these experts' memory was given back", where=f"layer {layer}", do="read the record")
        m = self._layers[layer]
        if experts_in(m) != self.num_experts:
            raise UnsupportedModelError(f"{experts_in(m)} experts", where=f"layer {layer}", expected=f"{self.num_experts}, as in layer 0",
                                        do="give models of equal layers")
        order = getattr(m.module, "is_concatenated", None)
        return parts_of(m, expert, interleaved=None if order is None else not order)

    def held_bytes(self, layer: int) -> int:
        """Bytes of the layer's parameters that are in memory because of this source."""
        return 0 if layer in self._gone else sum(t.untyped_storage().nbytes() for t in self._storages(layer))

    def _storages(self, layer: int) -> list[torch.Tensor]:
        return list({t.untyped_storage().data_ptr(): t for t in self._layers[layer].tensors.values()}.values())

    def forget(self, layer: int) -> None:
        """Give the layer's memory back: parameters keep their identity and dtype and have no elements."""
        tensors = self._layers[layer].tensors
        self._gone[layer] = {n: (t.shape, t.stride()) for n, t in tensors.items()}
        for t in tensors.values():
            t.data = torch.empty(0, dtype=t.dtype, device=t.device)

    def recall(self, layer: int, unpack: Callable[[int, Mapping[str, Piece]], None]) -> None:
        """Memory for the layer again, shapes and strides as they were; `unpack(expert, parts)` fills it."""
        was = self._gone.get(layer)
        if was is None:
            return
        fresh = {n: torch.empty_strided(shape, stride, dtype=(t := self._layers[layer].tensors[n]).dtype, device=t.device)
                 for n, (shape, stride) in was.items()}
        with torch.inference_mode(False):
            for n, t in fresh.items():
                self._layers[layer].tensors[n].data = t
        del self._gone[layer]
        for expert in range(self.num_experts):
            unpack(expert, self.tensors(layer, expert))


class _Files:
    """The tensors of one layer's experts in a checkpoint."""

    def __init__(self) -> None:
        self.entries: dict[str, checkpoint.Stored] = {}

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.entries[name].shape if name in self.entries else None

    def get(self, name: str, row: int | None) -> torch.Tensor:
        return checkpoint.read_stored(self.entries[name], row)


class CheckpointSource:
    """The experts of a safetensors checkpoint (a folder, sharded or not), read one at a time: the model is never in memory.

    Layers are taken in ascending order of the decoder layer's number; draft layers are left out: those from `num_hidden_layers` of
    config.json (or of its `text_config`) on, as DeepSeek's, and those below `mtp`, as Qwen3-Next's. Raises ArtefactError,
    UnsupportedModelError: experts in more than one place, such as Qwen3-Omni's thinker and talker.
    """

    def __init__(self, folder: Path) -> None:
        config = Path(folder) / "config.json"
        said = checkpoint.read_json(config) if config.is_file() else {}
        whole = said if isinstance(said, dict) else {}
        depths = [x.get("num_hidden_layers") for x in (whole, whole.get("text_config")) if isinstance(x, dict)]
        limit = next((n for n in depths if type(n) is int), None)
        places: dict[str, dict[int, _Files]] = {}
        for name, entry in checkpoint.stored_tensors(Path(folder)).items():
            if (m := _LAYER.fullmatch(name)) and (limit is None or int(m[2]) < limit) and "mtp" not in m[1].split("."):
                places.setdefault(f"{m[1]}N{m[3]}", {}).setdefault(int(m[2]), _Files()).entries[m[4]] = entry
        if len(places) != 1:
            raise UnsupportedModelError(f"experts in {len(places)} places: {', '.join(sorted(places))}" if places else
                                        "no experts in this checkpoint", where=str(folder), expected="tensors of one layers.N. … .experts",
                                        do="give the folder of an MoE model, with the files of one stack of layers")
        (layers,) = places.values()
        self.layers = sorted(layers)
        self._layers = [layers[n] for n in self.layers]
        self.num_layers, self.num_experts = len(self.layers), experts_in(self._layers[0])
        for n, files in zip(self.layers, self._layers, strict=True):
            if (have := experts_in(files)) != self.num_experts:
                raise ArtefactError(f"{have} experts in layer {n}", where=str(folder), expected=f"{self.num_experts}",
                                    do="fetch the checkpoint again")

    def tensors(self, layer: int, expert: int) -> dict[str, Piece]:
        """The expert's parts, read now. Raises ArtefactError: a file was cut short."""
        return parts_of(self._layers[layer], expert)

    def held_bytes(self, layer: int) -> int:
        return 0

    def forget(self, layer: int) -> None:
        """Nothing is held."""

    def recall(self, layer: int, unpack: Callable[[int, Mapping[str, Piece]], None]) -> None:
        """Nothing is missing."""
