"""What a run directory records, and going on from it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.hostfile import parse_hostfile
from dslaunch.core.plan import LaunchPlan, OptimizerPlan, OutputPlan, RunPlan
from dslaunch.core.topology import Host, Topology, local_topology
from dslaunch.launch.record import (
    CommandPlan,
    hold_run_dir,
    load_recorded_plan,
    move_plan,
    render_run_files,
    write_run_files,
)
from dslaunch.launch.resume import resolve_resumed
from dslaunch.launch.script import render_launch_script
from tests.launch.plans import run_plan

HOSTILE = ("a b", "it's", "$HOME", "`id`", "two\nlines", "\udcff", "-x", "", "é")


def command_plan(run_dir: Path, *argv: str) -> CommandPlan:
    launch = LaunchPlan(
        argv=argv, topology=local_topology(1), run_dir=str(run_dir), cwd="/", env={"A": "b\nc"}
    )
    return CommandPlan(name="x", launch=launch)


def test_a_command_plan_round_trip(tmp_path: Path) -> None:
    plan = command_plan(tmp_path, *HOSTILE)
    write_run_files(render_run_files(plan, "#!/bin/sh\n"))
    assert load_recorded_plan(tmp_path / "plan.json") == plan
    assert (tmp_path / "hostfile").read_text() == "localhost slots=1\n"
    assert not (tmp_path / "ds_config.json").exists()
    assert stat.S_IMODE((tmp_path / "launch.sh").stat().st_mode) & 0o100


def test_a_run_plan_round_trip(tmp_path: Path) -> None:
    plan = run_plan(tmp_path)
    write_run_files(render_run_files(plan, "#!/bin/sh\n"))
    assert load_recorded_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "ds_config.json").read_text()) == plan.ds_config


@pytest.mark.parametrize("text", [None, "no json", "[]", '{"kind": "command", "schema_version": 99}'])
def test_what_is_no_plan_is_said(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        load_recorded_plan(path)


def test_moving_a_plan_moves_its_own_path_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    plan = run_plan(old, argv=("python", "--plan", f"{old}/plan.json", f"--note={old}/plan.json"))
    moved = move_plan(plan, new)
    assert moved.launch.argv == ("python", "--plan", f"{new}/plan.json", f"--note={old}/plan.json")
    assert moved.launch.run_dir == str(new)
    assert move_plan(moved, old) == plan


def test_the_script_parses_and_holds_no_secret(tmp_path: Path) -> None:
    plan = command_plan(tmp_path, *HOSTILE, "); rm -rf / #", "\n rm -rf /")
    launch = dataclasses.replace(plan.launch, cwd="/tmp/it's $HOME\n", secret_env=("HF_TOKEN", "odd.name"))
    text = render_launch_script(dataclasses.replace(plan, launch=launch), python="/opt/my python/bin/python")
    checked = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    code = [line for line in text.splitlines() if not line.startswith("#")]
    assert code == [
        "set -eu",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)',
        ': "${HF_TOKEN?export HF_TOKEN first; its value is not recorded}"',
        'exec \'/opt/my python/bin/python\' -m dslaunch launch --plan "$here/plan.json" "$@"',
    ]


def test_resuming_takes_the_new_launch_and_output(tmp_path: Path) -> None:
    recorded = run_plan(tmp_path)
    asked = dataclasses.replace(
        recorded,
        output=OutputPlan(save_steps=5),
        launch=dataclasses.replace(recorded.launch, env={"NCCL_DEBUG": "INFO"}),
    )
    resumed = resolve_resumed(recorded, asked)
    assert resumed == asked


def test_resuming_another_training_shows_what_differs(tmp_path: Path) -> None:
    recorded = run_plan(tmp_path)
    asked = dataclasses.replace(
        recorded,
        seed=2,
        optimizer=OptimizerPlan(type="AdamW", lr=3e-4, params={"lr": 3e-4, "betas": [0.9, 0.999]}),
        ds_config={"train_batch_size": 8, "optimizer": {"params": {"lr": 3e-4}}},
    )
    with pytest.raises(ConfigError) as caught:
        resolve_resumed(recorded, asked)
    assert caught.value.message.splitlines()[1:] == [
        "  seed: recorded 1, now 2",
        "  optimizer.lr: recorded 0.0001, now 0.0003",
        "  optimizer.params.lr: recorded 0.0001, now 0.0003",
    ]
    assert caught.value.exit_code == 2


def test_a_changed_deepspeed_override_alone_is_shown(tmp_path: Path) -> None:
    recorded = run_plan(tmp_path)
    asked: RunPlan = dataclasses.replace(
        recorded, ds_config={**recorded.ds_config, "wall_clock_breakdown": True}
    )
    with pytest.raises(ConfigError, match=r"ds_config\.wall_clock_breakdown: recorded null, now true"):
        resolve_resumed(recorded, asked)


def test_a_run_directory_in_use_is_not_used_twice(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dslaunch.launch.record import hold_run_dir\n"
        "from dslaunch.core.errors import ConfigError\n"
        "try:\n    with hold_run_dir(Path(sys.argv[1])): pass\n"
        "except ConfigError as error: print(error.message); sys.exit(error.exit_code)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with hold_run_dir(tmp_path):
        second = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2, second.stderr
    assert f"still going on (process {os.getpid()} on " in second.stdout
    assert subprocess.run(argv, timeout=60).returncode == 0


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with hold_run_dir(tmp_path) as fd:
        assert fd is None
    assert f"{tmp_path} is on a file system without locks" in capsys.readouterr().err


def test_every_slot_can_be_recorded(tmp_path: Path) -> None:
    plan = command_plan(tmp_path, "true")
    topology = Topology(hosts=(Host(name="localhost", slots=("3",)),))
    plan = dataclasses.replace(plan, launch=dataclasses.replace(plan.launch, topology=topology))
    write_run_files(render_run_files(plan, "#!/bin/sh\n"))
    text = (tmp_path / "hostfile").read_text()
    assert parse_hostfile(text, "hostfile") == topology.hosts


def test_what_cannot_be_rendered_is_found_before_anything_is_written(tmp_path: Path) -> None:
    plan = dataclasses.replace(run_plan(tmp_path), ds_config={"train_batch_size": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        render_run_files(plan, "")
    assert list(tmp_path.iterdir()) == []
