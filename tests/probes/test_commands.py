"""`trace` and `fit` on a tiny model: whose text a trace holds, which domains judge, what a batch is, and that no advice is void."""
from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from moe_prefetch import cli
from moe_prefetch.errors import ArtefactError, ConfigError, MoEPrefetchError
from moe_prefetch.integrations.transformers import gates
from moe_prefetch.probes import jobs
from moe_prefetch.probes.probe import RoutingProbe
from moe_prefetch.probes.traces import Trace
from tests.tiny import tiny

ROOT = Path(__file__).resolve().parents[2]
MODEL = tiny("qwen3_moe")
A, B = "".join(chr(65 + i * i % 26) for i in range(2300)), "".join(chr(97 + i * 7 % 26) for i in range(2300))


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "load_model", lambda model: (MODEL, lambda text: {"input_ids": [ord(c) % 90 + 2 for c in text]}))


def trace(folder: Path, *texts: str, **kw: object) -> Trace:
    files = []
    for text in texts:
        files.append(folder.parent / f"{abs(hash(text))}.txt")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_text(text)
    return jobs.run_trace("tiny", folder, texts=files, shard_tokens=512, **kw)  # type: ignore[arg-type]


def test_another_text_is_refused_and_the_same_one_goes_on(tmp_path: Path) -> None:
    whole = trace(tmp_path / "whole" / "t", A, B)
    folder = tmp_path / "x" / "t"
    assert trace(folder, A, tokens=512).tokens == 512
    for other in ((B,), (B, A), (B[:600],)):
        with pytest.raises(ArtefactError, match="another text"):
            trace(folder, *other)
    with pytest.raises(ArtefactError, match="another text"):
        trace(folder, A, window=256)
    assert Trace(folder).tokens == 512
    # More of the same, and more after the same: what it would have been at once.
    assert trace(folder, A).tokens == 2048
    assert trace(folder, A, tokens=512).tokens == 2048
    again = trace(folder, A, B)
    assert again.tokens == whole.tokens and torch.equal(again.all().ids_TLK, whole.all().ids_TLK)
    assert again.manifest["text_hash"] == whole.manifest["text_hash"]


def test_a_trace_that_does_not_name_its_text_goes_on_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "t"
    trace(folder, A, tokens=512)
    manifest = json.loads((folder / "trace.json").read_text())
    del manifest["text_hash"]
    (folder / "trace.json").write_text(json.dumps(manifest))
    for tokens in (1024, 1536):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            found = trace(folder, A, tokens=tokens)
        assert found.tokens == tokens and "does not say what text" in caplog.text
        assert "text_hash" not in found.manifest, "what was never compared would be vouched for"


def test_at_most_as_many_tokens_as_were_asked_for(tmp_path: Path) -> None:
    assert trace(tmp_path / "a", A, tokens=1300).tokens == 1024
    with pytest.raises(ConfigError, match=r"less than one window.*512 or more"):
        trace(tmp_path / "b", A, tokens=511)
    assert not (tmp_path / "b").exists()


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "x" / "book", tmp_path / "y" / "book"
    for folder, text in zip(folders, (A, B)):
        trace(folder, text)
    return folders


def test_traces_of_one_name_are_two_domains(two: tuple[Path, Path], tmp_path: Path) -> None:
    specs = gates(MODEL)
    traces = [Trace(p, specs) for p in two]
    source, held = jobs.split(traces, [])
    assert sorted(held) == ["x/book", "y/book"] and source.tokens == 2 * 1536
    assert torch.equal(held["y/book"].logits_LTE, traces[1].shard(3).taps.logits_LTE)
    assert list(jobs.split(traces[:1], traces[1:])[1]) == ["y/book"]
    assert list(jobs.split(traces[:1], [])[1]) == ["book"]
    # Beside a third of another name each keeps what it takes.
    trace(tmp_path / "z", A[3:])
    assert sorted(jobs.split([*traces, Trace(tmp_path / "z")], [])[1]) == ["x/book", "y/book", "z"]
    both = jobs.FitConfig(rank=4, linear=2, steps=2, batch=64)
    jobs.run_fit("tiny", tmp_path / "p", traces=two, config=both, force=True)
    assert all(f"| {name} | h0 |" in (tmp_path / "p" / "README.md").read_text() for name in ("x/book", "y/book"))


def test_no_token_is_learnt_from_and_judged_on(two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = two
    copy = trace(tmp_path / "copy", A).folder
    monkeypatch.setattr(jobs, "load_model", lambda model: pytest.fail("the model was loaded"))
    twice = ((x, x), ()), ((x,), (x,)), ((x, copy), ()), ((x, y), (copy,)), ((y,), (x, copy)), ((x, y, y.parent / ".." / "y" / "book"), ())
    for traces, held_out in twice:
        with pytest.raises(ConfigError, match="the same tokens"):
            jobs.run_fit("tiny", tmp_path / "out", traces=traces, held_out=held_out)
    with pytest.raises(ConfigError, match="text of its own"):
        jobs.run_fit("tiny", tmp_path / "out", traces=[x], quick=True)
    assert not (tmp_path / "out").exists()


def test_quick_takes_the_past_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUICK", jobs.replace(jobs.QUICK, rank=4, linear=2, steps=2))
    monkeypatch.setattr(jobs, "QUICK_TOKENS", 2048)
    probe = jobs.run_fit("tiny", tmp_path / "p", quick=True, past=True, force=True)
    assert probe.sees_past(0)
    assert "2 steps of 256 tokens" in (tmp_path / "p" / "README.md").read_text()


def test_advice_names_only_options_that_exist(tmp_path: Path) -> None:
    group = typer.main.get_command(cli.app)
    commands = [*group.commands.values(), *group.commands["bench"].commands.values()]  # type: ignore[attr-defined]
    known = {o for c in commands for p in c.params for o in p.opts} | {"--help"}
    for path in (ROOT / "moe_prefetch").rglob("*.py"):
        # In what is said, not in what is defined or explained.
        said = re.findall(r'(?:what|do|expected|where|Error\(f?)=?\s*f?"([^"]*)"', path.read_text())
        assert not (set(re.findall(r"--[a-z][a-z-]+", " ".join(said))) - known), path
    with pytest.raises(MoEPrefetchError) as short:
        trace(tmp_path / "t", "short")
    with pytest.raises(MoEPrefetchError) as small:
        trace(tmp_path / "u", A, cap_mb=0.1)
    assert "--" not in str(short.value).partition("What to do")[2] and str(small.value).endswith("raise the cap.")
    assert re.search(r"\(\d+ MB\)", str(small.value))


def test_the_command_says_so(tmp_path: Path, two: tuple[Path, Path]) -> None:
    (tmp_path / "b.txt").write_text(B)
    said = CliRunner().invoke(cli.app, ["trace", "--out", str(two[0]), "--text", str(tmp_path / "b.txt")])
    assert said.exit_code == 1 and "another text" in " ".join(said.stderr.split())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_a_fit_replaces_nothing_but_a_probe(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own checkpoint, say: refused before any work, and by whoever writes a probe."""
    trace(tmp_path / "t", A)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_text('{"model_type": "qwen3_moe"}')
    monkeypatch.setattr(jobs, "load_model", lambda model: pytest.fail("this is work"))
    for write in (lambda: jobs.run_fit("tiny", tmp_path / "m", traces=[tmp_path / "t"]),
                  lambda: RoutingProbe(gates(MODEL)).save_pretrained(tmp_path / "m")):
        with pytest.raises(ArtefactError, match=f"{name} would be replaced") as said:
            write()
        assert (f"cut off there, delete {name}" in str(said.value)) == (name != "config.json")
    assert [p.name for p in (tmp_path / "m").iterdir()] == [name] and "qwen3_moe" in (tmp_path / "m" / name).read_text()
    (tmp_path / "m" / name).rename(tmp_path / "m" / "notes.md")
    for _ in range(2):
        RoutingProbe(gates(MODEL)).save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "notes.md").exists()


def test_a_cap_that_is_no_size_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "load_model", lambda model: pytest.fail("this is work"))
    said = CliRunner().invoke(cli.app, ["trace", "--out", str(tmp_path / "t"), "--cap-mb", "inf"])
    assert said.exit_code == 1
    for cap in (float("inf"), float("nan"), 0.0):
        with pytest.raises(ConfigError, match="megabytes"):
            jobs.run_trace("tiny", tmp_path / "t", cap_mb=cap)
