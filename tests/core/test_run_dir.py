"""The run directory: its name, its files, when it may be made."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.run_dir import RunDir, cache_dir, checkpoint_step, default_run_dir, runs_root


def test_a_new_directory(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a" / "b")
    run_dir.create(resume=False)
    assert run_dir.logs.is_dir()
    assert run_dir.checkpoints.is_dir()
    assert run_dir.rank_log(3) == tmp_path / "a" / "b" / "logs" / "rank-3.log"


def test_an_empty_directory_is_as_good_as_new(tmp_path: Path) -> None:
    RunDir(tmp_path).create(resume=False)
    assert (tmp_path / "logs").is_dir()


def test_a_used_directory_needs_resume(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.plan.write_text("{}")
    with pytest.raises(ConfigError, match="exists already; nothing was started"):
        run_dir.create(resume=False)
    assert not run_dir.logs.exists()
    run_dir.create(resume=True)
    assert run_dir.logs.is_dir()


def test_resume_needs_a_plan(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="no run to resume"):
            RunDir(path).create(resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentNotReady, match="cannot write the run directory"):
        RunDir(tmp_path / "file" / "run").create(resume=False)


def test_the_steps_of_a_runs_checkpoints(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.checkpoint_steps() == ()
    for name in ("step-10", "step-9", "step-100", "step-x", "step-", "step-7.tmp", "tmp-step-11"):
        (run_dir.checkpoints / name).mkdir(parents=True)
    (run_dir.checkpoints / "step-8").touch()
    assert run_dir.checkpoint_steps() == (9, 10, 100)


def test_names_and_places() -> None:
    now = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
    assert default_run_dir("x", runs_root=Path("/r"), now=now) == Path("/r/x-20260304T050607Z")
    assert runs_root({}, Path("/here")) == Path("/here/runs")
    assert runs_root({"DSLAUNCH_RUNS": "/there"}, Path("/here")) == Path("/there")
    assert cache_dir({"DSLAUNCH_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/dslaunch")
    assert cache_dir({}) == Path.home() / ".cache" / "dslaunch"


def test_steps_of_checkpoints() -> None:
    assert checkpoint_step(Path("/r/checkpoints/step-120")) == 120
    for name in ("latest", "step-", "step-1.tmp", "xstep-1"):
        assert checkpoint_step(Path(name)) is None
