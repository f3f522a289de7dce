"""A run that stopped and went on is the run that never stopped."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dslaunch.core.plan import RunPlan
from dslaunch.train.export import export_checkpoint
from tests.support.plans import in_directory, read_rows, save_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.train.conftest import FinishedRuns

EXACT = ("loss", "grad_norm", "lr", "data_digest", "num_supervised_tokens", "epoch", "skipped")


def _copy_stopped_at_step_3(runs: FinishedRuns, target: Path, name: str = "s2-dropout") -> RunPlan:
    plan = in_directory(runs.plans[name], target)
    shutil.copytree(runs.run_dir(name), plan.launch.run_dir)
    save_plan(plan)
    checkpoints = Path(plan.launch.run_dir) / "checkpoints"
    for later in ("step-6", "step-8"):
        shutil.rmtree(checkpoints / later)
    (Path(plan.launch.run_dir) / "metrics.jsonl").unlink()
    return plan


@pytest.mark.parametrize("name", ["s2-dropout", "torch-dropout-bf16"])
def test_resumed_run_equals_straight_run(finished_runs: FinishedRuns, tmp_path: Path, name: str) -> None:
    plan = _copy_stopped_at_step_3(finished_runs, tmp_path, name)
    run_dir = Path(plan.launch.run_dir)
    # `latest` still names step-8, which is gone: the newest one that is there must be found.
    results = run_ranks(
        ["-m", "dslaunch.train.worker", "--plan", run_dir / "plan.json", "--resume"], world_size=2
    )
    check_ranks(results)
    assert "resuming at step 3 of 8" in results[0].stderr

    straight_metrics = finished_runs.run_dir(name) / "metrics.jsonl"
    straight = read_rows(straight_metrics, "train")[3:]
    resumed = read_rows(run_dir / "metrics.jsonl", "train")
    assert [row["step"] for row in resumed] == [4, 5, 6, 7, 8]
    for ours, theirs in zip(resumed, straight, strict=True):
        assert [ours[key] for key in EXACT] == [theirs[key] for key in EXACT]

    evals = [row["loss"] for row in read_rows(run_dir / "metrics.jsonl", "eval")]
    assert evals == [row["loss"] for row in read_rows(straight_metrics, "eval")][1:]

    export_checkpoint(run_dir, tmp_path / "resumed")
    export_checkpoint(finished_runs.run_dir(name), tmp_path / "straight")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("resumed", "straight")]
    weights, expected = (load_file(file) for file in files)
    assert weights and weights.keys() == expected.keys()
    assert all(bool((weights[name] == expected[name]).all()) for name in expected)


@pytest.mark.parametrize("name", ["s2-dropout", "torch-dropout-bf16"])
def test_dropout_is_on_so_the_random_state_matters(finished_runs: FinishedRuns, name: str) -> None:
    """Guards the test above: if dropout did nothing, it would not notice a lost random state."""
    run_dir = finished_runs.run_dir(name)
    first = read_rows(run_dir / "metrics.jsonl", "train")
    kept = [load_file(run_dir / f"checkpoints/step-{n}/rng/rank-0.safetensors")["torch"] for n in (3, 6)]
    assert not kept[0].equal(kept[1])  # numbers were drawn in between
    assert len({row["data_digest"] for row in first}) == 8  # no step repeats another's data


def test_a_finished_run_says_so(finished_runs: FinishedRuns) -> None:
    assert "already at step 8 of 8: nothing to do" in finished_runs.stdout


def test_changed_data_is_refused(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    plan = _copy_stopped_at_step_3(finished_runs, tmp_path)
    other = write_questions(tmp_path / "other.jsonl", 23)
    source = replace(plan.data.train[0], path=str(other))
    path = save_plan(replace(plan, data=replace(plan.data, train=(source,))))
    results = run_ranks(["-m", "dslaunch.train.worker", "--plan", path, "--resume"], world_size=2)
    assert [r.returncode for r in results] == [2, 2]
    assert "the training data is not what the checkpoint was trained on" in results[0].stderr
    assert "num_units 24 then, 23 now" in results[0].stderr
    assert "not what the checkpoint" not in results[1].stderr  # said once
    assert "Traceback" not in results[0].stderr + results[1].stderr
