"""Runs that get nowhere are not trained to the end: exit code 76, one sentence, a diagnosis."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dslaunch.core.plan import RunPlan, WatchPlan
from tests.support.plans import make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import RankResult, check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir

SCRIPT = Path(__file__).with_name("rank_plans.py")
LAYER = "model.layers.0.mlp.{}.weight"


def broken_model(path: Path) -> Path:
    """One nan among all its weights."""
    file = make_tiny_model_dir(path, layers=1) / "model.safetensors"
    tensors = load_file(file)
    tensors[LAYER.format("up_proj")][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def huge_gradients(path: Path, factor: float) -> Path:
    """The loss is that of the model as it was, and a gradient ``factor`` times as large."""
    file = make_tiny_model_dir(path, layers=1) / "model.safetensors"
    tensors = load_file(file)
    tensors[LAYER.format("up_proj")] *= factor
    tensors[LAYER.format("down_proj")] /= factor
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@dataclass(frozen=True)
class Ended:
    """Runs of one pair of ranks, by name."""

    plans: Mapping[str, RunPlan]
    ranks: list[RankResult]

    def run_dir(self, name: str) -> Path:
        return Path(self.plans[name].launch.run_dir)

    def diagnosis(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.run_dir(name) / "diagnosis.json").read_text()))

    @property
    def said(self) -> str:
        return "".join(rank.stderr for rank in self.ranks)


@pytest.fixture(scope="module")
def ended(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    root = tmp_path_factory.mktemp("diverged")
    data = write_questions(root / "train.jsonl")
    nan = broken_model(root / "nan")
    # Too large for the norm to be a float32, in bf16 as in fp32: they have the same largest number.
    huge = huge_gradients(root / "huge", 1e25)
    four = WatchPlan(max_skipped_in_a_row=4)
    plans = {
        "nan": make_plan(root / "1", nan, data, max_steps=50),
        "fp32": replace(make_plan(root / "2", huge, data, zero_stage=0, max_steps=50), watch=four),
        "bf16": replace(make_plan(root / "3", huge, data, precision="bf16", max_steps=50), watch=four),
    }
    ranks = run_ranks([SCRIPT, *map(save_plan, plans.values())], world_size=2)
    check_ranks(ranks)
    for plan in plans.values():
        assert all(f"EXIT {plan.launch.run_dir}/plan.json 76" in rank.stdout for rank in ranks)
    return Ended(plans, ranks)


@pytest.mark.parametrize("name", ["nan", "fp32", "bf16"])
def test_nothing_is_saved_and_nothing_is_called_done(ended: Ended, name: str) -> None:
    assert not any((ended.run_dir(name) / "checkpoints").glob("step-*"))
    assert "train_end" not in {row["kind"] for row in read_rows(ended.run_dir(name) / "events.jsonl")}
    assert "Traceback" not in ended.said and "done" not in ended.ranks[0].stdout


def test_a_loss_that_is_nan_in_the_first_step_stops_the_run(ended: Ended) -> None:
    assert ended.said.count("Error: step 1 has loss nan on ranks 0, 1: forward itself gives it") == 1
    assert "see what `dslaunch generate` makes of this model" in ended.ranks[0].stderr
    diagnosis = ended.diagnosis("nan")
    assert (diagnosis["kind"], diagnosis["steps"][-1]["loss"]) == ("forward non-finite", "nan")
    (verdict,) = [row for row in read_rows(ended.run_dir("nan") / "events.jsonl") if row["kind"] == "verdict"]
    assert (verdict["verdict"], verdict["step"]) == ("forward non-finite", 1)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_run_that_only_skips_is_stopped(ended: Ended, name: str) -> None:
    assert ended.said.count("Error: step 4: 4 steps in a row were skipped (non-finite gradient)") == 2
    diagnosis = ended.diagnosis(name)
    assert diagnosis["kind"] == "persistent skipping"
    assert [step["step"] for step in diagnosis["steps"]] == [1, 2, 3, 4]
    assert {step["skip_reason"] for step in diagnosis["steps"]} == {"non-finite gradient"}
    losses = [row["loss"] for row in read_rows(ended.run_dir(name) / "metrics.jsonl", "train")]
    assert len(losses) == 3
    assert torch.isfinite(torch.tensor(losses)).all()


def test_at_minimum_ends_a_launched_run_with_76_and_a_diagnosis(ops_dir: Path, tmp_path: Path) -> None:
    """A run file of fp16, through `dslaunch launch`: the gradients overflow at every scale."""
    huge_gradients(tmp_path / "model", 4096.0)
    write_questions(tmp_path / "train.jsonl")
    (tmp_path / "run.yaml").write_text(
        "model: ./model\ndata: {train: train.jsonl, max_length: 128}\nmax_steps: 9\ntrain_batch_size: 4\n"
        "train_micro_batch_size_per_gpu: 2\ncluster: {gpu: cpu, num_gpus_per_node: 2}\n"
        "precision: fp16\nallow_emulated_fp16: true\n"
        "fp16: {initial_scale_power: 16, min_loss_scale: 32768, hysteresis: 1}\n"
    )
    argv = [sys.executable, "-m", "dslaunch", "launch", "run.yaml", "--run-dir", "run"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 76, done.stderr
    assert "step 2: the gradients overflow fp16 even at the minimum loss scale 32768" in done.stderr
    assert "Traceback" not in done.stderr
    diagnosis = json.loads((tmp_path / "run/diagnosis.json").read_text())
    assert diagnosis["kind"] == "at minimum" and "bf16" in diagnosis["advice"]
    assert [(step["step"], step["next_loss_scale"]) for step in diagnosis["steps"]] == [(1, 32768)]
    events = read_rows(tmp_path / "run/events.jsonl")
    assert [row["verdict"] for row in events if row["kind"] == "verdict"] == ["at minimum"]
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        note = "fp16 is emulated on this CPU: right, but slow; for tests and debugging only"
        assert f"note: {note}" in done.stderr
        assert note in [row["message"] for row in events if row["kind"] == "note"]
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert "emulated" in plan["origins"]["precision"]["reason"]
