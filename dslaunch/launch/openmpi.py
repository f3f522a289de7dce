"""The way to other machines by Open MPI: one mpirun, and so one daemon of its, for each host.

For clusters where mpirun reaches nodes and ssh does not (a PBS or LSF job), or where that is what people
use. mpirun hands stdin to its first process alone, so each host has an mpirun of its own. It carries both
streams as they are; killed, it lets the agent see the end of its stdin at once (measured with 4.1.4).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import mpi
from dslaunch.launch.carried import loader_argv, packed_agent
from dslaunch.launch.orders import encode_orders

# By default mpirun pins one or two processes to a core each: all ranks of the host would share it.
OPTIONS = ("-np", "1", "--bind-to", "none")
# The agent is alone in its MPI job. A rank that took these for its own place would think itself alone.
_PLACE_OF_THE_AGENT = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_UNIVERSE_SIZE", "PMIX_RANK",
    "PMIX_NAMESPACE", "PMIX_ID", "PMIX_SERVER_URI2", "PMIX_SERVER_URI3", "PMIX_SERVER_URI4",
)  # fmt: skip
# Two that start in the same instant may both want to make the folder of this host's sessions
# (TMPDIR/ompi.HOST.UID): the one that comes second gives up, and finds it the next time.
WORTH_ANOTHER_TRY = (*mpi.WORTH_ANOTHER_TRY, b"A call to mkdir was unable")


def build_agent_command(
    host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The mpirun command that starts the agent on ``host``, ``within`` a container there."""
    return build_command(host, packed_agent() + encode_orders(orders), within)


def build_command(host: Host, stdin: bytes, within: Sequence[str] = ()) -> Command:
    """The mpirun command that runs a program on ``host``: ``packed`` first on its stdin (see carried.py)."""
    argv = ("mpirun", *OPTIONS, "--host", host.name, *within, *loader_argv(forget=_PLACE_OF_THE_AGENT))
    # Its own two words for "yes, as root": without them it starts nothing there.
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return Command(argv=argv, env=env, stdin=stdin)


def check_hosts(topology: Topology, environ: Mapping[str, str]) -> None:
    """Raises EnvironmentNotReady where there is no mpirun, ConfigError for what it has no word for."""
    mpi.find_program(("mpirun",), environ, "load the site's Open MPI module, or --via ssh")
    mpi.check_names(topology, "mpirun")
