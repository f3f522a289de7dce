"""The network interface on which the ranks of several hosts talk to each other."""

from __future__ import annotations

import os
import socket

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface() -> None:
    """Set what is not set of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where there are other hosts.

    ``dslaunch launch`` has done so; ``deepspeed`` and ``torchrun`` do not. gloo then takes the
    address that the host's own name leads to: on Debian 127.0.1.1, at which no other host finds it.
    """
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if local_size is None or local_size == os.environ["WORLD_SIZE"]:
        return
    interface = interface_towards(os.environ["MASTER_ADDR"])
    if interface is not None:
        for name in VARIABLES:
            os.environ.setdefault(name, interface)


def interface_towards(host: str) -> str | None:
    """The interface on the way to ``host``; on that host itself, the one that has its address.

    None where the way is not to be found out or does not leave this machine.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # no packet is sent
            own: str = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return None if own.startswith("127.") or own == "::1" else name
    return None
