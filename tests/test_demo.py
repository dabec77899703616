"""The demo's machinery on tiny-moe: same runs, same report, in seconds."""
from __future__ import annotations

import json

import pytest
import torch

from moe_prefetch import demo
from moe_prefetch.errors import ArtefactError
from moe_prefetch.experts.ledger import Totals
from moe_prefetch.integrations.transformers import gates
from moe_prefetch.probes.jobs import builtin_texts
from moe_prefetch.probes.probe import RoutingProbe
from tests.tiny import tiny


class Bytes:
    """A tokenizer of bytes, for a vocabulary of 256."""

    eos_token_id = 0

    def __call__(self, text, return_tensors):
        return type("Encoded", (), {"input_ids": torch.tensor([list(text.encode())[:24]])})

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


@pytest.fixture
def runs(tmp_path):
    model = tiny()
    RoutingProbe(gates(model)).save_pretrained(tmp_path / "probe", card="untrained")
    return demo.expert_runs(model, Bytes(), tmp_path / "probe", new_tokens=8, drive=demo.DriveConfig(bandwidth=1e8), tick=lambda: None)


def test_every_plan_gives_the_tokens_of_the_untouched_model(runs):
    planned = {(p, s) for p in demo.PLANS for s in demo.SHARES}
    assert {(r.name, r.share) for r in runs} == planned | {("untouched", "100%"), ("resident", "100%")}
    assert all(r.tokens == runs[0].tokens for r in runs)
    for share in demo.SHARES:
        unmet = {r.name: r.unmet for r in runs if r.share == share}
        assert unmet["oracle"] < unmet["lru"]
        # Each record crosses the link for a miss, or because it was fetched ahead; never more often.
        for r in (r for r in runs if r.share == share):
            assert r.bytes_read % 4096 == 0 and r.bytes_read >= (r.decode.miss + r.prefill.miss) * 4096 > 0


def test_the_report_holds_every_run(runs, tmp_path):
    kv = [demo.KVRow("fp16", 100.0, 16.0, 16.0, 9.0, 0.0, 1.0), demo.KVRow("fp4-72", 30.0, 6.0, 4.5, 9.1, 0.01, 0.95)]
    report = demo.demo_report(runs, kv, demo.DRIVE, {"prose": "a | b\nc"})
    folder = report.save(tmp_path / "out")
    text = (folder / "report.md").read_text()
    assert "modelled" in text and "a \\| b c" in text and text.count("| identical |") >= len(runs)
    assert {p.name for p in folder.iterdir()} == {"report.md", "report.json", "experts.png", "bytes.png", "stall.png", "kv.png"}
    data = json.loads((folder / "report.json").read_text())["data"]
    assert data["tokens_identical"] is True and len(data["runs"]) == len(runs)
    runs[3].tokens[0][0] += 1
    assert demo.demo_report(runs, kv, None, {}).data["tokens_identical"] is False


def test_a_folder_with_other_things_is_refused_before_work(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ArtefactError, match="name another folder"):
        demo.run(tmp_path, new_tokens=8, drive=None, probe=None, progress=lambda *a: pytest.fail("work was begun"))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_documentation_text_is_long_enough_for_the_kv_table():
    assert len(builtin_texts()[0]) > 8 * demo.KV_TOKENS


def test_unmet_counts_late_and_missing_of_both_phases():
    run = demo.Run("lru", "50%", [[1, 2]], 2.0, Totals(hit=1, late=2, miss=3), Totals(late=4, miss=5))
    assert run.unmet == 14 and run.per_second == 1.0
