"""May a launch use a run directory? A failed start must not stand in the way of its own retry.

A directory in which no training step was done holds nothing worth keeping, so
the next start takes it without ``--resume``. Only files that dslaunch itself
makes are ever removed, and only under the directory's lock.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dslaunch.core.errors import (
    EXIT_OK,
    EXIT_STOPPED_AT_CHECKPOINT,
    ConfigError,
    DslaunchError,
    EnvironmentNotReady,
)
from dslaunch.core.events import read_lines
from dslaunch.core.file_lock import LocksUnsupported, is_held
from dslaunch.core.run_dir import RunDir
from dslaunch.launch.record import CommandPlan, in_use, load_recorded_plan

# What a start leaves behind before its first step. Checkpoints and tracker directories are not among it.
_OWN_FILE = re.compile(
    r"\.lock|\.seen-by-all-hosts-\w+|plan\.json|ds_config\.json|hostfile|launch\.sh|deepspeed-(hostfile|env)|events\.jsonl|metrics\.jsonl"
    r"|logs/rank-\d+\.(log|traceback)|tensorboard/events\.out\.tfevents\.[^/]+"
)
_OWN_FOLDERS = ("logs", "tensorboard", "checkpoints")


def check_run_dir(path: Path, *, resume: bool) -> None:
    """Whether a launch could go into ``path``. Writes nothing.

    Raises ConfigError where it is a file, in use, holds a run (without
    ``resume``) or holds none (with it); EnvironmentNotReady where it cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"the run directory {path} is a file; nothing was started", hint="give another --run-dir"
        )
    check_writable(path)
    if resume and not RunDir(path).plan.exists():
        raise ConfigError(
            f"{path} holds no run to resume: there is no plan.json in it",
            hint="give the --run-dir of the run to go on with, or leave --resume out",
        )
    check_unused(path)
    if resume:
        return
    obstacle = find_obstacle(path)
    if obstacle is not None:
        what = "to go on with it" if RunDir(path).plan.exists() else "if a run of dslaunch is in it"
        raise ConfigError(
            f"run directory {path} exists already; nothing was started ({obstacle})",
            hint=f"add --resume {what}, or give another --run-dir",
        )


def check_unused(path: Path) -> None:
    """Raises ConfigError where a launch is going on in the run directory ``path``."""
    lock = path / ".lock"
    try:
        if is_held(lock):
            raise in_use(path, lock.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:  # no locks here, or not readable: said where the lock is taken
        pass


def find_obstacle(path: Path) -> str | None:
    """Why a new run may not take the directory ``path``; None where nothing would be lost."""
    if not path.is_dir() or not any(path.iterdir()):
        return None
    try:
        if is_held(path / ".lock"):
            return "a launch is going on in it"
    except LocksUnsupported:
        return "without file locks it cannot be told whether a launch is going on in it"
    except OSError as error:
        return f"its .lock cannot be read: {error.strerror}"
    return _find_content(path)


def clear_failed_start(path: Path) -> bool:
    """Remove what a failed start left in ``path``, whose lock the caller holds; whether there was anything.

    Raises ConfigError where it holds more than that.
    """
    obstacle = _find_content(path)
    if obstacle is not None:
        raise ConfigError(
            f"run directory {path} exists already; nothing was started ({obstacle})",
            hint="give another --run-dir",
        )
    files = [file for file in _own_files(path) if file.name != ".lock"]
    for file in files:
        file.unlink(missing_ok=True)
    return bool(files)


def remove_failed_start(path: Path) -> bool:
    """Remove a run directory in which no rank was ever started; False, and untouched, where one was."""
    if _find_content(path) is not None or any(e.get("kind") == "rank_start" for e in _events(path)):
        return False
    try:
        for file in _own_files(path):
            file.unlink(missing_ok=True)
        for name in _OWN_FOLDERS:
            if (path / name).is_dir():
                (path / name).rmdir()
        path.rmdir()
    except OSError:  # somebody else put a file there, or the disk is failing: it does no harm
        return False
    return True


def check_writable(path: Path) -> None:
    """Raises EnvironmentNotReady where the directory ``path`` can neither be written in nor made."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    why = "" if existing.is_dir() else f"{existing} is not a directory"
    if not why and not os.access(existing, os.W_OK | os.X_OK):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        why = f"{existing} is on a file system that is mounted read-only" if read_only else ""
        why = why or f"no permission to write in {existing}"
    if why:
        raise EnvironmentNotReady(
            f"cannot write the run directory {path}: {why}",
            hint="give a --run-dir on a file system you can write to",
        )


def _find_content(path: Path) -> str | None:
    """What in ``path`` would be lost; None where it has only the files of a start without a step."""
    for foreign in _foreign(path):
        return f"it holds {foreign}"
    plan_path = RunDir(path).plan
    if not plan_path.exists():
        # Without a plan beside them, files such as `hostfile` may be the user's own.
        own = next((file.name for file in _own_files(path) if file.name != ".lock"), None)
        return f"it holds {own}" if own else None
    try:
        plan = load_recorded_plan(plan_path)
    except (OSError, DslaunchError):
        return "its plan.json cannot be read"
    metrics = RunDir(path).metrics
    if metrics.exists() and metrics.stat().st_size > 0:
        return "training was done in it"
    events = list(_events(path))
    if any(event.get("exit_code") in (EXIT_OK, EXIT_STOPPED_AT_CHECKPOINT) for event in _ends(events)):
        return "a run was completed in it"
    if isinstance(plan, CommandPlan) and any(event.get("kind") == "rank_start" for event in events):
        return "a command was run in it"  # what it did, only its own files could tell
    return None


def _ends(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("kind") == "launch_end"]


def _entries(path: Path) -> Iterator[tuple[str, bool]]:
    """Paths below ``path`` and whether each is one of our own; of our folders, the files in them."""
    for entry in sorted(os.scandir(path), key=lambda item: item.name):
        if entry.name in _OWN_FOLDERS and entry.is_dir(follow_symlinks=False):
            for inner in sorted(os.scandir(entry.path), key=lambda item: item.name):
                name = f"{entry.name}/{inner.name}"
                yield name, _is_own(name, inner)
        else:
            yield entry.name, _is_own(entry.name, entry)


def _is_own(name: str, entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) and _OWN_FILE.fullmatch(name) is not None


def _own_files(path: Path) -> list[Path]:
    return [path / name for name, own in _entries(path) if own]


def _foreign(path: Path) -> Iterator[str]:
    return (name for name, own in _entries(path) if not own)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        yield from read_lines(RunDir(path).events)
