"""What is said of skipped steps and of the loss scale's course, and when a run is stopped for them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from dslaunch.core.errors import Diverged
from dslaunch.core.loss_scale import LossScaleRule, simulate_loss_scale
from dslaunch.core.plan import WatchPlan
from dslaunch.train.engine import StepResult
from dslaunch.train.engine.result import Pending
from dslaunch.train.watch import Watch


class Told:
    """A watch and all that it said."""

    def __init__(self, precision: str = "fp16", *, diagnosis: Path | None = None, **limits: int) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.watch = Watch(
            precision=precision,
            limits=WatchPlan(**limits),
            event=lambda kind, **fields: self.events.append((kind, fields)),
            say=self.said.append,
            diagnosis=diagnosis,
        )

    def see(self, step: int, *, skipped: bool = False, scale: float = 1.0, following: float | None = None,
            loss: float = 1.0, norm: float | None = None, bad: tuple[int, ...] = (),
            hysteresis: tuple[int, int] | None = None) -> None:  # fmt: skip
        """A step of two ranks. ``bad``: what each rank says of itself (1: gradients, 2: loss)."""
        before, after = hysteresis or (None, None)
        result = StepResult(
            step=step, lr=1e-3, loss_scale=scale, next_loss_scale=scale if following is None else following,
            skip_reason="overflow" if skipped else None, num_tokens=1, gradient_clipping=1.0,
            grad_norm=float(step) if norm is None else norm, hysteresis=before, next_hysteresis=after,
            window=Pending(torch.tensor([loss, 0.0, *(bad or (0, 0))])),
        )  # fmt: skip
        self.watch.see(result)

    def course(self, rule: LossScaleRule, *, steps: int, overflow_at: Collection[int]) -> None:
        left = rule.hysteresis
        for step in simulate_loss_scale(rule, steps=steps, overflow_at=overflow_at):
            self.see(
                step.step,
                skipped=step.overflow,
                scale=step.scale,
                following=step.next_scale,
                hysteresis=(left, step.hysteresis_left),
            )
            left = step.hysteresis_left

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]

    def verdicts(self) -> list[tuple[int, str]]:
        return [(fields["step"], fields["verdict"]) for fields in self.kinds("verdict")]


def test_the_descent_at_the_start_is_one_line_and_no_reason_to_stop() -> None:
    told = Told()
    told.course(LossScaleRule(), steps=19, overflow_at=range(1, 18))
    assert told.verdicts() == [(18, "warm-up descent")]
    (line,) = told.said
    assert line.startswith(
        "warm-up descent: the first 17 steps were skipped, and the loss scale went from 65536 to 1: normal"
    )
    assert len(told.kinds("step_skipped")) == 17


def test_overflows_that_a_static_scale_cannot_answer_are_no_descent() -> None:
    told = Told()
    for step, skipped in enumerate([True, True, False], start=1):
        told.see(step, skipped=skipped, scale=256.0)
    assert told.verdicts() == []
    assert len(told.said) == 2


def test_a_skip_later_on_is_no_descent() -> None:
    told = Told()
    for step, skipped in enumerate([False, True, False], start=1):
        told.see(step, skipped=skipped)
    assert told.verdicts() == []
    assert told.said == ["step 2 skipped: overflow; the weights are as before"]


def test_a_resumed_run_that_begins_with_a_skip_does_not_descend() -> None:
    told = Told()
    told.see(101, skipped=True)
    told.see(102)
    assert told.verdicts() == []


def test_a_scale_that_grows_and_falls_back_is_called_a_saw_tooth_once() -> None:
    told = Told()
    rule = LossScaleRule(initial_scale_power=8, loss_scale_window=20, hysteresis=1)
    told.course(rule, steps=200, overflow_at=(22, 43, 64, 85, 106))
    assert told.verdicts() == [(44, "sporadic saw-tooth")]
    assert len(told.kinds("loss_scale_grew")) >= 4


def test_overflows_that_are_not_rare_are_not_called_normal() -> None:
    told = Told()
    rule = LossScaleRule(initial_scale_power=8, loss_scale_window=3, hysteresis=1)
    told.course(rule, steps=60, overflow_at=range(5, 60, 5))
    assert told.verdicts() == []


def test_growths_and_hysteresis_are_events_with_step_ranks_and_scale() -> None:
    told = Told()
    told.see(1, skipped=True, scale=8.0, bad=(0, 1), hysteresis=(2, 1))
    told.see(2, scale=8.0, following=16.0, hysteresis=(1, 2))
    told.see(3, skipped=True, scale=16.0, following=8.0, bad=(1, 1), hysteresis=(1, 1))
    assert told.events[0] == (
        "step_skipped",
        {"step": 1, "reason": "overflow", "ranks": (1,), "loss_scale": 8.0, "next_loss_scale": 8.0},
    )
    assert told.kinds("loss_scale_grew") == [
        {"step": 2, "ranks": "all", "loss_scale": 16.0, "previous_loss_scale": 8.0}
    ]
    assert told.kinds("hysteresis_changed") == [
        {"step": 1, "ranks": (1,), "loss_scale": 8.0, "previous_hysteresis": 2, "hysteresis": 1},
        {"step": 2, "ranks": "all", "loss_scale": 16.0, "previous_hysteresis": 1, "hysteresis": 2},
    ]
    assert told.kinds("step_skipped")[1]["ranks"] == (0, 1)


@pytest.mark.parametrize(
    ("precision", "advice"), [("fp16", "use precision bf16"), ("bf16", "see which samples")]
)
def test_so_many_skipped_in_a_row_are_the_end(precision: str, advice: str) -> None:
    told = Told(precision, max_skipped_in_a_row=3)
    for step, skipped in enumerate([True, True, False, True, True], start=1):
        told.see(step, skipped=skipped, bad=(1, 0))
    with pytest.raises(Diverged, match="step 6: 3 steps in a row were skipped") as caught:
        told.see(6, skipped=True, bad=(1, 0))
    assert (caught.value.exit_code, caught.value.verdict, caught.value.step) == (76, "persistent skipping", 6)
    assert "(overflow on rank 0)" in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(advice)


def test_a_forward_that_gives_nan_stops_the_run_at_once_where_the_step_was_skipped() -> None:
    told = Told()
    told.see(1)
    with pytest.raises(Diverged, match="step 2 has loss nan on rank 1: forward itself gives it") as caught:
        told.see(2, skipped=True, loss=math.nan, bad=(1, 3))
    assert (caught.value.exit_code, caught.value.verdict) == (76, "forward non-finite")


def test_a_loss_that_is_not_finite_though_the_gradients_are_stops_it_one_step_later() -> None:
    told = Told("bf16")
    told.see(1, loss=math.inf, bad=(2, 0))
    with pytest.raises(Diverged, match="step 1 has loss inf on rank 0"):
        told.see(2)


def test_as_many_losses_that_are_not_finite_may_pass_as_the_run_file_says() -> None:
    told = Told("bf16", max_nonfinite_losses_in_a_row=2)
    for step, loss in enumerate([math.nan, 1.0, math.nan], start=1):
        told.see(step, skipped=math.isnan(loss), loss=loss, bad=(0, 3))
    with pytest.raises(Diverged, match="step 4 has loss nan"):
        told.see(4, skipped=True, loss=math.nan, bad=(0, 3))


def test_a_loss_of_exactly_0_is_said_once_a_step_later() -> None:
    told = Told("bf16")
    for step, loss in enumerate([0.0] * 4 + [1.0] + [0.0] * 9, start=1):
        told.see(step, loss=loss)
    assert told.verdicts() == [(10, "loss 0")]
    assert "overlap_comm" in told.said[0]


def test_a_norm_that_never_changes_is_said_once() -> None:
    told = Told("bf16", max_unchanged_in_a_row=3)
    for step, norm in enumerate([1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], start=1):
        told.see(step, norm=norm)
    assert told.verdicts() == [(5, "norm constant")]


def test_what_was_seen_last_can_be_read_at_the_end() -> None:
    told = Told("bf16")
    told.see(1, loss=math.nan)
    with pytest.raises(Diverged, match="step 1 has loss nan"):
        told.watch.read_last()


def test_the_diagnosis_has_the_last_steps(tmp_path: Path) -> None:
    told = Told("bf16", diagnosis=tmp_path / "d.json", max_skipped_in_a_row=300)
    for step in range(1, 300):
        told.see(step, skipped=True, scale=2.0, bad=(0, 1))
    with pytest.raises(Diverged), told.watch.concluding():
        told.see(300, skipped=True, scale=2.0, bad=(0, 1))
    report = json.loads((tmp_path / "d.json").read_text())
    assert (report["kind"], report["skipped_in_a_row"]) == ("persistent skipping", 300)
    assert report["verdict"].startswith("step 300: 300 steps in a row")
    assert report["advice"].startswith("see which samples")
    assert [step["step"] for step in report["steps"]] == list(range(101, 301))
    assert report["steps"][-1]["ranks"] == [1]
    assert told.verdicts() == [(300, "persistent skipping")]


def test_a_diagnosis_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    told = Told(diagnosis=tmp_path / "no" / "d.json")
    with pytest.raises(Diverged, match="it ended"), told.watch.concluding():
        raise Diverged("it ended", verdict="at minimum", step=7)
    assert told.said[-1].startswith("cannot write")
    assert told.verdicts() == [(7, "at minimum")]
