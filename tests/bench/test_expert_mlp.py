"""The benchmark of expert records: what it compares with is right, and it counts the bytes that the models have."""

from __future__ import annotations

import csv

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from moe_prefetch.bench import expert_mlp as job
from moe_prefetch.kernels.expert_mlp.naive import moe_records
from moe_prefetch.kernels.expert_mlp.record import Form

FORMS = [Form("bfloat16", 64, 48, "bfloat16"), Form("mxfp4", 64, 96, "bfloat16"), Form("fp8", 64, 96, "", "float32", 32)]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.weights)
@pytest.mark.parametrize("limit", [0.0, 7.0])
def test_the_baselines_compute_the_same_layer(form: Form, limit: float) -> None:
    model = job.Model(form, 5, 2, shared=1, limit=limit)
    block = job.random_block(form, 6, "cpu")
    x = torch.randn(11, 64).to(torch.bfloat16)
    ids, weights = job.draw(model, 11, 0, "cpu")
    want = moe_records(x, ids, weights, list(block), form, limit, 1.702, torch.float64)
    plain = job.dense(form, block)
    assert job.relative(job.by_grouped_mm(x, ids, weights, plain, limit), want) < 2e-2
    assert job.relative(job.by_loop(ids, plain, limit)(x, weights), want) < 2e-2
    got = job.fused.launch(x, ids, weights, torch.tensor([r.data_ptr() for r in block]), form, limit, 1.702)
    assert job.relative(got, want) < job.BOUND


def test_ids_are_drawn_without_repetition_and_shared_records_are_everyone_s() -> None:
    model = job.MODELS["deepseek-v2-lite"]
    ids, weights = job.draw(model, 50, 3, "cpu")
    assert ids.shape == weights.shape == (50, 8)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert ids[:, 6:].tolist() == [[64, 65]] * 50
    assert int(ids[:, :6].max()) < 64


def test_bytes_of_an_expert() -> None:
    """3 x hidden x width weights, at 2 bytes, or at 4.25 bits; megabytes as published."""
    want = {"qwen3-30b-a3b": 9.44, "deepseek-v2-lite": 17.3, "mixtral-8x7b": 352.3, "gpt-oss-120b": 13.2, "qwen3-30b-a3b-fp8": 4.72,
            "deepseek-v3-fp8": 44.05}
    for name, model in job.MODELS.items():
        assert model.form.bytes_read / 1e6 == pytest.approx(want[name], rel=0.01), name


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run in the interpreter, with small models and a clock that says 7 microseconds."""
    stamp = {"machine": "none", "torch": "", "triton": "", "commit": "c", "date": "d"}
    for name, value in {"DEVICE": "cpu", "timed": lambda calls, replays=9: [f() for f in calls] and 7.0, "stamp_of": lambda commit: stamp,
                        "copy_rate": lambda device: 4e12, "TOKENS": (1, 5), "DRAWS": 2}.items():
        monkeypatch.setattr(job, name, value)
    small = {"plain": job.Model(Form("bfloat16", 64, 48), 4, 2, shared=1),
             "quantised": job.Model(Form("mxfp4", 64, 32, "bfloat16"), 4, 2, limit=7.0)}
    monkeypatch.setattr(job, "MODELS", small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_run_writes_the_rows_it_promises(on_cpu: None, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(job.fused, "SMALL", job.fused.SMALL)  # put back, whatever --set makes of it
    assert job.main(["--out", str(out), "--cases", "_t", "--set", "SMALL=64"], say=lambda *a: None) == 0
    rows = list(csv.DictReader(out.open()))
    assert {r["case"] for r in rows} == {"hbm_copy", *(f"{m}_t{t}" for m in ("plain", "quantised") for t in (1, 5))}
    for case in ("plain_t1", "quantised_t5"):
        mine = {r["metric"]: r for r in rows if r["case"] == case}
        assert mine.keys() == {"us", "hbm_fraction", "ratio_vs_best", "grouped_mm_us", "loop_us", "batch_invariant"}
        assert all(r["checked"].startswith("error ") for r in mine.values())
    # One token reads two experts and the shared one, once each.
    want = 3 * Form("bfloat16", 64, 48).bytes_read / 7e-6 / 4e12
    got = next(r["value"] for r in rows if (r["case"], r["metric"]) == ("plain_t1", "hbm_fraction"))
    assert float(got) == pytest.approx(want, rel=1e-3)
    monkeypatch.setattr(job.fused, "launch", lambda x, *a: x)
    assert job.main(["--out", str(out), "--cases", "_t"], say=lambda *a: None) == 0
    more = list(csv.DictReader(out.open()))
    assert more[: len(rows)] == rows and [r["case"] for r in more[len(rows) :]] == ["hbm_copy"], "a wrong result gets no row"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from moe_prefetch.cli import app

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "expert-mlp", "--out", str(tmp_path / "rows.csv")])
    assert result.exit_code == 2 and "need a GPU" in result.output
    assert not (tmp_path / "rows.csv").exists()
