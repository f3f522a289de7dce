"""Hosts, slots and the ranks that run on them."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# No name may start with "-": it would be an option to ssh.
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a run. ``slots`` are device ids (index or UUID); one rank each.

    ``all_slots``: those that it was listed with, of which a filter may have left some. They
    tell the agent whether its slots are ids of devices or places among those it is given.
    """

    name: str
    slots: tuple[str, ...]
    user: str | None = None
    port: int | None = None
    all_slots: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_slots", self.all_slots or self.slots)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank runs, with the numbers its environment carries."""

    rank: int
    local_rank: int
    node_rank: int
    local_world_size: int
    host: str
    slot: str


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All hosts of a run, in rank order. Slots may differ from host to host."""

    hosts: tuple[Host, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @functools.cached_property
    def world_size(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    @functools.cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """The rank of each host's first slot."""
        return tuple(itertools.accumulate((len(host.slots) for host in self.hosts), initial=0))

    def ranks(self) -> tuple[RankPlace, ...]:
        """Every rank, numbered host by host and slot by slot."""
        return tuple(place for node_rank in range(self.num_nodes) for place in self.ranks_on(node_rank))

    def ranks_on(self, node_rank: int) -> tuple[RankPlace, ...]:
        """The ranks of one host."""
        host, first = self.hosts[node_rank], self._first_ranks[node_rank]
        return tuple(
            RankPlace(
                rank=first + local_rank,
                local_rank=local_rank,
                node_rank=node_rank,
                local_world_size=len(host.slots),
                host=host.name,
                slot=slot,
            )
            for local_rank, slot in enumerate(host.slots)
        )


def span(ranks: Sequence[int], limit: int | None = None) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7; after ``limit`` such parts only how many ranks more there are."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:limit]]
    more = sum(map(len, parts[len(words) :]))
    return ", ".join(words) + (f" and {more} more" if more else "")


def without_rank(text: bytes, rank: int) -> bytes:
    """What ``rank`` wrote, with its own number (``rank 3``, ``[rank3]``, ``RANK=3``) as a star.

    So that what many ranks say alike is found: torch puts the number into each line.
    """
    return re.sub(rb"(?i)\b(rank\W{0,2})%d\b" % rank, rb"\1*", text)


def local_topology(num_ranks: int) -> Topology:
    """A topology of this machine alone, with slots 0 .. num_ranks-1."""
    return Topology(hosts=(Host(name="localhost", slots=tuple(str(i) for i in range(num_ranks))),))


def is_address(name: str) -> bool:
    """Whether a host's name is an IPv4 or IPv6 address."""
    import ipaddress

    if ":" not in name and not name[-1:].isdigit():  # most names, and ipaddress is slow
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def plain_name(name: str) -> str:
    """One spelling for all of a name: lower case, an address at its shortest, ``localhost`` for loopback."""
    plain = name.lower().rstrip(".")
    if ":" in plain and is_address(plain):
        import ipaddress

        plain = str(ipaddress.ip_address(plain))
    return "localhost" if plain in _LOOPBACK else plain


def master_fault(addr: str, *, meet_elsewhere: bool) -> tuple[str, str] | None:
    """Why ranks cannot meet at ``addr``, and what to do; None where they may.

    ``meet_elsewhere``: some ranks are on other machines than this one.
    """
    bare = addr.removeprefix("[").removesuffix("]")
    if bare != addr and is_address(bare):
        return f"{addr!r} is in brackets, which ranks do not read", f"write {bare}"
    if not HOST_NAME.fullmatch(addr) and not is_address(addr):
        return f"{addr!r} is no host name or address", "leave it out: it is found by the way to the others"
    if meet_elsewhere and plain_name(addr) == "localhost":
        message = f"{addr!r} is what each host calls itself: ranks of several hosts do not meet there"
        return message, "leave it out, or give the address at which the others find the first host"
    return None


def is_this_machine(name: str, *, look_up: bool = True) -> bool:
    """Whether ``name`` is this host's name or resolves to one of its addresses.

    The one rule for it, in planning and in launching. A name that is none of the
    obvious ones is looked up, which may ask a name server; not with ``look_up`` False.
    """
    own = os.uname().nodename
    if name in (*_LOOPBACK, own, own.split(".")[0]):
        return True
    if not look_up:
        return False
    import socket

    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    import socket

    # The kernel binds only to addresses of this machine; no packet is sent.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
