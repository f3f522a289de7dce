"""F24: under ZeRO each step has one backward; DeepSpeed loses gradients of others without a word."""

from __future__ import annotations

import pytest

from tests.train.case_results import CaseResults

STAGES = (1, 2, 3)


# What is right is [-2.0, -1.0].
@pytest.mark.parametrize(("stage", "found"), [(1, [-1.0, 0.0]), (2, [-1.0, 0.0]), (3, [-1.0, -1.0])])
def test_upstream_loses_gradients_of_the_first_of_two_backwards(
    two_ranks: CaseResults, stage: int, found: list[float]
) -> None:
    assert two_ranks[f"turns-bare/{stage}"] == found


def test_upstream_steps_with_old_gradients_where_no_backward_came(two_ranks: CaseResults) -> None:
    assert two_ranks["turns-bare/step-alone"] == [-2.0, -2.0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_is_refused_and_harms_nothing(two_ranks: CaseResults, stage: int) -> None:
    assert two_ranks[f"turns/{stage}"].startswith(
        "ConfigError: backward was called twice without a step between: DeepSpeed loses gradients"
    )
    assert two_ranks[f"turns/{stage}/in-turn"] == [-1.0, -1.0]


@pytest.mark.parametrize("cell", [*map(str, STAGES), *(f"{stage}/offload" for stage in STAGES)])
def test_a_step_without_a_backward_is_refused(two_ranks: CaseResults, cell: str) -> None:
    assert two_ranks[f"turns/{cell}/step-alone"].startswith(
        "ConfigError: step was called without a backward before it"
    )


def test_fp32_at_stage_0_adds_up_and_steps_with_nothing_as_torch_does(two_ranks: CaseResults) -> None:
    assert two_ranks["turns/0"] == [-2.0, -1.0]
    assert two_ranks["turns/0/step-alone"] == [-1.0, -1.0]
