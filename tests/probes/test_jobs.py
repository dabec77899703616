"""The commands `trace` and `fit`: what is wrong with their input is said before a model is loaded."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from moe_prefetch.errors import ConfigError, MoEPrefetchError
from moe_prefetch.probes import jobs
from moe_prefetch.probes.jobs import load_model
from tests.tiny import tiny


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(jobs, "load_model", load)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    for wrong in ({"traces": [tmp_path / "none"]}, {"quick": True, "held_out": [tmp_path / "none"]}):
        with pytest.raises(MoEPrefetchError, match="none"):
            jobs.run_fit("smolmoe", tmp_path / "out", **wrong)
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(MoEPrefetchError):
        jobs.run_fit("smolmoe", tmp_path / "out", traces=[tmp_path])


def test_a_folder_of_somebody_elses_shards(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors").write_text("mine")
    with pytest.raises(MoEPrefetchError, match="would be replaced"):
        jobs.run_trace("smolmoe", tmp_path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MoEPrefetchError, match="none"):
        jobs.run_trace("smolmoe", tmp_path / "out", texts=[tmp_path / "none.txt"])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    words = WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(tmp_path)
    return tmp_path


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(("spoil", "said"), [
    (cut, "transformers can't load it"), (lambda f: (f / "model.safetensors").write_bytes(b""), "transformers can't load it"),
    (config(hidden_size=32), "transformers can't load it"), (config(hidden_size="wide"), "transformers can't load it"),
    (config(quantization_config={"quant_method": "gptq", "bits": 4}), "transformers can't load it"),
    (config(model_type="mine", auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}), "transformers can't load it"),
    (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "no tokenizer"),
], ids=["cut", "empty", "shapes", "types", "quantised", "code of its own", "no tokenizer"])
def test_a_checkpoint_that_can_not_be_loaded(checkpoint: Path, spoil: Callable[[Path], None], said: str) -> None:
    """One sentence, whatever transformers raises."""
    model, tokenizer = load_model(str(checkpoint))
    assert model.config.hidden_size == 64 and tokenizer("a")["input_ids"] == [0]
    spoil(checkpoint)
    with pytest.raises(ConfigError, match=said):
        load_model(str(checkpoint))


def test_a_tokenizer_of_other_letters_is_one(checkpoint: Path) -> None:
    """It has no ids for an English word."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0, "c": 1, "ac": 2}, [("a", "c")]))).save_pretrained(checkpoint)
    _, tokenizer = load_model(str(checkpoint))
    assert tokenizer("acc")["input_ids"] == [2, 1] and tokenizer("word")["input_ids"] == []


def test_a_text_with_words_that_the_tokenizer_lacks():
    strict = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1})))
    assert jobs.text_windows(strict, ["a"], 1).tolist() == [[0]]
    with pytest.raises(ConfigError, match=r"tokenizer can't read the text: .*UNK"):
        jobs.text_windows(strict, ["zebra"], 1)
