"""A model that is broken from the start is not trained to the end."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.plans import make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import describe, run_ranks
from tests.support.tiny import make_tiny_model_dir


def broken_model(path: Path) -> Path:
    """One nan among all its weights."""
    file = make_tiny_model_dir(path, layers=1) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_a_loss_that_is_nan_in_the_first_step_stops_the_run(ops_dir: Path, tmp_path: Path) -> None:
    model, data = broken_model(tmp_path / "model"), write_questions(tmp_path / "train.jsonl")
    plan = make_plan(tmp_path, model, data, max_steps=50)
    results = run_ranks(["-m", "dslaunch.train.worker", "--plan", save_plan(plan)], world_size=2)
    assert [r.returncode for r in results] == [76, 76], describe(results)
    said = results[0].stderr + results[1].stderr
    assert said.count("Error: step 1 has loss nan on ranks 0, 1: forward itself gives it") == 1
    assert "see what `dslaunch generate` makes of this model" in results[0].stderr
    assert "Traceback" not in said and "done" not in results[0].stdout
    run_dir = Path(plan.launch.run_dir)
    assert not any((run_dir / "checkpoints").glob("step-*"))
    diagnosis = json.loads((run_dir / "diagnosis.json").read_text())
    assert (diagnosis["kind"], diagnosis["steps"][-1]["loss"]) == ("forward non-finite", "nan")
    (verdict,) = [row for row in read_rows(run_dir / "events.jsonl") if row["kind"] == "verdict"]
    assert (verdict["verdict"], verdict["step"]) == ("forward non-finite", 1)
    assert "train_end" not in {row["kind"] for row in read_rows(run_dir / "events.jsonl")}
