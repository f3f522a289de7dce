"""Logs of the installed DeepSpeed: the diagnosis tells the scale of each step, as its engine did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.observe.diagnose.read import diagnose
from tests.observe.diagnose.logs import names, scales_by_step
from tests.observe.diagnose.ranks_deepspeed import CASES, STEPS
from tests.support.ranks import check_ranks, run_ranks


@pytest.fixture(scope="module")
def logs(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deepspeed")
    argv = ["-W", "ignore", "-m", "tests.observe.diagnose.ranks_deepspeed", out]
    check_ranks(run_ranks(argv, world_size=1))
    return out


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("stage")])
def test_the_scale_of_each_step(case: str, logs: Path) -> None:
    found = diagnose([str(logs / f"{case}.log")])
    assert found.num_overflows == 6
    assert scales_by_step(found, STEPS) == json.loads((logs / f"{case}.json").read_text())
    assert names(found) == ["warm_up_descent", "saw_tooth"]
    assert (found.course.growths == ()) == (case == "stage-0")  # the only one that names them


def test_a_run_that_ends_at_the_minimum(logs: Path) -> None:
    found = diagnose([str(logs / "at-minimum.log")])
    assert names(found)[0] == "at_minimum"
    assert found.is_wrong
