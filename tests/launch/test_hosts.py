"""A local launch never starts ranks where they do not belong."""

from __future__ import annotations

import os

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.topology import Host, Topology, local_topology
from dslaunch.launch.local import check_hosts, is_this_machine


@pytest.mark.parametrize("name", ["localhost", os.uname().nodename, "127.0.0.1"])
def test_this_machine(name: str) -> None:
    assert is_this_machine(name)
    check_hosts(Topology(hosts=(Host(name=name, slots=("0",)),)))


@pytest.mark.parametrize("name", ["192.0.2.1", "worker-1.invalid", "a" * 300, "\udcff"])
def test_another_machine(name: str) -> None:
    assert not is_this_machine(name)
    with pytest.raises(ConfigError, match="nothing was started"):
        check_hosts(Topology(hosts=(Host(name=name, slots=("0",)),)))


def test_several_hosts_are_not_this_machine() -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_hosts(Topology(hosts=(*local_topology(1).hosts, *local_topology(1).hosts)))
