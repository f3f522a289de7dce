"""What surrounds every verb: closed streams, files that cannot be read; never a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from tests.support.machine import CANNOT_RUN

RUN = "model: org/model\ndata: {train: org/data}\ntrain_batch_size: 8\nprecision: fp32\n"


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash in which ``$DSLAUNCH`` is the command; stdin is no terminal."""
    command = f"{sys.executable} -m dslaunch"
    return subprocess.run(
        ["bash", "-c", line.replace("$DSLAUNCH", command)],
        cwd=cwd, env={**os.environ, "DS_ACCELERATOR": "cpu"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    "verb", ["plan -", "gen-config -", "launch - --dry-run", "generate . --prompt -", "check -"]
)
def test_a_closed_stdin_reads_as_empty(tmp_path: Path, verb: str) -> None:
    done = shell(f"$DSLAUNCH {verb} <&-", tmp_path)
    assert done.returncode == 2, done.stderr
    assert "internal error" not in done.stderr
    said = done.stdout if verb == "check -" else done.stderr
    assert "empty" in said


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_ranks_start_with_closed_streams(tmp_path: Path, closed: str) -> None:
    done = shell(f"$DSLAUNCH launch --num-gpus-per-node 1 --run-dir r -- echo hi {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r/logs/rank-0.log").read_text() == "hi\n"
    assert done.stdout == ("" if ">&-" in closed.split() else "hi\n")


def test_what_is_said_on_a_closed_stderr_does_not_come_on_stdout(tmp_path: Path) -> None:
    done = shell("$DSLAUNCH plan nowhere.yaml 2>&-", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


# Root reads and writes every file, unless it gives these two rights up.
_PLAIN = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search "
AS_USER = _PLAIN if os.geteuid() == 0 else ""
as_user = pytest.mark.skipif(
    bool(AS_USER) and shutil.which("setpriv") is None, reason=f"{CANNOT_RUN}root without setpriv (util-linux)"
)


@as_user
@pytest.mark.parametrize("verb", ["plan", "gen-config", "launch", "check"])
def test_a_file_that_may_not_be_read(tmp_path: Path, verb: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "run.yaml").chmod(0)
    done = shell(f"{AS_USER}$DSLAUNCH {verb} run.yaml", tmp_path)
    assert done.returncode == 2
    if verb == "check":  # a finding, so that other files are checked all the same
        assert done.stdout.startswith("run.yaml: error: cannot be read: Permission denied [not-read]\n")
    else:
        assert done.stderr == "Error: cannot read run file run.yaml: Permission denied\n"


@as_user
def test_data_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("org/data", "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.jsonl").chmod(0)
    done = shell(f"{AS_USER}$DSLAUNCH launch run.yaml", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "Error: run.yaml:2: data.train[0].path: a.jsonl may not be read by this user\n"
    assert not (tmp_path / "runs").exists()


@as_user
@pytest.mark.parametrize("where", ["", "--run-dir ../ro/r", "--run-dir ."])
def test_a_place_that_may_not_be_written(tmp_path: Path, where: str) -> None:
    (tmp_path / "ro").mkdir(mode=0o555)
    done = shell(f"cd ro; {AS_USER}$DSLAUNCH launch --num-gpus-per-node 1 {where} -- true", tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("Error: cannot write the run directory ")
    assert "no permission to write in" in done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("launch", "run.yaml", "--zero-stage", "1"), "for a run file: --set zero_optimization.stage=1"),
        (("launch", "run.yaml", "--offload-param=cpu"), "--set zero_optimization.offload_param=cpu"),
        (("launch", "run.yaml", "--gradient-checkpointing", "x"), "--set model.gradient_checkpointing=true"),
        (("launch", "run.yaml", "--learning-rate", "1e-4"), "--set optimizer.lr=1e-4"),
        (("plan", "run.yaml", "--seed"), "--set seed=VALUE"),
        (("plan", "--num-samples", "5"), "it is an option of gen-config"),
        (("launch", "run.yaml", "--verbos"), "did you mean --verbose?"),
        (("status", "--zzz"), "Error: No such option '--zzz'"),
    ],
)
def test_an_unknown_option_says_what_sets_the_same(
    argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(argv)) == 2
    assert capsys.readouterr().err.rstrip().endswith(says)
