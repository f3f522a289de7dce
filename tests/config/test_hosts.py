"""Which hosts and slots a run has, and of what kind."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.config.facts import Facts, PathFact
from dslaunch.config.hosts import ResolvedHosts, resolve_hosts
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.devices import Inventory, lookup_device
from dslaunch.core.errors import ConfigError
from dslaunch.core.hostfile import parse_hostfile
from tests.config.build import CPU, gpus

A100S = gpus("a100", "a100", "a100", "a100")


def hosts(inventory: Inventory = CPU, hostfile: str | None = None, **cluster: Any) -> ResolvedHosts:
    listed = parse_hostfile(hostfile, "hosts") if hostfile else None
    paths = {"cluster.hostfile": PathFact("file", "/hosts")}
    facts = Facts(inventory, hosts=listed, paths=paths, local_names=("localhost", "here"))
    return resolve_hosts(ClusterSpec.model_validate(cluster), facts)


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
