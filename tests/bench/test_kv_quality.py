"""`bench kv-quality`: what it measures is what the parts measure, it resumes, and it says what it can't do."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from moe_prefetch import cli
from moe_prefetch.bench import kv_quality as bench
from moe_prefetch.bench.rows import Journal, append_rows, checkpoint_id
from moe_prefetch.config import KVConfig
from moe_prefetch.errors import ConfigError
from moe_prefetch.integrations.transformers_cache import calibrate, make_cache
from moe_prefetch.integrations.transformers_quality import decoded, log_probs
from moe_prefetch.kv.format import FORMATS, format_of, layout_for
from moe_prefetch.kv.gate import drift
from tests.kv.models import llama, mla


class Letters:
    """A tokenizer of letters: enough for a model with random weights."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) % 60 for c in text]}


TEXT = " ".join(str(n * n * 7919) for n in range(400))


@pytest.fixture
def model(monkeypatch):
    made = llama()
    monkeypatch.setattr(bench, "load_model", lambda name: (made, Letters()))
    return made


def job(**kw):
    return bench.Job(TEXT, "tiny", **{"texts": 2, "length": 96, "calibration": 256, "schemes": ("fp4-quality_w64", "fp8_nowindow"), **kw})


def test_figures_are_those_of_the_parts(model):
    j, journal = job(), Journal()
    assert bench.run(j, journal) == {}
    found = bench.drifts(j, journal)
    ids = torch.tensor(Letters()(TEXT)["input_ids"])[:192].view(2, 96)
    fp8 = decoded(None, {0: "fp8", 1: "fp8"}, window=0)
    want = drift([log_probs(model, i) for i in ids], [log_probs(model, i, fp8) for i in ids], list(ids))
    d, bits, n = found["fp8_nowindow"]
    assert n == 2 and d.kl == pytest.approx(want.kl) and d.ppl_ratio == pytest.approx(want.ppl_ratio) and d.top1 == want.top1
    # fp8 has no basis, whatever the calibration has.
    assert bits == pytest.approx(layout_for(FORMATS["fp8"], 64, 64).bits_per_element(window=31))
    fp4 = layout_for(FORMATS["fp4-quality"], 64, 64, window=95)
    assert found["fp4-quality_w64"][1] == pytest.approx(fp4.bits_per_element(window=95, basis=True))
    assert len(d.kl_by_position) == 8 and sum(d.kl_by_position) / 8 == pytest.approx(d.kl)


def test_pairs_of_formats_are_measured_and_counted(model):
    """K's basis counts where K has one, whatever V is."""
    j, journal = job(schemes=("fp8+fp4-72", "fp4-quality+fp8_topn_w64", "fp4-72+fp8_nowindow"), texts=1), Journal()
    assert bench.run(j, journal) == {}
    found = bench.drifts(j, journal)
    assert all(0 < d.kl < float("inf") for d, _, _ in found.values())
    mixed = layout_for(format_of("fp8+fp4-72"), 64, 64)
    assert found["fp8+fp4-72"][1] == pytest.approx(mixed.bits_per_element(window=95, basis=False))
    keys = layout_for(format_of("fp4-72+fp8"), 64, 64, window=31)
    assert found["fp4-72+fp8_nowindow"][1] == pytest.approx(keys.bits_per_element(window=31, basis=True))
    assert bench.Scheme.parse("fp8+nvfp4").policy == "none" and bench.Scheme.parse("fp8+fp4-quality").window == 1024


def test_tokens_may_leave_together_as_in_generation(model):
    """`_s32` reads exactly what a cache with `settle: 32` has not encoded yet; its bits count the same 31 tokens."""
    j, journal = job(schemes=("fp8_nowindow", "fp8_nowindow_s32")), Journal()
    bench.run(j, journal)
    found = bench.drifts(j, journal)
    ids = torch.tensor(Letters()(TEXT)["input_ids"])[:192].view(2, 96)
    fp8 = decoded(None, {0: "fp8", 1: "fp8"}, window=0, settle=32)
    want = drift([log_probs(model, i) for i in ids], [log_probs(model, i, fp8) for i in ids], list(ids))
    assert found["fp8_nowindow_s32"][0].kl == pytest.approx(want.kl) and want.kl < found["fp8_nowindow"][0].kl
    assert found["fp8_nowindow_s32"][1] == found["fp8_nowindow"][1]
    wide = Journal()
    bench.run(job(schemes=("fp8_nowindow_s64",), texts=1), wide)
    assert bench.drifts(job(schemes=("fp8_nowindow_s64",)), wide)["fp8_nowindow_s64"][1] > found["fp8_nowindow"][1]


def test_capacity_is_told_in_both_ways(model):
    j, journal = job(texts=1, schemes=("fp16", "fp4-72", "peer-fp8-cast")), Journal()
    bench.run(j, journal)
    quality, fits = bench.report_of(j, journal, {}).tables
    assert [r[0] for r in quality.rows] == ["fp16", "fp4-72", "peer-fp8-cast"] and [r[0] for r in fits.rows] == ["fp16", "fp4-72"]
    (_, ours, fp16, n, paged, reserved, by_paged, by_reserved) = fits.rows[1]
    assert ours < fp16 / 2 and n > paged > reserved and by_reserved > by_paged > 2
    assert by_reserved == pytest.approx(2 * by_paged, rel=0.1)


def test_mla_is_counted_as_its_cache_counts_it(monkeypatch):
    """One latent for all heads, and no axes of keys."""
    made = mla(layers=1)
    monkeypatch.setattr(bench, "load_model", lambda name: (made, Letters()))
    j, journal = job(texts=1, schemes=("fp4-72",)), Journal()
    bench.run(j, journal)
    found = journal.get(j.key("fp4-72", 0))
    cache = make_cache(made, KVConfig(format="fp4-72"), calibrate(made, torch.ones(1, 64, dtype=torch.long)))
    with torch.no_grad():
        made(torch.ones(1, 200, dtype=torch.long), past_key_values=cache)
    (row,) = cache.report()
    assert found["bits"] == pytest.approx(row["bits_per_element"])
    assert found["fp16_bytes_per_token"] == 2 * (64 + 16) > found["bytes_per_token"] > 80 * found["bits"] / 8


def test_a_drift_that_is_infinite_is_reported(model, tmp_path):
    j, journal = job(texts=1), Journal()
    bench.run(j, journal)
    found = journal.get(j.key("fp8_nowindow", 0))
    journal.put(j.key("fp8_nowindow", 0), {**found, "kl": math.inf, "ppl": math.inf, "kl_by_position": [math.inf] * 8})
    folder = bench.report_of(j, journal, {}).save(tmp_path / "r")
    assert json.loads((folder / "report.json").read_text())["data"]["fp8_nowindow"]["kl"] == "inf"
    append_rows(tmp_path / "rows.csv", "kv-quality", bench.rows_of(j, journal), machine="m", commit="", checked="")
    assert ",kl,inf," in (tmp_path / "rows.csv").read_text()


def test_texts_together_equal_texts_alone(model):
    one, two = Journal(), Journal()
    bench.run(job(), one)
    bench.run(job(together=2), two)
    for name in job().schemes:
        assert bench.drifts(job(), one)[name][0].kl == pytest.approx(bench.drifts(job(), two)[name][0].kl, rel=1e-3)


def test_a_second_run_measures_only_what_is_missing(model, tmp_path, monkeypatch):
    bench.run(job(texts=1), Journal([tmp_path / "j"]))
    assert len((tmp_path / "j").read_text().splitlines()) == 2
    bench.run(job(), Journal([tmp_path / "j"]))
    assert len((tmp_path / "j").read_text().splitlines()) == 4
    monkeypatch.setattr(bench, "load_model", lambda name: pytest.fail("nothing was missing"))
    assert bench.run(job(), Journal([tmp_path / "j"])) == {}


def test_another_text_calibration_or_layout_is_another_measurement(model, tmp_path, monkeypatch):
    bench.run(job(texts=1), Journal([tmp_path / "j"]))
    for other in (job(calibration=128), job(span=512), bench.Job(TEXT + "1", "tiny", length=96, calibration=256, schemes=("fp8",))):
        assert Journal([tmp_path / "j"]).get(other.key("fp4-quality_w64", 0)) is None
    assert Journal([tmp_path / "j"]).get(job(texts=1).key("fp4-quality_w64", 0))
    monkeypatch.setattr(bench, "LAYOUT_VERSION", 0)
    assert Journal([tmp_path / "j"]).get(job(texts=1).key("fp4-quality_w64", 0)) is None


def test_another_checkpoint_in_the_folder_is_another_measurement(model, tmp_path):
    folder, other = tmp_path / "m", tmp_path / "other"
    for path, text in ((folder, "one"), (other, "another")):
        path.mkdir()
        (path / "model.safetensors").write_text(text)
    keys = [bench.Job(TEXT, str(folder), texts=1, length=96, schemes=("fp8_nowindow",)).key("fp8_nowindow", 0)]
    checkpoint_id.cache_clear()
    other.rename(folder.with_name("m2"))
    folder.rename(folder.with_name("old"))
    folder.with_name("m2").rename(folder)
    keys.append(bench.Job(TEXT, str(folder), texts=1, length=96, schemes=("fp8_nowindow",)).key("fp8_nowindow", 0))
    checkpoint_id.cache_clear()
    assert keys[0] != keys[1] and keys[0]["model"] == keys[1]["model"]
    assert "checkpoint" not in job().key("fp8_nowindow", 0)


def test_a_missing_framework_is_no_missing_peer(model, monkeypatch):
    def gone(self, name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(bench.Bench, "attend", gone)
    with pytest.raises(ModuleNotFoundError):
        bench.run(job(), Journal())


def test_keys_are_hidden_and_looked_for(model):
    j = job(passkey=3, length=768, calibration=128)
    hidden, asked, answer = bench.Bench(j).hide(1)
    assert len(hidden) == 768 and answer == 6 and asked > answer
    journal = Journal()
    bench.run(j, journal)
    found = bench.retrieval(j, journal)
    assert set(found) == {"exact", *j.schemes} and all(n == 3 and 0 <= share <= 1 for share, n in found.values())
    assert {r.metric for r in bench.rows_of(j, journal)} == {"retrieval"}


def test_a_text_too_short_for_a_key_is_refused(model):
    with pytest.raises(ConfigError, match="hide a key"):
        bench.run(job(passkey=1, length=128, calibration=128), Journal())


def test_a_key_is_found_by_a_model_that_answers_it(model, monkeypatch):
    j = job(passkey=2, length=768, calibration=128)
    one = bench.Bench(j)
    answers = {n: one.hide(n)[0] for n in range(2)}

    def answering(model, ids, asked, caches):
        for name in caches:
            wrong = int(name == "fp4-quality_w64" and torch.equal(ids, answers[1]))
            yield name, torch.zeros(asked, 60).scatter_(1, torch.roll(ids[-asked:], -1)[:, None] - wrong, 1.0)

    monkeypatch.setattr(one.quality, "ask", answering)
    journal = Journal()
    bench.run(j, journal)
    assert bench.retrieval(j, journal) == {"exact": (1.0, 2), "fp4-quality_w64": (0.5, 2), "fp8_nowindow": (1.0, 2)}


def test_a_question_reads_the_text_from_each_cache(model):
    """FP16 pages answer as the model's own cache does, four bits without a window nearly so, and no question sees another's."""
    one = bench.Bench(job())
    ids = torch.tensor(Letters()(TEXT)["input_ids"])[:300]
    names = ("exact", "fp16", "fp4-72_nowindow", "exact again")
    caches = {n: None if n.startswith("exact") else one.cache(n) for n in names}
    got = dict(one.quality.ask(model, ids, 9, caches))
    with torch.no_grad():
        want = model(input_ids=ids[None], use_cache=False).logits[0, -9:].float()
    assert torch.allclose(got["exact"], want, atol=1e-4) and torch.equal(got["exact"], got["exact again"])
    fp16, fp4 = ((got[n] - want).abs().max() for n in ("fp16", "fp4-72_nowindow"))
    assert 0 < fp16 < 0.02 and fp16 < fp4 < 4 and caches["fp4-72_nowindow"].get_seq_length() == 300


@pytest.mark.parametrize("name", ["peer-quanto-int4-k1v0", "fp8_pinned", "fp8_s8", "fp8_s1"])
def test_keys_are_looked_for_in_caches_only(name):
    with pytest.raises(ConfigError, match="hide a key in"):
        job(passkey=2, length=768, schemes=(name,))


def test_a_window_that_holds_the_whole_text_is_refused():
    """It would be measured as FP16."""
    with pytest.raises(ConfigError, match="never leave a window of 1024"):
        job(schemes=("fp4-quality",), length=1029)
    job(schemes=("fp4-quality",), length=1030)
    with pytest.raises(ConfigError, match="32 at a time"):
        job(schemes=("fp4-72_s32",), length=100)
    job(schemes=("fp4-72_s32",), length=101)
    with pytest.raises(ConfigError, match="32 at a time"):
        job(schemes=("fp4-quality",), length=1060, passkey=1)


@pytest.mark.parametrize("name", ["fp5", "fp4-quality_w", "fp4-quality_s0", "fp4-quality_s129", "fp4-quality_best",
                                  "fp4-72_w0_w16", "fp4-72_s8_s32", "fp4-72_w64_topn", "peer-unknown"])
def test_names_that_mean_nothing_or_two_things_are_refused(name):
    with pytest.raises(ConfigError):
        bench.Scheme.parse(name)


def test_names_are_read():
    assert bench.Scheme.parse("fp4-quality_topn_w128") == ("fp4-quality", "topn", 128, False, 1)
    assert bench.Scheme.parse("fp4-72_nowindow_s32") == ("fp4-72", "importance", 0, False, 32)
    assert bench.Scheme.parse("fp4-72_w256_pinned") == ("fp4-72", "importance", 256, True, 1)
    for name in bench.EVERY:
        assert name in bench.PEERS or bench.Scheme.parse(name)


def test_a_text_too_short_is_refused_before_anything_is_measured(model):
    with pytest.raises(ConfigError, match="tokens"):
        bench.run(job(texts=500), Journal())


def test_a_missing_peer_is_named_and_the_rest_is_measured(model, monkeypatch):
    j, journal = job(schemes=("peer-hqq4-g64", "fp8"), texts=1), Journal()
    monkeypatch.setitem(__import__("sys").modules, "hqq", None)

    def absent(bits):
        raise ImportError("You need to install `HQQ`")

    peers = pytest.importorskip("moe_prefetch.integrations.transformers_peers")
    monkeypatch.setitem(peers.PEERS, "peer-hqq4-g64", absent)
    assert bench.run(j, journal) == {"peer-hqq4-g64": "You need to install `HQQ`"}
    assert set(bench.drifts(j, journal)) == {"fp8"}
    assert "HQQ" in bench.report_of(j, journal, {"peer-hqq4-g64": "You need to install `HQQ`"}).tables[0].note


def test_the_verb_writes_report_journal_and_rows(model, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text(TEXT * 4)
    call = ["bench", "kv-quality", "--out", str(tmp_path / "r"), "--text", str(text), "--model", "tiny", "--texts", "1", "--length", "72",
            "--only", "fp8,fp4-72", "--journal", str(tmp_path / "j"), "--rows", str(tmp_path / "rows.csv"), "--commit", "abc"]  # fmt: skip
    done = CliRunner().invoke(cli.app, call)
    assert done.exit_code == 0 and "logit KL" in done.output and "fp4-72" in done.output, done.output
    assert {"report.md", "report.json", "kl-by-bits.png", "kl-by-position.png"} <= {p.name for p in (tmp_path / "r").iterdir()}
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert {r["case"] for r in rows} == {"tiny_fp8_1x72", "tiny_fp4-72_1x72"} and {r["commit"] for r in rows} == {"abc"}
    assert json.loads((tmp_path / "j").read_text().splitlines()[0])["of"]["scheme"] == "fp8"
    same = CliRunner().invoke(cli.app, [*call, "--journal", str(tmp_path / "rows.csv")])
    assert same.exit_code == 2 and "--rows" in same.output
    bad = CliRunner().invoke(cli.app, [*call[:-8], "--only", "fp5", "--out", str(tmp_path / "new" / "r")])
    assert bad.exit_code == 1 and "fp5" in bad.output and not (tmp_path / "new").exists()
