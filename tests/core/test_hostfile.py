"""Hostfiles: what is read, what is refused and where, and host filters."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import HostfileError
from dslaunch.core.hostfile import parse_hostfile, render_hostfile, select_hosts
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
        ("  a  slots=x!", "hosts:1:12", "'x!'"),
    ],
)
def test_a_wrong_line_is_named_with_its_column(text: str, where: str, part: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "hosts")
    assert caught.value.message.startswith(f"{where}:")
    assert part in caught.value.message
    assert caught.value.exit_code == 2


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
        ({"include": "bb"}, "no host bb", "did you mean b?"),
        ({"include": "b:4"}, "no slot '4'", "it has 0, 1, 2, 3"),
        ({"include": ""}, "is not host or host:0,1", "a@b:0,2"),
        ({"include": "a@"}, "is not host or host:0,1", "a@b:0,2"),
        ({"include": "a@a:1"}, "given twice", None),
        ({"include": "a", "exclude": "b"}, "both given", "one of the two"),
        ({"include": "a", "num_nodes": 1}, "cannot be combined", "leave one out"),
        ({"exclude": "a@b@c@[fe80::1]"}, "no host is left", "loosen"),
        ({"num_nodes": 5}, "the hostfile has 4", "use num_nodes 4"),
        ({"num_gpus_per_node": 3}, "host c has 2 slots", "use num_gpus_per_node 2"),
    ],
)
def test_filters_that_cannot_be(filters: dict[str, object], part: str, hint: str | None) -> None:
    with pytest.raises(HostfileError) as caught:
        chosen(**filters)
    assert part in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_ten_thousand_hosts_are_filtered() -> None:
    text = "".join(f"node{i:05d} slots=8\n" for i in range(10_000))
    wanted = "@".join(f"node{i:05d}:0,1" for i in range(0, 10_000, 2))
    hosts = select_hosts(parse_hostfile(text, "hosts"), include=wanted)
    assert len(hosts) == 5_000
    assert {host.slots for host in hosts} == {("0", "1")}
