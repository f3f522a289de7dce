"""cluster: section and facts -> hosts, slots and the kind of device they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dslaunch.config.facts import Facts
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.devices import CPU_NAME, Device, lookup_device
from dslaunch.core.errors import ConfigError
from dslaunch.core.hostfile import select_hosts
from dslaunch.core.topology import Host, Topology


@dataclass(frozen=True)
class ResolvedHosts:
    """Where the ranks run. ``devices`` is None where nothing is known of the hosts."""

    topology: Topology
    topology_reason: str
    devices: tuple[Device, ...] | None
    device_type: Literal["cpu", "cuda"]
    device_reason: str


def resolve_hosts(cluster: ClusterSpec, facts: Facts, *, runs_here: bool = True) -> ResolvedHosts:
    """Hosts from the hostfile and its filters, else ``num_nodes`` nodes, else this machine.

    ``runs_here``: what is planned is started from this machine. Where it is not (the
    JSON of a script of one's own), a number of devices that this machine has not got
    is meant for another one, never for the CPU of the login node where it was typed.
    Raises ConfigError (HostfileError) where they are not there or not said.
    """
    named = tuple(lookup_device(name) for name in cluster.gpu) if cluster.gpu else None
    if facts.hosts is not None:
        return _from_hostfile(cluster, facts, facts.hosts, named, runs_here)
    for key in ("include", "exclude"):
        if getattr(cluster, key) is not None:
            raise ConfigError(f"cluster.{key} needs a hostfile", hint="set cluster.hostfile or --hostfile")
    if (cluster.num_nodes or 1) > 1:
        return _unnamed_nodes(cluster, named)
    if named is None and not runs_here and cluster.num_gpus_per_node and not facts.inventory.accelerators:
        return _another_machine(cluster.num_gpus_per_node)
    return _this_machine(cluster, facts, named)


def choose_via(hosts: ResolvedHosts, facts: Facts) -> tuple[Literal["local", "ssh"], str]:
    """How to reach the hosts, and why, where nothing is said."""
    names = [host.name for host in hosts.topology.hosts]
    if len(names) == 1 and names[0] in facts.local_names:
        return "local", "this machine is the only host"
    if facts.hosts is None:
        return "local", "the names of the hosts are not known without a hostfile"
    others = [name for name in names if name not in facts.local_names]
    if not others:
        return "local", "all hosts are this machine"
    return (
        "ssh",
        f"{others[0]}{' and others' if len(others) > 1 else ''} of the hostfile are not this machine",
    )


def _from_hostfile(
    cluster: ClusterSpec,
    facts: Facts,
    hosts: Sequence[Host],
    named: tuple[Device, ...] | None,
    runs_here: bool,
) -> ResolvedHosts:
    chosen = select_hosts(
        hosts,
        include=cluster.include,
        exclude=cluster.exclude,
        num_nodes=cluster.num_nodes,
        num_gpus_per_node=cluster.num_gpus_per_node,
    )
    reason = f"{len(chosen)} of {len(hosts)} hosts of {facts.paths['cluster.hostfile'].absolute}"
    if named is not None or _are_here(chosen, facts, runs_here):
        return _with_devices(chosen, reason, _local_devices(facts, named if named else None))
    why = "slots of a hostfile are GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=tuple(chosen)), reason, None, "cuda", why)


def _are_here(hosts: Sequence[Host], facts: Facts, runs_here: bool) -> bool:
    """Whether all hosts are this machine, and it can be what they are meant for."""
    if not runs_here and not facts.inventory.accelerators:
        return False
    # A name may have to be looked up: the first host that is elsewhere settles it.
    return all(host.name in facts.local_names for host in hosts)


def _another_machine(count: int) -> ResolvedHosts:
    reason = f"num_gpus_per_node {count}; this machine has no GPU, so another one is meant"
    why = "num_gpus_per_node counts GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=_localhost(_numbered(count))), reason, None, "cuda", why)


def _unnamed_nodes(cluster: ClusterSpec, named: tuple[Device, ...] | None) -> ResolvedHosts:
    if cluster.num_gpus_per_node is None:
        raise ConfigError(
            f"num_nodes {cluster.num_nodes} without a hostfile: how many ranks run on each is not known",
            hint="set cluster.num_gpus_per_node (--num-gpus-per-node)",
        )
    slots = _numbered(cluster.num_gpus_per_node)
    hosts = tuple(Host(name=f"node-{i}", slots=slots) for i in range(cluster.num_nodes or 1))
    reason = "num_nodes x num_gpus_per_node; the names are not known without a hostfile"
    if named is not None:
        return _with_devices(hosts, reason, named)
    why = "several nodes are taken to have GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=hosts), reason, None, "cuda", why)


def _this_machine(cluster: ClusterSpec, facts: Facts, named: tuple[Device, ...] | None) -> ResolvedHosts:
    devices = _local_devices(facts, named)
    ids = tuple(a.id for a in facts.inventory.accelerators)
    count = cluster.num_gpus_per_node
    if _all_cpu(devices):
        reason = "this machine, as many ranks as asked for" if count else "one rank on this machine's CPU"
        return _with_devices(_localhost(_numbered(count or 1)), reason, devices)
    if named is not None:
        if count is None and not ids:
            raise ConfigError(
                f"how many {cluster.gpu[0] if cluster.gpu else 'devices'} a node has is not known here",
                hint="set cluster.num_gpus_per_node (--num-gpus-per-node)",
            )
        slots = ids[:count] if count is None or count <= len(ids) else _numbered(count)
        return _with_devices(_localhost(slots), f"{len(slots)} devices on one node", devices)
    if count is not None and count > len(ids):
        raise ConfigError(
            f"num_gpus_per_node {count}, but this machine shows {len(ids)} devices",
            hint=f"use {len(ids)}, or name the device with --gpu to plan for another machine",
        )
    slots = ids if count is None else ids[:count]
    return _with_devices(_localhost(slots), f"{len(slots)} of {len(ids)} devices of this machine", devices)


def _local_devices(facts: Facts, named: tuple[Device, ...] | None) -> tuple[Device, ...]:
    """What was named; ``cpu`` by name and a machine without accelerators give this CPU."""
    if named is not None and not _all_cpu(named):
        return named
    accelerators = tuple(a.device for a in facts.inventory.accelerators)
    return accelerators if accelerators and named is None else (facts.inventory.cpu,)


def _with_devices(hosts: tuple[Host, ...], reason: str, devices: tuple[Device, ...]) -> ResolvedHosts:
    names = ", ".join(dict.fromkeys(str(device) for device in devices))
    kind: Literal["cpu", "cuda"] = "cpu" if _all_cpu(devices) else "cuda"
    if kind == "cuda" and any(device.name == CPU_NAME for device in devices):
        raise ConfigError("cluster.gpu names both cpu and GPUs", hint="a run computes on one kind of device")
    why = "no accelerator in use" if kind == "cpu" else f"devices: {names}"
    return ResolvedHosts(Topology(hosts=tuple(hosts)), reason, devices, kind, why)


def _all_cpu(devices: Sequence[Device]) -> bool:
    return all(device.name == CPU_NAME for device in devices)


def _localhost(slots: tuple[str, ...]) -> tuple[Host, ...]:
    return (Host(name="localhost", slots=slots),)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
