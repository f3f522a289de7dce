"""Which hosts and slots a run has, and of what kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dslaunch.config.facts import Facts, PathFact
from dslaunch.config.hosts import ResolvedHosts, resolve_hosts
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.devices import Device, Inventory, lookup_device
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.hostfile import parse_hostfile
from tests.config.build import CPU, gpus

A100S = gpus("a100", "a100", "a100", "a100")


def hosts(
    machine: Inventory = CPU,
    hostfile: str | None = None,
    inventories: Mapping[str, Inventory] | None = None,
    runs_here: bool = True,
    **cluster: Any,
) -> ResolvedHosts:
    listed = parse_hostfile(hostfile, "hosts") if hostfile else None
    paths = {"cluster.hostfile": PathFact("file", "/hosts")}
    facts = Facts(
        machine, hosts=listed, paths=paths, local_names=("localhost", "here"), inventories=inventories
    )
    return resolve_hosts(ClusterSpec.model_validate(cluster), facts, runs_here=runs_here)


def slots(found: ResolvedHosts) -> dict[str, str]:
    return {host.name: ",".join(host.slots) for host in found.topology.hosts}


def test_a_machine_without_accelerators_runs_one_rank() -> None:
    found = hosts()
    assert (slots(found), found.device_type) == ({"localhost": "0"}, "cpu")


def test_as_many_cpu_ranks_as_asked_for() -> None:
    found = hosts(num_gpus_per_node=2)
    assert (slots(found), found.device_type) == ({"localhost": "0,1"}, "cpu")


def test_all_accelerators_of_the_machine_by_default() -> None:
    found = hosts(A100S)
    assert (slots(found), found.device_type) == ({"localhost": "0,1,2,3"}, "cuda")


def test_fewer_accelerators_than_there_are() -> None:
    assert slots(hosts(A100S, num_gpus_per_node=2)) == {"localhost": "0,1"}


def test_more_accelerators_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_gpus_per_node 8, but this machine shows 4"):
        hosts(A100S, num_gpus_per_node=8)


def test_a_named_device_plans_for_another_machine() -> None:
    found = hosts(CPU, num_gpus_per_node=8, gpu="h100")
    assert (len(found.topology.ranks()), found.device_type) == (8, "cuda")
    with pytest.raises(ConfigError, match="how many h100 a node has is not known"):
        hosts(CPU, gpu="h100")


def test_cpu_by_name_leaves_the_accelerators_alone() -> None:
    found = hosts(A100S, gpu="cpu", num_gpus_per_node=2)
    assert (slots(found), found.device_type) == ({"localhost": "0,1"}, "cpu")
    assert found.devices == (lookup_device("cpu"),)


def test_nodes_without_names() -> None:
    found = hosts(num_nodes=2, num_gpus_per_node=8, gpu="a100")
    assert slots(found) == {"node-0": "0,1,2,3,4,5,6,7", "node-1": "0,1,2,3,4,5,6,7"}
    unknown = hosts(num_nodes=2, num_gpus_per_node=8)
    assert (unknown.devices, unknown.device_type) == (None, "cuda")  # never the login node's CPU
    with pytest.raises(ConfigError, match="how many ranks run on each is not known"):
        hosts(num_nodes=2)


def test_a_hostfile_and_its_filters() -> None:
    found = hosts(hostfile="a slots=4\nb slots=2\n", include="a:1,3@b", gpu="v100")
    assert slots(found) == {"a": "1,3", "b": "0,1"}
    assert found.topology_reason == "2 of 2 hosts of /hosts"
    assert found.devices == (lookup_device("v100"),)


def test_devices_of_other_hosts_are_not_guessed() -> None:
    found = hosts(A100S, hostfile="a slots=4\n")
    assert (found.devices, found.device_type) == (None, "cuda")
    assert hosts(A100S, hostfile="here slots=2\n").devices is not None
    assert hosts(CPU, hostfile="a slots=2\n", gpu="cpu").device_type == "cpu"


def test_a_hostfile_of_this_machine_has_no_more_slots_than_devices() -> None:
    assert slots(hosts(A100S, hostfile="here slots=4\n")) == {"here": "0,1,2,3"}
    with pytest.raises(ConfigError, match=r"cluster\.hostfile: here has 8 slots, but this machine shows 4"):
        hosts(A100S, hostfile="here slots=8\n")
    assert slots(hosts(A100S, hostfile="here slots=8\n", num_gpus_per_node=4)) == {"here": "0,1,2,3"}
    assert hosts(CPU, hostfile="here slots=8\n").device_type == "cpu"  # eight ranks on the CPU


def test_devices_that_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="both cpu and GPUs"):
        hosts(num_gpus_per_node=2, gpu=("cpu", "a100"))


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_filters_need_a_hostfile(key: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key} needs a hostfile"):
        hosts(**{key: "a"})


def test_an_unknown_device() -> None:
    with pytest.raises(ConfigError, match="unknown device 'a1000'"):
        hosts(gpu="a1000")


FOUR = "node-1 slots=4\nnode-2 slots=4\nnode-3 slots=4\nold slots=2\n"
BY_HOST = {"node-[1-3]": "a100-40g", "*": "v100-16g"}


def groups(found: ResolvedHosts) -> list[tuple[str, str]]:
    assert found.groups is not None
    return [(group.device.name, group.hosts) for group in found.groups]


def test_devices_by_host_pattern() -> None:
    found = hosts(hostfile=FOUR, gpu=BY_HOST)
    assert groups(found) == [("a100", "node-[1-3]"), ("v100", "old")]
    assert found.memory_gib == 15.76  # of the smallest


@pytest.mark.parametrize("filters", [{"exclude": "old"}, {"include": "node-1@node-3"}, {"num_nodes": 3}])
def test_only_the_hosts_of_the_run_count(filters: dict[str, Any]) -> None:
    found = hosts(hostfile=FOUR, gpu=BY_HOST, **filters)
    assert groups(found) == [("a100", "node-[1-3]")]
    assert found.memory_gib == 39.4


def test_the_first_pattern_that_fits_counts() -> None:
    found = hosts(hostfile=FOUR, gpu={"node-2": "t4", "node-*": "h100", "old": "l4"}, exclude="node-1")
    assert groups(found) == [("t4", "node-2"), ("h100", "node-3"), ("l4", "old")]


@pytest.mark.parametrize(
    ("gpu", "messages"),
    [
        ({"node-[1-2]": "a100"}, ["cluster.gpu: no pattern fits node-3, old"]),
        (
            {"node-*": "a100", "node-1": "h100", "nod": "l4"},
            [
                "cluster.gpu.node-1: it decides for no host of the hostfile",
                "cluster.gpu.nod: it decides for no host of the hostfile",
                "cluster.gpu: no pattern fits old",
            ],
        ),
    ],
)
def test_patterns_that_leave_something_open(gpu: dict[str, str], messages: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        hosts(hostfile=FOUR, gpu=gpu)
    assert [problem.message for problem in caught.value.problems] == messages


@pytest.mark.parametrize("cluster", [{"num_gpus_per_node": 4}, {"num_nodes": 2, "num_gpus_per_node": 4}])
def test_patterns_need_hosts(cluster: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="devices by host need a hostfile"):
        hosts(gpu=BY_HOST, **cluster)


def test_the_cpu_of_other_hosts_is_not_this_ones() -> None:
    """cpu by name says nothing of their instructions, whatever this machine's CPU has."""
    fast = Inventory((), Device("cpu", "", "yes", "yes"))
    assert hosts(fast, hostfile="a slots=2\n", gpu="cpu").devices == (lookup_device("cpu"),)
    assert hosts(fast, hostfile="here slots=2\n", gpu="cpu").devices == (fast.cpu,)


KNOWN = {
    "node-1": gpus("a100-80g", "a100-80g"),
    "node-2.cluster": gpus("a100-40g", "v100-32g"),
    "cpu-1": Inventory((), Device("cpu", "", "no", "yes")),
}


def test_an_inventory_tells_the_device_behind_each_slot() -> None:
    found = hosts(hostfile="node-1 slots=2\nnode-2 slots=2\n", inventories=KNOWN, inventory="i")
    assert groups(found) == [("a100", "node-1"), ("a100", "node-2"), ("v100", "node-2")]
    assert found.memory_gib == 31.52
    one = hosts(hostfile="node-1 slots=1\nnode-2 slots=0,\n", inventories=KNOWN, inventory="i")
    assert (groups(one), one.memory_gib) == ([("a100", "node-1"), ("a100", "node-2")], 39.4)
    cpu = hosts(hostfile="cpu-1 slots=4\n", inventories=KNOWN, inventory="i")
    assert (cpu.device_type, cpu.devices) == ("cpu", (KNOWN["cpu-1"].cpu,))


def test_an_inventory_without_a_hostfile_counts_as_a_whole() -> None:
    known = {name: KNOWN[name] for name in ("node-1", "node-2.cluster")}
    found = hosts(inventories=known, inventory="i", num_nodes=2, num_gpus_per_node=2)
    assert {name for name, _ in groups(found)} == {"a100", "v100"}
    assert found.memory_gib == 31.52


@pytest.mark.parametrize(
    ("hostfile", "cluster", "part"),
    [
        ("node-1 slots=2\nnode-9 slots=1\n", {}, "cluster.inventory: node-9 is not in it"),
        ("node-1 slots=8\n", {}, "host node-1 has 2 devices there, but 8 slots"),
        ("node-1 slots=2\ncpu-1 slots=2\n", {}, "both cpu and GPUs"),
        ("node-1 slots=2\n", {"gpu": "a100"}, "cluster.inventory: cluster.gpu is given too"),
    ],
)
def test_an_inventory_that_does_not_fit(hostfile: str, cluster: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        hosts(hostfile=hostfile, inventories=KNOWN, inventory="i", **cluster)


def test_a_script_of_ones_own_is_not_meant_for_this_machines_cpu() -> None:
    found = hosts(num_gpus_per_node=4, runs_here=False)
    assert (found.devices, found.device_type, len(found.topology.ranks())) == (None, "cuda", 4)
    assert hosts(hostfile="here slots=4\n", runs_here=False).devices is None
    assert hosts(runs_here=False).device_type == "cpu"  # nothing but this machine is spoken of
    assert hosts(gpu="cpu", num_gpus_per_node=4, runs_here=False).device_type == "cpu"
    assert hosts(A100S, hostfile="here slots=4\n", runs_here=False).devices == (lookup_device("a100"),) * 4
    assert len(hosts(A100S, num_gpus_per_node=4, runs_here=False).devices or ()) == 4
