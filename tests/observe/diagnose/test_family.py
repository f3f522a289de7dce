"""Courses made by the rule of core/loss_scale.py alone, written as ZeRO logs them: each has its verdict."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.core.loss_scale import LossScaleRule, LossScaleState, next_state
from tests.observe.diagnose.logs import hf, names, overflow_line, read, stamp

STEPS = 400
FLOOR = "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


def written(rule: LossScaleRule, overflows: Callable[[int, float], bool]) -> tuple[list[str], bool]:
    """The lines of a run and whether it ended at the floor. ``overflows``: of a step and its scale."""
    state: LossScaleState = rule.start()
    lines = []
    for step in range(1, STEPS + 1):
        lines.append(f"\r 10%|#    | {step}/{STEPS} [00:{step % 60:02}<10:00,  1.00s/it]")
        bad = overflows(step, state.scale)
        after, event = next_state(rule, state, bad)
        if event == "stopped":
            return [*lines, FLOOR], True
        if bad and rule.dynamic:
            left = state.hysteresis_left if event == "hysteresis" else None
            lines.append(overflow_line(state.scale, after.scale, left, step=step))
        elif bad:
            head = stamp(step, "engine.py:1:step")
            lines += [
                f"{head}Grad overflow on iteration: {step - 1}",
                f"{head}Using static loss scale of: {state.scale}",
            ]
        lines.append(hf(2 + step % 7 / 10, "inf" if bad else 1 + step % 11 / 10))
        state = after
    return lines, False


def above(limit: float) -> Callable[[int, float], bool]:
    """Gradients fit up to this scale."""
    return lambda step, scale: scale > limit


def from_step(first: int) -> Callable[[int, float], bool]:
    """Not finite from a step on, at any scale."""
    return lambda step, scale: step >= first


def now_and_then(share: float, seed: int) -> Callable[[int, float], bool]:
    chance = random.Random(seed)
    return lambda step, scale: chance.random() < share


RULES = [
    LossScaleRule(initial_scale_power=power, loss_scale_window=window, hysteresis=hysteresis,
                  consecutive_hysteresis=consecutive)
    for power, window in ((16, 1000), (16, 50), (12, 20), (20, 100))
    for hysteresis, consecutive in ((1, False), (2, False), (3, True))
]  # fmt: skip


def _name(rule: LossScaleRule) -> str:
    """2^POWER/WINDOW/HYSTERESIS, with a c where that is consecutive."""
    kind = "c" if rule.consecutive_hysteresis else ""
    return f"2^{rule.initial_scale_power}/{rule.loss_scale_window}/{rule.hysteresis}{kind}"


ANY_RULE = pytest.mark.parametrize("rule", RULES, ids=_name)


@ANY_RULE
@pytest.mark.parametrize("limit", [2.0**10, 2.0**4])
def test_a_scale_that_finds_its_level_is_normal(rule: LossScaleRule, limit: float, tmp_path: Path) -> None:
    lines, stopped = written(rule, above(limit))
    assert not stopped
    found = names(read(tmp_path, lines))
    assert found[:1] == ["warm_up_descent"]
    assert set(found) <= {"warm_up_descent", "saw_tooth"}
    assert ("saw_tooth" in found) == (rule.loss_scale_window < STEPS / 2)


@ANY_RULE
def test_a_run_that_never_fits_ends_at_the_minimum(rule: LossScaleRule, tmp_path: Path) -> None:
    lines, stopped = written(rule, from_step(1))
    assert stopped
    assert names(read(tmp_path, lines))[0] == "at_minimum"


@ANY_RULE
def test_a_run_that_breaks_in_its_middle_is_an_error(rule: LossScaleRule, tmp_path: Path) -> None:
    lines, stopped = written(rule, from_step(150))
    assert stopped
    found = read(tmp_path, lines)
    assert found.is_wrong and found.verdicts[0].name in ("at_minimum", "persistent_skipping")
    assert {"at_minimum", "persistent_skipping"} <= set(names(found))


@ANY_RULE
def test_the_same_run_cut_before_its_end_skips_persistently(rule: LossScaleRule, tmp_path: Path) -> None:
    lines, _ = written(rule, from_step(150))
    place = next(i for i, line in enumerate(lines) if f"| 158/{STEPS}" in line)
    assert "persistent_skipping" in names(read(tmp_path, lines[:place]))


@ANY_RULE
@pytest.mark.parametrize("seed", range(2))
def test_rare_overflows_are_no_error(rule: LossScaleRule, seed: int, tmp_path: Path) -> None:
    lines, _ = written(rule, now_and_then(0.01, seed))
    found = read(tmp_path, lines)
    assert not found.is_wrong


@pytest.mark.parametrize("scale", [1024.0, 65536.0])
def test_a_static_scale_that_is_too_high_skips_persistently(scale: float, tmp_path: Path) -> None:
    lines, _ = written(LossScaleRule(loss_scale=scale), above(512.0))
    found = read(tmp_path, lines)
    assert names(found)[0] == "persistent_skipping" and found.is_wrong
