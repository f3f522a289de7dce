"""What can be known, before a run directory is made, to keep a launch from starting."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dslaunch.core.allocation import check_started_once
from dslaunch.core.errors import ConfigError, ConfigErrors, EnvironmentNotReady
from dslaunch.core.packages import missing_packages, packages_missing
from dslaunch.core.plan import LaunchPlan, RunPlan
from dslaunch.launch import local, mpich, openmpi, pdsh, slurm, ssh
from dslaunch.launch.container import check_container
from dslaunch.launch.orders import accelerator, check_launch, is_elsewhere, way_to
from dslaunch.launch.ports import lease_port
from dslaunch.launch.text import utf8_environ

_FILES_PER_AGENT = 3  # its stdin, stdout and stderr
_OTHER_FILES = 128
_MANY_HOSTS = 1000


def check_ready(
    plan: LaunchPlan, *, device_source: str | None = None, dry_run: bool = False
) -> Mapping[str, str]:
    """Whether ``plan`` can start from this machine now; returns the environment it looked at. Starts nothing.

    ``device_source``: where its devices were written, as an Origin says it, for the message.
    ``dry_run``: this process will not hold a connection to each host.
    No other host is contacted: each one's agent looks at its own when the launch starts.
    Raises ConfigError where the plan makes no sense here, EnvironmentNotReady
    where a secret, device, program, directory or the asked port is missing.
    """
    environ = utf8_environ()
    if plan.via != "local":
        check_started_once(environ)
    check_launch(plan, environ)
    check_way(plan, environ)
    if plan.via == "local":
        local.check_devices(plan, environ, source=device_source)
        if plan.container is None:
            local.check_program(plan, environ)
    if not dry_run:
        allow_open_files(plan.topology.num_nodes)
    if plan.master_port is not None and not is_elsewhere(plan, plan.topology.hosts[0]):
        lease_port(plan.master_port).close()
    return environ


def check_way(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Whether the hosts, and the containers on them, can be reached from here, as far as that is known here.

    Raises ConfigError for what that way has no word for, EnvironmentNotReady where a program is missing.
    """
    if plan.via == "local":
        local.check_hosts(plan.topology)
    elif plan.via == "slurm":
        slurm.check_job(plan.topology, environ)
    elif plan.via == "openmpi":
        openmpi.check_hosts(plan.topology, environ)
    elif plan.via == "mpich":
        mpich.check_hosts(plan.topology, environ)
    elif plan.via == "pdsh":
        pdsh.check_hosts(plan.topology, environ)
    else:
        ssh.check_client(environ)
    if plan.container is not None:
        here = any(way_to(plan, host) == "local" for host in plan.topology.hosts)
        check_container(plan, environ, here=here)


def check_packages(plan: RunPlan) -> None:
    """Raise EnvironmentNotReady where a rank that is started here could not import what it trains with.

    Asked is only this very interpreter: of another one, or of another host's, each rank says it.
    """
    launch = plan.launch
    elsewhere = launch.via != "local" or launch.container is not None
    if elsewhere or launch.argv[0] != sys.executable or "PYTHONPATH" in launch.env:
        return
    if missing := missing_packages():
        raise packages_missing(missing, but="; nothing was started")


def check_accelerator(plan: RunPlan) -> None:
    """Raise ConfigError for devices that our own trainer does not run on."""
    if accelerator(plan.launch) not in ("cpu", "cuda"):
        raise ConfigError(
            "dslaunch's own trainer runs on NVIDIA's and AMD's GPUs and on CPUs, and the plan is for"
            f" {', '.join(plan.launch.devices)}; nothing was started",
            hint="dslaunch gen-config writes the JSON for a script of your own; launch -- COMMAND starts it",
        )


def allow_open_files(num_hosts: int) -> None:
    """Raise the soft limit of open files to what so many agents take.

    Raises EnvironmentNotReady where the hard limit is below that.
    """
    if (problem := open_files_problem(num_hosts)) is not None:
        hint = "have the limit raised (ulimit -Hn), or use fewer hosts"
        raise EnvironmentNotReady(f"{problem}; nothing was started", hint=hint)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _files_for(num_hosts):
        resource.setrlimit(resource.RLIMIT_NOFILE, (_files_for(num_hosts), hard))


def open_files_problem(num_hosts: int) -> str | None:
    """Why this process could not watch so many agents; None where it could."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= _files_for(num_hosts):
        return None
    hosts = f"{num_hosts} hosts take" if num_hosts > 1 else "this launch takes"
    return f"{hosts} {_files_for(num_hosts)} open files here, and the limit is {hard}"


def many_hosts_problem(plan: LaunchPlan) -> str | None:
    """Why more hosts than these ways are good for are better started otherwise; None where they are not."""
    num_hosts = plan.topology.num_nodes
    if num_hosts <= _MANY_HOSTS:
        return None
    return (
        f"{plan.via} takes a process here for each of {num_hosts} hosts; it is good to about {_MANY_HOSTS}."
        " For more use srun or MPI by themselves, which start processes in a tree, with the lines of"
        " --print-as torchrun"
    )


def _files_for(num_hosts: int) -> int:
    return _FILES_PER_AGENT * num_hosts + _OTHER_FILES


def check_recorded_paths(plan: RunPlan) -> None:
    """Raise ConfigErrors for the model and data that a plan names and that are gone since it was made."""
    hint = "put it back, or a symbolic link in its place; or launch the run file with its new path"
    gone = [
        ConfigError(f"{key}: {path} of the plan is not there any more; nothing was started", hint=hint)
        for key, path in _local_paths(plan)
        if not Path(path).exists()
    ]
    if gone:
        raise ConfigErrors(list(gone))


def _local_paths(plan: RunPlan) -> Iterator[tuple[str, str]]:
    model = plan.model
    if model.kind != "hub":
        yield "model.path", model.path
    for key, path in (("tokenizer", model.tokenizer), ("chat_template", model.chat_template)):
        if path is not None and Path(path).is_absolute():  # else a hub id
            yield f"model.{key}", path
    for part, sources in (("train", plan.data.train), ("eval", plan.data.eval)):
        for i, source in enumerate(sources):
            if source.kind != "hub":
                yield f"data.{part}[{i}].path", source.path
