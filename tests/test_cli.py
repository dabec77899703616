"""The command line: what it prints, its exit codes, and the exact set of its flags (they grow for ever otherwise)."""
from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import moe_prefetch
from moe_prefetch import cli, demo
from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.observe.report import Table

run = CliRunner().invoke


def test_help_names_every_verb():
    text = run(cli.app, ["--help"]).output
    assert all(verb in text for verb in ("demo", "env", "validate", "trace", "fit", "bench"))


def test_version_and_module():
    assert run(cli.app, ["--version"]).output == f"{moe_prefetch.__version__}\n"
    said = subprocess.run([sys.executable, "-m", "moe_prefetch", "--version"], capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout == f"{moe_prefetch.__version__}\n"


def test_flags_are_frozen():
    import typer

    group = typer.main.get_command(cli.app)
    options = lambda command: sorted(o for p in command.params for o in p.opts if o != "--help")  # noqa: E731
    flags = {name: options(command) for name, command in group.commands.items()}
    bench = {name: options(command) for name, command in group.commands["bench"].commands.items()}
    where, what = ["--commit", "--journal", "--out", "--rows"], ["--length", "--model", "--only", "--passkey", "--text", "--texts"]
    assert bench["kv-quality"] == sorted(where + what)
    assert bench["dispatch"] == ["--cases", "--commit", "--device", "--gpus", "--ids", "--out", "--seconds", "--slots"]
    assert flags["demo"] == ["--out", "--probe", "--real-drive", "--tokens"]
    assert flags["trace"] == ["--cap-mb", "--model", "--out", "--text", "--tokens"]
    assert flags["fit"] == ["--force", "--held-out", "--model", "--out", "--past", "--quick", "--trace"]
    assert flags["env"] == [] and flags["validate"] == ["config"]


def test_validate_lists_every_problem(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nexperts: {hom: disk, resident: 0}\nkv: {format: fp5}\n")
    result = run(cli.app, ["validate", str(bad)])
    assert result.exit_code == 1
    assert all(word in result.output for word in ("did you mean 'home'", "experts.resident", "kv.format", "3 problems"))
    good = tmp_path / "good.yaml"
    good.write_text("experts: {home: disk, resident: 50%}\n")
    assert run(cli.app, ["validate", str(good)]).exit_code == 0


def test_env_prints_the_block():
    result = run(cli.app, ["env"])
    assert result.exit_code == 0 and "torch" in result.output and "python" in result.output


@pytest.mark.parametrize(("error", "code", "words"), [
    (MoEPrefetchError("it broke", where="here", do="mend it"), 1, "What to do: mend it"),
    (KeyboardInterrupt(), 130, "temporary files are gone")])
def test_demo_ends_with_one_clear_paragraph(monkeypatch, tmp_path, error, code, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(demo, "run", fail)
    result = run(cli.app, ["demo", "--out", str(tmp_path / "r")])
    assert result.exit_code == code and words in result.output.replace("\n", " ") and "Traceback" not in result.output


@pytest.mark.parametrize("verb", [["trace", "--out"], ["fit", "--quick", "--out"], ["demo", "--out"]])
def test_where_nothing_can_be_written_no_work_is_begun(monkeypatch, tmp_path, verb):
    """A file stands where a folder would have to be made."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("moe_prefetch.integrations.smolmoe.load", lambda *a, **k: pytest.fail("the model was loaded"))
    said = run(cli.app, [*verb, str(tmp_path / "file" / "x" / "y")])
    assert said.exit_code == 1 and "nothing can be written there: Not a directory" in " ".join(said.stderr.split())


def test_the_systems_errors_about_files_are_told_in_a_sentence(monkeypatch, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr("moe_prefetch.probes.jobs.run_trace", full)
    said = run(cli.app, ["trace", "--out", str(tmp_path)])
    assert said.exit_code == 1 and "error: No space left on device [/some/file]. What to do:" in " ".join(said.stderr.split())


WITHOUT = """
import importlib.abc, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in WHAT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
sys.argv = ["moe-prefetch", *sys.argv[1:]]
from moe_prefetch.cli import main
main()
"""


@pytest.mark.parametrize(("without", "args", "code", "words"), [
    ("transformers", ["demo", "--out", "run"], 1, "transformers is not installed. What to do: pip install 'moe_prefetch[hf]'"),
    ("torch", ["validate", "ds.json"], 0, "no problems"),
    ("torch", ["validate", "probe.yaml"], 1, "probe.path: can't be looked into without torch"),
])
def test_what_a_plain_install_leaves_out(tmp_path, without, args, code, words):
    (tmp_path / "ds.json").write_text('{"dtype": "fp32", "moe_prefetch": {"experts": {"home": "disk", "resident": "50%"}}}')
    (tmp_path / "probe.yaml").write_text("probe: {path: p}\n")
    line = [sys.executable, "-c", WITHOUT.replace("WHAT", repr([without])), *args]
    said = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == code and words in " ".join((said.stdout + said.stderr).split()), said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("args", [["env"], ["--help"], ["validate", "FILE"]])
def test_a_reader_that_leaves_is_no_fault(tmp_path, args):
    """`moe-prefetch env | head -1`."""
    (tmp_path / "c.yaml").write_text("")
    args = [str(tmp_path / "c.yaml") if a == "FILE" else a for a in args]
    with subprocess.Popen([sys.executable, "-m", "moe_prefetch.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        p.stdout.close()
        assert "Traceback" not in p.stderr.read().decode() and p.wait() == 1


@pytest.mark.parametrize(("to", "code", "words"), [(">&-", 0, ""), ("> /dev/full", 1, "error: No space left on device"), ("| true", 0, "")])
@pytest.mark.parametrize("args", ["-m moe_prefetch.cli env", "-m moe_prefetch.cli validate c.yaml", "-m moe_prefetch.observe.env"])
def test_output_that_goes_nowhere(tmp_path, to, code, words, args):
    """A daemon's closed stdout, a full drive, a reader that left."""
    (tmp_path / "c.yaml").write_text("")
    said = subprocess.run(["sh", "-c", f"{sys.executable} {args} {to}"], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == code and words in said.stderr and "Traceback" not in said.stderr and "ignored" not in said.stderr, said.stderr


def test_a_narrow_table_keeps_its_title_in_one_line(capsys):
    title, note = "A title of more words than its table is wide", "And a note of as many words as that."
    cli._print(Table(title, ("a",), [(1,)], note))
    assert {title, note} <= set(capsys.readouterr().out.splitlines())
