"""dslaunch status and logs on real launches."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from tests.launch.launching import Launched, python, wait_until
from tests.observe.test_run_status import FAILED, RANKS, START, UP, end, run, save


def launched(tmp_path: Path, code: str) -> Launched:
    return Launched(["--num-gpus-per-node", "2"], python(code), run_dir=tmp_path / "run")


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main([*argv]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_a_run_that_goes_on_and_is_then_cancelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    with launched(tmp_path, "print(f'rank {rank} here', flush=True); time.sleep(300)") as job:
        logs = [tmp_path / f"run/logs/rank-{rank}.log" for rank in (0, 1)]
        wait_until(lambda: all(log.exists() and "here" in log.read_text() for log in logs), "both are up")
        out = said(capsys, "status", run)
        assert "running for" in out
        assert "2 of 2 ranks up on localhost; launched by process" in out
        command = [sys.executable, "-m", "dslaunch", "logs", run, "--rank", "all", "--follow"]
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait()[0] == 143
    out, _ = follower.communicate(timeout=30)
    assert follower.returncode == 0
    assert "rank 0-1| rank 0 here\n" in out  # alike but for the rank's own number
    assert "cancelled after" in said(capsys, "status", run)


def test_a_run_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    code = (
        "print(f'bad {rank}', file=sys.stderr, flush=True)\n"
        f"while rank and 'bad 0' not in open('{run}/logs/rank-0.log').read(): time.sleep(0.02)\n"
        "sys.exit(9 * rank)"
    )
    with launched(tmp_path, code) as job:
        assert job.wait()[0] == 9
    out = said(capsys, "status", run)
    assert "failed after" in out
    assert "trouble  rank 1 on localhost failed first: it exited with code 9" in out
    assert f"log      {run}/logs/rank-1.log" in out
    assert said(capsys, "logs", run) == "bad 1\n"  # the failed one
    assert said(capsys, "logs", run, "--rank", "0-1") == "rank 0| bad 0\nrank 1| bad 1\n"
    report = json.loads(said(capsys, "status", run, "--json"))
    assert (report["schema_version"], report["state"], report["exit_code"]) == (1, "failed", 9)


def test_a_launcher_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with launched(tmp_path, "time.sleep(300)") as job:
        wait_until(lambda: len(job.events("rank_start")) == 2, "the ranks are up")
        job.process.kill()
        job.process.wait()
        job.nothing_left()
    assert "gone: the launcher ended without a word" in said(capsys, "status", str(tmp_path / "run"))


def test_following_a_run_that_never_began_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "plan.json").write_text('{"name": "x"}')
    (tmp_path / "logs/rank-0.log").write_text("one\nunfinished")
    assert said(capsys, "logs", "-f", str(tmp_path)) == "one\nunfinished\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("status", "nowhere"), "Error: run directory not found: nowhere (in /"),
        (("logs", "nowhere"), "Error: run directory not found: nowhere (in /"),
        (("logs", "run", "--rank", "x"), "Error: --rank 'x': 'x' is no rank"),
        (("logs", "run", "--rank", "5-2"), "Error: --rank '5-2': '5-2' is no rank"),
        (("logs", "run", "--rank", "5"), "Error: rank 5 has no log in run/logs"),
    ],
)
def test_what_is_not_there(
    argv: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/plan.json").write_text('{"name": "x"}')
    (tmp_path / "run/logs/rank-0.log").touch()
    assert said(capsys, *argv, code=2).startswith(message)


def test_logs_that_are_empty_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/plan.json").write_text('{"name": "x"}')
    for rank in (0, 1):
        (tmp_path / f"run/logs/rank-{rank}.log").touch()
    assert main(["logs", "run", "--rank", "all"]) == 0
    assert capsys.readouterr() == ("", "note: ranks 0-1 wrote nothing\n")


@pytest.mark.parametrize(
    ("exit_code", "text", "goes_on"),
    [(9, "abc", True), (9, "ab", False), (2, "abc", False)],
    ids=["whole", "damaged", "what-the-ranks-refuse"],
)
def test_resume_is_advised_only_where_it_can_go_on(
    exit_code: int, text: str, goes_on: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(tmp_path, [START, UP, *RANKS, FAILED, end(exit_code)])
    save(path, 4, text)
    out = said(capsys, "status", str(path))
    assert ("--resume" in out) is goes_on
    assert ("damaged  step-4: a.pt has 2 bytes, the manifest says 3\n" in out) is (text == "ab")
