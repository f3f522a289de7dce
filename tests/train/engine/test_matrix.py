"""Every update equals the float64 oracle, over a course with overflows, growths, hysteresis and min scale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.train.case_results import CaseResults
from tests.train.engine import matrix
from tests.train.engine.matrix import Cell

CELLS = [*matrix.pairwise_cells(), *matrix.further_cells()]
FP16 = matrix.Cell("fp16 dynamic", 2, 1, 0.0, False, "SGD", "straight", 2)


def result_of(request: pytest.FixtureRequest, cell: Cell, rank: int) -> dict:
    results: CaseResults = request.getfixturevalue("two_ranks" if cell.ranks == 2 else "one_rank")
    return results.of_rank(rank, f"matrix/{cell.name}")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_step_is_that_of_the_oracle(request: pytest.FixtureRequest, cell: Cell) -> None:
    for rank in range(cell.ranks):
        assert matrix.differences(cell, result_of(request, cell, rank)["steps"]) == []


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_it_stops_at_the_minimum_scale_and_counts_what_was_trained(
    request: pytest.FixtureRequest, cell: Cell
) -> None:
    truth = matrix.expected(cell)
    result = result_of(request, cell, 0)
    assert result["error"] == ("at minimum" if cell.precision == "fp16 dynamic" else None)
    applied = sum(not step["skipped"] for step in truth)
    assert (result["global_step"], result["skipped"]) == (len(truth), len(truth) - applied)
    assert result["trained_samples"] == applied * cell.accumulation * cell.ranks


def test_the_cells_cover_every_pair_and_the_course_has_all_that_can_happen() -> None:
    pairs = set().union(*(matrix.pairs_of(cell) for cell in CELLS))
    assert pairs == set().union(*(matrix.pairs_of(cell) for cell in matrix.all_cells()))
    steps = matrix.expected(FP16)
    scales = [step["scale"] for step in steps]
    moves = [(step["skipped"], after - step["scale"]) for step, after in zip(steps, scales[1:], strict=False)]
    assert any(skipped and move == 0 for skipped, move in moves)  # the hysteresis lets one pass
    assert any(skipped and move < 0 for skipped, move in moves)
    assert any(not skipped and move > 0 for skipped, move in moves)
    assert len(steps) < matrix.STEPS  # it ends at the minimum


def test_the_clip_binds_on_some_steps_and_not_on_others() -> None:
    clipped = matrix.expected(replace(FP16, clipping=matrix.CLIPPING))
    binds = {step["norm"] > step["clipped"] for step in clipped if not step["skipped"]}
    assert binds == {True, False}


def test_the_oracle_finds_the_growth_that_halves_an_update(two_ranks: CaseResults) -> None:
    """Without the cure of F2 the same comparison fails, at the step where the scale grows."""
    truth = matrix.expected(FP16)
    measured = two_ranks["matrix-bare"]["weights"]
    steps = [{**must, "weights": have} for must, have in zip(truth, measured, strict=False)]
    found = [text for text in matrix.differences(FP16, steps) if "weights" in text]
    grew = next(k for k, step in enumerate(truth) if truth[k + 1]["scale"] > step["scale"])
    assert grew == matrix.TURN  # so a resumed course goes through its first growth after the load
    assert found[0].startswith(f"step {grew}: weights")


def test_upstream_adds_the_gradients_of_a_skipped_step_to_all_later_ones(two_ranks: CaseResults) -> None:
    """F17: nothing changes any more after the overflow at step 1."""
    weights = two_ranks["matrix-bare-offload"]["weights"]
    assert weights[0] != matrix.start(FP16).tolist()
    assert len(weights) > 1 and all(later == weights[0] for later in weights[1:])
