"""Hosts, slots and the ranks that run on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a run. ``slots`` are device ids (index or UUID); one rank each."""

    name: str
    slots: tuple[str, ...]
    user: str | None = None
    port: int | None = None


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

    @property
    def world_size(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    def ranks(self) -> tuple[RankPlace, ...]:
        """Every rank, numbered host by host and slot by slot."""
        places: list[RankPlace] = []
        for node_rank, host in enumerate(self.hosts):
            for local_rank, slot in enumerate(host.slots):
                places.append(
                    RankPlace(
                        rank=len(places),
                        local_rank=local_rank,
                        node_rank=node_rank,
                        local_world_size=len(host.slots),
                        host=host.name,
                        slot=slot,
                    )
                )
        return tuple(places)


def local_topology(num_ranks: int) -> Topology:
    """A topology of this machine alone, with slots 0 .. num_ranks-1."""
    return Topology(hosts=(Host(name="localhost", slots=tuple(str(i) for i in range(num_ranks))),))
