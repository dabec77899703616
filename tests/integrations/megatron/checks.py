"""The tests that both versions of Megatron-core must pass; `test_megatron_016.py` and `test_megatron_019.py` run them."""
from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.setup_env import NEWER_MEGATRON

ROOT = Path(__file__).resolve().parents[3]
FEATURES = ("shared", "shared_overlap", "losses", "expert_bias", "groups", "drop_and_pad", "bf16", "jitter", "mtp", "virtual_pipeline",
            "expert_tensor", "dense_between", "recompute_full", "recompute_parts")
LAYOUTS = ("one", "ep2", "tp2", "pp2", "ep4", "tp2ep2", "pp2ep2")


def environment(version: str, *first: str) -> dict[str, str]:
    """Variables under which a fresh Python imports this version of Megatron-core. The newer one lies in a folder of its own."""
    path = [*first, str(ROOT)]
    if version == "0.19.2":
        folder = ROOT / ".venv" / NEWER_MEGATRON
        if not folder.is_dir():
            pytest.skip(f"Megatron-core {version} is not installed: make setup-test")
        path.insert(len(first), str(folder))
    elif importlib.util.find_spec("megatron") is None or importlib.metadata.version("megatron-core") != version:
        pytest.skip(f"Megatron-core {version} is not installed: make setup-test")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def work(version: str, folder: Path, *cases: str, first: str = "", timeout: float = 1400) -> Results:
    """Run cases under a version: those named, or all but the ones that run only when named."""
    done = subprocess.run([sys.executable, "-m", "tests.integrations.megatron.worker", str(folder), *cases], cwd=ROOT, text=True,
                          env=environment(version, *filter(None, [first])), capture_output=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return Results(folder)


class Results:
    """What every rank of every case returned."""

    def __init__(self, folder: Path, nightly: tuple[str, ...] = ()) -> None:
        self.folder, self.nightly = folder, nightly

    def __call__(self, case: str) -> list[dict[str, Any]]:
        if case in self.nightly:
            pytest.skip("long: the other version of Megatron-core runs it, this one with --nightly")
        errors = sorted(self.folder.glob(f"{case}.*.error"))
        assert not errors, errors[0].read_text()
        ranks = [json.loads(p.read_text()) for p in sorted(self.folder.glob(f"{case}.*.json"))]
        assert ranks, f"{case} did not run"
        return ranks


# Whichever test comes first runs all the cases.
@pytest.mark.timeout(1500)
class Checks:
    version = ""
    nightly: tuple[str, ...] = ()  # long cases that the other version runs every time

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Results:
        left_out = () if pytestconfig.getoption("--nightly") else cls.nightly
        folder = tmp_path_factory.mktemp("megatron")
        work(cls.version, folder, *(f"-{case}" for case in left_out))
        return Results(folder, left_out)

    @pytest.mark.parametrize("how", ["allgather", "alltoall"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_training_is_what_it_was_bit_by_bit(self, results: Results, layout: str, how: str) -> None:
        for rank in results(f"matrix_{layout}_{how}"):
            assert all(rank["same"].values()), rank["same"]
            assert rank["passes"] == [10]
            assert rank["steps"] >= 7
            assert all(norm > 0 for norm in rank["norms"]), "clipping saw no gradient"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_probes_loss_falls_on_every_rank(self, results: Results, layout: str) -> None:
        for rank in results(f"learns_{layout}"):
            for losses in rank["losses"]:
                assert len(losses) >= 28
                # Windows: of single steps on 64 rows one may lie above the first by chance.
                assert sum(losses[-10:]) < 0.95 * sum(losses[:10]), losses

    @pytest.mark.parametrize("layout", ["pp2", "pp2ep2"])
    def test_every_target_of_every_stage_is_fitted(self, results: Results, layout: str) -> None:
        ranks = results(f"matrix_{layout}_alltoall")
        assert ranks[0]["targets"] == [3]
        assert ranks[-1]["targets"] == [6]

    @pytest.mark.parametrize("feature", FEATURES)
    def test_features_of_the_model_change_nothing(self, results: Results, feature: str) -> None:
        for rank in results(f"feature_{feature}"):
            assert all(rank["same"].values()), rank["same"]
            assert rank["steps"] >= 6
            assert rank["passes"] == [10] * len(rank["targets"])
            assert all(n >= rank["steps"] for n in rank["counted"]), "metrics"

    def test_specs_keep_what_users_made_of_them(self, results: Results) -> None:
        (found,) = results("specs")
        assert found["mine"]
        assert found["names"] == ["PrefetchMine", "PrefetchMyRouter"]
        assert found["one"]
        assert found["untouched"]
        assert "no RMSNorm" in found["faults"]["normalization"]
        assert "CUDA graphs" in found["faults"]["cuda_graph_impl"]
        assert "sqrtsoftplus" in found["faults"]["moe_router_score_function"]
        assert "no MoE layer" in found["refused"][0]
        assert "Megatron's own" in found["refused"][1]

    def test_the_comparison_sees_a_draw_a_leak_and_a_parameter(self, results: Results) -> None:
        (found,) = results("planted")
        assert not any(found["draw"].values())
        for plant in ("leak", "parameter"):
            assert not (found[plant]["gradients"] or found[plant]["norms"] or found[plant]["parameters"])

    def test_the_overlapped_schedule_calls_our_steps(self, results: Results) -> None:
        for rank in results("overlap"):
            assert all(rank["same"].values()), rank["same"]
            assert rank["steps"] == 8
            assert rank["forward_calls"] == 0

    @pytest.mark.parametrize("layout", ["ep2", "tp2ep2"])
    def test_served_experts_are_the_models_own(self, results: Results, layout: str) -> None:
        for rank in results(f"serve_{layout}"):
            # FP32, sums in another order.
            assert max(rank["off"].values()) < 1e-5, rank["off"]
            assert all(rank["bits"]) and all(rank["same"]) and rank["restored"]
            assert "served or watched already" in rank["twice"] and "keeps gradients" in rank["training"]
        # What an expert group agrees on; with tensor parallelism there are two of them.
        made = {tuple(rank["made"]) for rank in results(f"serve_{layout}")}
        assert len(made) == {"ep2": 1, "tp2ep2": 2}[layout] and all(set(sizes) == {32, 64} for sizes in made), made

    def test_experts_that_no_kernel_computes_are_refused(self, results: Results) -> None:
        (said,) = results("serve_refuses")
        assert "no SwiGLU" in said["gelu"] and "add_bias_linear is True" in said["bias"] and "experts are Grouped" in said["other"]
        assert "activation_func_clamp_value is 1.0" in said["clamp"] and "glu_linear_offset is 1.0" in said["offset"]
        assert "moe_mlp_glu_interleave_size is 2" in said["moe_mlp_glu_interleave_size"]
        assert "inference_optimized" in said["_inference_token_dispatcher"] and said["grouped"]

    def test_whatever_else_an_expert_does_is_refused(self, results: Results) -> None:
        (said,) = results("serve_leaves_nothing_out")
        for name, word in said["words"].items():
            layer = 1 if name in ("patched class", "every module") else 2
            assert said[name].startswith("UnsupportedModelError"), (name, said[name])
            assert word in said[name] and f"[MoE layer {layer}]" in said[name], (name, said[name])
        assert "it has a forward of its own" in said["own"] and said["kept"] and said["again"] and said["restored"]
        for name, word in {"hook": "1 has hooks", "forward": "1.linear_fc1 has a forward", "adapter": "1.linear_fc1 is Adapter",
                           "outside": "every module has hooks"}.items():
            for text in said["later"][name]:
                assert text.startswith("SessionError: experts were changed") and word in text, (name, text)

    def test_weights_in_a_buffer_come_back_and_a_broken_pass_says_so(self, results: Results) -> None:
        (said,) = results("serve_refuses")
        assert said["lent"] and "a forward pass broke off" in said["broken"] and "put elsewhere" in said["elsewhere"]

    def test_replay_records_the_same_choices(self, results: Results) -> None:
        (found,) = results("routing_replay")
        assert all(found["same"].values())
        assert found["records"] == 20
        assert found["same_records"]

    def test_recomputation_is_not_counted_twice(self, results: Results) -> None:
        (found,) = results("recompute_counts_once")
        assert found["steps"] == [7, 7, 7]
        assert found["passes"] == [10, 10, 10]
        assert found["same"] == [True, True]

    def test_evaluation_does_not_train_and_close_leaves_nothing(self, results: Results) -> None:
        (found,) = results("evaluation_and_close")
        # Ten passes: four let go by, two for the start.
        assert found["before"] == found["after_eval"] == found["after_close"] == [10, 4]
        assert found["hooks"] == 1
        assert found["left"] == 0
        assert found["keys"] == []
        assert not any(found["listening"])

    def test_one_probe_of_all_stages_is_written(self, results: Results) -> None:
        first, second = results("saves_the_whole_model")
        assert first == second | {"seconds": first["seconds"]}
        assert first["True"]["layers"] == 4
        assert first["True"]["fitted"] == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
        # Without taps from the stage before, the first layers of the second one keep the stale gate.
        assert first["False"]["fitted"] == [[0, 1, 2, 3], [0, 2], []]
        assert all(t > 0 for row in first["True"]["temperatures"] for t in row)
        assert "| online | h2 |" in first["True"]["card"]

    def test_a_checkpoint_moves_between_layouts(self, results: Results) -> None:
        for rank in results("checkpoint"):
            assert rank["same"]
            assert rank["done"] == rank["saved_done"] == 8
            assert rank["went_on"] > 8
            assert rank["plain"] == rank["tensors"] > 0

    def test_checkpoints_without_probes_load_and_other_settings_are_refused(self, results: Results) -> None:
        (found,) = results("old_checkpoint")
        assert found["done"] > 0
        assert "does not fit" in found["refused"]

    def test_damaged_probes_are_refused_before_anything_is_taken_over(self, results: Results) -> None:
        (found,) = results("damaged_checkpoints")
        assert len(found["found"]) >= 36
        for name, (kind, text, names_the_key, untouched) in found["found"].items():
            assert kind == ("ShapeError" if name.startswith("another shape") else "ArtefactError"), (name, kind, text)
            assert names_the_key and untouched, (name, text)
            assert "What to do" in text
        assert found["good"][0] == found["good"][1] > 0

    def test_a_checkpoint_without_probes_is_refused_unless_they_start_anew(self, results: Results) -> None:
        (found,) = results("checkpoints_without_probes")
        assert found["refused"][0] == "ArtefactError" and "holds no probes" in found["refused"][1]
        assert found["untouched"]
        assert found["megatrons"][0] == "CheckpointException" and "mlp.probes." in found["megatrons"][1]
        for way in ("anew", "anew_distributed"):
            assert found[way] == ["", "", True], way
        assert found["closed"] == ["", ""]
        assert found["again"] == [0, False, True]
        assert found["resumed"] == found["done"] > 0 < found["keys"]

    def test_a_second_fit_of_a_model_is_refused(self, results: Results) -> None:
        (found,) = results("a_second_fit")
        for way in ("second", "wrapped", "reopened"):
            assert found[way][0] == "SessionError" and "attached to this model already" in found[way][1], way
        assert found["same"] == found["open_again"] == found["left"] == [True]

    def test_wrong_arguments_have_typed_errors(self, results: Results) -> None:
        (found,) = results("wrong_arguments")
        for name, (kind, text) in found["found"].items():
            assert kind in ("ConfigError", "UnsupportedModelError", "ShapeError"), (name, kind, text)
        assert len(found["found"]) >= 35
        assert all(name in found["every"][1] for name in ("tokens", "every", "watch"))
        assert found["hooks"] == 0

    def test_a_run_that_was_too_short_says_what_is_missing(self, results: Results) -> None:
        for rank in results("too_short"):
            assert {kind for kind, _ in (rank[k] for k in ("start", "held_out", "both", "dense_stage"))} == {"ShapeError"}
            start, held_out, both = (rank[k][1] for k in ("start", "held_out", "both"))
            assert "the start has got 512 rows of its moment_tokens=16384" in start
            assert "moment_tokens" not in held_out and "8 passes; none was kept back: the first to be is pass 50" in held_out
            assert "8 micro-batches gave 3 passes (the first 2 were let go by, then one in 2 was taken)" in both
            assert "moment_tokens" in both and "pass 50" in both
            assert not rank["written"]

    def test_the_documented_example_runs(self, results: Results) -> None:
        (found,) = results("documented")
        assert found["written"]
        assert found["steps"] > 0

    def test_the_ridge_start_beats_the_stale_gate(self, results: Results) -> None:
        (found,) = results("whitened")
        assert found["recall"] > found["stale"] + 0.1

    def test_padding_is_no_text(self, results: Results) -> None:
        (found,) = results("padding")
        assert found["taken"] == [20, 0, 0, 0]
        assert found["finite"]
        assert found["moved"]

    def test_passes_of_any_size_lead_to_the_start_and_padding_judges_nothing(self, results: Results) -> None:
        for rank in results("ragged"):
            assert rank["started"] == [False] * 6 + [True] * 3, "by the rows that came, whatever the first pass had"
            assert rank["horizons"] == [[0, 1, 2], []], "a recall of nothing"
            assert rank["unjudged"][0] == "ShapeError"
            assert "holds no tokens" in rank["unjudged"][1]
            assert not rank["written"]
            # 128 rows of one rank: the other kept back nothing but padding.
            assert rank["judged"] == [128]
            assert "1 steps of 128 tokens" in rank["card"]
        assert [rank["told"] for rank in results("ragged")] == [2, 0], "nobody hears of a start that does not come"

    def test_process_groups_of_the_users_own(self, results: Results) -> None:
        for rank in results("own_groups"):
            assert rank["same_True"]
            assert not rank["refused_True"]
            # 0.16.1 hands its groups to MoELayer alone: what it can't be told it must be refused, not mistaken.
            assert rank["same_False"] != rank["refused_False"]

    def test_a_namesake_of_apex_fools_nobody(self, tmp_path: Path) -> None:
        (tmp_path / "fake" / "apex").mkdir(parents=True)
        (tmp_path / "fake" / "apex" / "__init__.py").write_text('"""A web framework."""\n')
        (found,) = work(self.version, tmp_path, "namesake_of_apex", first=str(tmp_path / "fake"))("namesake_of_apex")
        assert found["apex"].startswith(str(tmp_path))
        assert found["found"] == "None"
        assert all(found["same"].values())
        assert found["steps"] == 7

    @pytest.mark.model
    def test_smolmoe_computes_what_it_computes_in_transformers(self, results: Results) -> None:
        (found,) = results("smolmoe_logits")
        assert found["worst"] < 1e-3, "fp32 logits"
        assert found["same"] == [True] * 5, "greedy tokens"
        assert all(n >= 33 for n in found["tokens"])
        # In bfloat16 both are as far from fp32 as rounding takes them, and no further from each other.
        assert found["rounding_ours"] < 1.25 * found["rounding"]
        assert found["apart"] < 1.5 * found["rounding"]

    @pytest.mark.model
    def test_a_trace_of_smolmoe_is_that_of_transformers(self, results: Results) -> None:
        (found,) = results("smolmoe_taps")
        assert max(found["far"].values()) < 1e-5
        assert found["ids"] == 1.0
        assert found["starts"]
        assert found["hash"]
