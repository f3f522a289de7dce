"""How much a host of the run offers."""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.config.facts import Facts
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.devices import lookup_device
from dslaunch.core.topology import Host

GIB = 2**30


def host_gib(cluster: ClusterSpec, hosts: Sequence[Host], device_type: str, facts: Facts) -> float | None:
    """GiB of RAM of each host: as written, else this machine's, where all the run is meant for it.

    It is not where other hosts are named, or a device that this machine has none of: None then.
    """
    if cluster.host_memory_gib is not None:
        return cluster.host_memory_gib
    present = {accelerator.device for accelerator in facts.inventory.accelerators}
    named = {lookup_device(name) for name in cluster.gpu or ()}
    if device_type != "cpu" and not named <= present:
        return None
    if facts.host_memory_bytes is None or not all(host.name in facts.local_names for host in hosts):
        return None
    return facts.host_memory_bytes / GIB
