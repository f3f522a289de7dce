"""The master port: a free one found by binding, or the asked one checked, with who holds it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.launch import agent


class PortLease:
    """A port that no other launch on this machine will pick while this is open.

    The port itself is left unbound for rank 0. The reservation is an abstract
    Unix socket, which the kernel frees however this process ends.
    """

    def __init__(self, port: int, reservation: socket.socket | None) -> None:
        self.port = port
        self._reservation = reservation

    def close(self) -> None:
        if self._reservation is not None:
            self._reservation.close()


def lease_port(wanted: int | None) -> PortLease:
    """``wanted`` if it is free, or any free port.

    Raises EnvironmentNotReady where ``wanted`` is taken, naming the process that
    holds it where /proc shows that, or where no free port is found.
    """
    if wanted is not None:
        reservation = agent.reserve_port(wanted)
        if reservation is None or not agent.is_free_port(wanted):
            if reservation is not None:
                reservation.close()
            raise EnvironmentNotReady(
                f"master_port {wanted} is taken{_holder_text(wanted)}; nothing was started",
                hint="leave master_port out, and a free port is found",
            )
        return PortLease(wanted, reservation)
    try:
        return PortLease(*agent.find_port())
    except agent.Refusal as refusal:
        raise EnvironmentNotReady(refusal.message, hint=refusal.hint) from None


def find_holder(port: int) -> tuple[int, str] | None:
    """Process id and program name of who listens on TCP ``port``; None where /proc does not show it."""
    inodes = _listening_inodes(port)
    for entry in Path("/proc").iterdir() if inodes else ():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in (entry / "fd").iterdir():
                if os.readlink(fd) in inodes:
                    return int(entry.name), (entry / "comm").read_text(encoding="utf-8").strip()
    return None


def _holder_text(port: int) -> str:
    holder = find_holder(port)
    return f" by process {holder[0]} ({holder[1]})" if holder else " by another process or launch"


def _listening_inodes(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes
