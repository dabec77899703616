"""The README's paragraph works by copy and paste, and the examples run."""
from __future__ import annotations

import csv
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moe_prefetch.errors import ArtefactError
from tests.integrations.deepspeed.ranks import environment
from tests.tiny import tiny

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[3]
# DeepSpeed compiles collectives for CPUs at the first use; gloo needs no compiler.
RUN = """
import runpy, sys
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(script: Path, *arguments: object, port: int = 29500) -> str:
    env = os.environ | environment(0, 1) | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RUN, script, *map(str, arguments)], capture_output=True, text=True,
                          timeout=800, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def fenced(language: str) -> str:
    """The first block of that language after the README's word on DeepSpeed."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^```{language}\n(.*?)^```", text[text.index("**DeepSpeed**"):], re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.model
def test_the_readmes_paragraph(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(fenced("json"))
    scope: dict = {}
    exec(compile(fenced("python"), "README.md", "exec"), scope)
    assert "The old bridge over the river was built" in capsys.readouterr().out
    assert Path("run/report.md").exists()
    assert scope["engine"].moe_prefetch.ledger.total.bytes_moved > 0


@pytest.mark.model
def test_generate():
    assert "hit" in run(ROOT / "examples/deepspeed_generate.py", "--tokens", 4)


@pytest.mark.parametrize(("family", "attention"), [("qwen3_moe", "auto"), ("qwen2_moe", "pages")])
def test_generate_next_to_deepspeed_alone(family, attention, tmp_path, monkeypatch, capsys):
    scope = runpy.run_path(str(ROOT / "examples/deepspeed_generate.py"))
    main = scope["main"]
    monkeypatch.setitem(main.__globals__, "random_model", lambda layers, dtype, device: tiny(family, vocabulary=32000))
    arguments = ["--random", 4, "--home", "local", "--kv", "fp16", "fp8", "--batch", 2, "--prompt", 80, "--tokens", 4, "--rounds", 1,
                 "--attention", attention]
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--compare", str(tmp_path / "rows.csv")])
    (tmp_path / "rows.csv").write_text("my,own\n")
    with pytest.raises(ArtefactError, match="something else than rows"):
        main()
    assert (tmp_path / "rows.csv").read_text() == "my,own\n"
    (tmp_path / "rows.csv").unlink()
    assert main() == 0
    with open(tmp_path / "rows.csv") as f:
        found = [(row["case"].removesuffix(f"-{attention}"), row["metric"], float(row["value"])) for row in csv.DictReader(f)]
    rows = {(case.rpartition("-")[2], metric): value for case, metric, value in found}
    assert rows["fp16", "same_tokens"] == 1.0 == rows["fp16", "kv_bytes_vs_16bit"] != rows["fp8", "kv_bytes_vs_16bit"]
    for kv in ("fp16", "fp8"):
        ours, theirs = rows[kv, "decode_ms_ours"], rows[kv, "decode_ms_deepspeed"]
        assert rows[kv, "speedup_vs_deepspeed"] == pytest.approx(theirs / ours, rel=1e-3)


def test_train_then_serve(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    said = run(ROOT / "examples/deepspeed_train_moe.py", "--steps", 90, "--out", tmp_path / "probe", port=port)
    assert (tmp_path / "probe/config.json").exists()
    missing = {plan: int(n) for plan, n in re.findall(r"^(\w+): .* there, (\d+) late or missing", said, re.MULTILINE)}
    assert 0 < missing["probe"] and 0 < missing["lru"]
    assert all(float(x) < 1e-4 for x in re.findall(r"logits ([\d.e+-]+)", said))


def test_the_file_that_comes_along_is_sound():
    from moe_prefetch.validate import check

    assert check(ROOT / "examples/ds_config.json") == []
