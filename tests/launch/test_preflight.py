"""What a launch doubts of its hosts before their ranks start."""

from __future__ import annotations

from dataclasses import replace

from dslaunch.launch.preflight import GIB, ReadyHost, find_doubts, ready_host

NODE = ReadyHost(name="a", num_ranks=2, shm_bytes=2 * GIB, versions={"torch": "2.9.0", "deepspeed": "0.19.8"})
NODES = [replace(NODE, name=name) for name in "abc"]


def test_hosts_that_are_alike() -> None:
    assert find_doubts(NODES) == []
    assert find_doubts([replace(NODE, shm_bytes=None, versions={})]) == []


def test_another_torch() -> None:
    other = replace(NODE, name="d", versions={"torch": "2.8.0"})
    assert find_doubts([*NODES, other]) == [
        "torch is 2.8.0 on d, but 2.9.0 on the others: ranks may hang or compute something else;"
        " --exclude d leaves that out"
    ]
    assert find_doubts([*NODES, replace(NODE, name="d", versions={})]) == []  # not known there


def test_other_gpus() -> None:
    nodes = [replace(host, gpus=("NVIDIA A100-SXM4-80GB",)) for host in NODES]
    assert find_doubts([*nodes, replace(NODE, name="d")]) == []  # not known there
    (doubt,) = find_doubts([*nodes, replace(NODE, name="d", gpus=("NVIDIA H100 80GB HBM3",))])
    assert doubt.startswith("the GPU is NVIDIA H100 80GB HBM3 on d, but NVIDIA A100-SXM4-80GB on the others:")
    assert doubt.endswith("; --exclude d leaves that out")
    said = {"time": 0.0, "shm_bytes": None, "versions": {}, "gpus": ["A", "A", "B"]}
    assert ready_host("a", 1, said, now=0.0).gpus == ("A", "B")


def test_a_small_shared_memory_is_said_once_for_all_hosts() -> None:
    hosts = [replace(host, shm_bytes=64 * 2**20) for host in NODES]
    assert find_doubts(hosts) == [
        "a, b, c: /dev/shm is 64 MiB for 2 ranks: NCCL and data loaders die of a bus error where it is full;"
        " docker run --shm-size=8g (or --ipc=host); on a host: mount -o remount,size=8g /dev/shm"
    ]


def test_a_clock_that_is_wrong() -> None:
    said = {"time": 1000.0, "shm_bytes": None, "versions": {}, "gpus": []}
    hosts = [ready_host(name, 1, said, now=1000.2) for name in "abc"]
    assert find_doubts(hosts) == []
    late = ready_host("d", 1, {**said, "time": 940.0}, now=1000.2)
    assert find_doubts([*hosts, late]) == ["d: its clock is 60 s behind the others'"]
    # Where ours is the wrong one, all of theirs seem so.
    assert find_doubts([ready_host(name, 1, said, now=5000.0) for name in "abc"]) == []
