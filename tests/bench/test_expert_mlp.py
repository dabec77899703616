"""The benchmark of expert records: what it compares with is right, and it counts the bytes that the models have."""

from __future__ import annotations

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
    want = {"qwen3-30b-a3b": 9.44, "deepseek-v2-lite": 17.3, "mixtral-8x7b": 352.3, "gpt-oss-120b": 13.2, "qwen3-30b-a3b-fp8": 4.72}
    for name, model in job.MODELS.items():
        assert model.form.bytes_read / 1e6 == pytest.approx(want[name], rel=0.01), name


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from moe_prefetch.cli import app

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "expert-mlp", "--out", str(tmp_path / "rows.csv")])
    assert result.exit_code == 2 and "need a GPU" in result.output
    assert not (tmp_path / "rows.csv").exists()
