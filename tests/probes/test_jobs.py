"""The commands `trace` and `fit`: what is wrong with their input is said before a model is loaded."""
from __future__ import annotations

from pathlib import Path

import pytest

from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.probes import jobs


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(jobs, "load_model", load)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    for wrong in ({"traces": [tmp_path / "none"]}, {"quick": True, "held_out": [tmp_path / "none"]}):
        with pytest.raises(MoEPrefetchError, match="none"):
            jobs.run_fit("smolmoe", tmp_path / "out", **wrong)
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(MoEPrefetchError):
        jobs.run_fit("smolmoe", tmp_path / "out", traces=[tmp_path])


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MoEPrefetchError, match="none"):
        jobs.run_trace("smolmoe", tmp_path / "out", texts=[tmp_path / "none.txt"])
