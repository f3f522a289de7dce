"""What a launch doubts of its hosts before their ranks start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslaunch.core.topology import Host
from dslaunch.launch.preflight import (
    GIB,
    ReadyHost,
    Space,
    Surroundings,
    TorchLock,
    find_doubts,
    given_twice,
    ready_host,
    way_doubts,
)

FINE = Surroundings(
    machine="x86_64", shm=Space(total_bytes=2 * GIB, free_bytes=GIB, free_inodes=None), cache_path="/cache",
    cache=Space(total_bytes=9 * GIB, free_bytes=5 * GIB, free_inodes=10**6), cache_problem=None,
    nofile=1024, memlock=65536, infiniband=False, locks=(),
)  # fmt: skip
VERSIONS = {"python": "3.11.7", "torch": "2.9.0", "deepspeed": "0.19.8"}
NODE = ReadyHost(name="a", num_ranks=2, surroundings=FINE, versions=VERSIONS)
NODES = [replace(NODE, name=name) for name in "abc"]
SAID: dict[str, Any] = {
    "time": 1000.0, "versions": {}, "gpus": [], "unseen": None,
    "surroundings": {
        "machine": "x86_64", "identity": "",
        "shm": {"total_bytes": None, "free_bytes": None, "free_inodes": None},
        "cache": {"path": "/c", "problem": None, "total_bytes": 1, "free_bytes": None, "free_inodes": None},
        "nofile": -1, "memlock": -1, "infiniband": True, "locks": [{"path": "/ops/x/lock", "held": True}],
    },
}  # fmt: skip
LOCK = TorchLock(path="/ops/x/lock", held=False)


def doubts(hosts: list[ReadyHost], **more: Any) -> list[str]:
    return find_doubts(hosts, **{"clears_locks": False, **more})


def having(**changes: Any) -> list[ReadyHost]:
    """Three hosts, of which the last two are not as the first."""
    return [NODES[0], *(replace(host, surroundings=replace(FINE, **changes)) for host in NODES[1:])]


def test_hosts_that_are_alike() -> None:
    assert doubts(NODES) == []
    assert doubts([replace(NODE, versions={})]) == []


def test_what_differs_is_one_table() -> None:
    others = {"python": "3.12.1", "torch": "2.8.0", "deepspeed": "0.19.8", "peft": "0.21.2"}
    arm = replace(NODE, name="e", surroundings=replace(FINE, machine="aarch64"))
    assert doubts([*NODES, replace(NODE, name="d", versions=others), arm]) == [
        "hosts differ: ranks may hang, or compute something else; --exclude d@e leaves that out\n"
        "differs  value    hosts\n"
        "machine  x86_64   a, b, c, d\n"
        "         aarch64  e\n"
        "python   3.11.7   a, b, c, e\n"
        "         3.12.1   d\n"
        "torch    2.9.0    a, b, c, e\n"
        "         2.8.0    d\n"
        "peft     none     a, b, c, e\n"
        "         0.21.2   d"
    ]
    assert doubts([*NODES, replace(NODE, name="d", versions={})]) == []  # not known there
    assert "--exclude" in doubts([NODE, replace(NODE, name="d", versions={**VERSIONS, "torch": "2"})])[0]


def test_of_python_only_what_all_tell_is_compared() -> None:
    short = replace(NODE, name="d", versions={**VERSIONS, "python": "3.11"})
    assert doubts([*NODES, short]) == []
    (said,) = doubts([*NODES, replace(short, versions={**VERSIONS, "python": "3.12"})])
    assert "python   3.11   a, b, c\n         3.12   d" in said


def test_where_no_host_is_as_most_none_is_to_be_left_out() -> None:
    one, two, three = (replace(host, versions=dict(VERSIONS)) for host in NODES)
    one = replace(one, versions={**VERSIONS, "torch": "1"})
    two = replace(two, versions={**VERSIONS, "peft": "1"})
    three = replace(three, versions={**VERSIONS, "python": "3.12"})
    assert doubts([one, two, three])[0].startswith(
        "hosts differ: ranks may hang, or compute something else\n"
    )


def test_other_gpus() -> None:
    nodes = [replace(host, gpus=("NVIDIA A100-SXM4-80GB",)) for host in NODES]
    assert doubts([*nodes, replace(NODE, name="d")]) == []  # not known there
    (doubt,) = doubts([*nodes, replace(NODE, name="d", gpus=("NVIDIA H100 80GB HBM3",))])
    assert "--exclude d leaves that out\n" in doubt
    assert "GPU      NVIDIA A100-SXM4-80GB  a, b, c\n         NVIDIA H100 80GB HBM3  d" in doubt
    assert ready_host("a", 1, {**SAID, "gpus": ["A", "A", "B"]}, now=0.0).gpus == ("A", "B")


def test_one_machine_under_several_names() -> None:
    hosts = [replace(host, surroundings=replace(FINE, identity="n1 boot pid")) for host in NODES]
    assert doubts([*hosts[:2], NODES[2]]) == [
        "a, b: these are one machine, n1, and its ranks share it; keep one of them, with all slots:"
        " --exclude b"
    ]
    found = given_twice([
        (Host(name="a", slots=("0", "1")), "x"), (Host(name="b", slots=("2",)), "x"),
        (Host(name="c", slots=("0",)), "y"), (Host(name="d", slots=("0",)), ""),
        (Host(name="e", slots=("0",)), ""), (Host(name="f", slots=("3", "2", "1")), "x"),
    ])  # fmt: skip
    assert found == {"f": ("b", "2")}  # where they say nothing of themselves, nothing is known


def test_a_way_that_none_has_is_the_first_hosts_matter() -> None:
    def found(*unreached: str, names: str = "abc", chosen: bool = False) -> dict[str, str]:
        doubts = way_doubts(names, ("10.0.0.1", 29500), dict.fromkeys(unreached, "timed out"), chosen=chosen)
        return {name: doubt.message for name, doubt in doubts.items()}

    assert found("c") == {"c": "cannot reach a at 10.0.0.1 port 29500: timed out"}
    assert found("b", "c") == {"a": "no other host reaches it at 10.0.0.1 port 29500: timed out"}
    assert list(found("b", names="ab")) == ["b"]  # of two it may be either
    doubts = way_doubts("abc", ("10.0.0.9", 1), {"b": "timed out"}, chosen=True)
    assert doubts["b"].hint.startswith("leave --master-addr (cluster.master_addr) out")


def test_gpus_of_another_kind_than_the_plan_is_for() -> None:
    hosts = [replace(host, gpus=("Tesla V100-SXM2-32GB",)) for host in NODES]
    assert doubts(hosts, planned=["a100"]) == [
        "a, b, c: the plan is for a100 (sm_80), but it has v100 (sm_70);"
        " name what the hosts have with --gpu, or give --inventory"
    ]
    for planned in (["v100"], ["a100", "v100"], [], ["some-gpu"]):
        assert doubts(hosts, planned=planned) == []
    assert doubts([replace(host, gpus=("Some GPU",)) for host in NODES], planned=["a100"]) == []


FULL = Space(total_bytes=9 * GIB, free_bytes=100 * 2**20, free_inodes=7)
SHORT = "; free some, or set DSLAUNCH_CACHE to another file system"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"shm": Space(total_bytes=64 * 2**20, free_bytes=0, free_inodes=None)},
            [
                "/dev/shm is 64 MiB for 2 ranks: NCCL and data loaders die of a bus error where it is full;"
                " docker or podman run --shm-size=8g (or --ipc=host); on a host, and so in apptainer, which"
                " has the host's: mount -o remount,size=8g /dev/shm"
            ],
        ),
        (
            {"shm": Space(total_bytes=64 * GIB, free_bytes=GIB // 4, free_inodes=None)},
            [
                "of /dev/shm 0.2 GiB of 64.0 GiB are free for 2 ranks: NCCL and data loaders die of a bus"
                " error where it is full; killed programs leave files there: see ls -l /dev/shm, and remove"
                " what is yours"
            ],
        ),
        (
            {"cache_problem": "Disk quota exceeded", "cache": FULL},
            [
                "cannot write the cache /cache: Disk quota exceeded;"
                " set DSLAUNCH_CACHE to a directory that can be written"
            ],
        ),
        (
            {"cache": FULL},
            [
                "100 MiB are free for the cache /cache" + SHORT,
                "only 7 files more fit on the file system of /cache" + SHORT,
            ],
        ),
        ({"nofile": 300}, ["a process may open 300 files; ulimit -n 65536"]),
        (
            {"infiniband": True},
            [
                "it has InfiniBand, and a process may lock 64 KiB of memory;"
                " set memlock to unlimited (limits.conf; for ssh in sshd's own limits)"
            ],
        ),
        (
            {"locks": (LOCK,)},
            [
                "no process has /ops/x/lock open: a killed build left it, and DeepSpeed waits for it"
                " for ever; rm /ops/x/lock, unless a build runs on another machine"
            ],
        ),
    ],
)
def test_what_a_host_lacks_is_said_once_for_all_hosts(changes: dict[str, Any], said: list[str]) -> None:
    assert doubts(having(**changes)) == [f"b, c: {text}" for text in said]


def test_a_lock_is_no_doubt_where_somebody_has_it_or_our_trainer_removes_it() -> None:
    hosts = having(locks=(LOCK,))
    assert doubts(hosts, clears_locks=True) == []
    assert doubts(hosts, held_here={LOCK.path}) == []
    elsewhere = ready_host("d", 2, {**SAID, "time": 0.0}, now=0.0)  # on this host a process has it open
    assert doubts([*hosts, elsewhere]) == []


def test_a_run_directory_that_is_not_shared() -> None:
    hosts = [
        NODES[0],
        *(replace(host, unseen="the run directory /r is not seen there") for host in NODES[1:]),
    ]
    assert doubts(hosts) == [
        "b, c: the run directory /r is not seen there; the logs of its ranks stay there:"
        " put --run-dir on a file system that all hosts share"
    ]


def test_a_clock_that_is_wrong() -> None:
    hosts = [ready_host(name, 1, SAID, now=1000.2) for name in "abc"]
    assert doubts(hosts) == []
    late = ready_host("d", 1, {**SAID, "time": 940.0}, now=1000.2)
    assert doubts([*hosts, late]) == ["d: its clock is 60 s behind the others'; start an NTP client there"]
    # Where ours is the wrong one, all of theirs seem so.
    assert doubts([ready_host(name, 1, SAID, now=5000.0) for name in "abc"]) == []
