"""``dslaunch launch``: start the ranks of a run file, of a recorded plan, or of any command."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.launch_request import LaunchRequest
from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from dslaunch.core.events import JsonlWriter
    from dslaunch.core.plan import LaunchPlan
    from dslaunch.launch.record import RecordedPlan, RunFile
    from dslaunch.launch.verdict import Outcome

_COMMAND_KEY = "dslaunch.command"


class _WithCommand(click.Command):
    """Everything after a literal ``--`` is the command to run, taken as it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_COMMAND_KEY] = tuple(args[cut + 1 :])
            return super().parse_args(ctx, args[:cut])
        try:
            return super().parse_args(ctx, list(args))
        except click.UsageError as error:  # most often the command's own words
            raise _without_dashes(args, ctx) or error from None

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[RUN.yaml]", "[OPTIONS]", "[-- COMMAND ...]"]


def _without_dashes(args: list[str], ctx: click.Context) -> click.UsageError | None:
    """The error for a command that was given without ``--`` before it, where ``args`` look like one."""
    from dslaunch.core.command import shell_text

    cut = _first_word(args, ctx)
    if cut is None or not _is_program(args[cut]):
        return None
    words = shell_text(args[cut:] if not args[cut].endswith(".py") else ["python", *args[cut:]])
    # The options are not repeated: a secret may be among them.
    return click.UsageError(f"put -- before the command: dslaunch launch ... -- {words}", ctx)


def _first_word(args: list[str], ctx: click.Context) -> int | None:
    """Where the first of ``args`` stands that is neither an option nor the value of one."""
    options = [param for param in ctx.command.params if isinstance(param, click.Option)]
    with_value = {name for option in options if not option.is_flag for name in option.opts}
    for index, word in enumerate(args):
        if not word.startswith("-") and (index == 0 or args[index - 1] not in with_value):
            return index
    return None


def _is_program(word: str) -> bool:
    import shutil

    return word.endswith((".py", ".sh")) or shutil.which(word) is not None


@click.command(cls=_WithCommand, name="launch")
@click.argument("run_file", required=False, metavar="[RUN.yaml]")
@click.option("--plan", "plan_file", metavar="FILE", help="A plan.json of a run directory, not a run file.")
@options.launch_set_option
@options.cluster_options
@options.master_options
@click.option(
    "--via",
    metavar="WAY",
    help="Way to reach hosts: auto (default), local, ssh, slurm, openmpi, mpich, pdsh.",
)
@options.container_option
@options.local_rank_option
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start again up to N times after a failed rank or a lost host, from the last checkpoint.",
)
@click.option(
    "--env", multiple=True, metavar="K=V | K", help="Set K for the ranks; K alone: pass it on, unrecorded."
)
@options.run_dir_option
@options.resume_option
@click.option(
    "--print-as",
    "launcher",
    type=click.Choice(["deepspeed", "torchrun"]),
    help="Start nothing: print the command for another launcher, and write the files that it reads.",
)
@options.dry_run_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; rank 0's output on stderr.")
@click.pass_context
def command(
    ctx: click.Context, /, *, launcher: str | None, dry_run: bool, as_json: bool, **flags: object
) -> int:
    """Start ranks, here or elsewhere, and stay until all have ended; the first to fail gives the exit code.

    \b
    dslaunch launch RUN.yaml                                     train what the run file says
    dslaunch launch --num-gpus-per-node 2 -- python train.py ... run any command, once per rank
    dslaunch launch --hostfile hosts -- python train.py ...      the same on every slot of these hosts, by ssh
    dslaunch launch --plan RUN_DIR/plan.json                     run a recorded plan again
    """
    from dslaunch.cli.launch_request import check_ready_to_run, rank_plan, resolve_request

    _check_working_directory()
    request = LaunchRequest(command=ctx.meta.get(_COMMAND_KEY), **flags)  # type: ignore[arg-type]
    if request.resume and request.run_dir is not None and not _sources(request):
        request = dataclasses.replace(request, plan_file=os.path.join(request.run_dir, "plan.json"))
    _check_request(request, ctx)
    plan = resolve_request(request)
    if launcher is not None:
        from dslaunch.cli.launch_print import print_as

        print_as(plan, request, launcher, dry_run=dry_run, as_json=as_json)
        return 0
    check_ready_to_run(plan, request, dry_run=dry_run)
    _render(plan)  # what cannot be written must be found while there is no run directory
    _say_what_it_takes(plan)
    if dry_run:
        from dslaunch.cli.launch_show import show

        show(plan, rank_plan(plan, request), as_json=as_json)
        return 0
    return _run(plan, request, as_json)


def _check_working_directory() -> None:
    from dslaunch.core.errors import EnvironmentNotReady

    try:
        os.getcwd()
    except OSError as error:
        raise EnvironmentNotReady(
            f"the current directory is gone or cannot be entered: {error.strerror}",
            hint="cd to one that exists",
        ) from None


def _sources(request: LaunchRequest) -> list[str]:
    """What says what to run, in words; exactly one is needed."""
    found = []
    if request.run_file is not None:
        found.append(f"a run file ({request.run_file})")
    if request.plan_file is not None:
        found.append("--plan")
    if request.command is not None:
        found.append("a command after --")
    return found


def _check_request(request: LaunchRequest, ctx: click.Context) -> None:
    given = _sources(request)
    if not given:
        raise click.UsageError("give one of: a run file, --plan FILE, or `-- COMMAND ...`")
    if len(given) > 1:
        raise click.UsageError(f"both {' and '.join(given)} were given; leave one out")
    word = request.run_file
    if word is not None and not os.path.exists(word) and (error := _without_dashes([word], ctx)):
        raise error
    if request.local_rank_arg and request.command is None:
        raise click.UsageError("--local-rank-arg is for a command after `--`: our trainer needs none")
    devices = (request.gpu, request.inventory)
    ways = (request.via, request.container)
    hosts = (request.hostfile, request.include, request.exclude, request.num_nodes, *devices, *ways)
    if request.plan_file is not None and any(value is not None for value in hosts):
        raise click.UsageError("a recorded plan has its hosts already; leave --hostfile and the like out")
    if request.num_gpus_per_node is not None and request.num_gpus_per_node < 1:
        raise click.UsageError(f"--num-gpus-per-node {request.num_gpus_per_node}: at least 1")
    if request.master_port is not None and not 0 < request.master_port < 65536:
        raise click.UsageError(f"--master-port {request.master_port}: a port is 1 to 65535")
    if request.plan_file is not None and request.num_gpus_per_node is not None:
        raise click.UsageError("a recorded plan has its ranks already; leave --num-gpus-per-node out")


# --- acting -----------------------------------------------------------------------------------------


def _run(plan: RecordedPlan, request: LaunchRequest, as_json: bool) -> int:
    from dslaunch.cli.host_check import say_what_was_planned
    from dslaunch.cli.launch_request import claim_run_dir, rank_plan
    from dslaunch.core.plan import RunPlan
    from dslaunch.launch.restarts import supervise_with_restarts
    from dslaunch.launch.signals import SignalInbox

    out = sys.stderr.buffer if as_json else sys.stdout.buffer
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
    if as_json:
        click.echo(json.dumps(_outcome_json(outcome, plan.launch)))
    if outcome.exit_code == 0 and isinstance(plan, RunPlan):
        _say_what_is_next(plan)
    elif isinstance(plan, RunPlan):
        say_what_was_planned(plan, outcome.exit_code)
    return outcome.exit_code


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


def _outcome_json(outcome: Outcome, launch: LaunchPlan) -> dict[str, Any]:
    first = outcome.first_failure
    return {
        "schema_version": 1,
        "run_dir": launch.run_dir,
        "exit_code": outcome.exit_code,
        "cancelled_by_signal": outcome.cancelled_by,
        "lost_host": outcome.lost_host,
        "late_ranks": list(outcome.late),
        "first_failure": first and {"rank": first.rank, "host": first.host, "code": first.code},
        "ranks": [
            {"rank": end.rank, "host": end.host, "code": end.code, "asked_to_stop": end.asked}
            for end in outcome.ends
        ],
    }


def _quoted(word: str) -> str:
    from dslaunch.core.command import quote

    return quote(word)
