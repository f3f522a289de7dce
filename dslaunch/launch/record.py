"""What a run directory records of a launch: the plan, its files, and that it is in use."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dslaunch.core import atomic
from dslaunch.core.errors import ConfigError
from dslaunch.core.file_lock import LocksUnsupported, LockTimeout, exclusive
from dslaunch.core.hostfile import render_hostfile
from dslaunch.core.plan import SCHEMA_VERSION, LaunchPlan, RunPlan, from_json, load_run_plan, to_json
from dslaunch.core.run_dir import RunDir
from dslaunch.core.tell import tell


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


@dataclass(frozen=True)
class RunFile:
    """A file of a run directory that is still to be written. ``is_private``: nobody else may read it."""

    path: Path
    text: str
    is_program: bool = False
    is_private: bool = False


def render_run_files(plan: RecordedPlan, launch_script: str) -> tuple[RunFile, ...]:
    """plan.json, hostfile, launch.sh and, for a training run, ds_config.json. Writes nothing.

    What cannot be rendered is found here, before there is a run directory.
    """
    run_dir = RunDir(Path(plan.launch.run_dir))
    files = [RunFile(run_dir.plan, _json_text(to_json(plan)))]
    if isinstance(plan, RunPlan) and plan.engine == "deepspeed":
        files.append(RunFile(run_dir.ds_config, _json_text(plan.ds_config)))
    files.append(RunFile(run_dir.hostfile, render_hostfile(plan.launch.topology.hosts)))
    files.append(RunFile(run_dir.launch_script, launch_script, is_program=True))
    return tuple(files)


def _json_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def write_run_files(files: Iterable[RunFile]) -> None:
    """Write what :func:`render_run_files` gave, each file whole. Raises OSError."""
    for file in files:
        mode = 0o600 if file.is_private else 0o777 & ~atomic.umask() if file.is_program else None
        atomic.write_text(file.path, file.text, mode=mode)


def in_use(run_dir: Path, holder: str) -> ConfigError:
    """The error for a run directory in which a launch is going on; ``holder`` says whose."""
    return ConfigError(
        f"the run in {run_dir} is still going on ({holder}); nothing was started",
        hint="wait for it, stop it, or use another --run-dir",
    )


@contextmanager
def hold_run_dir(run_dir: Path) -> Iterator[int | None]:
    """Keep other launches out of a run directory. Gives the lock's descriptor, for the agents to inherit.

    The kernel lets go when this process and all that inherited the descriptor have
    ended, however they do. On a file system without locks a line on stderr says
    so, and None is given. Raises ConfigError where another launch is in it.
    """
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(exclusive(run_dir / ".lock", timeout_s=0))
        except LockTimeout as error:
            raise in_use(run_dir, error.holder) from None
        except LocksUnsupported as error:
            tell(
                f"dslaunch: {run_dir} is on a file system without locks ({error.strerror}): "
                "see to it yourself that no second launch uses it"
            )
            yield None
            return
        yield fd
