"""`dslaunch compare` up to its ranks: what both runs are, what keeps them from starting, how they end.

A real pair runs in tests/test_end_to_end.py; here a program stands for the ranks' Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main

ARGV = [sys.executable, "-m", "dslaunch", "compare"]
Said = pytest.CaptureFixture[str]


def compare(run_file: Path, *argv: str, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*ARGV, str(run_file), *argv], cwd=run_file.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def dry_run(run_file: Path, capsys: Said, *argv: str) -> dict[str, Any]:
    assert main(["compare", str(run_file), "--dry-run", "--json", *argv]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.fixture(autouse=True)
def _there(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_file.parent)


def set_ranks(run_file: Path, script: str) -> None:
    """``script`` is what each rank does; $PLAN is its plan.json."""
    text = f"#!/bin/sh\nfor PLAN; do :; done\n{script}\n"
    (run_file.parent / "fake python").write_text(text)


def test_both_are_planned_as_launch_would_and_only_the_changes_differ(run_file: Path, capsys: Said) -> None:
    with run_file.open("a") as stream:
        stream.write("num_train_epochs: 2\nzero_optimization: {stage: 1, reduce_bucket_size: 1000}\n")
    text = run_file.read_text().replace("max_steps: 3\n", "output: {logging_steps: 50}\n")
    run_file.write_text(text)
    report = dry_run(run_file, capsys, "--max-steps", "7", "--run-dir", "both", "--set", "seed=5")
    base, changed = report["base"]["plan"], report["changed"]["plan"]
    for plan, name in ((base, "base"), (changed, "changed")):
        assert (plan["max_steps"], plan["num_train_epochs"], plan["seed"]) == (7, None, 5)
        assert plan["output"]["logging_steps"] == 1
        assert plan["launch"]["run_dir"] == str(run_file.parent / "both" / name)
        assert plan["launch"]["argv"][-1] == str(run_file.parent / "both" / name / "plan.json")
    assert (base["engine"], base["zero_stage"]) == ("deepspeed", 1)
    assert (changed["engine"], changed["zero_stage"], changed["ds_config"]) == ("torch", 0, {})
    assert [host["host"] for host in report["changed"]["hosts"]] == ["localhost"]
    assert not (run_file.parent / "both").exists()


def test_a_run_without_deepspeed_is_compared_with_one_that_has_it(run_file: Path, capsys: Said) -> None:
    report = dry_run(run_file, capsys, "--set", "engine=torch")
    assert [report[name]["plan"]["engine"] for name in ("base", "changed")] == ["torch", "deepspeed"]


def test_other_settings_leave_the_engine(run_file: Path, capsys: Said) -> None:
    report = dry_run(run_file, capsys, "--to", "zero_optimization.stage=3", "--to", "optimizer.lr=0.5")
    base, changed = report["base"]["plan"], report["changed"]["plan"]
    assert [plan["engine"] for plan in (base, changed)] == ["deepspeed", "deepspeed"]
    assert (base["zero_stage"], changed["zero_stage"]) == (2, 3)
    assert (base["optimizer"]["lr"], changed["optimizer"]["lr"]) == (0.001, 0.5)


def test_a_dry_run_in_words_shows_one_start_after_the_other(run_file: Path, capsys: Said) -> None:
    assert main(["compare", str(run_file), "--dry-run", "--run-dir", "both"]) == 0
    first, second = capsys.readouterr().out.split("and when it has ended")
    assert "both/base/plan.json" in first
    assert "both/changed/plan.json" in second


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--to", "output.run_dir=x"),
            "Error: --to output.run_dir=x: the second run is kept beside the first",
        ),
        (("--to", "foo"), "Error: --to 'foo' is not of the form key=value"),
        (("--to", "seeed=1"), "of the second run, with seeed=1:\nError: --set: unknown key seeed"),
        (("--set", "seeed=1"), "Error: --set: unknown key seeed"),
        (
            ("--to", "engine=torch", "--to", "zero_optimization.stage=2"),
            "of the second run, with engine=torch, zero_optimization.stage=2:\nError: --set: "
            "zero_optimization.stage 2: engine torch shards nothing",
        ),
        (
            ("--to", "optimizer.type=Foo"),
            "of the second run, with optimizer.type=Foo:\nError: --set: optimizer",
        ),
        (("--to", "=1"), "Error: --to '=1' is not of the form"),
        (("--run-dir", "mine.yaml"), "mine.yaml cannot be the directory of a comparison: it is a file"),
    ],
)
def test_what_keeps_either_from_starting_is_said_before_both(
    run_file: Path, capsys: Said, argv: tuple[str, ...], message: str
) -> None:
    assert main(["compare", str(run_file), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not (run_file.parent / "runs").exists()


def test_one_that_fails_does_not_keep_the_other_from_running(run_file: Path) -> None:
    set_ranks(run_file, 'case "$PLAN" in */base/*) exit 9;; esac')
    done = compare(run_file, "--run-dir", "both", "--json", code=9)
    report = json.loads(done.stdout)
    assert report["exit_code"] == 9
    assert (report["base"]["state"], report["base"]["exit_code"]) == ("failed", 9)
    assert "exited with code 9" in report["base"]["trouble"][0]
    assert (report["changed"]["state"], report["changed"]["exit_code"]) == ("done", 0)
    assert json.loads((run_file.parent / "both/comparison.json").read_text()) == report


def test_what_the_first_did_is_not_lost_where_the_second_fails(run_file: Path, capsys: Said) -> None:
    row = '{"kind": "train", "step": 1, "loss": 2.5, "grad_norm": 1.0, "loss_scale": 1.0}'
    set_ranks(
        run_file,
        f'case "$PLAN" in */changed/*) exit 76;; esac\necho \'{row}\' > "${{PLAN%plan.json}}metrics.jsonl"',
    )
    done = compare(run_file, "--run-dir", "both", code=76)
    assert "failed, 0 steps (exit code 76)" in done.stdout
    assert "changed: rank" in done.stdout
    assert "2.500000" in done.stdout
    assert main(["compare", str(run_file), "--run-dir", "both"]) == 2
    again = capsys.readouterr().err
    assert "both/base cannot be the directory of a comparison: training was done in it" in again


def test_ctrl_c_in_the_first_leaves_the_second_out(run_file: Path) -> None:
    set_ranks(run_file, 'touch "${PLAN%plan.json}started"; exec sleep 60')
    process = subprocess.Popen(
        [*ARGV, str(run_file), "--run-dir", "both"], cwd=run_file.parent,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started = run_file.parent / "both/base/started"
    limit = time.monotonic() + 30
    while not started.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "not started" in stdout
    assert "to have both runs, start it anew" in stderr
    assert not (run_file.parent / "both/changed/plan.json").exists()


def test_two_in_one_second_have_a_directory_each(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dslaunch.core.run_dir.default_run_dir", lambda name, *, runs_root, now: runs_root / name
    )
    for _ in range(2):
        assert main(["compare", str(run_file)]) == 0
    for name in ("mine", "mine-2"):
        found = json.loads((run_file.parent / "runs" / name / "comparison.json").read_text())
        for run in ("base", "changed"):
            said = (run_file.parent / "runs" / name / run / "logs/rank-0.log").read_text()
            assert found[run]["run_dir"] == str(run_file.parent / "runs" / name / run)
            assert said.split()[-1] == f"{found[run]['run_dir']}/plan.json"


@pytest.mark.parametrize(
    ("verb", "named"), [("compare", ()), ("compare", ("--run-dir", "x")), ("launch", ())]
)
def test_a_directory_that_nobody_named_goes_where_no_rank_starts(
    run_file: Path, verb: str, named: tuple[str, ...]
) -> None:
    """The host lets nobody in, which only a start can find out."""
    (run_file.parent / "hosts").write_text("far.invalid slots=2\n")
    (run_file.parent / "ssh").write_text("#!/bin/sh\necho Permission denied >&2\nexit 255\n")
    (run_file.parent / "ssh").chmod(0o755)
    done = subprocess.run(
        [*ARGV[:-1], verb, str(run_file), "--hostfile", "hosts", *named], cwd=run_file.parent,
        env={**os.environ, "PATH": f"{run_file.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert (f"no rank was started; removed {run_file.parent}/runs/mine-" in done.stderr) == (not named)
    plans = [path.relative_to(run_file.parent) for path in run_file.parent.rglob("plan.json")]
    assert plans == ([Path("x/base/plan.json")] if named else [])
    assert named or list((run_file.parent / "runs").iterdir()) == []


def test_the_run_file_must_be_a_file(capsys: Said) -> None:
    assert main(["compare", "-"]) == 2
    assert "so it must be a file: not -" in capsys.readouterr().err
