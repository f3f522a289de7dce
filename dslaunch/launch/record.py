"""What a run directory records of a launch: the plan, its files, and that it is in use."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dslaunch.core import atomic
from dslaunch.core.errors import ConfigError
from dslaunch.core.hostfile import render_hostfile
from dslaunch.core.plan import SCHEMA_VERSION, LaunchPlan, RunPlan, from_json, load_run_plan, to_json
from dslaunch.core.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class CommandPlan:
    """A launch of somebody's own command: what plan.json holds when there is no run file."""

    name: str
    launch: LaunchPlan
    kind: Literal["command"] = "command"
    schema_version: int = SCHEMA_VERSION


RecordedPlan = RunPlan | CommandPlan


def load_recorded_plan(path: Path) -> RecordedPlan:
    """Read a plan.json of either kind. Raises ConfigError where it is missing or not of this version."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return load_run_plan(path)  # which says what is wrong
    if isinstance(value, dict) and value.get("kind") == "command":
        if value.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: schema_version is {value.get('schema_version')!r}, "
                f"this dslaunch reads {SCHEMA_VERSION}"
            )
        return from_json(CommandPlan, value, str(path))
    return load_run_plan(path)


def move_plan(plan: RecordedPlan, run_dir: Path) -> RecordedPlan:
    """The same plan for another run directory: the words of argv that name its plan.json follow."""
    old, new = RunDir(Path(plan.launch.run_dir)), RunDir(run_dir)
    argv = tuple(str(new.plan) if word == str(old.plan) else word for word in plan.launch.argv)
    launch = dataclasses.replace(plan.launch, run_dir=str(run_dir), argv=argv)
    return dataclasses.replace(plan, launch=launch)


def write_run_files(plan: RecordedPlan, launch_script: str) -> None:
    """Write plan.json, hostfile, launch.sh and, for a training run, ds_config.json."""
    run_dir = RunDir(Path(plan.launch.run_dir))
    atomic.write_json(run_dir.plan, to_json(plan))
    if isinstance(plan, RunPlan):
        atomic.write_json(run_dir.ds_config, plan.ds_config)
    atomic.write_text(run_dir.hostfile, render_hostfile(plan.launch.topology.hosts))
    atomic.write_text(run_dir.launch_script, launch_script, mode=0o777 & ~atomic.umask())


class RunLock:
    """Held while a launch uses a run directory. The kernel frees it however this process ends."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError where another launch holds it."""
        path = run_dir / ".lock"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 256, 0).decode("utf-8", "replace").strip()
            os.close(self._fd)
            raise ConfigError(
                f"the run in {run_dir} is still going on ({holder}); nothing was started",
                hint="wait for it, stop it, or use another --run-dir",
            ) from None
        except OSError:
            return  # a file system without locks
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._fd)
