"""Hostfiles: what is read, what is refused and where, and host filters."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import HostfileError
from dslaunch.core.hostfile import filter_text, parse_hostfile, render_hostfile, select_hosts
from dslaunch.core.templating import hostfile_root
from dslaunch.core.topology import Host

GOOD = """\ufeff# a comment
worker-0 slots=2

alice@worker-1:2222\tslots=0,1,4   # trailing remark\r
  [fe80::1%eth0]:22 slots=GPU-8f1b
10.0.0.4 slots=MIG-1,MIG-2
one-id slots=3,
one-uuid slots=GPU-7,
"""


def test_every_form_of_a_line() -> None:
    assert parse_hostfile(GOOD, "hosts") == (
        Host(name="worker-0", slots=("0", "1")),
        Host(name="worker-1", slots=("0", "1", "4"), user="alice", port=2222),
        Host(name="fe80::1%eth0", slots=("GPU-8f1b",), port=22),
        Host(name="10.0.0.4", slots=("MIG-1", "MIG-2")),
        Host(name="one-id", slots=("3",)),
        Host(name="one-uuid", slots=("GPU-7",)),
    )


def test_what_is_rendered_reads_back() -> None:
    hosts = parse_hostfile(GOOD, "hosts")
    assert parse_hostfile(render_hostfile(hosts), "again") == hosts


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (("0",), "1"),
        (("1",), "1,"),
        (("3",), "3,"),
        (("0", "1"), "2"),
        (("1", "0"), "1,0"),
        (("GPU-1",), "GPU-1"),
    ],
)
def test_slots_as_they_are_written(slots: tuple[str, ...], text: str) -> None:
    host = Host(name="a", slots=slots)
    assert render_hostfile([host]) == f"a slots={text}\n"
    assert parse_hostfile(render_hostfile([host]), "again") == (host,)


def test_the_shipped_examples_are_read() -> None:
    files = sorted(hostfile_root().iterdir())
    assert files
    for file in files:
        assert parse_hostfile(file.read_text(encoding="utf-8"), file.name)


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("", "hosts", "no host in it"),
        ("# nothing\n\n", "hosts", "no host in it"),
        ("a slots=2\nb", "hosts:2:2", "slots are missing"),
        ("a slots = 2", "hosts:1:3", "'slots' is not slots=N"),
        ("a slots= 2", "hosts:1:10", "'2' after the slots"),
        ("a 2", "hosts:1:3", "'2' is not slots=N"),
        ("a slot=2", "hosts:1:3", "'slot=2' is not slots=N"),
        ("a SLOTS=2", "hosts:1:3", "'SLOTS=2' is not slots=N"),
        ("a slots=0", "hosts:1:9", "between 1 and 4096"),
        ("a slots=-1", "hosts:1:9", "'-1'"),
        ("a slots=,", "hosts:1:9", "an empty slot id"),
        ("a slots=1,,", "hosts:1:9", "an empty slot id"),
        ("a slots=0,1,", "hosts:1:9", "an empty slot id"),
        ("a slots=", "hosts:1:9", "an empty slot id"),
        ("a slots=1,1", "hosts:1:9", "slot 1 is given twice"),
        ("a slots=2 max_slots=4", "hosts:1:11", "'max_slots=4' after the slots"),
        ("a slots=2\n\nb slots=1\na slots=4", "hosts:4:1", "host a is given twice, first in line 1"),
        ("a,b slots=2", "hosts:1:1", "'a,b' is not a host"),
        ("fe80::1 slots=2", "hosts:1:1", "'fe80::1' is not a host"),
        ("-oProxyCommand=x slots=2", "hosts:1:1", "is not a host"),
        ("$(reboot) slots=2", "hosts:1:1", "is not a host"),
        ("a;b slots=2", "hosts:1:1", "is not a host"),
        ("a:99999 slots=2", "hosts:1:1", "port 99999"),
        ("a slots=8x", "hosts:1:9", "'8x' is neither a number nor the id of a device"),
        ("a slots=x", "hosts:1:9", "'x' is neither a number nor the id of a device"),
        ("a slots=0,b", "hosts:1:9", "'b' is neither a number nor the id of a device"),
        ("10.0.0.300 slots=2", "hosts:1:1", "10.0.0.300 is not an IPv4 address"),
        ("10.0.0.010 slots=2", "hosts:1:1", "10.0.0.010 is not an IPv4 address"),
        ("10.0.1. slots=2", "hosts:1:1", "10.0.1. is not an IPv4 address"),
        ("[node1] slots=2", "hosts:1:1", "node1 is not an IPv6 address"),
        ("[10.0.0.1] slots=2", "hosts:1:1", "10.0.0.1 is not an IPv6 address"),
        ("  a  slots=x!", "hosts:1:12", "'x!'"),
    ],
)
def test_a_wrong_line_is_named_with_its_column(text: str, where: str, part: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "hosts")
    assert caught.value.message.startswith(f"{where}:")
    assert part in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("x lots=8", "write x slots=8"),
        ("a slots = 2", "write a slots=2"),
        ("a slots= 2", "write a slots=2"),
        ("a 4", "write a slots=4"),
        ("a SLOTS=0,3", "write a slots=0,3"),
        ("a slots=2 max_slots=4", "write a slots=2"),
        ("a slots=8x", "write slots=8"),
        ("a:8", "write a slots=8"),
        ("[fe80::1]:22", "write [fe80::1]:22 slots=8"),
        ("a", "write a slots=8"),
        ("a,8", "write one host a line: a slots=8"),
        ("a,b slots=2", "write one host a line: a slots=2"),
        ("fe80::1 slots=2", "write an IPv6 address in brackets: [fe80::1] slots=2"),
        ("<worker-1> slots=8", "write the name of a host in place of <worker-1>"),
        ("slots=8", "write the host's name first: worker-0 slots=8"),
    ],
)
def test_the_nearest_fix(line: str, hint: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(line, "hosts")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("first", "again", "alias"),
    [
        ("a", "a", ""),
        ("node1", "Node1", " (as node1)"),
        ("node1", "node1.cluster.org", " (as node1)"),
        ("node1.cluster.org", "node1", " (as node1.cluster.org)"),
        ("node1.cluster.org", "node1.cluster.org.", " (as node1.cluster.org)"),
        ("[fe80::1]", "[fe80:0:0::1]", " (as fe80::1)"),
        ("[FE80::1]", "[fe80::1]", " (as FE80::1)"),
        ("localhost", "127.0.0.1", " (as localhost)"),
        ("[::1]", "localhost", " (as ::1)"),
        ("root@a", "a:22", ""),
    ],
)
def test_one_host_under_two_names(first: str, again: str, alias: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(f"{first} slots=1\nb slots=1\n{again} slots=1\n", "hosts")
    assert caught.value.message.startswith("hosts:3:1: ")
    assert caught.value.message.endswith(f" is given twice, first in line 1{alias}")


def test_hosts_that_only_look_alike() -> None:
    names = ["a.x.org", "a.y.org", "10.0.0.1", "10.0.0.2", "b", "b1", "[fe80::1%eth0]", "[fe80::1%eth1]"]
    text = "".join(f"{name} slots=1\n" for name in names)
    assert len(parse_hostfile(text, "hosts")) == len(names)


FOUR = parse_hostfile("a slots=4\nb slots=4\nc slots=2\n[fe80::1] slots=2", "hosts")


def chosen(**filters: object) -> dict[str, str]:
    hosts = select_hosts(FOUR, **filters)  # type: ignore[arg-type]
    return {host.name: ",".join(host.slots) for host in hosts}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {"a": "0,1,2,3", "b": "0,1,2,3", "c": "0,1", "fe80::1": "0,1"}),
        ({"include": "b"}, {"b": "0,1,2,3"}),
        ({"include": "b:3,0@a"}, {"a": "0,1,2,3", "b": "0,3"}),  # in the hostfile's order
        ({"include": "b:0@b:2"}, {"b": "0,2"}),
        ({"include": "[fe80::1]:1"}, {"fe80::1": "1"}),
        ({"exclude": "a@c:0"}, {"b": "0,1,2,3", "c": "1", "fe80::1": "0,1"}),
        ({"exclude": "c:0,1"}, {"a": "0,1,2,3", "b": "0,1,2,3", "fe80::1": "0,1"}),
        ({"num_nodes": 2}, {"a": "0,1,2,3", "b": "0,1,2,3"}),
        ({"num_nodes": 3, "num_gpus_per_node": 1}, {"a": "0", "b": "0", "c": "0"}),
        ({"include": "a:2,3", "num_gpus_per_node": 1}, {"a": "2"}),
    ],
)
def test_filters(filters: dict[str, object], expected: dict[str, str]) -> None:
    assert chosen(**filters) == expected


@pytest.mark.parametrize(
    ("filters", "part", "hint"),
    [
        ({"include": "bb"}, "there is no host bb", "did you mean b?"),
        ({"include": "fe80::1"}, "there is no host fe80", "in brackets: [fe80::1]"),
        ({"exclude": "[fe80::2]:0"}, "there is no host fe80::2", "did you mean [fe80::1]?"),
        ({"include": "b:4"}, "no slot '4'", "it has 0, 1, 2, 3"),
        ({"include": ""}, "is not host or host:0,1", "a@b:0,2"),
        ({"include": "a@"}, "is not host or host:0,1", "a@b:0,2"),
        ({"include": "a@a:1"}, "given twice", None),
        ({"include": "a", "exclude": "b"}, "both given", "one of the two"),
        ({"include": "a", "num_nodes": 1}, "cannot be combined", "leave one out"),
        ({"exclude": "a@b@c@[fe80::1]"}, "no host is left", "loosen"),
        ({"num_nodes": 5}, "there are 4 hosts", "use num_nodes 4"),
        ({"num_gpus_per_node": 3}, "host c has 2 slots", "use num_gpus_per_node 2"),
    ],
)
def test_filters_that_cannot_be(filters: dict[str, object], part: str, hint: str | None) -> None:
    with pytest.raises(HostfileError) as caught:
        chosen(**filters)
    assert part in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_a_filter_of_names_is_read_as_it_is_written() -> None:
    names = [host.name for host in FOUR[1:]]
    assert filter_text(names) == "b@c@[fe80::1]"
    assert list(chosen(include=filter_text(names))) == names


def test_ten_thousand_hosts_are_filtered() -> None:
    text = "".join(f"node{i:05d} slots=8\n" for i in range(10_000))
    wanted = "@".join(f"node{i:05d}:0,1" for i in range(0, 10_000, 2))
    hosts = select_hosts(parse_hostfile(text, "hosts"), include=wanted)
    assert len(hosts) == 5_000
    assert {host.slots for host in hosts} == {("0", "1")}
