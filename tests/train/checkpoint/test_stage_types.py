"""F14, cured in dslaunch/train/engine/cures.py: checkpoints hold the stage as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

Found = dict[str, list[object]]


@pytest.fixture(scope="module")
def found(ops_dir: Path) -> Found:
    result = run_ranks(["-m", "tests.train.checkpoint.stage_types"], world_size=1, timeout_s=120)[0]
    assert result.returncode == 0, result.stderr
    value: Found = json.loads(result.stdout.strip().rpartition("\n")[2])
    return value


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_upstream_saves_an_enum_member(found: Found, stage: int) -> None:
    assert found[str(stage)][0] == "ZeroStageEnum"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_is_a_number(found: Found, stage: int) -> None:
    assert found[str(stage)][1:] == ["int", stage]
