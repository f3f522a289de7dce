"""``dslaunch launch``: start the ranks of a run file, of a recorded plan, or of any command."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.launch_request import LaunchRequest

if TYPE_CHECKING:
    from dslaunch.core.plan import LaunchPlan
    from dslaunch.launch.record import RecordedPlan
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
@options.via_option
@options.container_option
@options.local_rank_option
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start again up to N times after a failed rank or a lost host, from the last checkpoint.",
)
@options.env_option
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
    from dslaunch.cli.launch_request import rank_plan, resolve_request
    from dslaunch.cli.launch_run import check_start, check_working_directory

    check_working_directory()
    request = LaunchRequest(command=ctx.meta.get(_COMMAND_KEY), **flags)  # type: ignore[arg-type]
    if request.resume and request.run_dir is not None and not _sources(request):
        request = dataclasses.replace(request, plan_file=os.path.join(request.run_dir, "plan.json"))
    _check_request(request, ctx)
    plan = resolve_request(request)
    if launcher is not None:
        from dslaunch.cli.launch_print import print_as

        print_as(plan, request, launcher, dry_run=dry_run, as_json=as_json)
        return 0
    check_start(plan, request, dry_run=dry_run)
    if dry_run:
        from dslaunch.cli.launch_show import show

        show(plan, rank_plan(plan, request), as_json=as_json)
        return 0
    return _run(plan, request, as_json)


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


def _run(plan: RecordedPlan, request: LaunchRequest, as_json: bool) -> int:
    from dslaunch.cli.launch_run import run

    plan, outcome = run(plan, request, sys.stderr.buffer if as_json else sys.stdout.buffer)
    if as_json:
        click.echo(json.dumps(_outcome_json(outcome, plan.launch)))
    return outcome.exit_code


def _outcome_json(outcome: Outcome, launch: LaunchPlan) -> dict[str, Any]:
    first = outcome.first_failure
    return {
        "schema_version": 1,
        "run_dir": launch.run_dir,
        "exit_code": outcome.exit_code,
        "cancelled_by_signal": outcome.cancelled_by,
        "lost_host": outcome.lost and outcome.lost.host,
        "late_ranks": list(outcome.late),
        "first_failure": first and {"rank": first.rank, "host": first.host, "code": first.code},
        "ranks": [
            {"rank": end.rank, "host": end.host, "code": end.code, "asked_to_stop": end.asked}
            for end in outcome.ends
        ],
    }
