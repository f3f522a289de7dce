"""The master port: a free one found by binding, or the asked one checked, with who holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from pathlib import Path

from dslaunch.core.errors import EnvironmentNotReady

_LOWEST = 15000  # below are ports that sites give to services
_TRIES = 200


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
        reservation = _reserve(wanted)
        if reservation is None or not _is_free(wanted):
            if reservation is not None:
                reservation.close()
            raise EnvironmentNotReady(
                f"master_port {wanted} is taken{_holder_text(wanted)}; nothing was started",
                hint="leave master_port out, and a free port is found",
            )
        return PortLease(wanted, reservation)
    for port in _candidates():
        reservation = _reserve(port)
        if reservation is not None and _is_free(port):
            return PortLease(port, reservation)
        if reservation is not None:
            reservation.close()
    raise EnvironmentNotReady("no free port for the ranks to meet at", hint="give --master-port")


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


def _candidates() -> list[int]:
    # Outside the ephemeral range: within it, the ranks' own outgoing connections may take
    # the port between our test and rank 0's bind.
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    pool = range(_LOWEST, low) if low - _LOWEST >= _TRIES else range(_LOWEST, 65536)
    return random.SystemRandom().sample(pool, _TRIES)


def _reserve(port: int) -> socket.socket | None:
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reservation.bind(f"\0dslaunch-master-port-{port}")
    except OSError:
        reservation.close()
        return None
    return reservation


def _is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` on every interface, IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TCPStore does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            # No such family on this machine: nobody can hold the port there.
    return True


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
