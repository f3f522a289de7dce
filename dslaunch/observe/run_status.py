"""What became of a run, read from its directory alone: nobody is asked, nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dslaunch.core import events
from dslaunch.core.checkpoint_manifest import candidates, find_fault, read_manifest
from dslaunch.core.command import quote
from dslaunch.core.errors import (
    EXIT_CANCELLED_INT,
    EXIT_CANCELLED_TERM,
    EXIT_OK,
    EXIT_STOPPED_AT_CHECKPOINT,
    ConfigError,
)
from dslaunch.core.events import parse_number, to_jsonable
from dslaunch.core.file_lock import is_held
from dslaunch.core.missing_path import not_found
from dslaunch.core.run_dir import RunDir, checkpoint_step

State = Literal[
    "not started", "starting", "running", "done", "stopped", "cancelled", "failed", "gone", "unknown"
]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a training run is: the last line of metrics.jsonl, and what it says of the time to go."""

    step: int
    total_steps: int | None
    loss: float | None
    lr: float | None
    loss_scale: float | None
    skipped_steps: int
    tokens_per_s: float | None
    time: str
    seconds_left: float | None
    eval_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """``gone``: the launcher ended without a word, most often by KILL. ``stopped``: at a checkpoint.
    ``unknown``: another launcher started our trainer, which has not come to its end.

    ``started`` is of the last launch, ``restarted`` of its last restart.
    """

    run_dir: str
    name: str
    state: State
    exit_code: int | None
    world_size: int
    hosts: tuple[str, ...]
    hosts_up: int
    ranks_up: int
    started: str | None
    ended: str | None
    restarts: int
    restarted: str | None
    trouble: tuple[str, ...]  # what went wrong, in words, first things first
    progress: Progress | None
    checkpoints: tuple[int, ...]
    damaged: Mapping[int, str] = field(default_factory=dict)  # of those newer than the newest whole one: why
    holder: str | None = None
    failed_rank: int | None = None
    logs_elsewhere: Mapping[int, str] = field(
        default_factory=dict
    )  # rank -> host that has its log for itself

    def to_json(self) -> dict[str, Any]:
        """The object that ``status --json`` prints."""
        values = {key: value for key, value in vars(self).items() if key != "progress"}
        progress = None if self.progress is None else vars(self.progress)
        report: dict[str, Any] = to_jsonable({"schema_version": 1, **values, "progress": progress})
        return report


# What is read of an event of each kind, and of what type; a line without it is left out.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "launch_start": ("time",), "launch_end": ("time", "exit_code"),
    "host_up": ("host",), "host_lost": ("host", "how"),
    "ranks_start": (), "rank_start": ("rank",), "rank_exit": ("rank",),
    "first_failure": ("rank", "host", "how"), "rank_error": ("rank", "message"),
    "train_start": ("time",), "resumed": ("time",), "train_end": ("time",), "train_stopped": ("time",),
    "train": ("time", "step"), "eval": (),
}  # fmt: skip
_NUMBERS = ("exit_code", "rank", "step")
_TRAINERS_ENDS = {"train_end": EXIT_OK, "train_stopped": EXIT_STOPPED_AT_CHECKPOINT}


@dataclass
class _Story:
    """The last start of a run as its events tell it; ``started`` is when its launch was."""

    started: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    ranks_started: bool = False
    by_another: bool = False  # launcher: only the trainer tells how it goes
    hosts_up: set[str] = field(default_factory=set)
    ranks_up: set[int] = field(default_factory=set)
    restarts: int = 0  # of this launch
    restarted: str | None = None
    total_steps: int | None = None
    trouble: list[str] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # what each rank itself said
    failed_rank: int | None = None
    unshared_hosts: frozenset[str] = frozenset()
    logs_elsewhere: dict[int, str] = field(default_factory=dict)
    before: tuple[int | None, tuple[str, ...]] = (None, ())  # failed rank and trouble of the start before

    def add(self, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "launch_start":
            self.__init__(**self._of_launch(event))  # type: ignore[misc]
        elif kind == "host_up":
            self.hosts_up.add(event["host"])
        elif kind == "ranks_start":
            hosts = event.get("unshared_hosts")
            self.unshared_hosts = frozenset(map(str, hosts if isinstance(hosts, list) else ()))
        elif kind == "rank_start":
            self.ranks_started = True
            if (host := str(event.get("host"))) in self.unshared_hosts:
                self.logs_elsewhere[event["rank"]] = host
            self.ranks_up.add(event["rank"])
        elif kind == "rank_exit":
            self.ranks_up.discard(event["rank"])
        elif kind in ("train_start", "resumed"):
            if self.started is None or self.ended is not None:
                self.__init__(started=event["time"], by_another=True)  # type: ignore[misc]
            total = event.get("total_steps")
            self.total_steps = total if isinstance(total, int) else None
        elif kind in _TRAINERS_ENDS and self.by_another:
            self.ended, self.exit_code = event["time"], _TRAINERS_ENDS[kind]
        elif kind == "first_failure":
            self.failed_rank = event["rank"]
            self.trouble = [f"rank {event['rank']} on {event['host']} failed first: it {event['how']}"]
            if (said := self.errors.get(event["rank"])) is not None:
                self.trouble.append(said)
        elif kind == "rank_error":
            self.errors[event["rank"]] = event["message"]
            if self.by_another and self.failed_rank is None:
                self.failed_rank = event["rank"]
                self.trouble.append(f"rank {event['rank']}: {event['message']}")
        elif kind == "host_lost":
            self.trouble.append(f"host {event['host']} was lost: {event['how']}")
        elif kind == "launch_end":
            self.ended, self.exit_code = event["time"], event["exit_code"]
            self.trouble += map(str, event.get("places", ()))
            if event.get("refused") and self.restarts:  # what failed is what made a restart necessary
                self.failed_rank = self.before[0]
                self.trouble = [*self.before[1], f"restart {self.restarts}: {event['refused']}"]
            elif event.get("refused"):
                self.trouble.append(str(event["refused"]))

    def _of_launch(self, event: dict[str, Any]) -> dict[str, Any]:
        """What a start that begins so has of the one before."""
        restart = event.get("restart")
        if self.started is None or not isinstance(restart, int) or restart < 1:
            return {"started": event["time"]}
        before = (self.failed_rank, tuple(self.trouble))
        return {"started": self.started, "restarts": restart, "restarted": event["time"], "before": before}


def load_status(path: Path) -> RunStatus:
    """The status of the run in ``path``. Raises ConfigError where there is no run."""
    run_dir = RunDir(path)
    plan = _load_plan(run_dir)
    story = _Story()
    for event in read_lines(run_dir.events):
        if _fits(event):
            story.add(event)
    holder = _holder(path / ".lock")
    hosts = _hosts(plan, run_dir.plan)
    progress = _progress(read_lines(run_dir.metrics), story.total_steps)
    return RunStatus(
        run_dir=str(path.absolute()),
        name=str(plan.get("name", path.name)),
        state=_state(story, is_alive=holder is not None),
        exit_code=story.exit_code,
        world_size=sum(hosts.values()),
        hosts=tuple(hosts),
        hosts_up=len(story.hosts_up),
        ranks_up=len(story.ranks_up),
        started=story.started,
        ended=story.ended,
        restarts=story.restarts,
        restarted=story.restarted,
        trouble=tuple(story.trouble),
        progress=progress,
        checkpoints=run_dir.checkpoint_steps(),
        damaged=_damaged(run_dir.checkpoints),
        holder=holder,
        failed_rank=story.failed_rank,
        logs_elsewhere=story.logs_elsewhere,
    )


def is_over(path: Path) -> bool:
    """Whether no launch of the run in ``path`` goes on: by its lock, or its events where there are none."""
    try:
        return not is_held(path / ".lock")
    except OSError:
        kinds = ("launch_start", "launch_end")
        last = [event["kind"] for event in read_lines(RunDir(path).events) if event.get("kind") in kinds][-1:]
        return last != ["launch_start"]


def _damaged(root: Path) -> dict[int, str]:
    """Checkpoints that a resumed run would pass over, with the reason; contents are not read, only sizes."""
    found: dict[int, str] = {}
    for path in candidates(root):
        try:
            fault = find_fault(path, read_manifest(path), ())
        except ConfigError as error:
            fault = error.message
        step = checkpoint_step(path)
        if fault is None or step is None:
            break
        found[step] = fault
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """As of ``core.events``, and none where there is no file. Raises ConfigError where it cannot be read."""
    try:
        yield from events.read_lines(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _fits(event: dict[str, Any]) -> bool:
    """Whether a line is of a kind that is read here, and has all that is read of it."""
    kind = event.get("kind")
    if not isinstance(kind, str) or kind not in _NEEDS:
        return False
    values = {name: event.get(name) for name in _NEEDS[kind]}
    if not all(isinstance(value, int if name in _NUMBERS else str) for name, value in values.items()):
        return False
    return "time" not in values or _is_time(values["time"])


def _is_time(text: Any) -> bool:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).tzinfo is not None
    except ValueError:
        return False


def _load_plan(run_dir: RunDir) -> dict[str, Any]:
    if not run_dir.path.is_dir():
        raise not_found("run directory", run_dir.path, wanted=os.DirEntry.is_dir)
    try:
        plan = json.loads(run_dir.plan.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = _other_directory(run_dir.path)
        raise ConfigError(f"{run_dir.path} holds no run: there is no plan.json in it", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"cannot read {run_dir.plan}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{run_dir.plan} is not JSON") from None
    if not isinstance(plan, dict):
        raise ConfigError(f"{run_dir.plan} is no plan")
    return plan


def _other_directory(path: Path) -> str:
    """What a directory without a plan is, where that can be seen, and what to do with it."""
    if runs := sorted(str(plan.parent) for plan in path.glob("*/plan.json")):
        more = f"{len(runs)} runs, among them " if len(runs) > 8 else ""
        return f"it holds {more}{', '.join(runs[-8:])}"
    if any((path / name).exists() for name in ("events.jsonl", "diagnosis.json")):
        return f"a loop of one's own wrote it: `dslaunch diagnose {quote(str(path))}` reads it"
    return "give the directory that `dslaunch launch` named, which holds plan.json"


def _hosts(plan: dict[str, Any], path: Path) -> dict[str, int]:
    """The hosts of a plan, and how many ranks each has."""
    try:
        hosts = plan.get("launch", {}).get("topology", {}).get("hosts", ())
        return {str(host["name"]): len(host["slots"]) for host in hosts}
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(f"{path}: launch.topology is not that of a plan") from None


def _holder(lock: Path) -> str | None:
    """Who runs the launch, where one runs; None also where the file system cannot tell."""
    try:
        if not is_held(lock):
            return None
        return lock.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return None


def _state(story: _Story, *, is_alive: bool) -> State:
    if story.started is None:
        return "starting" if is_alive else "not started"
    if is_alive:
        return "running" if story.ranks_started and story.ended is None else "starting"
    if story.exit_code is None:
        return "unknown" if story.by_another else "gone"
    if story.exit_code == EXIT_OK:
        return "done"
    if story.exit_code == EXIT_STOPPED_AT_CHECKPOINT:
        return "stopped"
    cancelled = story.exit_code in (EXIT_CANCELLED_INT, EXIT_CANCELLED_TERM, 129, 142) and not story.trouble
    return "cancelled" if cancelled else "failed"


def _progress(rows: Iterable[dict[str, Any]], total_steps: int | None) -> Progress | None:
    last: dict[str, Any] | None = None
    before = 0  # the step of the line before the last
    eval_loss = None
    skipped: set[int] = set()
    for row in filter(_fits, rows):
        if row["kind"] == "train":
            before = 0 if last is None or last["step"] >= row["step"] else last["step"]
            last = row
            if row.get("skipped"):
                skipped.add(row["step"])
        elif row["kind"] == "eval":
            eval_loss = parse_number(row.get("loss"))
    if last is None:
        return None
    step, seconds = int(last["step"]), parse_number(last.get("seconds"))
    to_go = None if total_steps is None else max(0, total_steps - step)
    left = None if to_go is None or seconds is None else to_go * seconds / max(1, step - before)
    return Progress(
        step=step,
        total_steps=total_steps,
        loss=parse_number(last.get("loss")),
        lr=parse_number(last.get("lr")),
        loss_scale=parse_number(last.get("loss_scale")),
        skipped_steps=len(skipped),
        tokens_per_s=parse_number(last.get("tokens_per_s")),
        time=str(last.get("time")),
        seconds_left=left,
        eval_loss=eval_loss,
    )
