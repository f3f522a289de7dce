"""What is said of skipped steps and of the loss scale's course, and when a run is stopped for them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dslaunch.core.errors import Diverged
from dslaunch.core.loss_scale import LossScaleRule, simulate_loss_scale
from dslaunch.core.plan import WatchPlan
from dslaunch.train.engine import StepResult
from dslaunch.train.watch import Watch
from tests.support.plans import make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import describe, run_ranks
from tests.support.tiny import make_tiny_model_dir


class Told:
    """A watch and all that it said."""

    def __init__(self, precision: str = "fp16", limit: int = 50) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.watch = Watch(
            precision=precision,
            max_skipped_in_a_row=limit,
            event=lambda kind, **fields: self.events.append((kind, fields)),
            say=self.said.append,
        )

    def see(self, step: int, *, skipped: bool, scale: float = 1.0, following: float | None = None) -> None:
        result: Any = StepResult(
            step=step, lr=1e-3, loss_scale=scale, skip_reason="overflow" if skipped else None, num_tokens=1,
            gradient_clipping=1.0, grad_norm=1.0, window=None,  # type: ignore[arg-type]
        )  # fmt: skip
        self.watch.see(step, result, scale if following is None else following)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


def test_the_descent_at_the_start_is_one_line_and_no_reason_to_stop() -> None:
    told = Told()
    for step in simulate_loss_scale(LossScaleRule(), steps=19, overflow_at=range(1, 18)):
        told.see(step.step, skipped=step.overflow, scale=step.scale, following=step.next_scale)
    (verdict,) = told.kinds("verdict")
    assert (verdict["step"], verdict["verdict"]) == (18, "warm-up descent")
    assert "has come down to 1 after 17 skipped steps" in verdict["message"]
    assert len(told.kinds("step_skipped")) == 17


def test_a_skip_later_on_is_no_descent() -> None:
    told = Told()
    for step, skipped in enumerate([False, True, False], start=1):
        told.see(step, skipped=skipped)
    assert told.kinds("verdict") == []


def test_growths_are_events() -> None:
    told = Told()
    told.see(1, skipped=False, scale=4.0, following=8.0)
    told.see(2, skipped=False, scale=8.0)
    assert told.kinds("loss_scale_grew") == [{"step": 1, "loss_scale": 8.0}]


@pytest.mark.parametrize(
    ("precision", "advice"), [("fp16", "use precision bf16"), ("bf16", "see which samples")]
)
def test_so_many_skipped_in_a_row_are_the_end(precision: str, advice: str) -> None:
    told = Told(precision, limit=3)
    for step, skipped in enumerate([True, True, False, True, True], start=1):
        told.see(step, skipped=skipped)
    with pytest.raises(Diverged, match="step 6: 3 steps in a row were skipped") as caught:
        told.see(6, skipped=True)
    assert caught.value.exit_code == 76
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(advice)


def test_a_loss_of_exactly_0_is_said_once() -> None:
    told = Told("bf16")
    for step, loss in enumerate([0.0] * 4 + [1.0] + [0.0] * 9, start=1):
        told.watch.see_loss(step, loss)
    (verdict,) = told.kinds("verdict")
    assert (verdict["step"], verdict["verdict"]) == (10, "loss 0")


def test_the_diagnosis_has_the_last_steps(tmp_path: Path) -> None:
    told = Told(limit=400)
    for step in range(1, 301):
        told.see(step, skipped=True, scale=2.0)
    told.watch.write_diagnosis(tmp_path / "d.json", Diverged("it ended", hint="do this"))
    report = json.loads((tmp_path / "d.json").read_text())
    assert (report["verdict"], report["advice"], report["skipped_in_a_row"]) == ("it ended", "do this", 300)
    assert [step["step"] for step in report["steps"]] == list(range(101, 301))
    told.watch.write_diagnosis(tmp_path / "no" / "d.json", Diverged("it ended"))
    assert told.said[-1].startswith("cannot write")


def huge_gradients(path: Path) -> Path:
    """A model whose loss is finite and whose gradient is too large for its norm to be a float32."""
    file = make_tiny_model_dir(path, layers=1) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e25
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e-25
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_a_run_that_only_skips_is_stopped(ops_dir: Path, tmp_path: Path) -> None:
    model, data = huge_gradients(tmp_path / "model"), write_questions(tmp_path / "train.jsonl")
    plan = make_plan(tmp_path, model, data, zero_stage=0, max_steps=50)
    plan = dataclasses.replace(plan, watch=WatchPlan(max_skipped_in_a_row=4))
    results = run_ranks(["-m", "dslaunch.train.worker", "--plan", save_plan(plan)], world_size=2)
    assert [r.returncode for r in results] == [76, 76], describe(results)
    said = results[0].stderr + results[1].stderr
    assert said.count("Error: step 4: 4 steps in a row were skipped (non-finite gradient)") == 1
    run_dir = Path(plan.launch.run_dir)
    diagnosis = json.loads((run_dir / "diagnosis.json").read_text())
    assert [step["step"] for step in diagnosis["steps"]] == [1, 2, 3, 4]
    assert {step["skip_reason"] for step in diagnosis["steps"]} == {"non-finite gradient"}
    losses = [row["loss"] for row in read_rows(run_dir / "metrics.jsonl", "train")]
    assert len(losses) == 3
    assert torch.isfinite(torch.tensor(losses)).all()
    assert not any((run_dir / "checkpoints").glob("step-*"))
