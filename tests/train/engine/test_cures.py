"""Each fault of DeepSpeed 0.19.8: still there without the cure, gone with it.

A test named ``test_upstream_...`` that goes red means that DeepSpeed was mended (or
broken otherwise): then the cure beside it must be looked at. Numbers are exact: fp16
of .01 is 0.01000213623046875, a power-of-two scale does not change it, and sums of a
few of them are exact in fp32.
"""

from __future__ import annotations

import math

import pytest

from tests.oracles import adamw
from tests.oracles.loss_scaler import Scaler, course
from tests.train.case_results import CaseResults

STEP = 0.01000213623046875  # float16(0.01)
OVERFLOWS = {1, 2, 3, 8, 9, 18}
STEPS = 22
# Both lists were read from DeepSpeed's own scaler (start 256, window 3, overflows as above).
SCALES = {
    1: [256, 128, 64, 32, 32, 32, 32, 64, 32, 16, 16, 16, 16, 32, 32, 32, 64, 64, 32, 32, 32, 32],
    2: [256, 256, 128, 64, 64, 64, 64, 128, 128, 64, 64, 64, 64, 128, 128, 128, 256, 256, 256, 256, 256, 256],
}
ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ZERO_STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def expected_weights() -> list[float]:
    """Minus one STEP for each step that was not skipped."""
    good, weights = 0, []
    for step in range(STEPS):
        good += step not in OVERFLOWS
        weights.append(-good * STEP)
    return weights


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_the_oracle_of_the_scale_agrees_with_deepspeeds_course(hysteresis: int) -> None:
    assert course(Scaler(256, window=3, hysteresis=hysteresis), OVERFLOWS, STEPS) == SCALES[hysteresis]


# F2: the step on which the scale grows


@ZERO_STAGES
def test_upstream_halves_the_update_where_the_scale_grows(two_ranks: CaseResults, stage: int) -> None:
    weights = two_ranks[f"bare-course/{stage}"]["weights"]
    increments = [b - a for a, b in zip([0.0, *weights], weights, strict=False)]
    assert increments == pytest.approx([-STEP, -STEP, -STEP / 2, -STEP, -STEP / 2, -STEP], rel=1e-6)


def test_upstream_reports_half_the_norm_at_stage_3(two_ranks: CaseResults) -> None:
    assert two_ranks["bare-course/3"]["norms"] == [STEP, STEP, STEP / 2, STEP, STEP / 2, STEP]


@ALL_STAGES
@pytest.mark.parametrize("name", ["course/{}/1", "course/{}/2", "course-accumulated/{}", "course-static/{}"])
def test_every_applied_update_is_whole(two_ranks: CaseResults, stage: int, name: str) -> None:
    result = two_ranks[name.format(stage)]
    assert result["weights"] == expected_weights()
    norms = [math.inf if step in OVERFLOWS else STEP for step in range(STEPS)]
    assert result["norms"] == pytest.approx(norms, rel=1e-7)


@ZERO_STAGES
def test_every_applied_update_is_whole_with_cpu_offload(two_ranks: CaseResults, stage: int) -> None:
    assert two_ranks[f"course-offload/{stage}"]["weights"] == expected_weights()


@ALL_STAGES
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_the_scale_takes_deepspeeds_course(two_ranks: CaseResults, stage: int, hysteresis: int) -> None:
    result = two_ranks[f"course/{stage}/{hysteresis}"]
    assert result["after"] == SCALES[hysteresis]
    assert result["used"] == [256, *SCALES[hysteresis][:-1]]  # a step carries the scale of the one before


@ALL_STAGES
def test_one_bad_micro_batch_on_one_rank_skips_that_window_only(two_ranks: CaseResults, stage: int) -> None:
    for rank in range(two_ranks.world_size):
        result = two_ranks.of_rank(rank, f"course-accumulated/{stage}")
        reasons = ["overflow" if step in OVERFLOWS else None for step in range(STEPS)]
        assert result["skips"] == reasons
        assert (result["global_step"], result["skipped_steps"]) == (STEPS, len(OVERFLOWS))


def test_a_cure_that_no_longer_fits_says_so(two_ranks: CaseResults) -> None:
    """Renamed upstream, the method would else be left uncured without a word."""
    import deepspeed

    expected = f"EnvironmentNotReady: DeepSpeed {deepspeed.__version__} is not the one that the cure of"
    assert two_ranks["renamed"].startswith(expected)
    assert "has no _update_scale" in two_ranks["renamed"]


@ALL_STAGES
def test_clip_between_half_the_norm_and_the_norm(two_ranks: CaseResults, stage: int) -> None:
    norm = STEP * math.sqrt(32)
    clipped = STEP * 0.04 / (norm + 1e-6)  # 1e-6: DeepSpeed's guard against a division by zero
    expected = [-clipped * step for step in range(1, 7)]
    assert two_ranks[f"growth-clip/{stage}"] == pytest.approx(expected, rel=1e-6)


@ALL_STAGES
def test_overflow_at_the_minimum_scale_is_an_error_of_ours(two_ranks: CaseResults, stage: int) -> None:
    for rank in range(two_ranks.world_size):
        result = two_ranks.of_rank(rank, f"minimum/{stage}")
        assert result["scales"] == [2, 1]
        assert result["exit_code"] == 76
        assert "minimum loss scale 1" in result["error"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_scale_that_only_grows_stays_finite(two_ranks: CaseResults, stage: int) -> None:
    """2^128 is inf in float32, and 0 x inf is nan: that step is skipped, and the scale goes back."""
    result = two_ranks[f"without-end/{stage}"]
    assert max(result["used"]) == 2.0**128
    assert result["used"][-1] <= 2.0**128
    assert result["skipped"] > 0
    assert result["weight"] == [1.0]


# F1, F3, F4: 16 bit at stage 0


def test_upstream_stage_0_does_not_scale_the_fp16_loss(two_ranks: CaseResults) -> None:
    update = two_ranks["bare-stage-0-fp16"]
    assert update == pytest.approx(-STEP / 256, rel=1e-3)  # divided by the scale it never got


def test_upstream_stage_0_knows_no_hysteresis_and_is_silent_at_the_minimum(two_ranks: CaseResults) -> None:
    """F4. Stages 1-3 would have 256, 128, 64 and then raise."""
    assert two_ranks["bare-stage-0-scales"] == [128, 64, 64, 64]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_upstream_stage_0_takes_a_step_before_training(two_ranks: CaseResults, precision: str) -> None:
    # lr .1 x decay .5, on zero gradients
    assert two_ranks[f"bare-phantom/{precision}"] == pytest.approx(0.95)


@ALL_STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_adamw_from_its_first_step(two_ranks: CaseResults, stage: int, precision: str) -> None:
    # The gradient is .01 in the precision of the weights; bf16(.01) = 0.010009765625.
    gradient = {"fp32": 0.01, "bf16": 0.010009765625, "fp16": STEP}[precision]
    expected = adamw.trajectory(1.0, [gradient] * 4, lr=0.1, weight_decay=0.5)
    result = two_ranks[f"adamw/{stage}/{precision}"]
    assert result["weights"][0] == 1.0
    assert result["weights"][1:] == pytest.approx(expected, rel=5e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_at_stage_0_runs_as_stage_1_and_says_so(two_ranks: CaseResults, precision: str) -> None:
    result = two_ranks[f"adamw/0/{precision}"]
    assert result["stage"] == 1
    assert any(f"{precision} at ZeRO stage 0 runs as stage 1" in note for note in result["notes"])
    assert two_ranks["adamw/0/fp32"]["stage"] == 0


@ALL_STAGES
def test_bf16_gradients_are_added_up_in_fp32(two_ranks: CaseResults, stage: int) -> None:
    """64 x bf16(.01): exact in fp32. Added up in bf16, 8 bits do not hold the sum.

    At stages 1-3 by data_types.grad_accum_dtype; at stage 0 without asking for it.
    """
    assert two_ranks[f"bf16-sum/{stage}"] == -0.010009765625


def test_upstream_adds_bf16_gradients_up_in_bf16(two_ranks: CaseResults) -> None:
    error = two_ranks["bf16-sum-in-bf16"] / -0.010009765625 - 1
    assert abs(error) > 0.01


# F5, F6, F7: float16 autocast, and the clip that nobody asked for


def test_upstream_float16_autocast_under_zero_never_trains(two_ranks: CaseResults) -> None:
    assert two_ranks["bare-autocast/1"] == [1.0] * 8


def test_upstream_float16_autocast_leaks_into_the_next_engine(two_ranks: CaseResults) -> None:
    assert two_ranks["autocast-leak/True"] == 5.0 * 65536


def test_the_next_engine_knows_nothing_of_float16_autocast(two_ranks: CaseResults) -> None:
    assert two_ranks["autocast-leak/False"] == 5.0


def test_upstream_clips_at_1_where_nothing_is_said(two_ranks: CaseResults) -> None:
    weights, _ = two_ranks["clipping-left-out/True"]
    assert weights == pytest.approx([-3.0 / 5.000001, -4.0 / 5.000001], rel=2e-7)


def test_the_clip_that_is_left_out_is_written_and_said(two_ranks: CaseResults) -> None:
    weights, said = two_ranks["clipping-left-out/False"]
    assert weights == two_ranks["clipping-left-out/True"][0]
    assert said == [
        "gradient_clipping is left out: 1.0, as DeepSpeed has it since 0.19.3 (docs/upstream.md, F7)"
    ]


# F11: Muon under ZeRO


def test_upstream_reports_and_would_clip_the_norm_of_muons_update(two_ranks: CaseResults) -> None:
    assert two_ranks["bare-muon"] > 1.0  # the gradient's is .02


# F8: fp32 at stage 0


def test_upstream_fp32_stage_0_trains_on_nan_and_reports_no_norm(two_ranks: CaseResults) -> None:
    result = two_ranks["bare-fp32-stage-0"]
    assert math.isnan(result["weight"])
    assert result["norm"] is None


SKIP_CELLS = [f"nan/{s}/{p}/{bad}" for s in (0, 1, 2, 3) for p in ("fp32", "bf16") for bad in ("nan", "inf")]


@pytest.mark.parametrize("cell", [*SKIP_CELLS, "nan/1/bf16-accum32"])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(two_ranks: CaseResults, cell: str) -> None:
    """Gradient 1, bad, 1; rates .25, .5, .5 as a skipped step does not move the schedule."""
    for rank in range(two_ranks.world_size):
        result = two_ranks.of_rank(rank, cell)
        first, second, third = result["steps"]
        good = {"skipped": False, "reason": None, "norm": 1.0, "clipped": 1.0}
        assert first == {**good, "lr": 0.25, "weight": -0.25}
        assert second == {
            "skipped": True,
            "reason": "non-finite gradient",
            "norm": math.inf,
            "clipped": None,
            "lr": 0.5,
            "weight": -0.25,
        }
        assert third == {**good, "lr": 0.5, "weight": -0.75}
        assert (result["global_step"], result["skipped_steps"]) == (3, 1)
