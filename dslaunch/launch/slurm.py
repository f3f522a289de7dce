"""The way to the nodes of a Slurm job: one srun, and so one job step, for each node. No ssh.

srun carries stdin and stdout as they are (stdout line by line, which our events are). Signals
do not pass: TERM to srun is KILL for its task, so the agents are only ever told on stdin.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from dslaunch.core.allocation import Allocation, read_allocation
from dslaunch.core.command import Command
from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.topology import Host, Topology
from dslaunch.launch.carried import loader_argv, packed_agent
from dslaunch.launch.orders import encode_orders

# A step that says nothing of CPUs has all that the job has on the node. --cpus-per-task and --exact
# would cut that down; --unbuffered would make stdout a terminal.
OPTIONS = (
    "--nodes=1", "--ntasks=1",
    "--overlap",  # beside the step that we may run in ourselves
    "--mem=0",  # all of the job's on the node
    "--cpu-bind=none", "--mpi=none",
    "--export=ALL",  # also in a job of `sbatch --export=NONE`
    "--chdir=/",  # the agent looks at the run's own directory, and says where it is missing
)  # fmt: skip
# What sbatch leaves in the environment is a request to srun, meant for the job as a whole: --gpus=16 is
# 16 on one node, --gpus-per-task one of eight, --cpus-per-task (Slurm 23.11) the CPUs of one rank.
_REQUESTS = (
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU",
    "SLURM_TASKS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK", "SLURM_GRES", "SLURM_GRES_FLAGS", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND",
    "SLURM_GPU_BIND", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE", "SLURM_CORE_SPEC", "SLURM_THREAD_SPEC", "SLURM_THREADS_PER_CORE", "SLURM_HINT",
    "SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE", "SLURM_HOSTFILE", "SLURM_EXACT", "SLURM_EXCLUSIVE",
    "SLURM_WHOLE", "SLURM_OVERCOMMIT", "SLURM_SPREAD_JOB", "SLURM_LABELIO", "SLURM_UNBUFFEREDIO",
    "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_WAIT",
)  # fmt: skip
_GPUS_NOT_BY_NODE = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_TRES_PER_TASK")
# The agent is the only task of its step. A rank that took these for its own place would think itself alone.
_PLACE_OF_THE_AGENT = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_STEPID",
    "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
# srun's own words where another try may succeed: the controller is busy or starting anew.
WORTH_ANOTHER_TRY = (
    b"Socket timed out", b"Unable to contact slurm controller", b"Zero Bytes were transmitted",
    b"Connection refused",
)  # fmt: skip
HINTS = {
    # 22.05, of a job by --gpus whose nodes have different numbers of them.
    b"Invalid generic resource": "ask for GPUs by node (sbatch --gpus-per-node): a step on one node gets no"
    " more of them than the job's first node has",
}


def build_agent_command(
    host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The srun command that starts the agent on ``host``, a node of the job that ``environ`` tells of.

    ``within``: the words that lead into a container on the node.
    """
    stdin = packed_agent() + encode_orders(orders)
    return build_command(host, stdin, environ, gpus=orders["visible_devices"] is not None, within=within)


def build_command(
    host: Host, stdin: bytes, environ: Mapping[str, str], *, gpus: bool, within: Sequence[str] = ()
) -> Command:
    """The srun command that runs a program on ``host``: ``packed`` first on its stdin (see carried.py)."""
    forget = [word for name in _REQUESTS if name in environ for word in ("-u", name)]
    devices = _all_gpus(host, environ, wanted=gpus)
    srun = ("srun", *OPTIONS, *devices, f"--nodelist={host.name}")
    argv = ("env", *forget, *srun, *within, *loader_argv(forget=_PLACE_OF_THE_AGENT))
    return Command(argv=argv, stdin=stdin)


def _all_gpus(host: Host, environ: Mapping[str, str], *, wanted: bool) -> tuple[str, ...]:
    """All GPUs that the job has on the host.

    Without a word a step inherits the job's own request. One that is not for each node makes no
    sense for a single one: --gpus=16 cannot be had there, --gpus-per-task is one GPU for one task.
    """
    if not any(environ.get(name) for name in _GPUS_NOT_BY_NODE):
        return ()
    if not wanted:
        return ("--gres=none",)
    job = _find_job(environ)
    known = dict(zip(job.names, job.devices.counts, strict=True)) if job and job.devices.counts else {}
    # Where nodes differ nothing tells how many: enough for the slots, which are places in the step's list.
    enough = max(len(host.slots), *(int(slot) + 1 for slot in host.slots if slot.isdecimal()), 1)
    # Not --gpus-per-node: where nodes differ, Slurm compares it with the poorest of the job.
    return (f"--gpus={known.get(host.name, enough)}",)


def _find_job(environ: Mapping[str, str]) -> Allocation | None:
    found = read_allocation(environ, this_host=os.uname().nodename)
    return found if found is not None and found.scheduler == "Slurm" else None


def nodes_of_this_job(topology: Topology, environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The first nodes of the job that we are in, with as many slots each as the hosts of ``topology`` have.

    None where those are nodes of this job, or where it has fewer than that or is none.
    """
    job = _find_job(environ)
    if job is None or len(job.names) < topology.num_nodes:
        return None
    if {host.name for host in topology.hosts} <= set(job.names):
        return None
    return tuple(
        # Places in what Slurm makes visible there: ids were those of the other nodes.
        Host(name=name, slots=tuple(map(str, range(len(host.slots)))))
        for name, host in zip(job.names, topology.hosts, strict=False)
    )


def check_job(topology: Topology, environ: Mapping[str, str]) -> None:
    """Whether srun can reach the hosts, as far as it can be known here.

    Raises EnvironmentNotReady where there is no srun or no job; ConfigError for a host that
    is not a node of the job, or is to be reached as another user or at a port (HostfileError:
    where the job cannot be read, or several copies of us run in it).
    """
    other_way = "or reach the hosts by ssh: --via ssh (launch.via)"
    job = _find_job(environ)
    if job is None or not environ.get("SLURM_JOB_ID"):
        raise EnvironmentNotReady(
            "this is no Slurm job (SLURM_JOB_ID), so srun reaches no host; nothing was started",
            hint=f"start it in a batch script or under salloc, {other_way}",
        )
    if shutil.which("srun", path=environ.get("PATH", os.defpath)) is None:
        raise EnvironmentNotReady(
            "no srun in PATH; nothing was started",
            hint=f"load the site's Slurm module, {other_way}",
        )
    nodes = set(job.names)
    if strangers := [host.name for host in topology.hosts if host.name not in nodes]:
        raise ConfigError(
            f"{', '.join(strangers[:8])}: not among the nodes of this Slurm job ({job.source}:"
            f" {environ[job.source]}); nothing was started",
            hint="leave the hostfile out, and the job's nodes are taken; to go on with a run that had more"
            " nodes than this job, launch its run file with --run-dir DIR --resume",
        )
    for host in topology.hosts:
        if host.user is not None or host.port is not None:
            raise ConfigError(
                f"host {host.name} has a user or port, which srun has no use for; nothing was started",
                hint=f"leave them out, {other_way}",
            )
