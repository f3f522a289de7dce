"""The rule is DeepSpeed's own scaler step by step, and the measured sequences come out of it."""

from __future__ import annotations

import itertools
import random

import pytest

from dslaunch.core.loss_scale import LossScaleRule, next_state, simulate_loss_scale


def scales(rule: LossScaleRule, overflow_at: set[int], steps: int) -> list[int]:
    """The scale after each step."""
    return [int(step.next_scale) for step in simulate_loss_scale(rule, steps=steps, overflow_at=overflow_at)]


# Steps counted from 1; measured on DeepSpeed 0.19.8, two ranks, window 3 from 256.
OVERFLOWS = {2, 3, 4, 9, 10, 19}


@pytest.mark.parametrize(
    ("hysteresis", "expected"),
    [
        (1, "256 128 64 32 32 32 32 64 32 16 16 16 16 32 32 32 64 64 32 32 32 32"),
        (2, "256 256 128 64 64 64 64 128 128 64 64 64 64 128 128 128 256 256 256 256 256 256"),
    ],
)
def test_measured_sequences(hysteresis: int, expected: str) -> None:
    rule = LossScaleRule(initial_scale_power=8, loss_scale_window=3, hysteresis=hysteresis)
    assert scales(rule, OVERFLOWS, 22) == [int(word) for word in expected.split()]


def test_consecutive_hysteresis_never_runs_out_on_single_overflows() -> None:
    plain = LossScaleRule(initial_scale_power=8, loss_scale_window=1000, hysteresis=2)
    kept = LossScaleRule(
        initial_scale_power=8, loss_scale_window=1000, hysteresis=2, consecutive_hysteresis=True
    )
    assert scales(plain, {1, 3, 5, 7}, 8) == [256, 256, 128, 128, 64, 64, 32, 32]
    assert scales(kept, {1, 3, 5, 7}, 8) == [256] * 8


def test_the_first_growth_comes_after_window_and_one_steps() -> None:
    rule = LossScaleRule(initial_scale_power=8, loss_scale_window=3)
    assert scales(rule, set(), 10) == [256, 256, 256, 512, 512, 512, 1024, 1024, 1024, 2048]


@pytest.mark.parametrize(("hysteresis", "absorbed"), [(1, 16), (2, 17)])
def test_it_stops_at_the_floor(hysteresis: int, absorbed: int) -> None:
    """From 2^16 the floor 1 is reached after 16 halvings; the next overflow stops the run."""
    rule = LossScaleRule(hysteresis=hysteresis)
    course = simulate_loss_scale(rule, steps=60, overflow_at=range(1, 61))
    assert [step.event for step in course].index("stopped") == absorbed
    assert len(course) == absorbed + 1


def test_stage_0_stays_at_the_floor_for_ever() -> None:
    rule = LossScaleRule(initial_scale_power=1, hysteresis=1, raises_at_floor=False)
    course = simulate_loss_scale(rule, steps=5, overflow_at=range(1, 6))
    assert [step.event for step in course] == ["halved", "floor", "floor", "floor", "floor"]


def test_a_static_scale_never_moves() -> None:
    course = simulate_loss_scale(LossScaleRule(loss_scale=128), steps=4, overflow_at={2})
    assert [step.next_scale for step in course] == [128.0] * 4
    assert [step.event for step in course] == ["", "skipped", "", ""]


def test_equal_to_deepspeeds_scaler_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of settings against the real class on random overflows, its exception included."""
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda *args, **kwargs: 1)
    rng = random.Random(3)
    stopped = 0
    for power, window, hysteresis, consecutive, floor in itertools.product(
        (0, 2, 8, 16), (1, 3, 50), (1, 2, 3), (False, True), (1, 2, 1000)
    ):
        rule = LossScaleRule(0, power, window, hysteresis, consecutive, floor)
        theirs = loss_scaler.DynamicLossScaler(2**power, window, floor, hysteresis, consecutive)
        state, chance = rule.start(), rng.choice((0.02, 0.3, 0.9))
        for _ in range(120):
            overflow = rng.random() < chance
            after, event = next_state(rule, state, overflow)
            if event == "stopped":
                with pytest.raises(Exception, match="already at minimum"):
                    theirs.update_scale(overflow)
                stopped += 1
                break
            theirs.update_scale(overflow)
            state = after
            ours = (state.scale, state.hysteresis_left, state.step, state.last_overflow)
            assert ours == (
                theirs.cur_scale,
                theirs.cur_hysteresis,
                theirs.cur_iter,
                theirs.last_overflow_iter,
            )
    assert stopped > 20
