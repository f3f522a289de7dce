"""Ranks numbered over hosts and slots."""

from __future__ import annotations

import pytest

from dslaunch.core.topology import (
    Host,
    Topology,
    is_address,
    local_topology,
    master_fault,
    span,
    without_rank,
)


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


@pytest.mark.parametrize(
    ("ranks", "limit", "words"),
    [
        ((), None, ""),
        ((3,), None, "3"),
        ((0, 1, 2, 3, 7, 9, 10), None, "0-3, 7, 9-10"),
        ((0, 1, 2, 3, 7, 9, 10), 2, "0-3, 7 and 2 more"),
        ((0, 1, 2, 3, 7, 9, 10), 3, "0-3, 7, 9-10"),
        ((5, 3, 4), None, "5, 3-4"),
    ],
)
def test_spans_of_ranks(ranks: tuple[int, ...], limit: int | None, words: str) -> None:
    assert span(ranks, limit) == words


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("10.0.0.1", True), ("fe80::1", True), ("::ffff", True), ("fe80::1%eth0", True), ("10.0.0.x", False),
        ("10.0.0.256", False), ("node1", False), ("", False), ("a:b", False),
    ],
)  # fmt: skip
def test_addresses(name: str, is_one: bool) -> None:
    assert is_address(name) == is_one


def test_what_ranks_say_alike_but_for_their_number() -> None:
    said = b"[rank3]: Rank 3, RANK=3, rank 31, step 3, crank3"
    assert without_rank(said, 3) == b"[rank*]: Rank *, RANK=*, rank 31, step 3, crank3"
