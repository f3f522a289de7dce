"""The engine on torch alone takes the steps that the mathematics says, as the one on DeepSpeed does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.oracles import adamw
from tests.oracles.linear_softmax import Weights, token_mean
from tests.train.case_results import CaseResults
from tests.train.engine.cases_torch import OVERFLOWS, STEPS, TINY
from tests.train.engine.test_gradients import distance, weights
from tests.train.rank_cases import SAMPLES

STEP = float(np.float32(0.01))
# torch.amp.GradScaler(growth_interval=3) over these overflows, by its documentation: halve at each,
# double after three good steps in a row.
SCALES = [256, 128, 64, 32, 32, 32, 64, 64, 32, 16, 16, 16, 32, 32, 32, 64, 64, 64, 32, 32, 32, 64]


def expected_weights() -> list[float]:
    value, course = np.float32(0), []
    for step in range(STEPS):
        value = value if step in OVERFLOWS else value - np.float32(0.01)
        course.append(float(value))
    return course


@pytest.mark.parametrize(("ranks", "micro"), [("two", 1), ("two", 4), ("one", 1), ("one", 8)])
def test_gradient_and_update_are_those_of_the_global_token_mean(
    request: pytest.FixtureRequest, ranks: str, micro: int
) -> None:
    results: CaseResults = request.getfixturevalue(f"{ranks}_rank{'s' if ranks == 'two' else ''}")
    value = results[f"torch/gradient/{micro}"]
    start, end = weights(value["start"]), weights(value["end"])
    truth = token_mean(start, SAMPLES)
    assert distance(weights(value["gradients"]), truth.gradient) < 1e-6 * truth.norm
    expected = Weights(*(w - g for w, g in zip(start, truth.gradient, strict=True)))
    assert max(np.abs(e - x).max() for e, x in zip(end, expected, strict=True)) < 3e-7
    assert value["loss"] == pytest.approx(truth.loss, rel=1e-6)
    assert value["grad_norm"] == value["grad_norm_clipped"] == pytest.approx(truth.norm, rel=1e-6)
    assert value["num_tokens"] == truth.num_tokens


@pytest.mark.parametrize(("precision", "digits"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_autocast_computes_in_16_bits_and_the_masters_are_fp32(
    two_ranks: CaseResults, precision: str, digits: float
) -> None:
    value = two_ranks[f"torch/half/{precision}"]
    truth = token_mean(weights(value["start"]), SAMPLES)
    error = distance(weights(value["gradients"]), truth.gradient) / truth.norm
    assert digits / 50 < error < 4 * digits  # else it was not computed in that type, or is wrong
    start, end = weights(value["start"]), weights(value["end"])
    taken = Weights(*(s - e for s, e in zip(start, end, strict=True)))
    assert distance(taken, weights(value["gradients"])) < 1e-6 * truth.norm


def test_backward_is_the_mean_over_micro_batches_and_ranks(two_ranks: CaseResults) -> None:
    assert two_ranks["torch/mean"] == {"end": [-7.0], "loss": 3.0, "num_tokens": None}


def test_gradients_meet_those_of_other_ranks_only_at_the_end_of_a_window(two_ranks: CaseResults) -> None:
    assert two_ranks.of_rank(0, "torch/no-sync") == [0.5, 6.5]  # 1 / 2 alone; (12 + 14) / 2 / 2
    assert two_ranks.of_rank(1, "torch/no-sync") == [1.0, 6.5]


@pytest.mark.parametrize("name", ["torch/course", "torch/course-accumulated"])
def test_the_scale_takes_gradscalers_course_and_every_update_is_whole(
    two_ranks: CaseResults, name: str
) -> None:
    result = two_ranks[name]
    assert result["after"] == SCALES
    assert result["used"] == [256, *SCALES[:-1]]
    assert result["weights"] == pytest.approx(expected_weights(), rel=1e-6)
    norms = [math.inf if step in OVERFLOWS else STEP for step in range(STEPS)]
    assert result["norms"] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("kind", ["course", "course-static", "course-bf16", "course-fp32"])
def test_an_overflow_on_one_rank_moves_nothing_on_any(two_ranks: CaseResults, kind: str) -> None:
    for rank in (0, 1):
        result = two_ranks.of_rank(rank, f"torch/{kind}")
        reason = "overflow" if kind in ("course", "course-static") else "non-finite gradient"
        assert result["skips"] == [reason if step in OVERFLOWS else None for step in range(STEPS)]
        assert result["weights"] == pytest.approx(expected_weights(), rel=1e-6)
        assert result["epochs"] == [sum(s not in OVERFLOWS for s in range(n + 1)) for n in range(STEPS)]
        assert (result["global_step"], result["skipped_steps"]) == (STEPS, len(OVERFLOWS))


@pytest.mark.parametrize(("kind", "scale"), [("course-static", 256.0), ("course-bf16", 1.0)])
def test_a_static_scale_and_none_never_move(two_ranks: CaseResults, kind: str, scale: float) -> None:
    assert set(two_ranks[f"torch/{kind}"]["after"]) == {scale}


@pytest.mark.parametrize(("case", "floor"), [("minimum", 2), ("minimum-between", 3)])
def test_an_overflow_at_the_minimum_scale_is_diverged_on_every_rank(
    two_ranks: CaseResults, case: str, floor: int
) -> None:
    """A floor that halving would jump over is held too."""
    for rank in (0, 1):
        result = two_ranks.of_rank(rank, f"torch/{case}")
        assert (result["scales"], result["exit_code"]) == ([float(floor)], 76)
        assert f"minimum loss scale {floor}" in result["error"]


def test_clipping_comes_after_unscaling(two_ranks: CaseResults) -> None:
    step = 0.04 / math.sqrt(32)
    assert two_ranks["torch/clipped"] == pytest.approx([-step * n for n in (1, 2, 3, 4)], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_clipped_gradient_has_its_direction_and_both_norms_are_told(
    two_ranks: CaseResults, precision: str
) -> None:
    result = two_ranks[f"torch/clipped/{precision}"]
    assert result["update"] == pytest.approx([0.6, 0.8], rel=1e-5)
    assert result["norms"] == pytest.approx([5.0, 1.0], rel=1e-5)


def test_a_scale_that_only_grows_stays_finite_and_says_so_once(two_ranks: CaseResults) -> None:
    result = two_ranks["torch/without-end"]
    assert result["scale"] == 2.0**32
    assert result["notes"] == ["the loss scale stays at 4.29497e+09: are the gradients all 0?"]


def test_adamw_is_the_papers_from_the_first_step_on(two_ranks: CaseResults) -> None:
    gradients = [float(np.float32(0.01 * (step + 1))) for step in range(6)]
    expected = adamw.trajectory(1.0, gradients, lr=0.1, weight_decay=0.5)
    assert two_ranks["torch/adamw"] == pytest.approx(expected, rel=1e-6)


def test_a_state_saved_and_loaded_goes_on_as_if_nothing_had_been(two_ranks: CaseResults) -> None:
    result = two_ranks["torch/interrupted"]
    assert result["resumed"] == result["straight"]
    assert len({scale for _, scale, _ in result["straight"]}) > 2  # the scale moves in what is compared
    assert result["skipped"] == [len(OVERFLOWS)] * 2


def test_a_gradient_below_fp16s_numbers_survives_by_the_scale(two_ranks: CaseResults) -> None:
    for precision, digits in (("fp32", 1e-6), ("bf16", 2**-8), ("fp16", 2**-10)):
        assert two_ranks[f"torch/tiny/{precision}"] == pytest.approx([-TINY], rel=digits)


@pytest.mark.parametrize("stage", [0, 1])
def test_losses_in_fp32_are_those_of_deepspeed(two_ranks: CaseResults, stage: int) -> None:
    ours, theirs = two_ranks["torch/same"], two_ranks[f"torch/same/{stage}"]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ours[-1] < 0.8 * ours[0]  # it trains


def test_a_parameter_without_a_gradient_is_one_sentence(two_ranks: CaseResults) -> None:
    assert two_ranks["torch/unused"].startswith("engine torch: a trained parameter got no gradient")


def test_trained_weights_in_16_bits_are_refused_by_name(two_ranks: CaseResults) -> None:
    assert two_ranks["torch/refused"].startswith("engine torch: embedding.weight is trained and float16")
