"""Hosts as a hostfile for the ``deepspeed`` command, and what else that command must be told.

DeepSpeed 0.19.8 (``launcher/runner.py``) reads ``NAME slots=COUNT``. Which of a
host's devices are meant goes to ``--include``, the ssh port to ``--ssh_port``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.core.topology import Host


@dataclass(frozen=True, kw_only=True)
class DeepSpeedHostfile:
    """``arguments`` are for the deepspeed command, beside ``--hostfile``. ``lost`` says, a
    sentence each, what of the hosts DeepSpeed cannot be told."""

    text: str
    arguments: tuple[str, ...]
    lost: tuple[str, ...]


def render_deepspeed_hostfile(hosts: Sequence[Host]) -> DeepSpeedHostfile:
    """The hosts as DeepSpeed reads them; the number of ranks on each stays the same."""
    chosen = any(_is_choice(host) for host in hosts)
    arguments: list[str] = []
    if chosen:
        arguments += ["--include", "@".join(map(_included, hosts))]
    ports = {host.port for host in hosts}
    if len(ports) == 1 and (port := ports.pop()) is not None:
        arguments += ["--ssh_port", str(port)]
    lines = [f"{_user(host, chosen)}{host.name} slots={_count(host)}" for host in hosts]
    return DeepSpeedHostfile(
        text="\n".join(lines) + "\n",
        arguments=tuple(arguments),
        lost=tuple(_lost(hosts, chosen=chosen, one_port="--ssh_port" in arguments)),
    )


def _lost(hosts: Sequence[Host], *, chosen: bool, one_port: bool) -> list[str]:
    """One sentence for each kind of loss, with the first host that it is about."""
    lost = []
    if named := [host for host in hosts if not _numeric(host)]:
        ids = ", ".join(named[0].slots)
        lost.append(
            f"{_about(named)}: DeepSpeed numbers devices and cannot be told {ids};"
            " its ranks take the first ones that it sees"
        )
    if turned := [host for host in hosts if _numeric(host) and list(host.slots) != _sorted(host)]:
        lost.append(
            f"{_about(turned)}: DeepSpeed numbers its ranks by rising slot, not {','.join(turned[0].slots)}"
        )
    if not one_port and (ports := [host for host in hosts if host.port is not None]):
        lost.append(f"{_about(ports)}: set Port {ports[0].port} in ~/.ssh/config, DeepSpeed has one for all")
    if chosen and (users := [host for host in hosts if host.user]):
        lost.append(
            f"{_about(users)}: set User {users[0].user} in ~/.ssh/config, --include has no place for it"
        )
    if chosen and (addresses := [host for host in hosts if ":" in host.name]):
        lost.append(f"{_about(addresses)}: --include cannot name an IPv6 address; give the host a name")
    return lost


def _about(hosts: Sequence[Host]) -> str:
    return hosts[0].name if len(hosts) == 1 else f"{hosts[0].name} and {len(hosts) - 1} more"


def _user(host: Host, chosen: bool) -> str:
    return f"{host.user}@" if host.user and not chosen else ""


def _numeric(host: Host) -> bool:
    return all(slot.isdecimal() for slot in host.slots)


def _sorted(host: Host) -> list[str]:
    return sorted(host.slots, key=int)


def _is_choice(host: Host) -> bool:
    """Whether the slots are numbers, but not all from 0 on."""
    return _numeric(host) and set(host.slots) != set(map(str, range(len(host.slots))))


def _count(host: Host) -> int:
    return max(map(int, host.slots)) + 1 if _is_choice(host) else len(host.slots)


def _included(host: Host) -> str:
    return f"{host.name}:{','.join(_sorted(host))}" if _is_choice(host) else host.name
