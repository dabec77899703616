"""Records in memory: every layout there and back, bit for bit; guards intact; never two copies."""
from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_prefetch.errors import ArtefactError, SessionError, ShapeError, UnsupportedModelError
from moe_prefetch.experts.homes import Block, HostHome, LocalHome, MemoryStore, PeerHome
from moe_prefetch.experts.sources import CheckpointSource, ModuleSource
from moe_prefetch.experts.store import DiskStore
from moe_prefetch.kernels.expert_mlp.op import expert_mlp
from moe_prefetch.kernels.expert_mlp.record import CODES, LINE, PAGE, Form, RecordLayout, pieces, plain_bytes, tiled_bytes
from moe_prefetch.runtime import REAL, Runtime
from tests.experts.layouts import CLASSES, D, E, F, checkpoint_of, module_of

ROOT = Path(__file__).resolve().parents[2]
KINDS = [*CLASSES, *(f"{k}_t" for k in CLASSES), "linears", "linears_t", "linears_bias", "fp8", "fp8_t"]
GUARD = 0xA5


class GuardedHome(LocalHome):
    """A home whose blocks lie between guard bytes."""

    def __init__(self) -> None:
        super().__init__("cpu", REAL)
        self.raw: list[torch.Tensor] = []
        self.released = 0

    def allocate(self, nbytes: int) -> Block:
        raw = torch.full((nbytes + 4 * LINE,), GUARD, dtype=torch.uint8)
        start = -raw.data_ptr() % LINE + LINE
        raw[start : start + nbytes] = 0
        self.raw.append(raw)
        self.spans = (start, nbytes)
        return Block(raw[start : start + nbytes], (raw.data_ptr() + start,), self._release)

    def _release(self) -> None:
        self.released += 1

    def check(self) -> None:
        for raw in self.raw:
            start = -raw.data_ptr() % LINE + LINE
            assert bool((raw[:start] == GUARD).all()) and bool((raw[-2 * LINE :] == GUARD).all())


def bits(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().view(torch.uint8).numpy().tobytes()


def state(modules) -> list:
    return [(n, id(p), p.dtype, tuple(p.shape), p.stride(), bits(p)) for m in modules for n, p in m.named_parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_modules_become_records_and_come_back(kind):
    modules = [module_of(kind, seed) for seed in (0, 1)]
    before, copies = state(modules), copy.deepcopy(modules)
    home = GuardedHome()
    store = MemoryStore(ModuleSource(modules), home, REAL, weights=7)
    assert all(p.numel() == 0 for m in modules for p in m.parameters()), "the model's own memory was given back"
    reference = ModuleSource(copies)
    for layer in range(2):
        for e in range(E):
            buffer = store.buffer(layer, e)
            assert buffer.data_ptr() == store.address(layer, e) and buffer.data_ptr() % LINE == 0 and len(buffer) % PAGE == 0
            assert store.layout.stamp_of(buffer) == (7, layer, e)
            views = store.layout.views(buffer)
            parts = reference.tensors(layer, e)
            assert views.keys() == parts.keys()
            for name, want in parts.items():
                tiled = kind.startswith("fp8") and name in CODES
                got = plain_bytes(views[name], D if name == "gate_up" else F) if tiled else views[name]
                assert bits(got) == b"".join(bits(t) for t in pieces(want)), (layer, e, name)
    home.check()
    store.close()
    assert state(modules) == before
    assert home.released == 2
    home.check()
    store.close()


def test_a_store_that_nobody_closes_unlocks_its_memory_when_it_goes():
    """Freed while page-locked, its addresses would be refused to whoever gets them next."""
    home = GuardedHome()
    store = MemoryStore(ModuleSource([module_of("gpt_oss", seed) for seed in (0, 1)]), home, REAL)
    record = store.buffer(0, 0)
    del store
    gc.collect()
    assert home.released == 2
    assert record.numel() > 0
    home.check()


@pytest.mark.parametrize("kind", ["stacked", "gpt_oss", "mxfp4", "linears", "mixtral", "deepseek_fp8"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_becomes_records(tmp_path, kind, shards):
    tensors = checkpoint_of(tmp_path, kind, shards=shards)
    source = CheckpointSource(tmp_path)
    assert (source.num_layers, source.num_experts) == (2, E)
    store = MemoryStore(source, LocalHome("cpu", REAL), REAL)
    assert store.peak_bytes == {"cpu": store.record_bytes + store.layout.nbytes}
    # The way back: into tensors like the checkpoint's, through the same description.
    empty = {n: torch.zeros_like(t) for n, t in tensors.items() if "experts." in n and "shared" not in n}
    for layer in range(2):
        mine = {n.split("experts.")[1]: t for n, t in empty.items() if f"layers.{layer}." in n}

        class Into:
            def names(self, mine=mine):
                return list(mine)

            def shape(self, name, mine=mine):
                return tuple(mine[name].shape) if name in mine else None

            def get(self, name, row, mine=mine):
                return mine[name] if row is None else mine[name][row]

        from moe_prefetch.experts.sources import parts_of

        for e in range(E):
            store.layout.unpack(store.buffer(layer, e), parts_of(Into(), e))
    for n, t in empty.items():
        assert bits(t) == bits(tensors[n]), n
    form = store.layout.form()
    assert (form.hidden, form.width) == (D, F)
    assert form.weights == {"mxfp4": "mxfp4", "deepseek_fp8": "fp8"}.get(kind, "bfloat16")
    assert form.layout() == store.layout
    if kind == "deepseek_fp8":
        assert (form.block, form.scale) == (32, "float32")


def test_module_and_checkpoint_of_the_same_weights_give_the_same_records(tmp_path):
    from safetensors.torch import save_file

    module = module_of("gpt_oss")
    save_file({f"model.layers.0.mlp.experts.{n}": p.detach() for n, p in module.named_parameters()}, tmp_path / "model.safetensors")
    a = MemoryStore(CheckpointSource(tmp_path), LocalHome("cpu", REAL), REAL)
    b = MemoryStore(ModuleSource([module]), HostHome(REAL), REAL)
    assert all(torch.equal(a.buffer(0, e), b.buffer(0, e)) for e in range(E))


@pytest.mark.parametrize("kind", ["mxfp4", "deepseek_fp8", "gpt_oss"])
def test_quantised_experts_in_a_record_file(tmp_path, kind):
    (tmp_path / "model").mkdir()
    checkpoint_of(tmp_path / "model", kind)
    source = CheckpointSource(tmp_path / "model")
    store = DiskStore.obtain(tmp_path / "records", source, REAL, weights=3)
    memory = MemoryStore(source, LocalHome("cpu", REAL), REAL, weights=3)
    buffer = REAL.allocate(store.layout.nbytes)
    for layer in range(2):
        for e in range(E):
            store.read_into(layer, e, buffer)
            assert torch.equal(buffer, memory.buffer(layer, e))
    store.close()
    data = bytearray(store.path.read_bytes())
    data[store.layout.parts[-1].offset] ^= 1
    store.path.write_bytes(data)
    with pytest.raises(ArtefactError, match="altered"):
        DiskStore.obtain(tmp_path / "records", source, REAL, weights=3)


def test_another_version_of_the_weights_is_written_again(tmp_path):
    source = ModuleSource([module_of("qwen3")])
    first = DiskStore.obtain(tmp_path, source, REAL)
    again = DiskStore.obtain(tmp_path, source, REAL, weights=2)
    assert again.path != first.path
    buffer = REAL.allocate(again.layout.nbytes)
    again.read_into(0, 1, buffer)
    assert again.layout.stamp_of(buffer) == (2, 0, 1)
    first.close()
    again.close()


def test_a_record_that_changes_under_an_open_file_is_refused(tmp_path):
    store = DiskStore.obtain(tmp_path, ModuleSource([module_of("qwen3")]), REAL)
    size = store.layout.nbytes
    data = store.path.read_bytes()
    with open(store.path, "r+b") as f:
        f.write(data[size : 2 * size])
    with pytest.raises(ArtefactError, match="expert 1") as e:
        store.read_into(0, 0, REAL.allocate(size))
    assert "expert 0" in e.value.where
    store.close()


# no two copies --------------------------------------------------------------------------------------------------------------
PEAK = """
import json, resource, sys
import torch
from moe_prefetch.experts.homes import LocalHome, MemoryStore
from moe_prefetch.experts.sources import ModuleSource
from moe_prefetch.runtime import REAL, Runtime
from torch import nn
layers, E, D, F = 12, 4, 512, 1024
modules = []
for _ in range(layers):
    m = nn.Module()
    m.gate_up_proj = nn.Parameter(torch.ones(E, 2 * F, D), requires_grad=False)
    m.down_proj = nn.Parameter(torch.ones(E, D, F), requires_grad=False)
    modules.append(m)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
store = MemoryStore(ModuleSource(modules), LocalHome("cpu", REAL), REAL)
built = peak()
model = layers * E * 3 * D * F * 4
said = store.peak_bytes["cpu"]
store.close()
print(json.dumps({"model": model, "layer": model // layers, "build": built - before, "back": peak() - before, "said": said}))
"""


def test_building_and_giving_back_hold_one_layer_twice_at_most():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["model"] > 250e6
    assert found["model"] + found["layer"] <= found["said"] <= found["model"] + 1.01 * found["layer"] + (1 << 20)
    for step in ("build", "back"):
        assert found[step] <= 2.5 * found["layer"], f"{step}: {found}"


def test_a_source_that_fails_half_way_has_its_weights_again():
    modules = [module_of("qwen3", 0), module_of("qwen3", 1), module_of("qwen3", 2)]
    modules[2].down_proj.data = modules[2].down_proj.data[:, :, : F - 1]
    before = state(modules)
    home = GuardedHome()
    with pytest.raises(UnsupportedModelError):
        MemoryStore(ModuleSource(modules), home, REAL)
    assert state(modules) == before and home.released == 3

    class Full(GuardedHome):
        def allocate(self, nbytes):
            if len(self.raw) == 2:
                raise MemoryError("full")
            return super().allocate(nbytes)

    with pytest.raises(MemoryError):
        MemoryStore(ModuleSource(modules[:2] + [module_of("qwen3", 5)]), Full(), REAL)
    assert state(modules[:2]) == state(modules)[: len(state(modules[:2]))]
    assert state(modules) == before


def test_experts_whose_memory_is_gone_can_not_be_read():
    source = ModuleSource([module_of("mixtral")])
    MemoryStore(source, LocalHome("cpu", REAL), REAL)
    with pytest.raises(SessionError, match="given back"):
        source.tensors(0, 0)


def test_a_home_of_several_ranks_gives_each_rank_s_addresses():
    """The seam for peers: this process fills its own experts and points at the others'."""

    class Peers(GuardedHome):
        name, rank = "peer", 1

        def allocate(self, nbytes):
            block = super().allocate(nbytes)
            return Block(block.mine, (1 << 20, block.bases[0], 1 << 30))

    store = MemoryStore(ModuleSource([module_of("qwen3")]), Peers(), REAL)
    size = store.layout.nbytes
    assert store.num_experts == 3 * E
    mine = store.buffer(0, E + 1).data_ptr()
    assert [store.address(0, e) for e in (0, 2, E + 1, 2 * E)] == [1 << 20, (1 << 20) + 2 * size, mine, 1 << 30]
    assert store.layout.stamp_of(store.buffer(0, E + 1)) == (1, 0, E + 1)
    with pytest.raises(ShapeError, match="another rank"):
        store.buffer(0, 0)


@pytest.mark.parametrize("possible", [True, False])
def test_a_peer_s_memory_needs_access_in_both_directions(possible):
    asked = []

    class Two(Runtime):
        def open_peers(self, one, other):
            asked.append((str(one), str(other)))
            return possible

    if not possible:
        with pytest.raises(UnsupportedModelError, match="can't read"):
            PeerHome("cpu", "cuda:1", Two())
        return
    store = MemoryStore(ModuleSource([module_of("qwen3")]), PeerHome("cpu", "cuda:1", Two()), Two())
    assert asked == [("cpu", "cuda:1")] and store.home.name == "peer" and store.address(0, 1) == store.buffer(0, 1).data_ptr()


@pytest.mark.gpu
def test_page_locked_records_are_read_where_they_are():
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(3, D, generator=g).bfloat16().cuda(), torch.rand(3, 2, generator=g).cuda()
    ids, said = torch.randint(0, E, (3, 2), generator=g).cuda(), []
    for home in (HostHome(REAL), LocalHome("cuda", REAL)):
        module = module_of("qwen3")
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 8)
        store = MemoryStore(ModuleSource([module]), home, REAL)
        where = torch.tensor([store.address(0, e) for e in range(E)], device="cuda")
        said.append(expert_mlp(x, ids, weights, where, store.form).clone())
        torch.cuda.synchronize()
        store.close()
    assert torch.equal(*said)
    assert said[0].isfinite().all()
    assert said[0].any()


# what is refused ------------------------------------------------------------------------------------------------------------
def test_layouts_that_are_not_known_are_refused():
    class Odd(torch.nn.Module):
        def __init__(self, **shapes):
            super().__init__()
            for n, s in shapes.items():
                self.register_parameter(n, torch.nn.Parameter(torch.zeros(s)))

    for shapes in ({"weight": (4, 4)}, {"gate_up_proj": (2, 6, 5), "down_proj": (2, 6, 5)}, {"gate_up_proj": (2, 6, 5)},
                   {"gate_up_proj": (6, 5), "down_proj": (5, 3)}):
        with pytest.raises(UnsupportedModelError) as e:
            ModuleSource([Odd(**shapes)]).tensors(0, 0)
        assert e.value.expected


def test_layers_that_share_their_experts_are_refused():
    one, other = module_of("qwen3", 0), module_of("qwen3", 1)
    other.down_proj = one.down_proj
    with pytest.raises(UnsupportedModelError, match="share memory"):
        ModuleSource([one, other])


def test_a_record_without_a_kernel_says_so():
    with pytest.raises(UnsupportedModelError):
        RecordLayout.of({"weight": torch.zeros(4, 4)}).form()
    with pytest.raises(UnsupportedModelError):
        RecordLayout.of({"gate_up": torch.zeros(8, 5), "down": torch.zeros(5, 3)}).form()
    with pytest.raises(UnsupportedModelError):
        Form("mxfp4", 100, 64).layout()
    extra = RecordLayout.of({"gate_up": torch.zeros(8, 5), "down": torch.zeros(5, 4), "norms": torch.zeros(5)})
    assert extra.form() == Form("float32", 5, 4)


def test_mxfp4_scales_beyond_the_kernels_factors_are_refused(tmp_path):
    from safetensors.torch import save_file

    tensors = checkpoint_of(tmp_path, "mxfp4", layers=1)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 3, 2] = 129
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="layer 0, expert 1"):
        MemoryStore(CheckpointSource(tmp_path), LocalHome("cpu", REAL), REAL)


@pytest.mark.parametrize(("part", "byte"), [("up_proj", 0x7F), ("down_proj", 0xFF)])
def test_fp8_weights_that_are_nan_are_refused(tmp_path, part, byte):
    from safetensors.torch import save_file

    tensors = checkpoint_of(tmp_path, "deepseek_fp8", layers=1)
    tensors[f"model.layers.0.mlp.experts.1.{part}.weight"].view(torch.uint8)[3, 2] = byte
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="NaN") as e:
        MemoryStore(CheckpointSource(tmp_path), LocalHome("cpu", REAL), REAL)
    assert "layer 0, expert 1" in str(e.value)


@pytest.mark.parametrize("columns", [16, 64, 80, 128, 144, 256])
def test_fp8_codes_lie_in_tiles_and_come_back(columns):
    """Every byte at every place. As `record.py` says it, one code after the other."""
    plain = torch.arange(3 * columns, dtype=torch.int64).mul(97).add(columns).remainder(256).to(torch.uint8).view(3, columns)
    plain[1] = plain[1].flip(0)
    lying = tiled_bytes(plain)
    assert lying.shape == (-(-columns // 128), 3, 128) and torch.equal(plain_bytes(lying, columns), plain)
    words = lying.view(torch.int16).to(torch.int64) & 0xFFFF
    for row in range(3):
        for tile in range(len(lying)):
            for j in range(64):
                codes = [int(plain[row, c]) if (c := tile * 128 + half * 64 + j) < columns else 0 for half in (0, 1)]
                word = int(words[tile, row, j])
                assert (word >> 15 << 7 | word >> 4 & 127, (word >> 11 & 1) << 7 | (word >> 12 & 7) << 4 | word & 15) == tuple(codes)


def damaged(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    first = next(k for k in sorted(header) if "experts.gate_up" in k)
    change(header, first)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data[8 + n :]))


@pytest.mark.parametrize("change", [
    lambda h, k: h[k].update(data_offsets=[0, 1 << 40]), lambda h, k: h[k].update(data_offsets=[-1, 5]),
    lambda h, k: h[k].update(data_offsets=h[k.replace("gate_up", "down")]["data_offsets"]), lambda h, k: h.update({k: []}),
    lambda h, k: h[k].update(shape=[2, 2]), lambda h, k: h[k].update(data_offsets=[n + (1 << 30) for n in h[k]["data_offsets"]]),
    lambda h, k: h[k].update(shape=[True, 2]), lambda h, k: h[k].pop("shape"), lambda h, k: h[k].update(shape=[1 << 60, 1 << 60]),
], ids=range(9))
def test_a_hostile_header_is_refused_by_name(tmp_path, change):
    checkpoint_of(tmp_path, "stacked")
    damaged(tmp_path, change)
    with pytest.raises(ArtefactError, match=r"model\.safetensors"):
        CheckpointSource(tmp_path)


def test_a_checkpoint_cut_short_is_refused_by_name(tmp_path):
    checkpoint_of(tmp_path, "stacked")
    source = CheckpointSource(tmp_path)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    for cut in (0, 4, 100, size - 1):
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(ArtefactError, match=r"model\.safetensors"):
            CheckpointSource(tmp_path)
    with pytest.raises(ArtefactError, match=r"model\.safetensors"):
        source.tensors(0, 0)


def test_an_index_that_names_what_is_not_there(tmp_path):
    checkpoint_of(tmp_path, "stacked", shards=2)
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    for change in ({"x": "model-00000.safetensors"}, {"x": "../model.safetensors"}, {"x": "gone.safetensors"}):
        index.write_text(json.dumps({"weight_map": {**said["weight_map"], **change}}))
        with pytest.raises(ArtefactError):
            CheckpointSource(tmp_path)
    index.write_text(json.dumps({}))
    with pytest.raises(ArtefactError, match="weight_map"):
        CheckpointSource(tmp_path)


def test_draft_layers_and_checkpoints_without_experts(tmp_path):
    checkpoint_of(tmp_path, "stacked", layers=3)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert CheckpointSource(tmp_path).num_layers == 2
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 1}}))
    assert CheckpointSource(tmp_path).num_layers == 1
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 0}))
    with pytest.raises(UnsupportedModelError, match="no experts"):
        CheckpointSource(tmp_path)


@pytest.mark.parametrize("other", ["talker.layers.0.mlp.experts.", "model.layers.0.mlp.vision_moe.experts.", "mtp.layers.0.mlp.experts."])
def test_experts_of_another_stack_are_not_taken_for_the_models(tmp_path, other):
    from safetensors.torch import save_file

    tensors = checkpoint_of(tmp_path, "stacked", layers=2)
    want = CheckpointSource(tmp_path).tensors(0, 0)
    mine = "model.layers.0.mlp.experts."
    theirs = {other + n.removeprefix(mine): -t for n, t in tensors.items() if n.startswith(mine)}
    save_file({**tensors, **theirs}, tmp_path / "model.safetensors")
    if other.startswith("mtp"):
        got = CheckpointSource(tmp_path).tensors(0, 0)
        assert all(bits(got[part]) == bits(want[part]) for part in want)
    else:
        with pytest.raises(UnsupportedModelError, match=r"2 places: .*layers\.N"):
            CheckpointSource(tmp_path)
