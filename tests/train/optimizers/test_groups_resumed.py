"""Parameter groups keep their rate and decay under a schedule, at every stage, also after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from dslaunch.train.schedule import lr_lambda
from tests.oracles.optimizers import course
from tests.train.case_results import CaseResults
from tests.train.optimizers.cells import (
    BAD_STEP,
    RESUMED,
    SAVED_AFTER,
    SCHEDULE,
    STEPS,
    TOTAL_STEPS,
    VECTOR_LR,
    Cell,
    applied_gradients,
    start,
)

CELL = pytest.mark.parametrize("cell", RESUMED, ids=lambda cell: cell.name)


def factors() -> list[float]:
    """Of each step: a skipped one does not advance the schedule."""
    factor = lr_lambda(SCHEDULE, TOTAL_STEPS)
    return [factor(step - (step > BAD_STEP)) for step in range(STEPS)]


@CELL
def test_the_schedule_scales_every_group_and_the_first_is_reported(courses: CaseResults, cell: Cell) -> None:
    result = courses[f"resume/{cell.name}"]
    lr = cell.plan.lr
    rates = [pytest.approx([lr * f, VECTOR_LR * f], rel=1e-12) for f in factors()]
    assert result["rates"] == rates
    assert result["resumed rates"] == rates[SAVED_AFTER:]
    assert result["reported"] == [pytest.approx(lr * f) for f in factors()]


@CELL
def test_a_resumed_run_ends_where_a_straight_one_does(courses: CaseResults, cell: Cell) -> None:
    result = courses[f"resume/{cell.name}"]
    assert result["resumed"] == result["straight"]


@pytest.mark.parametrize("cell", [c for c in RESUMED if "8bit" not in c.kind], ids=lambda cell: cell.name)
def test_each_group_has_its_own_rate_and_decay(courses: CaseResults, cell: Cell) -> None:
    applied = [f for step, f in enumerate(factors()) if step != BAD_STEP]
    gradients = applied_gradients(cell, 2)
    own = {1: {"lr": VECTOR_LR, "adam_lr": VECTOR_LR, "weight_decay": 0.0}}
    for i, weights in enumerate(start(cell)):
        params = {**cell.plan.params, **own.get(i, {})}
        expected = course(cell.kind, weights, [g[i] for g in gradients], params, applied)[-1]
        found = np.array(courses[f"resume/{cell.name}"]["straight"][i]).reshape(weights.shape)
        # The vector's updates are eight times as large as in test_courses.py.
        assert np.abs(found - expected).max() < 4e-6
