"""The way to other machines by MPICH's mpiexec (hydra, also Intel MPI's): one for each host.

It differs from Open MPI's in two things, which relay.py meets on the other side. Its proxy gives up where
more than a pipe holds waits for the process (4.0.2: "process reading stdin too slowly"), so stdin is sent
as the relay makes room. And when mpiexec dies the proxy kills the process group it started, with KILL: the
relay's, while the agent is in a session of its own, sees the end of its stdin and stops its ranks in peace.
When ssh fails (or srun, or what else it uses) mpiexec waits for ever for the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import mpi, relay
from dslaunch.launch.carried import loader_argv, packed, packed_agent
from dslaunch.launch.orders import encode_orders

PROGRAMS = ("mpiexec.hydra", "mpiexec.mpich")  # plain mpiexec may be any MPI's
# Not our environment, which has this machine's paths: what ranks are to have of it is in the orders.
OPTIONS = ("-genvnone", "-wdir", "/", "-bind-to", "none", "-n", "1")
# The agent is alone in its MPI job. A rank that took these for its own place would think itself alone.
_PLACE_OF_THE_AGENT = (
    "PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_PORT", "PMI_ID", "PMI_SPAWNED", "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "HYDI_CONTROL_FD",
    "GFORTRAN_UNBUFFERED_PRECONNECTED",
)  # fmt: skip
WORTH_ANOTHER_TRY = mpi.WORTH_ANOTHER_TRY


def build_agent_command(
    host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The mpiexec command that starts the agent on ``host``, ``within`` a container there."""
    return build_command(host, packed_agent() + encode_orders(orders), environ, within)


def build_command(
    host: Host, stdin: bytes, environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The mpiexec command that runs a program on ``host``: ``packed`` first on its stdin (see carried.py).

    Raises EnvironmentNotReady where there is no such mpiexec.
    """
    loader = loader_argv(forget=_PLACE_OF_THE_AGENT)
    argv = (_mpiexec(environ), *OPTIONS, "-hosts", host.name, *within, *loader)
    return Command(argv=argv, stdin=_packed_relay() + stdin, stdin_room=relay.ROOM)


def has_given_up(pid: int) -> bool:
    """Whether a program that an mpiexec had started, ssh say, has ended and is not looked after."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any(_is_zombie(child) for child in children)
    return False


def check_hosts(topology: Topology, environ: Mapping[str, str]) -> None:
    """Raises EnvironmentNotReady where there is no such mpiexec, ConfigError for what it has no word for."""
    _mpiexec(environ)
    mpi.check_names(topology, "mpiexec")


def _mpiexec(environ: Mapping[str, str]) -> str:
    return mpi.find_program(PROGRAMS, environ, "load the site's MPICH or Intel MPI module, or --via ssh")


def _is_zombie(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    return False


@cache
def _packed_relay() -> bytes:
    return packed(Path(relay.__file__).read_bytes())
