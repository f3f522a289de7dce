"""Ranks numbered over hosts and slots."""

from __future__ import annotations

import pytest

from dslaunch.core.topology import Host, Topology, local_topology, master_fault


def test_ranks_where_slots_differ() -> None:
    topology = Topology(hosts=(Host(name="a", slots=("2", "3")), Host(name="b", slots=("GPU-x",))))
    assert (topology.num_nodes, topology.world_size) == (2, 3)
    assert [
        (p.rank, p.local_rank, p.node_rank, p.local_world_size, p.host, p.slot) for p in topology.ranks()
    ] == [(0, 0, 0, 2, "a", "2"), (1, 1, 0, 2, "a", "3"), (2, 0, 1, 1, "b", "GPU-x")]


def test_the_ranks_of_one_host() -> None:
    topology = Topology(hosts=(Host(name="a", slots=("2", "3")), Host(name="b", slots=("0",))))
    assert topology.ranks_on(0) + topology.ranks_on(1) == topology.ranks()
    assert [place.rank for place in topology.ranks_on(1)] == [2]


def test_this_machine() -> None:
    topology = local_topology(3)
    assert topology.world_size == 3
    assert topology.hosts == (Host(name="localhost", slots=("0", "1", "2")),)


@pytest.mark.parametrize(
    ("addr", "elsewhere", "words"),
    [
        ("node1", True, None),
        ("10.0.0.1", True, None),
        ("fe80::1", True, None),
        ("fe80::1%eth0", True, None),
        ("127.0.0.1", False, None),
        ("127.0.0.1", True, "'127.0.0.1' is what each host calls itself"),
        ("LocalHost", True, "'LocalHost' is what each host calls itself"),
        ("[fe80::1]", False, "'[fe80::1]' is in brackets"),
        ("", False, "'' is no host name or address"),
        ("a b;", False, "'a b;' is no host name or address"),
        ("http://a:1", False, "'http://a:1' is no host name or address"),
    ],
)
def test_where_ranks_can_meet(addr: str, elsewhere: bool, words: str | None) -> None:
    fault = master_fault(addr, meet_elsewhere=elsewhere)
    assert (fault is None) == (words is None)
    if fault is not None and words is not None:
        assert fault[0].startswith(words)
