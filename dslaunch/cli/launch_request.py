"""From what was typed after ``dslaunch launch`` to the plan that runs."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import LaunchPlan, RunPlan
    from dslaunch.launch.record import CommandPlan, RecordedPlan


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The options of ``dslaunch launch``; ``command`` is what stood after ``--``."""

    run_file: str | None = None
    plan_file: str | None = None
    command: tuple[str, ...] | None = None
    set_: tuple[str, ...] = ()
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus_per_node: int | None = None
    gpu: str | None = None
    via: str | None = None
    container: str | None = None
    local_rank_arg: str | None = None
    max_restarts: int | None = None
    inventory: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    env: tuple[str, ...] = ()
    run_dir: str | None = None
    resume: bool = False


def resolve_request(request: LaunchRequest) -> RecordedPlan:
    """The plan asked for: of a run file, recorded, or made around a command; flags beat it.

    Raises ConfigError where it makes no sense or, with ``--resume``, is another
    run than the recorded one. A secret given as ``--env NAME=VALUE`` goes to this
    process' environment, from where it is passed on; the plan holds its name.
    """
    if request.command is not None:
        plan: RecordedPlan = _resolve_command(request, request.command)
    elif request.plan_file is not None:
        plan = _resolve_recorded(request, Path(request.plan_file))
    else:
        plan = _resolve_run_file(request)
    return dataclasses.replace(plan, launch=_with_flags(plan.launch, request))


def claim_run_dir(plan: RecordedPlan, request: LaunchRequest) -> RecordedPlan:
    """Make the plan's run directory; one that nobody named gets a number where it is taken."""
    from dslaunch.core.run_dir import RunDir
    from dslaunch.launch.claim import check_run_dir
    from dslaunch.launch.record import move_plan

    wanted = Path(plan.launch.run_dir)
    if request.resume or names_run_dir(plan, request):
        check_run_dir(wanted, resume=request.resume)
    else:
        # Two launches in the same second: the one that makes the directory has it.
        wanted = make_unused(wanted)
        plan = move_plan(plan, wanted) if str(wanted) != plan.launch.run_dir else plan
    RunDir(wanted).create(resume=request.resume, reuse=True)
    return plan


def check_ready_to_run(plan: RecordedPlan, request: LaunchRequest, *, dry_run: bool = False) -> None:
    """All that can be known to keep ``plan`` from starting here. Writes nothing.

    A dry run looks at the same, but for the open files that the launch alone takes: those it tells of.

    Raises ConfigError or EnvironmentNotReady.
    """
    from dslaunch.cli.host_check import check_host_memory
    from dslaunch.cli.plan_memory import check_names
    from dslaunch.cli.talk import note
    from dslaunch.core.plan import RunPlan
    from dslaunch.launch import ready

    if isinstance(plan, RunPlan):
        ready.check_accelerator(plan)
    ready.check_ready(plan.launch, device_source=_device_source(plan, request), dry_run=dry_run)
    if dry_run:
        many = ready.many_hosts_problem(plan.launch)
        for problem in filter(None, (ready.open_files_problem(plan.launch.topology.num_nodes), many)):
            note(problem)
    if isinstance(plan, RunPlan):
        ready.check_packages(plan)
        ready.check_recorded_paths(plan)
        check_names(plan)
        check_host_memory(plan)
    check_run_dir_of(plan, request)


def _device_source(plan: RecordedPlan, request: LaunchRequest) -> str | None:
    """Where it was written which devices the ranks are for; None where it was not."""
    from dslaunch.core.plan import RunPlan

    if isinstance(plan, RunPlan):
        origin = plan.origins.get("launch.device_type")  # a recorded plan may be of an older version
        return origin.source if origin else None
    return "--gpu" if request.gpu else None


def check_run_dir_of(plan: RecordedPlan, request: LaunchRequest) -> None:
    """Whether the plan's run directory may be used. Writes nothing; raises as :func:`claim_run_dir` would."""
    from dslaunch.launch.claim import check_run_dir, check_writable

    run_dir = Path(plan.launch.run_dir)
    if request.resume or names_run_dir(plan, request):
        check_run_dir(run_dir, resume=request.resume)
    else:
        check_writable(run_dir)


def rank_plan(plan: RecordedPlan, request: LaunchRequest) -> LaunchPlan:
    """What the ranks of this very start run: our own worker is told to resume."""
    from dslaunch.core.plan import RunPlan

    if request.resume and isinstance(plan, RunPlan):
        return dataclasses.replace(plan.launch, argv=(*plan.launch.argv, "--resume"))
    return plan.launch


def _resolve_run_file(request: LaunchRequest) -> RunPlan:
    from dslaunch.cli.options import load_and_resolve
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import RunPlan
    from dslaunch.launch.record import load_recorded_plan
    from dslaunch.launch.resume import resolve_resumed

    assert request.run_file is not None
    asked = load_and_resolve(
        request.run_file,
        set_=request.set_,
        hostfile=request.hostfile,
        include=request.include,
        exclude=request.exclude,
        num_nodes=request.num_nodes,
        num_gpus_per_node=request.num_gpus_per_node,
        gpu=request.gpu,
        via=request.via,
        container=request.container,
        max_restarts=request.max_restarts,
        inventory=request.inventory,
        master_addr=request.master_addr,
        master_port=request.master_port,
        run_dir=request.run_dir,
    )
    if not request.resume:
        return asked
    if not names_run_dir(asked, request):
        raise _which_run(asked.name, Path(asked.launch.run_dir).parent)
    recorded = load_recorded_plan(_recorded_path(asked.launch.run_dir))
    if not isinstance(recorded, RunPlan):
        raise _another_run(asked.launch.run_dir)
    try:
        return resolve_resumed(recorded, asked)
    except ConfigError as error:
        raise ConfigError(error.message, hint=_start_anew(asked.launch.run_dir) or error.hint) from None


def _resolve_recorded(request: LaunchRequest, path: Path) -> RecordedPlan:
    from dslaunch.launch.record import load_recorded_plan, move_plan

    path = _plan_path(path.absolute())
    plan = load_recorded_plan(path)
    target = path.parent
    if request.run_dir is not None:
        target = Path(request.run_dir).absolute()
    elif not request.resume:
        target = _default_run_dir(plan.name, path.parent.parent)
    # Also for --resume: the directory may have been moved since the plan was written.
    return move_plan(in_this_job(plan), target)


def in_this_job(plan: RecordedPlan) -> RecordedPlan:
    """The plan on the nodes of the Slurm job that we are in, where it was made in another one."""
    from dslaunch.cli.talk import talk
    from dslaunch.launch.slurm import nodes_of_this_job

    hosts = nodes_of_this_job(plan.launch.topology, os.environ) if plan.launch.via == "slurm" else None
    if hosts is None:
        return plan
    names = ", ".join(host.name for host in hosts[:8]) + (" ..." if len(hosts) > 8 else "")
    talk(f"the plan was made in another Slurm job; its ranks run on this job's nodes: {names}")
    topology = dataclasses.replace(plan.launch.topology, hosts=hosts)
    launch = dataclasses.replace(plan.launch, topology=topology, spare_hosts=())
    return dataclasses.replace(plan, launch=launch)


def _plan_path(path: Path) -> Path:
    """What ``--plan`` means: a plan.json, or the run directory that holds it."""
    from dslaunch.core.errors import ConfigError

    if path.is_dir():
        return _recorded_path(str(path))
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"--plan {path}: this is a run file, not a recorded plan",
            hint=f"dslaunch launch {path}",
        )
    try:
        path.read_bytes()
    except FileNotFoundError:
        pass  # which is said where it is loaded
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror}") from None
    return path


def _resolve_command(request: LaunchRequest, words: tuple[str, ...]) -> CommandPlan:
    from dslaunch.cli import options
    from dslaunch.cli.launch_ranks import choose_ranks
    from dslaunch.core.command import check_argv
    from dslaunch.core.plan import LaunchPlan
    from dslaunch.launch.record import CommandPlan, load_recorded_plan
    from dslaunch.launch.text import utf8

    argv = tuple(utf8(word) for word in words)
    check_argv(argv, "launch")
    ranks = choose_ranks(request)
    name = _command_name(argv)
    launch = LaunchPlan(
        argv=argv,
        topology=ranks.topology,
        run_dir=utf8(str(_command_run_dir(request, name))),
        cwd=utf8(os.getcwd()),
        container=None if request.container is None else options.container_plan(request.container),
        device_type=ranks.device_type,
        devices=ranks.devices,
        via=ranks.via,
        local_rank_arg=request.local_rank_arg,
        spare_hosts=ranks.spares if request.max_restarts else (),
    )
    if request.resume:
        recorded = load_recorded_plan(_recorded_path(launch.run_dir))
        if not isinstance(recorded, CommandPlan) or recorded.launch.argv != argv:
            raise _another_run(launch.run_dir)
    return CommandPlan(name=name, launch=launch)


def _command_run_dir(request: LaunchRequest, name: str) -> Path:
    from dslaunch.core.run_dir import runs_root

    if request.run_dir is not None:
        return Path(request.run_dir).absolute()
    root = runs_root(os.environ, Path.cwd()).absolute()
    if request.resume:
        raise _which_run(name, root)
    return _default_run_dir(name, root)


def _with_flags(launch: LaunchPlan, request: LaunchRequest) -> LaunchPlan:
    from dslaunch.core.command import holds_secret
    from dslaunch.core.errors import ConfigError
    from dslaunch.launch.text import utf8

    env = dict(launch.env)
    secrets = list(launch.secret_env)
    for item in request.env:
        name, equals, value = utf8(item).partition("=")
        if not name:
            raise ConfigError(
                f"--env {item!r}: write NAME=VALUE, or NAME to pass this environment's value on"
            )
        env.pop(name, None)
        secrets = [other for other in secrets if other != name]
        if equals and not holds_secret(name, value):
            env[name] = value
            continue
        secrets.append(name)
        if equals:
            os.environb[_bytes(name)] = _bytes(value)
    return dataclasses.replace(
        launch,
        env=env,
        secret_env=tuple(secrets),
        master_addr=request.master_addr or launch.master_addr,
        master_port=request.master_port or launch.master_port,
        max_restarts=launch.max_restarts if request.max_restarts is None else request.max_restarts,
        **_grace_times(request),
    )


def _grace_times(request: LaunchRequest) -> dict[str, Any]:
    """What ``--set`` says of a command or a recorded plan; with a run file it was heeded there."""
    if request.run_file is not None or not request.set_:
        return {}
    from dslaunch.config.load import load_grace_times

    return load_grace_times(request.set_)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _command_name(argv: tuple[str, ...]) -> str:
    script = next((word for word in argv if word.endswith((".py", ".sh"))), argv[0])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-.") or "command"


def _default_run_dir(name: str, root: Path) -> Path:
    from dslaunch.core.run_dir import default_run_dir

    return default_run_dir(name, runs_root=root, now=datetime.now(timezone.utc))


def names_run_dir(plan: RecordedPlan, request: LaunchRequest) -> bool:
    """Whether the user chose the run directory, by flag or in the run file; else it has a default name."""
    from dslaunch.core.plan import RunPlan

    if request.run_dir is not None or request.run_file is None:
        return request.run_dir is not None
    return isinstance(plan, RunPlan) and plan.origins["launch.run_dir"].source != "derived"


def _is_default(run_dir: Path, name: str) -> bool:
    return re.fullmatch(re.escape(name) + r"-\d{8}T\d{6}Z(-\d+)?", run_dir.name) is not None


def _which_run(name: str, root: Path) -> ConfigError:
    """The error for ``--resume`` without a directory; it proposes the newest run of that name."""
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.run_dir import RunDir

    runs = sorted(
        path for path in root.glob("*-*Z*") if _is_default(path, name) and RunDir(path).plan.exists()
    )
    hint = (
        f"--run-dir {runs[-1]} is the newest run of {name}"
        if runs
        else f"there is no run of {name} in {root}"
    )
    return ConfigError("--resume needs the run directory to go on in", hint=hint)


def make_unused(wanted: Path) -> Path:
    """Make ``wanted``, or where it is there the first of ``wanted-2``, ``wanted-3``, ... that is not."""
    from dslaunch.core.errors import EnvironmentNotReady

    number = 1
    while True:
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
        except OSError as error:
            raise EnvironmentNotReady(
                f"cannot make the run directory {candidate}: {error.strerror}",
                hint="give a --run-dir on a file system you can write to",
            ) from error


def _recorded_path(run_dir: str) -> Path:
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.run_dir import RunDir

    path = RunDir(Path(run_dir)).plan
    if not path.exists():
        raise ConfigError(
            f"{run_dir} holds no run to resume: there is no plan.json in it",
            hint="give the --run-dir of the run to go on with, or leave --resume out",
        )
    return path


def _another_run(run_dir: str) -> ConfigError:
    from dslaunch.core.errors import ConfigError

    return ConfigError(
        f"{run_dir} holds the run of another command; nothing was started",
        hint=_start_anew(run_dir) or "see its plan.json, or leave --resume out and give another --run-dir",
    )


def _start_anew(run_dir: str) -> str | None:
    """The hint where the directory holds only a failed start, with nothing to resume."""
    from dslaunch.launch.claim import find_obstacle

    if find_obstacle(Path(run_dir)) is not None:
        return None
    return "leave --resume out: no step was done there, so the new run can have the directory"
