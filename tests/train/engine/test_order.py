"""A step's parts in their order, at every stage, and what the engine adds to them."""

from __future__ import annotations

import pytest

from tests.train.case_results import CaseResults
from tests.train.engine.cases_order import KINDS

ALL_KINDS = pytest.mark.parametrize(("stage", "precision"), KINDS)
VECTOR = "one small vector"
PARTS = [VECTOR, "finite check", "norm", "unscale and clip", "optimizer", "loss scale", "schedule"]


def parts_of(stage: int, precision: str) -> list[str]:
    """Those that can be seen from outside: DeepSpeed has no check besides the norm in bf16 at stage 3."""
    absent = {"loss scale"} if precision != "fp16" else set()
    if stage == 3 and precision == "bf16":
        absent |= {"finite check"}
    if stage == 0:
        absent |= {"norm", "optimizer"}  # one function measures and checks; torch's own step is wrapped
    return [part for part in PARTS if part not in absent]


@ALL_KINDS
def test_check_norm_clip_step_scale_schedule(two_ranks: CaseResults, stage: int, precision: str) -> None:
    assert two_ranks[f"order/{stage}/{precision}"]["good"] == parts_of(stage, precision)


@ALL_KINDS
def test_after_inf_on_one_rank_nothing_but_the_scale_moves(
    two_ranks: CaseResults, stage: int, precision: str
) -> None:
    check = "norm" if (stage, precision) == (3, "bf16") else "finite check"
    after = {"fp16": ["loss scale"]}.get(precision, [])
    if stage == 0:  # torch clips gradients that no step will use
        after = ["unscale and clip"]
    assert two_ranks.of_rank(1, f"order/{stage}/{precision}")["skipped"] == [VECTOR, check, *after]


@ALL_KINDS
def test_one_small_vector_a_window_and_nothing_else(
    two_ranks: CaseResults, stage: int, precision: str
) -> None:
    """Two numbers and one for each rank. Only fp32 at stage 0, which has no check of its own, waits once."""
    result = two_ranks[f"talk/{stage}/{precision}"]
    waits = {"aten::_local_scalar_dense": 1} if stage == 0 else {}
    assert result["more"] == {"c10d::allreduce_": 1, **waits}
    assert result["sizes"] == [2 + two_ranks.world_size]
    assert result["bare"] > 0  # DeepSpeed's own talk is seen by the same count
