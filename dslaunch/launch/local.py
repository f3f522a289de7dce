"""The way to reach this machine: the agent as a child process. No ssh, no other program."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.errors import ConfigError
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import agent
from dslaunch.launch.orders import encode_orders


def build_agent_command(host: Host, orders: dict[str, Any]) -> Command:
    """The Command that starts the agent here, its orders on stdin.

    ``-I -S``: neither the user's PYTHONPATH nor site-packages are imported, so it
    starts in tens of milliseconds and nothing of theirs can break it.
    """
    return Command(argv=(sys.executable, "-I", "-S", agent.__file__), stdin=encode_orders(orders))


def check_hosts(topology: Topology) -> None:
    """Raises ConfigError where a host is not this machine: ranks must not silently start elsewhere."""
    for host in topology.hosts:
        if topology.num_nodes > 1 or not is_this_machine(host.name):
            raise ConfigError(
                f"host {host.name} cannot be reached: a local launch starts ranks on this machine alone; "
                "nothing was started",
                hint="leave the hostfile out, or name localhost in it",
            )


def is_this_machine(name: str) -> bool:
    """Whether ``name`` is this host's name or resolves to one of its addresses."""
    own = os.uname().nodename
    if name in ("localhost", own, own.split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    # The kernel binds only to addresses of this machine; no packet is sent.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
