"""The course of the scale, held against an independent loss scaler."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dslaunch.core.loss_scale import LossScaleRule, growths_within, simulate_loss_scale
from tests.observe.diagnose.logs import overflow_line, read, scales_by_step, zero_log


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_course_is_that_of_an_independent_scaler(seed: int, hysteresis: int, tmp_path: Path) -> None:
    """Every step's scale, with the growths that no line names; the window is given."""
    draw = random.Random(seed)
    overflows = {1, 2, 3} | {step for step in range(4, 300) if draw.random() < 0.03}
    made = zero_log(overflows, 300, hysteresis=hysteresis)
    found = read(tmp_path, made.lines, loss_scale_window=10.0)
    assert scales_by_step(found, 300) == made.scales
    counted = sum(growth.times for growth in found.course.growths)
    first, last = min(overflows), max(overflows)
    assert counted == len([step for step in made.growths if step > first])
    assert last in found.course.overflow_steps


def test_the_window_follows_from_the_overflows(tmp_path: Path) -> None:
    made = zero_log({1, 2, 150, 151, 420, 640}, 700, window=100)
    found = read(tmp_path, made.lines)
    window = found.course.settings["loss_scale_window"]
    assert (window.value, window.source) == (100, "inferred")
    assert scales_by_step(found, 700) == made.scales
    assert found.course.last_scale_is == "inferred"


def test_a_window_that_cannot_be_told_is_not_made_up(tmp_path: Path) -> None:
    made = zero_log({1, 2, 40}, 50, window=30, bars=False, losses=False)
    found = read(tmp_path, made.lines)
    assert "loss_scale_window" not in found.course.settings
    (growth,) = found.course.growths
    assert (growth.scale, growth.next_scale, growth.step) == (64.0, 128.0, None)
    assert found.course.last_scale_is == "last overflow"


@pytest.mark.parametrize("window", [1, 3, 10])
def test_growths_within_is_the_rule_in_one_number(window: int) -> None:
    rule = LossScaleRule(loss_scale_window=window)
    for good in range(40):
        course = simulate_loss_scale(rule, steps=good + 1, overflow_at={1})
        assert growths_within(rule, good) == sum(step.event == "doubled" for step in course)


def test_hysteresis_from_lines_before_0_8_3(tmp_path: Path) -> None:
    """They say "reducing to" the same value."""
    lines = [overflow_line(64, after) for after in (64, 64, 32)]
    assert read(tmp_path, lines).course.settings["hysteresis"].value == 3
