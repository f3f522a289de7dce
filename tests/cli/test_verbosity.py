"""-q and -v: the same on every command, before and after its name, through one variable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import dslaunch as package
from dslaunch.cli.main import VERBS, dslaunch, main
from dslaunch.core.verbosity import VARIABLE

RUN = """\
model: org/model
data: {train: squad}
train_batch_size: 8
precision: fp32
"""
NOTE = "note: run.yaml:2: data.train[0].path: there is no squad here; it is taken for a hub id\n"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "")  # and put back after the test, whatever main made of it
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)


def commands(command: click.Command, context: click.Context) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, context)


def test_every_command_has_both() -> None:
    found = list(commands(dslaunch, click.Context(dslaunch)))
    assert len(found) > len(VERBS)
    for command in found:
        flags = [flag for param in command.params for flag in param.opts]
        assert {"-q", "--quiet", "-v", "--verbose"} <= set(flags), command.name
        assert len(flags) == len(set(flags)), command.name


@pytest.mark.parametrize("argv", [["plan", "run.yaml"], ["plan", "run.yaml", "-v"]])
def test_notes_are_said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert NOTE in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["-q", "plan", "run.yaml"], ["plan", "--quiet", "run.yaml"]])
def test_quiet_leaves_the_result_alone(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "train_batch_size" in out


def test_errors_show_in_quiet_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-q", "plan", "run.yaml", "--gpu", "a1000"]) == 2
    assert capsys.readouterr().err.startswith("Error: --gpu: unknown device")


@pytest.mark.parametrize("argv", [["-q", "-v", "plan", "x"], ["-q", "plan", "-v", "x"], ["plan", "-qv", "x"]])
def test_both_exclude_each_other(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "--quiet and --verbose exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "level"), [("-q", "-1"), ("-v", "1"), ("--", "")])
def test_the_ranks_inherit_it_and_a_command_keeps_its_own_flags(
    tmp_path: Path, flag: str, level: str
) -> None:
    command = ["bash", "-c", f'echo "[${VARIABLE}]" "$@"', "x", "-q"]
    options = [] if flag == "--" else [flag]
    argv = ["launch", "--num-gpus-per-node", "1", "--run-dir", "r", *options, "--", *command]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *argv], env={**os.environ, VARIABLE: ""},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[{level}] -q\n"
    assert ("run directory" in done.stderr) == (flag != "-q")


def test_all_talk_of_the_commands_goes_one_way() -> None:
    folder = Path(package.__file__).parent / "cli"
    speakers = [
        file.name for file in folder.glob("*.py") if re.search(r"err=True|\btell\(", file.read_text())
    ]
    assert speakers == ["talk.py"]
