"""The engine's cases run once, in one pair of ranks and in one rank alone; the tests read the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.case_results import CaseResults, run_case_ranks

CASES = "tests.train.engine.ranks_engine"


@pytest.fixture(scope="session")
def two_ranks(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    """Every engine case on two ranks."""
    return run_case_ranks(CASES, tmp_path_factory.mktemp("two-ranks"), 2)


@pytest.fixture(scope="session")
def one_rank(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    """The gradient cases and the matrix on one rank."""
    return run_case_ranks(CASES, tmp_path_factory.mktemp("one-rank"), 1, "alone")
