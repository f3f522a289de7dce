"""F20 to F23: a parameter without a gradient keeps its value, and no old gradient comes back."""

from __future__ import annotations

import math

import pytest

from tests.train.case_results import CaseResults

CELLS = [f"{stage}/{precision}" for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16", "fp16")]
OFFLOADED = [f"{cell}/offload" for cell in ("1/fp32", "1/fp16", "2/fp32", "2/bf16", "3/bf16")]
OF_B = (1.0, 0.5, 0.5, 0.0)  # its gradient in each window: the mean over two micro-batches


@pytest.mark.parametrize("cell", [*CELLS, *OFFLOADED])
def test_what_gets_no_gradient_counts_as_zero(two_ranks: CaseResults, cell: str) -> None:
    result = two_ranks[f"absent/{cell}"]
    assert result["weights"] == [[-1.0, -1.0], [-2.0, -1.5], [-3.0, -2.0], [-4.0, -2.0]]
    assert result["norms"] == pytest.approx([math.sqrt(3 * (1 + b * b)) for b in OF_B], rel=1e-7)


def test_upstream_takes_the_gradient_of_the_window_before(two_ranks: CaseResults) -> None:
    # Window 3 has none in its first micro-batch, window 4 none at all.
    assert two_ranks["absent-bare/3"] == [-1.0, -1.5, -2.5, -3.5]


def test_upstream_with_offload_knows_only_what_came_in_the_last_micro_batch(two_ranks: CaseResults) -> None:
    assert two_ranks["absent-bare/2/offload"] == [-1.0, -2.0, -3.0, -4.0]
    assert two_ranks["absent-bare/1/offload"] == [-1.0, -1.5, -2.0, -2.5]  # only of a whole window


def test_every_rank_clips_by_the_norm_of_all(two_ranks: CaseResults) -> None:
    norm = math.sqrt(3 * (1 + 0.5**2))
    assert two_ranks["absent-on-one-rank"] == pytest.approx([norm, -1 / norm, -0.5 / norm], rel=1e-5)


def test_upstream_leaves_out_of_the_norm_what_this_rank_did_not_use(two_ranks: CaseResults) -> None:
    norm, a, _ = two_ranks["absent-bare-on-one-rank"]
    assert norm == pytest.approx(math.sqrt(3))
    assert a == pytest.approx(-1 / math.sqrt(3), rel=1e-5)  # the other rank has clipped b by another factor


def test_upstream_with_overlap_at_stage_1_leaves_a_rank_its_own_gradient(two_ranks: CaseResults) -> None:
    assert two_ranks["absent-bare/overlap"] == -1.5 - 0.5  # rank 0's; the mean of both is .75


def test_that_is_refused_by_the_parameters_name(two_ranks: CaseResults) -> None:
    assert two_ranks["absent/overlap"].startswith(
        "zero_optimization.overlap_comm at stage 1: b got no gradient in the last micro-batch"
    )


def test_with_overlap_and_offload_what_did_not_come_counts_as_zero_too(two_ranks: CaseResults) -> None:
    assert two_ranks["absent/overlap/offload"] == [-1.0, -1.5, -1.5]


@pytest.mark.parametrize("cell", ["1", "2", "2/order"])
def test_gradients_that_are_added_to_those_of_others_end_the_run(two_ranks: CaseResults, cell: str) -> None:
    """Upstream adds the first expert's gradient to the second's: each gets the mean, 1, and not its half."""
    weights, error = two_ranks[f"unlike/{cell}"]
    assert weights == [0.0, 0.0, 0.0]
    assert error.startswith("step 1: the gradients on rank 1 were of other parameters than on rank 0")


@pytest.mark.parametrize("cell", ["0", "bf16"])
def test_each_expert_has_a_place_of_its_own(two_ranks: CaseResults, cell: str) -> None:
    assert two_ranks[f"unlike/{cell}"] == [[0.0, 0.5, 0.5], None]


@pytest.mark.parametrize("cell", ["0/none", "1/none", "2/none", "0/order", "1/order"])
def test_what_is_added_up_right_is_let_through(two_ranks: CaseResults, cell: str) -> None:
    assert two_ranks[f"unlike/{cell}"] == [[0.0, 0.0, 0.0], None]


def test_a_cure_that_finds_nothing_to_hold_on_to_says_so(two_ranks: CaseResults) -> None:
    assert two_ranks["absent/renamed"].startswith("EnvironmentNotReady: DeepSpeed ")
    assert "F21" in two_ranks["absent/renamed"]
