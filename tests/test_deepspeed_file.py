"""A DeepSpeed file with our section: the halves come apart, and what they must not say together is named."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_prefetch.config import Config, load
from moe_prefetch.deepspeed_file import contradictions, split
from moe_prefetch.errors import ConfigError
from moe_prefetch.validate import check

DISK = {"experts": {"home": "disk"}}
FIT = {"fit": {"out": "p"}}
TRAIN = {"train_batch_size": 2}


def test_the_halves_come_apart_and_the_source_is_left_alone():
    source = {"dtype": "fp32", "moe_prefetch": DISK}
    ours, stock = split(source, {"max_out_tokens": 8})
    assert stock == {"dtype": "fp32", "max_out_tokens": 8} and ours == load(DISK)
    assert source == {"dtype": "fp32", "moe_prefetch": DISK}
    assert split({"moe_prefetch": Config()}, {})[0] == Config()
    assert split(None, {"moe_prefetch": DISK})[0] == load(DISK)


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"moe_prefetch": {"experts": {"home": "disk"}, "probe": {"path": "p"}}}))
    for source in (tmp_path / "ds.json", str(tmp_path / "ds.json")):
        assert split(source, {})[0].probe.path == tmp_path / "p"
    assert split({"moe_prefetch": {"experts": {"home": "disk"}, "probe": {"path": "p"}}}, {})[0].probe.path == Path("p")


@pytest.mark.parametrize(("source", "word"), [
    (5, "can't be a int"), ({}, "no moe_prefetch section"), ({"moe-prefetch": {}}, "did you mean 'moe_prefetch'"),
    ({"moe_prefetch": {}, "moe_prefetsch": {}}, "did you mean"), ({"moe_prefetch": []}, "is a list"), ({"moe_prefetch": None}, "NoneType"),
    ({1: 2, "moe_prefetch": {}}, "no text"), ({"moe_prefetch": {"expert": {}}}, "did you mean 'experts'"),
    ({"dtype": "fp16", "moe_prefetch": {}}, "as an argument")], ids=repr)
def test_what_is_refused(source, word):
    with pytest.raises(ConfigError, match=word):
        split(source, {"dtype": "fp32"})


@pytest.mark.parametrize(("stock", "ours", "word"), [
    ({"dtyp": "fp32"}, {}, "did you mean 'dtype'"), ({"zzz": 1}, {}, "drop it"),
    ({"replace_with_kernel_inject": True}, {}, "no kernels"), ({"kernel_inject": True}, {}, "no kernels"),
    ({"quant": {}, "checkpoint": "c"}, {}, "nothing would be loaded"), ({"quant": {"num_bits": 4}}, {}, "nothing would be quantised"),
    ({"moe": {"type": "residual"}}, {}, "moe.type"), ({"injection_dict": {"Block": ["o_proj"]}}, {}, "as an argument"),
    ({"enable_cuda_graph": True}, {}, "replayed graph"), ({"dtype": "int8"}, {}, "int8"),
    ({"tensor_parallel": {"tp_size": 2}}, {"kv": {"format": "fp4-72", "calibration": "c"}}, "tensor parallelism"),
    ({"tp": {"tp_size": 2}, "tensor_parallel": {"tp_size": 2}}, {}, "tp and tensor_parallel: two names"),
    ({"mp_size": 2}, {"kv": {"format": "fp4-72", "calibration": "c"}}, "1/2"), ({}, FIT, "belongs to training"),
    ({**TRAIN, "zero_optimization": {"stage": 3}}, FIT, "use stage 0, 1 or 2"),
    ({**TRAIN, "hybrid_engine": {"enabled": True}}, FIT, "hybrid"),
    ({**TRAIN, "compile": {"deepcompile": True}}, FIT, "compiled graph"), (TRAIN, {}, "asks for nothing"),
    ({**TRAIN, "optimizer": {}}, DISK, "serve inference")])
def test_halves_that_contradict_each_other(stock, ours, word):
    found = contradictions(stock, load(ours))
    assert len(found) == 1 and word in found[0]


def test_no_engine_reads_experts_from_the_hosts_memory():
    for stock in ({}, TRAIN, {**TRAIN, "expert_parallel": {"enabled": True, "autoep_size": 1}}):
        assert any("use local or disk" in line for line in contradictions(stock, load({"experts": {"home": "host"}})))


@pytest.mark.parametrize(("stock", "ours"), [
    ({}, {}), ({"quant": {"enabled": False}, "checkpoint": None, "return_tuple": True, "tm": True, "set_empty_params": False}, {}),
    ({"moe": True}, {}), ({"moe": {"ep_size": 2, "type": "standard"}}, {}), ({"moe": {"enabled": False, "type": "residual"}}, {}),
    ({"mp_size": 2, "save_mp_checkpoint_path": "out"}, {}),
    ({"dtype": "fp32", "tp": {"tp_size": 2}}, DISK), ({**TRAIN, "zero_optimization": {"stage": 2}, "optimizer": {}, "x": 1}, FIT),
    ({**TRAIN, "expert_parallel": {"enabled": True}}, DISK)])
def test_halves_that_go_together(stock, ours):
    assert contradictions(stock, load(ours)) == []


def test_validate_names_both_halves(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"dtyp": "fp32", "enable_cuda_graph": True, "moe_prefetch": {"kvs": {}}}))
    found = check(tmp_path / "ds.json")
    assert [line.split(":")[0] for line in found] == ["kvs", "dtyp", "enable_cuda_graph"]
    (tmp_path / "ds.json").write_text(json.dumps({**TRAIN, "moe_prefetch": {"fit": {"out": "p"}}, "MoE-Prefetch": {}}))
    assert len(check(tmp_path / "ds.json")) == 1
