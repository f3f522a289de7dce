"""How much a host of the run offers."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.config.facts import Facts
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.devices import Inventory
from dslaunch.core.inventory import find_host

GIB = 2**30


def host_gib(cluster: ClusterSpec, hosts: ResolvedHosts, facts: Facts) -> float | None:
    """GiB of RAM of each host: as written, by the inventory, else this machine's, where all the run is here.

    It is not where other hosts are named, or a device that this machine has none of: None then.
    """
    if cluster.host_memory_gib is not None:
        return cluster.host_memory_gib
    if facts.inventories is not None:
        return _least_ram(hosts, facts.inventories)
    present = {accelerator.device for accelerator in facts.inventory.accelerators}
    if hosts.device_type != "cpu" and (hosts.devices is None or not present.issuperset(hosts.devices)):
        return None
    here = all(host.name in facts.local_names for host in hosts.topology.hosts)
    return facts.host_memory_bytes / GIB if here and facts.host_memory_bytes is not None else None


def _least_ram(hosts: ResolvedHosts, inventories: Mapping[str, Inventory]) -> float | None:
    """Of the hosts of the run, of all where no hostfile names them. None where one is not known."""
    named = [find_host(inventories, host.name) for host in hosts.topology.hosts]
    found = list(inventories.values()) if None in named else named
    sizes = [inventory.ram_gib for inventory in found if inventory is not None]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(sizes) else None
