"""How much RAM a host has: as written, of the inventory's hosts in use, else of this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslaunch.config.facts import Facts, PathFact
from dslaunch.config.hosts import resolve_hosts
from dslaunch.config.memory.capacity import host_gib
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.hostfile import parse_hostfile
from tests.config.build import CPU, gpus

KNOWN = {
    "big": replace(gpus("h200"), ram_gib=2048.0),
    "small": replace(gpus("a100-80g"), ram_gib=512.0),
    "out": replace(gpus("v100-16g"), ram_gib=64.0),
}
HERE = {"inventory": gpus("a100"), "host_memory_bytes": 256 * 2**30}


def found(hostfile: str | None = None, facts: dict[str, Any] | None = None, **cluster: Any) -> float | None:
    spec = ClusterSpec.model_validate(cluster)
    world = Facts(
        **{"inventory": CPU, **(facts or {})},
        hosts=parse_hostfile(hostfile, "hosts") if hostfile else None,
        paths={"cluster.hostfile": PathFact("file", "/hosts")},
    )
    return host_gib(spec, resolve_hosts(spec, world), world)


def test_what_is_written_counts() -> None:
    assert found(facts=HERE, host_memory_gib=100.0) == 100.0


def test_the_least_of_the_hosts_in_use() -> None:
    facts = {**HERE, "inventories": KNOWN}
    hostfile = "big slots=1\nsmall slots=1\nout slots=1\n"
    assert found(hostfile, facts, exclude="out") == 512.0
    assert found(hostfile, facts, include="big") == 2048.0
    assert found(None, facts, num_nodes=2, num_gpus_per_node=1) == 64.0
    unknown = {**KNOWN, "small": replace(KNOWN["small"], ram_gib=None)}
    assert found(hostfile, {**facts, "inventories": unknown}, exclude="out") is None


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({}, 256.0),
        ({"gpu": "a100"}, 256.0),
        ({"gpu": "h100"}, None),  # another machine is meant
        ({"gpu": "cpu"}, 256.0),
        ({"num_nodes": 2, "num_gpus_per_node": 1, "gpu": "a100"}, None),
    ],
)
def test_this_machines_where_all_runs_here(cluster: dict[str, Any], expected: float | None) -> None:
    assert found(facts=HERE, **cluster) == expected


def test_devices_by_host_are_elsewhere() -> None:
    assert found("n1 slots=1\nn2 slots=1\n", HERE, gpu={"n1": "a100", "*": "v100"}) is None
