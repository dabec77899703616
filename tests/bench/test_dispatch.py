"""The benchmark of dispatch: every way computes the layer, what is wrong or fails gets no row, and what was not run is named."""
from __future__ import annotations

import csv
import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from moe_prefetch.bench import dispatch as job
from moe_prefetch.bench.dispatch_ways import WAYS
from moe_prefetch.cli import app
from moe_prefetch.errors import ConfigError
from tests.distributed import ranks

MODULE = "tests.bench.dispatch_bench_cases"
NAMES = {way.name for way in WAYS}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str], list[Any]]:
    return ranks.run(MODULE, [(2, ["everything", "over"]), (4, ["everything"])])


def right(found: dict[tuple[int, str], list[Any]], world: int) -> None:
    said = found[world, "everything"][0]
    assert not isinstance(said, str), said
    assert sorted(said) == sorted(f"tiny_ep{world}_t{t}_{r}" for t in (1, 5) for r in ("uniform", "zipf", "zipf_r2", "all-to-one",
                                                                                          "all-to-one_r2"))
    for case, each in said.items():
        assert {w for w, one in each.items() if one.get("error", 1) < 1e-5} == NAMES, (case, each)
        assert not any(one.get("fault") for w, one in each.items() if w != "fails"), each
        if "_t5_" in case:
            assert each["twice"]["error"] > 0.5 and "us" not in each["twice"]
            assert each["fails"] == {"fault": "RuntimeError: no such kernel"}


@pytest.mark.parametrize("world", [2, 4])
def test_every_way_is_the_layer(results, world):
    right(results, world)


@pytest.mark.nightly
def test_every_way_is_the_layer_on_eight_ranks():
    right(ranks.run(MODULE, [(8, ["everything"])]), 8)


def test_ranks_stop_together_when_the_time_is_over(results):
    assert results[2, "over"] == [[0, 1], [0, 0]]


@pytest.mark.nightly
def test_real_routing(shared_data):
    case = "everything real"
    said = ranks.run(MODULE, [(3, [case])], {"IDS": str(shared_data / "law_topk_ids.npz")})[3, case][0]
    assert not isinstance(said, str), said
    assert {"six_ep3_t1_real", "six_ep3_t5_real"} < said.keys()
    assert all(one["error"] < 1e-5 for each in said.values() for one in each.values())


@pytest.mark.nightly
@pytest.mark.framework
@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron-core as on a CPU")
def test_megatrons_layer_is_the_layer_too():
    pytest.importorskip("megatron.core")
    said = ranks.run(MODULE, [(2, ["megatron"])])[2, "megatron"][0]
    assert not isinstance(said, str), said
    others = {f"megatron_{kind}{kernel}" for kind in ("allgather", "alltoall") for kernel in ("", "_kernel")}
    for each in said.values():
        assert {w for w, one in each.items() if one.get("error", 1) < 1e-5} == NAMES | others, each
    assert len(said) == 3


@pytest.mark.nightly
def test_the_command_on_a_cpu(tmp_path):
    result = CliRunner().invoke(app, ["bench", "dispatch", "--device", "cpu", "--gpus", "2", "--out", str(tmp_path / "rows.csv")])
    assert result.exit_code == 0, result.output
    assert result.output.count("gather right") == 6 and "no figures" in result.output and "wrong" not in result.output
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(("argv", "words"), [
    (["--gpus", "3"], ("3 ranks and 1 GPUs", "a GPU for each", "--device cpu")), ([], ("2 ranks and 1 GPUs", "--gpus")),
    (["--device", "cpu", "--gpus", "1"], ("1 ranks", "2 ranks or more")), (["--device", "cpu", "--cases", "opt"], ("no case matches opt",)),
    (["--device", "cpu", "--ids", "absent.npz"], ("absent.npz",))])
def test_what_can_not_be_run_is_refused_before_anything_starts(monkeypatch, tmp_path, argv, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(job.multiprocessing, "get_context", lambda kind: pytest.fail("something started"))
    result = CliRunner().invoke(app, ["bench", "dispatch", "--out", str(tmp_path / "rows.csv"), *argv])
    text = " ".join(result.output.split())
    assert result.exit_code == 1 and all(word in text for word in words), text


class Done:
    """A process that has ended; the first leaves what its ranks found."""

    def __init__(self, target, args) -> None:
        self.rank, self.folder = args[0], args[1]

    def start(self) -> None:
        if self.rank == 0:
            ways = {"megatron_allgather": {"error": 1e-3, "us": 90.0}, "megatron_alltoall": {"error": 1e-3, "us": 75.0},
                    "megatron_alltoall_kernel": {"error": 1e-3, "us": 60.0},
                    "gather": {"error": 1e-3, "us": 30.0, "move_us": 6.0}, "ag_rs": {"error": 2e-3, "us": 45.0, "move_us": 20.0},
                    "ag_rs_packed": {"error": 2e-3, "us": 42.0, "move_us": 15.0}, "a2a_padded": {"fault": "RuntimeError: no"},
                    "host": {"error": 0.5}, "stay": {"error": float("nan")}}
            with open(f"{self.folder}/found", "w") as f:
                f.write(json.dumps(["mixtral-8x7b_ep2_t1_uniform", ways]) + "\n" + '["cut off')
        else:
            with open(f"{self.folder}/fault.1", "w") as f:
                f.write("rank 1: out of memory")

    def join(self, seconds=None) -> None: ...

    def is_alive(self) -> bool:
        return False


def test_rows_are_of_what_was_right_and_the_rest_is_named(monkeypatch, tmp_path, capsys):
    context = type("Context", (), {"Process": Done})
    for owner, name, value in ((job.multiprocessing, "get_context", lambda kind: context), (torch.cuda, "device_count", lambda: 2),
                               (torch.cuda, "get_device_name", lambda i: "H200")):
        monkeypatch.setattr(owner, name, value)
    out = tmp_path / "rows.csv"
    assert job.main(["--out", str(out), "--cases", "mixtral.*_t[12]_uniform"]) == 1
    rows = {r["metric"]: r for r in csv.DictReader(out.open())}
    assert rows.keys() == {"gather_us", "gather_move_us", "ag_rs_us", "ag_rs_move_us", "ag_rs_packed_us", "ag_rs_packed_move_us",
                           "layer_gain", "move_ratio", "megatron_gain", "megatron_kernel_gain", "megatron_allgather_us",
                           "megatron_alltoall_us", "megatron_alltoall_kernel_us"}
    assert float(rows["megatron_gain"]["value"]) == 2.5 and float(rows["megatron_kernel_gain"]["value"]) == 2.0
    assert float(rows["layer_gain"]["value"]) == pytest.approx(1.4) and float(rows["move_ratio"]["value"]) == pytest.approx(0.4)
    assert rows["gather_us"]["machine"] == "2x H200" and rows["gather_us"]["checked"] == "error 2.00e-03"
    said = capsys.readouterr().out
    assert "a2a_padded failed (RuntimeError: no)" in said and "host is wrong by 5.0e-01" in said
    assert "stay is wrong by nan" in said and "rank 1: out of memory" in said and "not run (1): mixtral-8x7b_ep2_t2_uniform" in said


def test_an_output_of_nan_is_wrong_whoever_has_it_and_whichever_call() -> None:
    want = torch.ones(2, 2)
    errors = [job.relative(out, want) for out in (want, want * float("nan"), want * float("inf"), want)]
    assert errors == [0.0, float("inf"), float("inf"), 0.0] and max(errors) == float("inf")


@pytest.mark.parametrize("routing", ["uniform", "zipf", "all-to-one"])
def test_routings(routing):
    model = job.MODELS["deepseek-v2-lite"]
    case = job.Case("deepseek-v2-lite", 2, 400, routing)
    ids = [job.routed(case, model, r, d, None) for r in (0, 1) for d in (0, 1)]
    assert all(len(set(row)) == 6 and 0 <= min(row) and max(row) < 64 for i in ids for row in i.tolist())
    most = [int(i.flatten().bincount(minlength=64).max()) / 400 for i in ids]
    assert {"uniform": max(most) < 0.25, "zipf": 0.5 < min(most) < 1, "all-to-one": min(most) == 1}[routing]
    assert torch.equal(ids[0], ids[1]) == (routing == "all-to-one")
    assert torch.equal(ids[0], job.routed(case, model, 0, 0, None))


def test_the_router_chooses_what_is_laid_down():
    x, gate = torch.randn(9, 16), torch.randn(12, 16)
    ids = torch.rand(9, 12).topk(4).indices
    mask = torch.full((9, 12), float("-inf")).scatter_(1, ids, 0.0)
    got, weights = job.choose(x, gate, mask, 4)
    assert torch.equal(got.sort().values, ids.sort().values)
    scores = torch.softmax((x @ gate.T).gather(1, got), -1)
    torch.testing.assert_close(weights, scores)


def test_a_choice_of_cases_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match="no regular expression"):
        job.cases_of(job.MODELS, 2, "[", False)
