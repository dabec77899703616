"""Every wrong configuration gives a typed error before the model is touched and before DeepSpeed is called."""
from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeDecoderLayer, Qwen2MoeForCausalLM

from moe_prefetch.deepspeed_file import INFERENCE_KEYS, SYNONYMS
from moe_prefetch.errors import (
    ArtefactError,
    BudgetError,
    ConfigError,
    MoEPrefetchError,
    ProbeMismatchError,
    SessionError,
    UnsupportedModelError,
)
from moe_prefetch.integrations import deepspeed as mpd
from moe_prefetch.integrations.transformers import gates
from moe_prefetch.probes import RoutingProbe
from tests.models import picture, small

pytestmark = pytest.mark.framework

DISK = {"home": "disk", "resident": 2}
TRAIN = {"train_micro_batch_size_per_gpu": 1}
FIT = {"fit": {"out": "probe"}}
AUTOEP = {"enabled": True}


class OtherPolicy:
    """Stands for a policy class of DeepSpeed's older style."""


def ours(**section):
    return {"dtype": "fp32", "moe_prefetch": section}


# (name, configuration or a call that makes it, error, a word of its message)
INFERENCE = [
    ("no section", {"dtype": "fp32"}, ConfigError, "no moe_prefetch section"),
    ("nothing at all", None, ConfigError, "no moe_prefetch section"),
    ("section misspelt", {"moe-prefetch": {}}, ConfigError, "did you mean 'moe_prefetch'"),
    ("section is a list", {"moe_prefetch": []}, ConfigError, "is a list"),
    ("section is true", {"moe_prefetch": True}, ConfigError, "is a bool"),
    ("unknown key of ours", ours(expert=DISK), ConfigError, "did you mean 'experts'"),
    ("unknown key within a section", ours(experts={**DISK, "residnt": 2}), ConfigError, "did you mean 'resident'"),
    ("unknown home", ours(experts={"home": "cloud"}), ConfigError, "given: 'cloud'"),
    ("the host's memory", ours(experts={"home": "host"}), ConfigError, "host's memory"),
    ("share above one", ours(experts={**DISK, "resident": "150%"}), ConfigError, "no share"),
    ("a budget that holds nothing", ours(experts={**DISK, "resident": "4KiB"}), BudgetError, "holds no expert"),
    ("more slots than experts", ours(experts={**DISK, "resident": 5}), BudgetError, "more than the layer has"),
    ("slots without a drive", ours(experts={"resident": 2}), ConfigError, "moves nothing"),
    ("a probe without a drive", ours(probe={"path": "p"}), ConfigError, "moves nothing"),
    ("a probe that is not there", ours(experts=DISK, probe={"path": "nowhere"}), ArtefactError, "nowhere"),
    ("plan without its probe", ours(experts={**DISK, "plan": "probe"}), ConfigError, "probe.path is empty"),
    ("unknown KV format", ours(kv={"format": "fp5"}), ConfigError, "given: 'fp5'"),
    ("a KV layer that is not there", ours(kv={"layers": {9: "fp8"}}), ConfigError, "decoder layer 9"),
    ("a window for fp16", ours(kv={"window": 8}), ConfigError, "keeps everything as it is"),
    ("another version of the keys", ours(version=2), ConfigError, "version"),
    ("fit in inference", {"moe_prefetch": FIT}, ConfigError, "belongs to training"),
    ("unknown key of DeepSpeed", {**ours(), "dtyp": "fp32"}, ConfigError, "did you mean 'dtype'"),
    ("unknown dtype", {**ours(), "dtype": "fp33"}, ConfigError, "fp33"),
    ("int8", {**ours(), "dtype": "int8"}, ConfigError, "int8"),
    ("a key of DeepSpeed of the wrong type", {**ours(), "max_out_tokens": -1}, ConfigError, "max_"),
    ("kernel injection", {**ours(), "replace_with_kernel_inject": True}, ConfigError, "no kernels"),
    ("CUDA graphs", {**ours(), "enable_cuda_graph": True}, ConfigError, "replayed graph"),
    ("ZeRO 3 in inference", {**ours(), "zero": {"stage": 3}}, ConfigError, "zero.stage"),
    ("more ranks than run", {**ours(), "tensor_parallel": {"tp_size": 64}}, ConfigError, "tp_size is 64"),
    ("calibration under tensor parallelism", {**ours(kv={"format": "fp4-72", "calibration": "c"}), "mp_size": 2}, ConfigError, "heads"),
    ("a policy class of the older style", {**ours(), "injection_policy": {nn.Linear: OtherPolicy}}, ConfigError, "no policy classes"),
    ("our policy for no MoE block", {**ours(), "injection_policy": {nn.Linear: mpd.MoEPrefetchPolicy}}, ConfigError, "no MoE block"),
    ("our policy for another block", {**ours(), "injection_policy": {mpd.MoE: mpd.MoEPrefetchPolicy}}, ConfigError, "has no MoE"),
    *((f"names of layers: {case}", {**ours(), "injection_policy": policy}, ConfigError, word) for case, policy, word in (
        ("a class in words, as in a file", {"Qwen2MoeDecoderLayer": ["self_attn.o_proj"]}, "a file can't hold"),
        ("no such layer", {Qwen2MoeDecoderLayer: ("self_attn.o_proj", "nope")}, "ends in 'nope'"),
        ("no names", {Qwen2MoeDecoderLayer: (1,)}, "ends in 1"), ("no module", {int: ("o_proj",)}, "has no int"),
        ("a class of another model", {nn.Conv2d: ("o_proj",)}, "has no Conv2d"),
        ("the model itself", {Qwen2MoeForCausalLM: ("o_proj",)}, "has no Qwen2MoeForCausalLM"))),
    ("experts spread by ep_size", {**ours(), "ep_size": 2}, ConfigError, "ep_size is 2"),
    ("experts spread by moe.ep_size", {**ours(), "moe": {"ep_size": 2}}, ConfigError, "ep_size is 2"),
    ("sizes old and new", {**ours(), "mp_size": 2, "tensor_parallel": {"tp_size": 1}}, ConfigError, "mp_size"),
    *((f"moe.{key}, which does nothing", {**ours(), "moe": {key: value}}, ConfigError, f"moe.{key}: DeepSpeed takes it") for key, value in {
        "moe_experts": [4], "num_experts": [4], "type": "residual", "ep_group": 1, "expert_group": 1, "ep_mp_group": 1}.items()),
    *((f"{key}, which does nothing", {**ours(), key: value}, ConfigError, f"{key}: DeepSpeed takes it and passes over") for key, value in {
        "quant": {"enabled": True}, "checkpoint": "weights.json", "base_dir": "weights", "checkpoint_config": {"checkpoint_dir": "weights"},
        "ckpt_config": {"base_dir": "w"}, "set_empty_params": True, "training_mp_size": 2, "use_triton": True, "triton_autotune": True,
        "transposed_mode": True, "triangular_masking": False, "tm": False, "return_tuple": False, "injection_policy_tuple": ("o_proj",),
        "min_out_tokens": 5, "min_tokens": 5, "moe_experts": [4], "moe_type": "residual", "ep_group": 1, "expert_group": 1,
        "ep_mp_group": 1, "expert_mp_group": 1, "config": {"dtype": "bf16"},
        "args": {"dtype": "bf16"}}.items()),
    ("quant without a word of enabled", {**ours(), "quant": {"weight": {"num_bits": 8}}}, ConfigError, "nothing would be quantised"),
    ("a place to save what is not split", {**ours(), "save_mp_checkpoint_path": "out"}, ConfigError, "writes nothing there"),
    ("a list for a configuration", [1], ConfigError, "can't be a list"),
    ("a file that is not there", "nowhere.json", ConfigError, "can't be read"),
    ("a file with a duplicate key", '{"dtype": "fp32", "dtype": "bf16", "moe_prefetch": {}}', ConfigError, "duplicate key"),
    ("a file cut short", '{"moe_prefetch": {', ConfigError, "not valid JSON"),
]
TRAINING = [
    ("training without a section", TRAIN, ConfigError, "no moe_prefetch section"),
    ("a section that asks for nothing", {**TRAIN, "moe_prefetch": {}}, ConfigError, "asks for nothing"),
    ("fit beside inference", {**TRAIN, "moe_prefetch": {**FIT, "kv": {"format": "fp8"}}}, ConfigError, "keep one of the two"),
    ("fit without a folder", {**TRAIN, "moe_prefetch": {"fit": {}}}, ConfigError, "fit.out"),
    ("fit into no name", {**TRAIN, "moe_prefetch": {"fit": {"out": ""}}}, ConfigError, "name a folder"),
    ("fit of no size", {**TRAIN, "moe_prefetch": {"fit": {"out": "p", "rank": 0}}}, ConfigError, "fit.rank"),
    ("ZeRO 3", {**TRAIN, "zero_optimization": {"stage": 3}, "moe_prefetch": FIT}, ConfigError, "stage 0, 1 or 2"),
    ("experts beside an optimizer", {**TRAIN, "optimizer": {"type": "Adam"}, "moe_prefetch": {"experts": DISK}}, ConfigError, "optimizer"),
    ("the hybrid engine", {**TRAIN, "hybrid_engine": {"enabled": True}, "moe_prefetch": FIT}, ConfigError, "hybrid_engine"),
    ("a section that is a number", {**TRAIN, "zero_optimization": 2, "moe_prefetch": FIT}, ConfigError, "no section"),
    ("AutoEP by a word", {**TRAIN, "expert_parallel": "yes", "moe_prefetch": FIT}, ConfigError, "no section"),
    ("a batch in words", {"train_micro_batch_size_per_gpu": "eight", "moe_prefetch": FIT}, ConfigError, "whole number"),
    ("no batch", {"dtype": "fp32", "moe_prefetch": FIT}, ConfigError, "train_micro_batch_size_per_gpu"),
    ("batches that clash", {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 8, "moe_prefetch": FIT}, ConfigError, "multiple"),
    ("two precisions", {**TRAIN, "fp16": {"enabled": True}, "bf16": {"enabled": True}, "moe_prefetch": FIT}, ConfigError, "both"),
    ("an optimizer that is not", {**TRAIN, "optimizer": {"type": "AdamX"}, "moe_prefetch": FIT}, ConfigError, "did you mean 'adam"),
    ("a key spelt otherwise", {**TRAIN, "zero_optimisation": {"stage": 1}, "moe_prefetch": FIT}, ConfigError, "'zero_optimization'"),
    ("unknown preset", {**AUTOEP, "preset_model": "mixtrall", "moe_prefetch": FIT}, ConfigError, "'mixtral'"),
    ("a group that does not divide", {**AUTOEP, "autoep_size": 3, "moe_prefetch": FIT}, ConfigError, "divisor"),
    ("KV layers that are not there", {**AUTOEP, "moe_prefetch": {"kv": {"layers": {9: "fp8"}}}}, ConfigError, "layer 9"),
]


@pytest.fixture(autouse=True)
def never_called(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("DeepSpeed was called")

    monkeypatch.setattr(deepspeed, "init_inference", fail)
    monkeypatch.setattr(deepspeed, "initialize", fail)
    for name, value in zip(mpd.LAUNCHER, ("0", "0", "1", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("source", "error", "word"), [row[1:] for row in INFERENCE], ids=[row[0] for row in INFERENCE])
def test_inference(source, error, word, tmp_path):
    if isinstance(source, str):
        path = tmp_path / "ds.json"
        if source.startswith("{"):
            path.write_text(source)
        source = str(path)
    model = small()
    before = picture(model)
    with pytest.raises(error, match=word) as e:
        mpd.init_inference(model, source)
    assert isinstance(e.value, MoEPrefetchError)
    assert picture(model) == before


@pytest.mark.parametrize(("source", "error", "word"), [row[1:] for row in TRAINING], ids=[row[0] for row in TRAINING])
def test_training(source, error, word):
    if "enabled" in source:
        autoep = {k: v for k, v in source.items() if k != "moe_prefetch"}
        source = {**TRAIN, "expert_parallel": autoep, "moe_prefetch": source["moe_prefetch"]}
    model = small("qwen3_moe")
    before = picture(model)
    with pytest.raises(error, match=word):
        mpd.initialize(model=model, config=source)
    assert picture(model) == before


@pytest.mark.parametrize("name", ["afile", "afile/new", "/proc/x"])
def test_folders_that_cannot_be_written(name, tmp_path):
    (tmp_path / "afile").write_text("kept")
    path, model = str(tmp_path / name), small("qwen3_moe")
    before = picture(model)
    with pytest.raises(ConfigError, match=r"experts\.path: nothing can be written"):
        mpd.init_inference(model, {"dtype": "bf16", "moe_prefetch": {"experts": {**DISK, "path": path}}})
    with pytest.raises(ConfigError, match=r"fit\.out: nothing can be written"):
        mpd.initialize(model=model, config={**TRAIN, "moe_prefetch": {"fit": {"out": path}}})
    assert picture(model) == before and (tmp_path / "afile").read_text() == "kept"


def test_folders_to_be_made_are_not_made_yet(tmp_path):
    with pytest.raises(AssertionError, match="DeepSpeed was called"):
        mpd.init_inference(small(), ours(experts={**DISK, "path": str(tmp_path / "a" / "b")}))
    assert not list(tmp_path.iterdir())


def test_the_tables_are_long_enough():
    assert len(INFERENCE) >= 30 and len({row[0] for row in INFERENCE + TRAINING}) == len(INFERENCE) + len(TRAINING)


def test_every_problem_of_both_halves_is_named():
    with pytest.raises(ConfigError) as e:
        mpd.init_inference(small(), {"dtyp": 1, "enable_cuda_graph": True, "kernel_inject": True, "moe_prefetch": {}})
    assert len(e.value.problems) == 3


def test_the_names_of_deepspeeds_keys_are_those_of_the_installed_one():
    from deepspeed.inference.config import DeepSpeedInferenceConfig

    fields = DeepSpeedInferenceConfig.model_fields
    assert {*fields, *(f.alias for f in fields.values() if f.alias)} == INFERENCE_KEYS
    assert {(f.alias, name) for name, f in fields.items() if f.alias not in (None, name)} == set(SYNONYMS)


# models --------------------------------------------------------------------------------------------------------------------
def test_models_that_are_not_served():
    from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    for model, word in ((OlmoeForCausalLM(OlmoeConfig(num_experts=2, num_experts_per_tok=1, **sizes)), "olmoe is an MoE family"),
                        (LlamaForCausalLM(LlamaConfig(**sizes)), "no MoE layers"), (nn.Linear(2, 2), "no MoE layers that we know"),
                        ("model", "no plain model")):
        with pytest.raises(UnsupportedModelError, match=word):
            mpd.init_inference(model, ours())


def test_an_attached_model_is_refused():
    import moe_prefetch

    model = small()
    with moe_prefetch.attach(model), pytest.raises(SessionError, match="attached"):
        mpd.init_inference(model, ours())


def test_a_probe_of_another_model_is_refused(tmp_path):
    RoutingProbe(gates(small(seed=1))).save_pretrained(tmp_path / "probe")
    model = small(seed=2)
    with pytest.raises(ArtefactError, match="other router weights"):
        mpd.init_inference(model, ours(experts=DISK, probe={"path": str(tmp_path / "probe")}))
    RoutingProbe(gates(model)).save_pretrained(tmp_path / "own")
    with pytest.raises(AssertionError, match="DeepSpeed was called"):  # all is well so far, also after the conversion
        mpd.init_inference(model, {**ours(experts=DISK, probe={"path": str(tmp_path / "own")}), "dtype": "bf16"})


def test_a_fit_into_a_models_folder_is_refused(tmp_path):
    model = small()
    model.save_pretrained(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ArtefactError, match="would be replaced"):
        mpd.initialize(model=model, config={**TRAIN, "moe_prefetch": {"fit": {"out": str(tmp_path)}}})
    assert before == {p: p.read_bytes() for p in tmp_path.iterdir()}


def test_a_probe_that_autoep_has_no_taps_for(tmp_path):
    model = small("qwen2_moe")
    RoutingProbe(gates(model)).save_pretrained(tmp_path / "transformers")
    RoutingProbe([replace(g, shared=False) for g in gates(model)]).save_pretrained(tmp_path / "autoep")
    RoutingProbe(gates(small("qwen2_moe", seed=3))).save_pretrained(tmp_path / "other")
    before = picture(model)

    def start(name, **section):
        mpd.initialize(model=model, config={**TRAIN, "expert_parallel": AUTOEP, "moe_prefetch": {
            "experts": DISK, "probe": {"path": str(tmp_path / name)}, **section}})

    with pytest.raises(ProbeMismatchError, match="AutoEP computes after the routed"):
        start("transformers")
    with pytest.raises(ProbeMismatchError, match="other router weights"):
        start("other")
    with pytest.raises(ArtefactError, match="nowhere"):
        start("nowhere")
    with pytest.raises(BudgetError, match="more than the layer has"):
        start("autoep", experts={**DISK, "resident": 5})
    assert picture(model) == before
    with pytest.raises(AssertionError, match="DeepSpeed was called"):
        start("autoep")


def test_pipelines_and_client_optimizers_are_refused(monkeypatch):
    pipeline = object.__new__(PipelineModule)
    nn.Module.__init__(pipeline)
    with pytest.raises(ConfigError, match="PipelineModule"):
        mpd.initialize(model=pipeline, config={**TRAIN, "moe_prefetch": FIT})
    model = small("qwen3_moe")
    with pytest.raises(ConfigError, match="drop the optimizer"):
        mpd.initialize(model=model, config={**TRAIN, "moe_prefetch": {"experts": DISK}}, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_autoep_where_it_does_not_work(monkeypatch):
    from transformers.utils import output_capturing

    class Registry(dict):
        def get(self, key):
            return None

    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", Registry())
    with pytest.raises(UnsupportedModelError, match="does not work with transformers"):
        mpd.initialize(model=small("qwen3_moe"), config={**TRAIN, "expert_parallel": AUTOEP, "moe_prefetch": FIT})


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="DeepSpeed asks MPI")
def test_training_needs_a_launcher(monkeypatch):
    monkeypatch.delenv("MASTER_PORT")
    model = small("qwen3_moe")
    before = picture(model)
    with pytest.raises(ConfigError, match="no launcher has set MASTER_PORT"):
        mpd.initialize(model=model, config={**TRAIN, "moe_prefetch": FIT})
    assert picture(model) == before


def test_local_size_must_be_there(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    with pytest.raises(ConfigError, match="LOCAL_SIZE"):
        mpd.init_inference(small(), {**ours(), "tensor_parallel": {"tp_size": 2}})


def test_a_file_is_validated_by_the_command(tmp_path):
    from typer.testing import CliRunner

    from moe_prefetch.cli import app

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"enable_cuda_graph": True, "moe_prefetch": {"kv": {"format": "fp5"}}}))
    done = CliRunner().invoke(app, ["validate", str(path)])
    assert done.exit_code == 1
    path.write_text(json.dumps(ours(experts=DISK)))
    assert CliRunner().invoke(app, ["validate", str(path)]).exit_code == 0
