"""Every optimizer's course, run once in one pair of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.case_results import CaseResults, run_case_ranks


@pytest.fixture(scope="session")
def courses(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_case_ranks("tests.train.optimizers.ranks_optimizers", tmp_path_factory.mktemp("optimizers"), 2)
