"""Run by the ranks of the tests beside it: all cases in one set of processes, results as JSON.

Run as ``python -m tests.train.engine.ranks_engine OUT_DIR [alone]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.train.engine import (
    cases_absent,
    cases_behaviour,
    cases_gradients,
    cases_loss_scale,
    cases_matrix,
    cases_norms,
    cases_order,
    cases_own_trace,
    cases_stage_0,
    cases_torch,
    cases_turns,
    cases_watch,
)
from tests.train.rank_cases import RANK, Case, run_cases


def all_cases() -> dict[str, Case]:
    modules = (
        cases_gradients,
        cases_loss_scale,
        cases_norms,
        cases_stage_0,
        cases_behaviour,
        cases_torch,
        cases_matrix,
        cases_order,
        cases_watch,
        cases_own_trace,
        cases_absent,
        cases_turns,
    )
    cases = {name: case for module in modules for name, case in module.all_cases().items()}
    return {**cases, **cases_norms.last_cases()}


if __name__ == "__main__":
    alone = {
        **cases_gradients.token_mean_cases(),
        **cases_torch.gradient_cases(),
        **cases_matrix.all_cases(),
    }
    run_cases(alone if sys.argv[2:] == ["alone"] else all_cases(), Path(sys.argv[1]), RANK)
