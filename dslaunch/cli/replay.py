"""dslaunch replay: run a step again and name what went inf or nan first."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk
from dslaunch.core.errors import EXIT_NO, EXIT_OK

if TYPE_CHECKING:
    from dslaunch.core.plan import RunPlan
    from dslaunch.launch.record import CommandPlan

_REPORT = "report.json"


@click.command("replay")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=click.IntRange(min=1),
    metavar="N",
    help="The step to run again. Default: the last one that was kept when the run failed.",
)
@click.option(
    "--detect-anomaly",
    is_flag=True,
    help="Ask autograd's anomaly mode too: the operation and its line of code.",
)
@click.option("--hostfile", metavar="FILE", help="Other hosts, with as many slots as the run had ranks.")
@click.option(
    "--via", metavar="WAY", help="Way to reach them, as for launch; local: all ranks on this machine."
)
@options.dry_run_option
@options.json_option
def command(
    run_dir: Path,
    step: int | None,
    detect_anomaly: bool,
    hostfile: str | None,
    via: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run a step of a training again and name what went inf or nan first.

    Starts as many ranks as RUN_DIR's run had, on its hosts or those that are given, with hooks on every
    module and parameter, and tells the module, the parameter, the rank and the samples, with the value
    ranges around it. A step that was kept when the run failed needs the model, but no training data.
    Exit code 0: found; 1: all was finite this time.
    """
    plan = _on_hosts(_load_plan(run_dir), hostfile, via)
    step = step if step is not None else _last_kept(run_dir)
    replay = _replay_plan(plan, run_dir, step, detect_anomaly)
    if dry_run:
        from dslaunch.cli.launch_show import show
        from dslaunch.launch.ready import check_ready

        check_ready(replay.launch)
        show(replay, replay.launch, as_json=as_json)
        return EXIT_OK
    code = _run(replay)
    path = Path(replay.launch.run_dir) / _REPORT
    if code != EXIT_OK:
        return code
    report = json.loads(path.read_text(encoding="utf-8"))
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from dslaunch.train.replay.describe import describe

        click.echo("\n".join(describe(report)))
        talk(f"all of it is in {path}")
    return EXIT_OK if report["findings"] or report["sums"] else EXIT_NO


def _load_plan(run_dir: Path) -> RunPlan:
    """The run's plan, also where its directory was moved. Raises ConfigError where it is no training."""
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import RunPlan
    from dslaunch.core.run_dir import RunDir
    from dslaunch.launch.claim import check_unused
    from dslaunch.launch.record import load_recorded_plan, move_plan

    path = RunDir(run_dir).plan
    if not path.is_file() and RunDir(run_dir).kept_steps():
        raise ConfigError(
            f"{run_dir} is the run_dir of a loop of your own: dslaunch cannot build its model",
            hint="in a script that makes the same engine: from dslaunch.train.replay.own_loop import replay;"
            f" replay(engine, '{run_dir}/nonfinite/step-{RunDir(run_dir).kept_steps()[-1]}')",
        )
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} holds no run: there is no plan.json in it",
            hint="give the run directory of a training that dslaunch launch started",
        )
    plan = load_recorded_plan(path)
    if not isinstance(plan, RunPlan):
        raise ConfigError(
            f"{run_dir} holds the launch of a command of your own: only dslaunch's trainings can be replayed",
            hint=f"dslaunch diagnose {run_dir}/logs/rank-0.log says what its log tells",
        )
    check_unused(run_dir)
    moved = move_plan(plan, run_dir.absolute())
    assert isinstance(moved, RunPlan)
    return moved


def _on_hosts(plan: RunPlan, hostfile: str | None, via: str | None) -> RunPlan:
    """The plan on the hosts that are asked for. Raises ConfigError where they have more or fewer slots."""
    from dslaunch.cli.launch_ranks import choose_ranks
    from dslaunch.cli.launch_request import LaunchRequest, in_this_job
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import RunPlan

    if hostfile is None and via is None:
        here = in_this_job(plan)
        assert isinstance(here, RunPlan)
        return here
    needed = plan.launch.topology.world_size
    local = needed if via == "local" and hostfile is None else None
    device = "cpu" if plan.launch.device_type == "cpu" and hostfile is not None else None
    ranks = choose_ranks(LaunchRequest(hostfile=hostfile, via=via, num_gpus_per_node=local, gpu=device))
    if ranks.topology.world_size != needed:
        raise ConfigError(
            f"a step is replayed by as many ranks as the run had, {needed}, and there are"
            f" {ranks.topology.world_size} slots; nothing was started",
            hint=f"give a hostfile of {needed} slots; --via local starts {needed} ranks on this machine",
        )
    launch = dataclasses.replace(
        plan.launch, topology=ranks.topology, via=ranks.via, device_type=ranks.device_type,
        master_addr=None, master_port=None,
    )  # fmt: skip
    return dataclasses.replace(plan, launch=launch)


def _last_kept(run_dir: Path) -> int:
    """The last step that was kept. Raises ConfigError where there is none."""
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.run_dir import RunDir

    steps = RunDir(run_dir).kept_steps()
    if not steps:
        raise ConfigError(
            f"{run_dir} kept no step: its run did not end for a loss or gradient that is not finite",
            hint="--step N runs step N again, from the last checkpoint before it",
        )
    return steps[-1]


def _replay_plan(plan: RunPlan, run_dir: Path, step: int, detect_anomaly: bool) -> CommandPlan:
    """The launch of the replay: the run's ranks with another program, in a directory of their own."""
    from dslaunch.launch.record import CommandPlan

    where = run_dir.absolute() / "replays" / f"step-{step}"
    number = 1
    while where.exists():
        number += 1
        where = where.with_name(f"step-{step}-{number}")
    words = ["-m", "dslaunch.train.replay.worker", "--plan", str(run_dir.absolute() / "plan.json")]
    words += ["--step", str(step), "--report", str(where / _REPORT)]
    words += ["--detect-anomaly"] if detect_anomaly else []
    python = plan.launch.argv[: plan.launch.argv.index("-m")]
    launch = dataclasses.replace(
        plan.launch, argv=(*python, *words), run_dir=str(where), max_restarts=0, spare_hosts=()
    )
    return CommandPlan(name="replay", launch=launch)


def _run(plan: CommandPlan) -> int:
    """Start the ranks and stay until they have ended. What they say goes to stderr."""
    from contextlib import closing

    from dslaunch.core.errors import EnvironmentNotReady
    from dslaunch.core.events import JsonlWriter
    from dslaunch.core.run_dir import RunDir
    from dslaunch.launch.ready import check_ready
    from dslaunch.launch.record import hold_run_dir, render_run_files, write_run_files
    from dslaunch.launch.script import render_launch_script
    from dslaunch.launch.supervisor import supervise

    check_ready(plan.launch)
    files = render_run_files(plan, render_launch_script(plan))
    here = RunDir(Path(plan.launch.run_dir))
    here.create(resume=False)
    with hold_run_dir(here.path) as lock:
        try:
            write_run_files(files)
            events: Any = JsonlWriter(here.events)
        except OSError as error:
            raise EnvironmentNotReady(f"cannot write {here.path}: {error.strerror}") from error
        with closing(events):
            outcome = supervise(
                plan.launch,
                events=events,
                out=sys.stderr.buffer,
                err=sys.stderr.buffer,
                keep_fds=() if lock is None else (lock,),
                own_worker=True,
            )
    return outcome.exit_code
