"""A full disk costs log lines, never the run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch.agent import Log
from dslaunch.launch.supervisor import supervise
from dslaunch.launch.verdict import Outcome
from tests.launch.conftest import Launch
from tests.launch.launching import python


def run(tmp_path: Path, code: str, events: Path | None = None) -> tuple[Outcome, bytes, str]:
    out, err = io.BytesIO(), io.BytesIO()
    plan = LaunchPlan(
        argv=(sys.executable, *python(code)[2:]),
        topology=local_topology(2),
        run_dir=str(tmp_path / "run"),
        cwd=str(tmp_path),
    )
    writer = JsonlWriter(events) if events else None
    outcome = supervise(plan, events=writer, out=out, err=err)
    return outcome, out.getvalue(), err.getvalue().decode()


def test_ranks_run_on_when_their_log_cannot_grow(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for rank in range(2):
        (logs / f"rank-{rank}.log").symlink_to("/dev/full")
    code = "for i in range(5000): print(i, 'x' * 100)\ntouch(f'done-{rank}')\n"
    outcome, out, err = run(tmp_path, code)
    assert outcome.exit_code == 0
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
    assert out.count(b"\n") == 5000
    assert err.count("No space left on device") == 2  # said once for each rank
    assert "the rank runs on" in err


def test_the_gap_is_noted_when_there_is_space_again(tmp_path: Path) -> None:
    problems: list[str] = []
    log = Log(os.fsencode(tmp_path / "rank-0.log"), problems.append)
    log.write(b"before\n")
    kept, log.fd = log.fd, os.open("/dev/full", os.O_WRONLY)
    log.write(b"lost\n")
    log.write(b"lost too\n")
    os.close(log.fd)
    log.fd = kept
    log.write(b"after\n")
    os.close(log.fd)
    text = (tmp_path / "rank-0.log").read_text()
    assert text == "before\n[dslaunch: 14 bytes could not be written here]\nafter\n"
    assert problems == ["No space left on device"]


def test_events_that_cannot_be_written_are_said_once(tmp_path: Path) -> None:
    outcome, _, err = run(tmp_path, "pass", events=Path("/dev/full"))
    assert outcome.exit_code == 0
    assert err.count("events.jsonl has a gap: No space left on device") == 1


def test_output_that_cannot_be_written_is_said(launch: Launch) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = launch(python("print('hello')"), stdout=full).wait()
    assert code == 0
    assert "rank 0's output could not all be written here: No space left on device; see " in err


def test_where_nothing_can_be_said_the_ranks_run_and_end_all_the_same(launch: Launch) -> None:
    with open("/dev/full", "wb") as full:
        launched = launch(
            python("print('hello'); sys.exit(9 if 'DSLAUNCH_RESTART_COUNT' not in os.environ else 7)"),
            "--max-restarts", "1", stdout=full, stderr=full,
        )  # fmt: skip
        assert launched.process.wait(60) == 7
    assert len(launched.events("launch_start")) == 2


@pytest.mark.needs("root", "namespaces")
def test_a_file_system_that_is_read_only_is_called_so(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o ro none "$1" && shift && exec "$@"'
    launch = [sys.executable, "-m", "dslaunch", "launch", "--num-gpus-per-node", "1", "--gpu", "cpu"]
    words = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), *launch]
    done = subprocess.run(
        [*words, "--run-dir", str(tmp_path / "run"), "--", "true"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert f"{tmp_path} is on a file system that is mounted read-only" in done.stderr


def test_a_log_that_cannot_be_opened_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs" / "rank-1.log").mkdir(parents=True)
    with pytest.raises(Exception, match=r"cannot write .*rank-1\.log: Is a directory; nothing was started"):
        run(tmp_path, "touch(f'started-{rank}')")
    assert not (tmp_path / "started-0").exists()


def test_a_missing_working_directory_starts_nothing(tmp_path: Path) -> None:
    plan = LaunchPlan(
        argv=("true",), topology=local_topology(1), run_dir=str(tmp_path), cwd=str(tmp_path / "no")
    )
    with pytest.raises(Exception, match=r"no working directory .*/no; nothing was started"):
        supervise(plan, events=None, out=io.BytesIO(), err=io.BytesIO())
