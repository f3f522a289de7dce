"""From a plan to ranks that have ended: what every verb that starts a run file or a command goes through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, BinaryIO

from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from dslaunch.cli.launch_request import LaunchRequest
    from dslaunch.core.events import JsonlWriter
    from dslaunch.launch.record import RecordedPlan, RunFile
    from dslaunch.launch.verdict import Outcome


def check_working_directory() -> None:
    """Raises EnvironmentNotReady where the ranks could not be started in it."""
    from dslaunch.core.errors import EnvironmentNotReady

    try:
        os.getcwd()
    except OSError as error:
        raise EnvironmentNotReady(
            f"the current directory is gone or cannot be entered: {error.strerror}",
            hint="cd to one that exists",
        ) from None


def check_start(plan: RecordedPlan, request: LaunchRequest, *, dry_run: bool = False) -> None:
    """All that can be known before a start, and what it takes, said. Writes nothing.

    Raises ConfigError or EnvironmentNotReady.
    """
    from dslaunch.cli.launch_request import check_ready_to_run

    check_ready_to_run(plan, request, dry_run=dry_run)
    _render(plan)  # what cannot be written must be found while there is no run directory
    _say_what_it_takes(plan)


def run(plan: RecordedPlan, request: LaunchRequest, out: BinaryIO) -> tuple[RecordedPlan, Outcome]:
    """Start the ranks and stay until all have ended; ``out`` gets what rank 0 writes to stdout.

    The plan that is given back has the run directory that it got.
    """
    import sys

    from dslaunch.cli.host_check import say_what_was_planned
    from dslaunch.cli.launch_request import claim_run_dir, rank_plan
    from dslaunch.core.plan import RunPlan
    from dslaunch.launch.restarts import supervise_with_restarts
    from dslaunch.launch.signals import SignalInbox

    # From the run directory on, a Ctrl-C is an end of the launch that is recorded there.
    with SignalInbox(watches_hosts=plan.launch.via != "local") as signals:
        plan = claim_run_dir(plan, request)
        with _recorded(plan, resume=request.resume) as (events, keep_fds), _tidy(plan, request):
            _announce(plan)
            _say_what_is_built(plan)
            outcome = supervise_with_restarts(
                rank_plan(plan, request), events=events, out=out, err=sys.stderr.buffer,
                keep_fds=keep_fds, signals=signals, own_worker=isinstance(plan, RunPlan),
            )  # fmt: skip
    if outcome.exit_code == 0 and isinstance(plan, RunPlan):
        _say_what_is_next(plan)
    elif isinstance(plan, RunPlan):
        say_what_was_planned(plan, outcome.exit_code)
    return plan, outcome


@contextmanager
def _tidy(plan: RecordedPlan, request: LaunchRequest) -> Iterator[None]:
    """A directory that nobody named does not stay where not one rank could be started."""
    from pathlib import Path

    from dslaunch.cli.launch_request import names_run_dir
    from dslaunch.core.errors import DslaunchError
    from dslaunch.launch.claim import remove_failed_start

    try:
        yield
    except DslaunchError:
        keep = request.resume or names_run_dir(plan, request)
        if not keep and remove_failed_start(Path(plan.launch.run_dir)):
            _talk(f"no rank was started; removed {plan.launch.run_dir}")
        raise


def _say_what_is_next(plan: RecordedPlan) -> None:
    from pathlib import Path

    from dslaunch.core.run_dir import RunDir

    if RunDir(Path(plan.launch.run_dir)).checkpoint_steps():
        _talk(f"next: dslaunch export {_quoted(plan.launch.run_dir)} -o DIR")


def _render(plan: RecordedPlan) -> tuple[RunFile, ...]:
    from dslaunch.launch.record import render_run_files
    from dslaunch.launch.script import render_launch_script

    return render_run_files(plan, render_launch_script(plan))


@contextmanager
def _recorded(plan: RecordedPlan, *, resume: bool) -> Iterator[tuple[JsonlWriter, tuple[int, ...]]]:
    """The run directory, with the plan in it, ours alone while this lasts: its events.jsonl, its lock."""
    from pathlib import Path

    from dslaunch.core.errors import EnvironmentNotReady
    from dslaunch.core.events import JsonlWriter
    from dslaunch.core.run_dir import RunDir
    from dslaunch.launch.claim import clear_failed_start
    from dslaunch.launch.record import hold_run_dir, write_run_files

    run_dir = RunDir(Path(plan.launch.run_dir))
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(hold_run_dir(run_dir.path))
            if not resume and clear_failed_start(run_dir.path):
                _talk("the start before this one did no step; its files are replaced")
            write_run_files(_render(plan))
            events = JsonlWriter(run_dir.events)
        except OSError as error:
            raise EnvironmentNotReady(
                f"cannot write the run directory {run_dir.path}: {error.strerror}; nothing was started",
                hint="free space there, or give another --run-dir",
            ) from error
        stack.callback(events.close)
        yield events, () if lock is None else (lock,)


def _announce(plan: RecordedPlan) -> None:
    launch = plan.launch
    world_size = launch.topology.world_size
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    hosts = ", ".join(host.name for host in launch.topology.hosts[:4])
    if (more := launch.topology.num_nodes - 4) > 0:
        hosts += f" and {more} more hosts"
    way = "" if launch.via == "local" else f" by {launch.via}"
    _talk(f"run directory {launch.run_dir}")
    _talk(f"starting {ranks} on {hosts}{way}; each writes to logs/rank-N.log there")


def _say_what_is_built(plan: RecordedPlan) -> None:
    """Before a minute of silence in which DeepSpeed compiles; our own worker says so itself."""
    from dslaunch.core.plan import RunPlan
    from dslaunch.launch.jit_cache import find_op_to_build
    from dslaunch.launch.text import utf8_environ

    if not isinstance(plan, RunPlan) and (folder := find_op_to_build(plan.launch, utf8_environ())):
        _talk(f"note: DeepSpeed will first build its communication op in {folder} (once, about a minute)")


def _say_what_it_takes(plan: RecordedPlan) -> None:
    """The size of checkpoints and export, with a warning where they will not fit."""
    from dslaunch.cli.disk_space import disk_line, disk_of_run, disk_warning
    from dslaunch.core.plan import RunPlan

    disk = disk_of_run(plan) if isinstance(plan, RunPlan) else None
    if disk is None:
        return
    _talk(disk_line(disk))
    if warning := disk_warning(disk):
        _talk(f"note: {warning}")


def _talk(text: str) -> None:
    from dslaunch.launch.text import printable

    talk(printable(text))


def _quoted(word: str) -> str:
    from dslaunch.core.command import quote

    return quote(word)
