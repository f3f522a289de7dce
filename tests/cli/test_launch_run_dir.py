"""Which run directories `dslaunch launch` takes, and which it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.launching import HELLO, dslaunch, error_of


def test_a_named_run_directory_is_never_another_one(tmp_path: Path, run_file: Path) -> None:
    name = "true-20260101T000000Z"  # as a default one would be
    options = ("--num-gpus-per-node", "1", "--run-dir", name)
    assert dslaunch(*options, command=("--", "true"), cwd=tmp_path).returncode == 0
    assert "exists already" in error_of(dslaunch(*options, command=("--", "true"), cwd=tmp_path))
    named = ("mine.yaml", "--set", "output.run_dir=mine-20260101T000000Z")
    assert dslaunch(*named, cwd=tmp_path).returncode == 0
    assert "exists already" in error_of(dslaunch(*named, cwd=tmp_path))
    assert dslaunch(*named, "--resume", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("*Z*")) == ["mine-20260101T000000Z", name]


def test_an_existing_run_directory_is_refused(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--run-dir", "r")
    assert dslaunch(*options, command=HELLO, cwd=tmp_path).returncode == 0
    before = (tmp_path / "r" / "events.jsonl").read_bytes()
    text = error_of(dslaunch(*options, command=HELLO, cwd=tmp_path))
    assert "exists already; nothing was started" in text
    assert "--resume" in text
    assert (tmp_path / "r" / "events.jsonl").read_bytes() == before


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = error_of(
        dslaunch("--num-gpus-per-node", "1", "--run-dir", "file/r", command=HELLO, cwd=tmp_path), 3
    )
    assert "cannot write the run directory" in text


def test_a_run_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--run-dir", "r")
    command = ("--", "bash", "-c", "echo x >> started")
    assert dslaunch(*options, command=command, cwd=tmp_path).returncode == 0
    (tmp_path / "r" / "events.jsonl").unlink()
    (tmp_path / "r" / "events.jsonl").mkdir()
    text = error_of(dslaunch(*options, "--resume", command=command, cwd=tmp_path), 3)
    assert "cannot write the run directory" in text
    assert "nothing was started" in text
    assert (tmp_path / "started").read_text() == "x\n"


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    for more in ((), ("--dry-run",)):
        done = dslaunch("--num-gpus-per-node", "1", "--run-dir", "r", *more, command=HELLO, cwd=tmp_path)
        assert "r is a file; nothing was started" in error_of(done)


FAILING = "#!/bin/sh\necho 'Error: no wandb' >&2\nexit 3\n"


def test_a_start_without_a_step_leaves_its_directory_to_the_retry(tmp_path: Path, run_file: Path) -> None:
    program = tmp_path / "fake python"
    good = program.read_text()
    program.write_text(FAILING)
    assert "Error: no wandb" in error_of(dslaunch("mine.yaml", "--run-dir", "r", cwd=tmp_path), 3)
    program.write_text(good)
    changed = ("mine.yaml", "--run-dir", "r", "--set", "optimizer.lr=0.002")
    assert "leave --resume out" in error_of(dslaunch(*changed, "--resume", cwd=tmp_path))
    done = dslaunch(*changed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the start before this one did no step; its files are replaced\n") == 1
    assert "no wandb" not in (tmp_path / "r" / "logs" / "rank-0.log").read_text()
    assert (tmp_path / "r" / "events.jsonl").read_text().count('"launch_start"') == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("notes.txt", "it holds notes.txt"),
        ("checkpoints/step-1", "it holds checkpoints/step-1"),
        ("metrics.jsonl", "training was done in it"),
    ],
)
def test_a_directory_with_anything_of_worth_is_refused(
    tmp_path: Path, run_file: Path, name: str, words: str
) -> None:
    (tmp_path / "fake python").write_text(FAILING)
    error_of(dslaunch("mine.yaml", "--run-dir", "r", cwd=tmp_path), 3)
    (tmp_path / "r" / name).write_text("x\n")
    before = sorted(tmp_path.rglob("*"))
    for options in ((), ("--dry-run",)):
        assert words in error_of(dslaunch("mine.yaml", "--run-dir", "r", *options, cwd=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_files_of_the_user_with_our_names_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("mine\n")
    text = error_of(dslaunch("--num-gpus-per-node", "1", "--run-dir", ".", command=HELLO, cwd=tmp_path))
    assert "it holds hostfile" in text
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine\n"]


def test_a_start_without_a_rank_leaves_no_default_directory(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no #! line\n")
    program.chmod(0o755)
    done = dslaunch("--num-gpus-per-node", "1", command=("--", "./program"), cwd=tmp_path)
    assert "is not a program this system can run" in error_of(done, 3)
    assert list((tmp_path / "runs").iterdir()) == []
    named = ("--num-gpus-per-node", "1", "--run-dir", "r")
    error_of(dslaunch(*named, command=("--", "./program"), cwd=tmp_path), 3)
    assert dslaunch(*named, command=HELLO, cwd=tmp_path).returncode == 0
