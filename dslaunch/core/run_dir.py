"""The run directory: every file that a run needs or leaves, named once.

plan.json ds_config.json hostfile launch.sh  deepspeed-hostfile deepspeed-env
logs/rank-N.log  metrics.jsonl  events.jsonl  tensorboard/  checkpoints/step-N/  checkpoints/latest
diagnosis.json  nonfinite/step-N/  replays/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from dslaunch.core.errors import ConfigError, EnvironmentNotReady


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory. Nothing is created by asking for a path."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def ds_config(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def hostfile(self) -> Path:
        return self.path / "hostfile"

    @property
    def deepspeed_hostfile(self) -> Path:
        """For the ``deepspeed`` command, as is the next: ``launch --print-as deepspeed`` writes them."""
        return self.path / "deepspeed-hostfile"

    @property
    def deepspeed_env(self) -> Path:
        return self.path / "deepspeed-env"

    @property
    def launch_script(self) -> Path:
        return self.path / "launch.sh"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def diagnosis(self) -> Path:
        return self.path / "diagnosis.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def nonfinite(self) -> Path:
        """What steps were given that ended the run with nan or inf, in ``step-N`` each."""
        return self.path / "nonfinite"

    def kept_steps(self) -> tuple[int, ...]:
        """The steps in it that are whole, rising."""
        steps = checkpoint_steps(self.nonfinite)
        return tuple(s for s in steps if (self.nonfinite / f"step-{s}" / "window.json").is_file())

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        return self.logs / rank_log_name(rank)

    def checkpoint_steps(self) -> tuple[int, ...]:
        """The steps of its checkpoints, rising."""
        return checkpoint_steps(self.checkpoints)

    def create(self, *, resume: bool, reuse: bool = False) -> None:
        """Make the directory. One that holds anything needs ``resume``, or ``reuse``: the caller has looked.

        Raises ConfigError where it exists and is not to be resumed, or is to be
        resumed and does not exist; EnvironmentNotReady where it cannot be written.
        """
        if resume and not self.plan.exists():
            raise ConfigError(
                f"{self.path} holds no run to resume: there is no plan.json in it",
                hint="give the --run-dir of the run to go on with, or leave --resume out",
            )
        if not (resume or reuse) and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"run directory {self.path} exists already; nothing was started",
                hint="add --resume to go on with it, or give another --run-dir",
            )
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise EnvironmentNotReady(
                f"cannot write the run directory {self.path}: {error.strerror}",
                hint="give a --run-dir on a file system you can write to",
            ) from error


def default_run_dir(name: str, *, runs_root: Path, now: datetime) -> Path:
    """``<runs_root>/<name>-<UTC time>``; ``now`` must be in UTC."""
    assert now.tzinfo is not None and now.utcoffset() == timezone.utc.utcoffset(now)
    return runs_root / f"{name}-{now.strftime('%Y%m%dT%H%M%SZ')}"


def runs_root(environ: dict[str, str] | os._Environ[str], cwd: Path) -> Path:
    """``$DSLAUNCH_RUNS``, else ``runs`` in ``cwd``."""
    return Path(environ["DSLAUNCH_RUNS"]) if environ.get("DSLAUNCH_RUNS") else cwd / "runs"


def cache_dir(environ: dict[str, str] | os._Environ[str]) -> Path:
    """``$DSLAUNCH_CACHE``, else ``dslaunch`` in the XDG cache directory."""
    if environ.get("DSLAUNCH_CACHE"):
        return Path(environ["DSLAUNCH_CACHE"])
    xdg = environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "dslaunch"


def rank_log_name(rank: int) -> str:
    """In ``logs``."""
    return f"rank-{rank}.log"


def checkpoint_steps(root: Path) -> tuple[int, ...]:
    """The steps of the checkpoint directories in ``root``, rising; none where it is not there."""
    if not root.is_dir():
        return ()
    found = (checkpoint_step(path) for path in root.iterdir() if path.is_dir())
    return tuple(sorted(step for step in found if step is not None))


def checkpoint_step(path: Path) -> int | None:
    """The step of a checkpoint directory named ``step-N``; None for any other name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else None
