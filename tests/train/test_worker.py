"""The rank's entry point: under each launcher, stopped by signals, and when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.core.checkpoint_manifest import read_manifest
from dslaunch.core.plan import RunPlan
from tests.support.plans import LORA, make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import REPO_ROOT, describe, free_port, run_ranks
from tests.support.tiny import make_tiny_model_dir
from tests.train.conftest import FinishedRuns

SIGNALS = Path(__file__).with_name("rank_signals.py")
WORKER = ["-m", "dslaunch.train.worker", "--plan"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and a data file."""
    root = tmp_path_factory.mktemp("inputs")
    return make_tiny_model_dir(root / "model", layers=1), write_questions(root / "train.jsonl")


def _losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run_dir / "metrics.jsonl", "train")]


def test_it_learns_and_evaluates(finished_runs: FinishedRuns) -> None:
    run_dir = finished_runs.run_dir("s0-full")
    evals = read_rows(run_dir / "metrics.jsonl", "eval")
    assert [row["step"] for row in evals] == [0, 4]
    assert evals[1]["loss"] < evals[0]["loss"] - 0.1
    events = [row["kind"] for row in read_rows(run_dir / "events.jsonl")]
    assert events == ["train_start", "checkpoint_saved", "train_end"]
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_stages_and_checkpointing_do_not_change_the_losses(finished_runs: FinishedRuns) -> None:
    stage_0, stage_3 = (_losses(finished_runs.run_dir(name)) for name in ("s0-lora", "s3-lora"))
    assert len(stage_0) == 4
    assert stage_3 == pytest.approx(stage_0, rel=1e-5)


def test_stdout_of_rank_0_has_one_line_a_step(finished_runs: FinishedRuns) -> None:
    steps = [line for line in finished_runs.stdout.splitlines() if line.startswith("step 1/")]
    assert len(steps) == len(finished_runs.plans)
    assert all("loss" in line and "grad_norm" in line and "lr" in line for line in steps)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_one_rank_stops_all_at_one_checkpoint(
    ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path], name: str
) -> None:
    plan = make_plan(tmp_path, *inputs, max_steps=5000, micro=1, accumulation=1)
    results = run_ranks([SIGNALS, name, "--plan", save_plan(plan)], world_size=2)
    assert [r.returncode for r in results] == [75, 75], describe(results)
    run_dir = Path(plan.launch.run_dir)
    stopped = read_rows(run_dir / "events.jsonl", "train_stopped")[0]["step"]
    assert 2 <= stopped < 5000
    assert (run_dir / "checkpoints/latest").read_text().strip() == f"step-{stopped}"
    assert read_manifest(run_dir / f"checkpoints/step-{stopped}").step == stopped
    assert f"stopped at step {stopped} of 5000" in results[0].stdout


def test_deepspeed_and_torchrun_start_it_too(
    ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    plan = make_plan(tmp_path, *inputs, adapter=LORA, max_steps=4, output={"save_steps": 2})
    path = save_plan(plan)
    run_dir = Path(plan.launch.run_dir)
    deepspeed = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--module"]
    _run([*deepspeed, "dslaunch.train.worker", "--plan", str(path)])
    assert len(_losses(run_dir)) == 4

    shutil.rmtree(run_dir / "checkpoints/step-4")
    torchrun = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m"]
    _run([*torchrun, "dslaunch.train.worker", "--plan", str(path), "--resume"])
    losses = _losses(run_dir)
    assert losses[4:] == losses[2:4]  # the same steps again, under the other launcher


def _run(argv: list[str]) -> None:
    program = str(Path(sys.executable).with_name(argv[0]))
    env = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run(
        [sys.executable, program, *argv[1:]], env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def test_the_world_must_be_that_of_the_plan(tmp_path: Path, inputs: tuple[Path, Path]) -> None:
    results = run_ranks([*WORKER, save_plan(make_plan(tmp_path, *inputs))], world_size=1)
    assert results[0].returncode == 2
    assert "1 ranks were started (WORLD_SIZE), but the plan is for 2" in results[0].stderr


def test_without_a_launcher_it_says_how_to_start(tmp_path: Path, inputs: tuple[Path, Path]) -> None:
    path = save_plan(make_plan(tmp_path, *inputs))
    done = subprocess.run(
        [sys.executable, *WORKER, str(path)], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "RANK" in done.stderr and "dslaunch launch" in done.stderr
    assert "Traceback" not in done.stderr


def test_checkpoints_are_not_overwritten_without_resume(finished_runs: FinishedRuns) -> None:
    path = finished_runs.run_dir("s0-full") / "plan.json"
    results = run_ranks([*WORKER, path], world_size=2, timeout_s=60)
    assert [r.returncode for r in results] == [2, 2]
    assert "add --resume" in results[0].stderr


def test_an_error_of_all_ranks_is_said_once(ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path]) -> None:
    typo = replace(LORA, target_modules=("q_porj",))
    plan = make_plan(tmp_path, *inputs, adapter=typo)
    results = run_ranks([*WORKER, save_plan(plan)], world_size=2)
    assert [r.returncode for r in results] == [2, 2]
    said = results[0].stderr + results[1].stderr
    assert said.count("'q_porj' matches no layer of the model") == 1
    assert "did you mean q_proj?" in results[0].stderr
    assert "Traceback" not in said
    errors = read_rows(Path(plan.launch.run_dir) / "events.jsonl", "rank_error")
    assert sorted(row["rank"] for row in errors) == [0, 1]
    assert {row["exit_code"] for row in errors} == {2}


def test_packing_is_refused_where_samples_would_see_each_other(
    ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    """By the run, before its first step: Bloom counts positions by itself (F9)."""
    from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

    model, data = inputs
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=4)
    for part in (tokenizer, BloomForCausalLM(config)):
        part.save_pretrained(tmp_path / "bloom")
    plan = make_plan(
        tmp_path, tmp_path / "bloom", data, packing=True, world_size=1, model={"attn_implementation": "eager"}
    )
    result = run_ranks([*WORKER, save_plan(plan)], world_size=1)[0]
    assert result.returncode == 2, result.stderr
    assert "BloomForCausalLM see each other" in result.stderr
    assert "hint: set data.packing: false for this model" in result.stderr
    assert read_rows(Path(plan.launch.run_dir) / "metrics.jsonl", "train") == []


LEAVES_IN_A_HURRY = """
import atexit, sys, torch
from dslaunch.train.worker import leave, main
def never_returns_under_nccl():
    raise RuntimeError("waited for the other ranks")
torch.distributed.destroy_process_group = never_returns_under_nccl
atexit.register(print, "ended as usual", file=sys.stderr)
leave(main(sys.argv[1:]))
"""


def test_a_failed_rank_leaves_without_the_others(
    ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    """Its error is told and its code kept, with the ranks connected; a good end is an orderly one."""
    typo = replace(LORA, target_modules=("q_porj",))
    plan = make_plan(tmp_path, *inputs, adapter=typo, world_size=1)
    result = run_ranks(["-c", LEAVES_IN_A_HURRY, "--plan", save_plan(plan)], world_size=1)[0]
    assert result.returncode == 2, result.stderr
    assert "'q_porj' matches no layer" in result.stderr
    assert "waited for the other ranks" not in result.stderr and "ended as usual" not in result.stderr


def test_a_finished_rank_takes_the_group_down(
    ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    """Guards the test above: the stand-in is what a good end calls."""
    plan = make_plan(tmp_path, *inputs, world_size=1, max_steps=2)
    result = run_ranks(["-c", LEAVES_IN_A_HURRY, "--plan", save_plan(plan)], world_size=1)[0]
    assert "waited for the other ranks" in result.stderr


TWO_STARTS = """
import sys, deepspeed
from dslaunch.train import worker
codes = [worker.main(["--plan", sys.argv[1]])]
deepspeed.__version__ = "0.99.1"
codes.append(worker.main(["--plan", sys.argv[2]]))
print(codes)
"""


def test_another_device_or_deepspeed_is_refused_before_anything_is_loaded(
    tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    plan = make_plan(tmp_path, *inputs, world_size=1)
    elsewhere = make_plan(tmp_path / "cuda", *inputs, world_size=1)
    elsewhere = replace(elsewhere, launch=replace(elsewhere.launch, device_type="cuda"))
    result = run_ranks(["-c", TWO_STARTS, save_plan(elsewhere), save_plan(plan)], world_size=1)[0]
    assert result.stdout.splitlines()[-1] == "[3, 3]", describe([result])
    assert "the plan is for device cuda, but DeepSpeed would run on cpu here (torch " in result.stderr
    assert "DS_ACCELERATOR cpu)" in result.stderr and "unset DS_ACCELERATOR" in result.stderr
    assert "Error: DeepSpeed 0.99.1 was never tested here, only 0.19" in result.stderr
    assert "`dslaunch doctor --numerics`" in result.stderr
    assert "loading" not in result.stderr and "Traceback" not in result.stderr


BROKEN_TRACKER = """
import sys
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.train import report, worker
def log_in(*arguments, **more):
    raise EnvironmentNotReady("wandb: not logged in", hint="wandb login")
report.open_report = log_in
worker.leave(worker.main(sys.argv[1:]))
"""


def test_a_tracker_that_cannot_log_in_fails_before_the_model_is_loaded(
    ops_dir: Path, tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    plan = make_plan(tmp_path, *inputs, world_size=1)
    result = run_ranks(["-c", BROKEN_TRACKER, "--plan", save_plan(plan)], world_size=1)[0]
    assert result.returncode == 3
    assert "wandb: not logged in" in result.stderr and "training data:" in result.stderr
    assert "loading" not in result.stderr


NO_MLFLOW = """
import sys
from dslaunch.train import report, worker
report._MODULES["mlflow"] = "a_module_nobody_has"
worker.leave(worker.main(sys.argv[1:]))
"""


def test_a_missing_tracker_stops_the_run_before_it_loads_anything(
    tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    plan: RunPlan = make_plan(tmp_path, *inputs, output={"report_to": ("mlflow",)}, world_size=1)
    results = run_ranks(["-c", NO_MLFLOW, "--plan", save_plan(plan)], world_size=1)
    assert results[0].returncode == 3
    assert "mlflow, which is not installed" in results[0].stderr


@pytest.mark.parametrize("spelling", ["--local_rank=0", "--local-rank=0"])
def test_both_spellings_of_the_local_rank_are_accepted(spelling: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *WORKER, str(tmp_path / "none.json"), spelling],
        cwd=REPO_ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no plan at" in done.stderr and "unrecognized" not in done.stderr
