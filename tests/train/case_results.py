"""Runs a module of cases on its ranks, once, and gives the tests what each case returned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ranks import check_ranks, run_ranks


class CaseResults:
    """Results of one run: ``results["course/2/1"]`` is what rank 0 returned for that case."""

    def __init__(self, out_dir: Path, world_size: int) -> None:
        self._ranks = [json.loads((out_dir / f"rank-{r}.json").read_text()) for r in range(world_size)]

    def __getitem__(self, case: str) -> Any:
        return self.of_rank(0, case)

    def of_rank(self, rank: int, case: str) -> Any:
        """What ``rank`` returned for ``case``; fails with that rank's traceback where it raised."""
        result = self._ranks[rank][case]
        assert "error" not in result, f"case {case} on rank {rank}:\n{result.get('error')}"
        return result["value"]

    @property
    def world_size(self) -> int:
        return len(self._ranks)


def run_case_ranks(
    module: str, out_dir: Path, world_size: int, *arguments: str, env: Mapping[str, str] | None = None
) -> CaseResults:
    """Start the ranks of a case module and collect what each wrote."""
    argv = ["-W", "ignore", "-m", module, str(out_dir), *arguments]
    check_ranks(run_ranks(argv, world_size=world_size, env=env, timeout_s=480))
    return CaseResults(out_dir, world_size)
