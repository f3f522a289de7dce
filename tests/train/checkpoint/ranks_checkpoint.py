"""Run by the ranks of test_checkpoint.py: python -m tests.train.checkpoint.ranks_checkpoint OUT_DIR."""

from __future__ import annotations

from tests.train.checkpoint import cases_loading, cases_resume, cases_saving
from tests.train.checkpoint.saving import OUT
from tests.train.rank_cases import RANK, Case, run_cases


def all_cases() -> dict[str, Case]:
    modules = (cases_resume, cases_loading, cases_saving)
    cases = {name: case for module in modules for name, case in module.all_cases().items()}
    return {**cases, **cases_saving.last_cases()}


if __name__ == "__main__":
    run_cases(all_cases(), OUT, RANK)
