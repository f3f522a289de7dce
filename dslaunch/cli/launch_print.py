"""``dslaunch launch --print-as``: the command for another launcher, with the files that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.cli.options import show_notes
from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from dslaunch.cli.launch_request import LaunchRequest
    from dslaunch.launch.print_as import Printed
    from dslaunch.launch.record import RecordedPlan


def print_as(
    plan: RecordedPlan, request: LaunchRequest, launcher: str, *, dry_run: bool, as_json: bool
) -> None:
    """Write the run directory and print what to type for ``launcher``; with ``dry_run`` only print.

    Raises ConfigError where the plan makes no sense, or the run directory may not be used.
    """
    from dslaunch.cli.launch_request import check_run_dir_of, claim_run_dir
    from dslaunch.core.errors import ConfigError
    from dslaunch.launch import local
    from dslaunch.launch.text import printable

    if plan.launch.container is not None:
        raise ConfigError(
            f"{launcher} knows nothing of containers; nothing was written",
            hint="leave launch.container (--container) out, and type what is printed inside of the container",
        )
    if plan.launch.via == "local":
        local.check_hosts(plan.launch.topology)
    check_run_dir_of(plan, request)
    printed = _printed(plan, request, launcher)  # what is wrong with it is found with nothing written
    if not dry_run:
        plan = claim_run_dir(plan, request)
        printed = _printed(plan, request, launcher)
        _write(plan, printed, resume=request.resume)
        talk(printable(f"run directory {plan.launch.run_dir}; nothing was started"))
    show_notes(tuple(map(printable, printed.notes)))
    if as_json:
        click.echo(json.dumps(_as_json(plan, launcher, printed)))
        return
    for host, command in printed.commands:
        click.echo(command.shell_text() + (f"  # {host}" if len(printed.commands) > 1 else ""))


def _printed(plan: RecordedPlan, request: LaunchRequest, launcher: str) -> Printed:
    from dslaunch.cli.launch_request import rank_plan
    from dslaunch.launch.orders import check_launch
    from dslaunch.launch.print_as import PRINTERS, with_local_rank
    from dslaunch.launch.text import utf8_environ

    launch, environ = with_local_rank(rank_plan(plan, request)), utf8_environ()
    # Where it is typed later a secret may be set that is not set here.
    check_launch(launch, {**dict.fromkeys(launch.secret_env, ""), **environ})
    return PRINTERS[launcher](launch, environ)


def _write(plan: RecordedPlan, printed: Printed, *, resume: bool) -> None:
    from dslaunch.core.errors import EnvironmentNotReady
    from dslaunch.launch.claim import clear_failed_start
    from dslaunch.launch.record import hold_run_dir, render_run_files, write_run_files
    from dslaunch.launch.script import render_launch_script

    run_dir = Path(plan.launch.run_dir)
    try:
        with hold_run_dir(run_dir):
            if not resume:
                clear_failed_start(run_dir)
            write_run_files((*render_run_files(plan, render_launch_script(plan)), *printed.files))
    except OSError as error:
        raise EnvironmentNotReady(
            f"cannot write the run directory {run_dir}: {error.strerror}; nothing was printed",
            hint="free space there, or give another --run-dir",
        ) from error


def _as_json(plan: RecordedPlan, launcher: str, printed: Printed) -> dict[str, object]:
    return {
        "schema_version": 1,
        "print_as": launcher,
        "run_dir": plan.launch.run_dir,
        "commands": [
            {"host": host, "argv": list(command.argv), "env": dict(command.env), "cwd": command.cwd}
            for host, command in printed.commands
        ],
        "notes": list(printed.notes),
    }
