"""cluster: section and facts -> hosts, slots and the kind of device they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dslaunch.config.facts import Facts
from dslaunch.config.host_devices import (
    DeviceGroup,
    KeyProblem,
    groups_of_any_host,
    groups_of_inventory,
    groups_of_names,
    groups_of_patterns,
    open_sizes,
)
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.allocation import Allocation
from dslaunch.core.devices import CPU_NAME, Device, lookup_device
from dslaunch.core.errors import ConfigError
from dslaunch.core.hostfile import select_hosts
from dslaunch.core.plan import Via
from dslaunch.core.topology import Host, Topology


@dataclass(frozen=True)
class ResolvedHosts:
    """Where the ranks run. ``groups``: the devices of the hosts in use; None where they are not known."""

    topology: Topology
    topology_reason: str
    groups: tuple[DeviceGroup, ...] | None
    device_type: Literal["cpu", "cuda"]
    device_reason: str
    spares: tuple[Host, ...] = ()  # of the hostfile or job, beyond num_nodes

    @property
    def devices(self) -> tuple[Device, ...] | None:
        return None if self.groups is None else tuple(group.device for group in self.groups)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """Each kind once, for a plan; empty where they are not known."""
        return tuple(dict.fromkeys(device.name for device in self.devices or () if device.arch))

    @property
    def memory_gib(self) -> float | None:
        """What the smallest device of the run has; None where one is not known, and for CPUs."""
        sizes = [device.memory_gib for device in self.devices or ()]
        known = [size for size in sizes if size is not None]
        return min(known) if known and len(known) == len(sizes) else None

    def memory_notes(self) -> list[str]:
        """What was assumed of the devices' memory."""
        return open_sizes(self.groups or ())


def resolve_hosts(cluster: ClusterSpec, facts: Facts, *, runs_here: bool = True) -> ResolvedHosts:
    """Hosts from the hostfile, else of the batch job, else ``num_nodes`` nodes, else this machine.

    ``runs_here``: what is planned is started from this machine. Where it is not (the
    JSON of a script of one's own), a number of devices that this machine has not got
    is meant for another one, never for the CPU of the login node where it was typed.
    Raises ConfigError (HostfileError) where they are not there or not said.
    """
    if cluster.gpu is not None and cluster.inventory is not None:
        raise KeyProblem("cluster.inventory", "cluster.gpu is given too", hint="keep one of the two")
    if facts.hosts is not None:
        found = _from_hostfile(cluster, facts, facts.hosts, runs_here)
        return replace(found, spares=_spares(cluster, facts.hosts))
    if (job := facts.allocation) is not None and (job.names or cluster.num_nodes is None):
        return _from_allocation(cluster, facts, job)
    for key in ("include", "exclude"):
        if getattr(cluster, key) is not None:
            raise ConfigError(f"cluster.{key} needs a hostfile", hint="set cluster.hostfile or --hostfile")
    named = _without_hosts(cluster, facts)
    if (cluster.num_nodes or 1) > 1:
        return _unnamed_nodes(cluster, named)
    if named is None and not runs_here and cluster.num_gpus_per_node and not facts.inventory.accelerators:
        return _another_machine(cluster.num_gpus_per_node)
    return _this_machine(cluster, facts, named)


def choose_via(hosts: ResolvedHosts, facts: Facts) -> tuple[Via, str]:
    """How to reach the hosts, and why, where nothing is said."""
    names = [host.name for host in hosts.topology.hosts]
    if len(names) == 1 and names[0] in facts.local_names:
        return "local", "this machine is the only host"
    if facts.hosts is None and not (facts.allocation and facts.allocation.names):
        return "local", "the names of the hosts are not known without a hostfile"
    # A name may have to be looked up: the first host that is elsewhere settles it.
    other = next((name for name in names if name not in facts.local_names), None)
    if other is None:
        return "local", "all hosts are this machine"
    if facts.hosts is None and facts.allocation is not None and facts.allocation.scheduler == "Slurm":
        return "slurm", f"{other} is a node of this Slurm job: srun reaches it"
    return "ssh", f"{other} is not this machine"


def _without_hosts(cluster: ClusterSpec, facts: Facts) -> tuple[DeviceGroup, ...] | None:
    """What is said of the devices where no hostfile says which hosts there are."""
    if isinstance(cluster.gpu, Mapping):
        raise KeyProblem(
            "cluster.gpu",
            "devices by host need a hostfile, which says which hosts there are",
            hint="set cluster.hostfile or --hostfile, or name the weakest device alone",
        )
    if facts.inventories is not None:
        return groups_of_any_host(facts.inventories)
    return groups_of_names(cluster.gpu) if cluster.gpu else None


def _from_hostfile(
    cluster: ClusterSpec, facts: Facts, hosts: Sequence[Host], runs_here: bool
) -> ResolvedHosts:
    chosen = _select(cluster, hosts)
    reason = f"{len(chosen)} of {len(hosts)} hosts of {facts.paths['cluster.hostfile'].absolute}"
    groups = _by_host(cluster, facts, hosts, chosen)
    if groups is not None:
        return hosts_with_devices(chosen, reason, groups)
    named = _by_name(cluster)
    if named is not None and not _all_cpu(named):
        return hosts_with_devices(chosen, reason, named)
    if _are_here(chosen, facts, runs_here):
        if named is None:
            _check_slots(chosen, facts)
        return hosts_with_devices(chosen, reason, _local_devices(facts, named))
    if named is not None:
        return hosts_with_devices(chosen, reason, named)
    why = "slots of a hostfile are GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=tuple(chosen)), reason, None, "cuda", why)


def _from_allocation(cluster: ClusterSpec, facts: Facts, job: Allocation) -> ResolvedHosts:
    if not job.names:
        raise ConfigError(
            f"this is a {job.scheduler} job, and its environment does not name its hosts",
            hint="for this machine alone set num_nodes 1 (--num-nodes 1); for all of them write a hostfile:"
            " flux hostlist -e local | tr ' ' '\\n' | sed 's/$/ slots=8/' > hosts",
        )
    on_cpu = _is_for_cpus(cluster, facts, job)
    hosts = job.hosts(num_gpus_per_node=cluster.num_gpus_per_node, cpu=on_cpu)
    found = _with_job_devices(cluster, facts, job, hosts, on_cpu)
    return replace(found, spares=_spares(cluster, hosts))


def _with_job_devices(
    cluster: ClusterSpec, facts: Facts, job: Allocation, hosts: Sequence[Host], on_cpu: bool
) -> ResolvedHosts:
    """The chosen hosts with what is said of their devices, by the user first."""
    chosen = _select(cluster, hosts)
    reason = job.reason(chosen, cpu=on_cpu)
    groups = _by_host(cluster, facts, hosts, chosen) or _by_name(cluster)
    if groups is None and on_cpu:
        groups = (DeviceGroup(facts.inventory.cpu),)
    if groups is not None:
        return hosts_with_devices(chosen, reason, groups)
    if (device := _known_device(job.devices.kind)) is not None:
        told = hosts_with_devices(chosen, reason, (DeviceGroup(device, name=job.devices.kind or ""),))
        return replace(told, device_reason=f"{told.device_reason}, as {job.devices.source} says")
    if job.here is not None and facts.inventory.accelerators:
        told = hosts_with_devices(chosen, reason, _local_devices(facts, None))
        return replace(told, device_reason=f"{told.device_reason}, as on this node")
    why = "slots of a job are GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=chosen), reason, None, "cuda", why)


def _select(cluster: ClusterSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    return select_hosts(
        hosts,
        include=cluster.include,
        exclude=cluster.exclude,
        num_nodes=cluster.num_nodes,
        num_gpus_per_node=cluster.num_gpus_per_node,
    )


def _by_host(
    cluster: ClusterSpec, facts: Facts, hosts: Sequence[Host], chosen: Sequence[Host]
) -> tuple[DeviceGroup, ...] | None:
    """The devices of the ``chosen`` hosts where they are said host by host."""
    if isinstance(cluster.gpu, Mapping):
        return groups_of_patterns(cluster.gpu, hosts, chosen)
    return None if facts.inventories is None else groups_of_inventory(facts.inventories, chosen)


def _by_name(cluster: ClusterSpec) -> tuple[DeviceGroup, ...] | None:
    """The devices where they are said for all hosts alike."""
    return None if not cluster.gpu or isinstance(cluster.gpu, Mapping) else groups_of_names(cluster.gpu)


def _is_for_cpus(cluster: ClusterSpec, facts: Facts, job: Allocation) -> bool:
    """Whether a job's ranks are to run on CPUs, as far as it is said."""
    if cluster.gpu:
        names = cluster.gpu.values() if isinstance(cluster.gpu, Mapping) else cluster.gpu
        return all(lookup_device(name).name == CPU_NAME for name in names)
    if facts.inventories is not None:
        return not any(inventory.accelerators for inventory in facts.inventories.values())
    return job.on_cpu


def _known_device(kind: str | None) -> Device | None:
    """The device of the name that a site has for it, which may be any."""
    try:
        return lookup_device(kind) if kind else None
    except ConfigError:
        return None


def _spares(cluster: ClusterSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts that num_nodes leaves over, with as many slots as the chosen ones use."""
    if cluster.num_nodes is None:
        return ()
    return select_hosts(hosts, num_gpus_per_node=cluster.num_gpus_per_node)[cluster.num_nodes :]


def _are_here(hosts: Sequence[Host], facts: Facts, runs_here: bool) -> bool:
    """Whether all hosts are this machine, and it can be what they are meant for."""
    if not runs_here and not facts.inventory.accelerators:
        return False
    # A name may have to be looked up: the first host that is elsewhere settles it.
    return all(host.name in facts.local_names for host in hosts)


def _check_slots(hosts: Sequence[Host], facts: Facts) -> None:
    """A machine that shows accelerators has at most as many slots. One without any runs on its CPU."""
    present = len(facts.inventory.accelerators)
    for host in hosts:
        if 0 < present < len(host.slots):
            raise KeyProblem(
                "cluster.hostfile",
                f"{host.name} has {len(host.slots)} slots, but this machine shows {present} devices",
                hint=f"use slots={present}, or num_gpus_per_node {present}",
            )


def _another_machine(count: int) -> ResolvedHosts:
    reason = f"num_gpus_per_node {count}; this machine has no GPU, so another one is meant"
    why = "num_gpus_per_node counts GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=_localhost(_numbered(count))), reason, None, "cuda", why)


def _unnamed_nodes(cluster: ClusterSpec, named: tuple[DeviceGroup, ...] | None) -> ResolvedHosts:
    if cluster.num_gpus_per_node is None:
        raise ConfigError(
            f"num_nodes {cluster.num_nodes} without a hostfile: how many ranks run on each is not known",
            hint="set cluster.num_gpus_per_node (--num-gpus-per-node)",
        )
    slots = _numbered(cluster.num_gpus_per_node)
    hosts = tuple(Host(name=f"node-{i}", slots=slots) for i in range(cluster.num_nodes or 1))
    reason = "num_nodes x num_gpus_per_node; the names are not known without a hostfile"
    if named is not None:
        return hosts_with_devices(hosts, reason, named)
    why = "several nodes are taken to have GPUs unless cluster.gpu says cpu"
    return ResolvedHosts(Topology(hosts=hosts), reason, None, "cuda", why)


def _this_machine(cluster: ClusterSpec, facts: Facts, named: tuple[DeviceGroup, ...] | None) -> ResolvedHosts:
    groups = _local_devices(facts, named)
    ids = tuple(a.id for a in facts.inventory.accelerators)
    count = cluster.num_gpus_per_node
    if _all_cpu(groups):
        reason = "this machine, as many ranks as asked for" if count else "one rank on this machine's CPU"
        return hosts_with_devices(_localhost(_numbered(count or 1)), reason, groups)
    if named is not None:
        if count is None and not ids:
            raise ConfigError(
                f"how many {named[0].name or named[0].device.name} a node has is not known here",
                hint="set cluster.num_gpus_per_node (--num-gpus-per-node)",
            )
        slots = ids[:count] if count is None or count <= len(ids) else _numbered(count)
        return hosts_with_devices(_localhost(slots), f"{len(slots)} devices on one node", groups)
    if count is not None and count > len(ids):
        raise ConfigError(
            f"num_gpus_per_node {count}, but this machine shows {len(ids)} devices",
            hint=f"use {len(ids)}, or name the device with --gpu to plan for another machine",
        )
    slots = ids if count is None else ids[:count]
    return hosts_with_devices(
        _localhost(slots), f"{len(slots)} of {len(ids)} devices of this machine", groups
    )


def _local_devices(facts: Facts, named: tuple[DeviceGroup, ...] | None) -> tuple[DeviceGroup, ...]:
    """What was named; ``cpu`` by name and a machine without accelerators give this CPU."""
    if named is not None and not (_all_cpu(named) and named[0].name):
        return named
    accelerators = tuple(DeviceGroup(a.device) for a in facts.inventory.accelerators)
    return accelerators if accelerators and named is None else (DeviceGroup(facts.inventory.cpu),)


def hosts_with_devices(
    hosts: tuple[Host, ...], reason: str, groups: tuple[DeviceGroup, ...]
) -> ResolvedHosts:
    """Hosts whose devices are known. Raises ConfigError where they are both CPUs and GPUs."""
    names = ", ".join(dict.fromkeys(str(group.device) for group in groups))
    kind: Literal["cpu", "cuda"] = "cpu" if _all_cpu(groups) else "cuda"
    if kind == "cuda" and any(group.device.name == CPU_NAME for group in groups):
        raise KeyProblem(
            "cluster.gpu", "the hosts have both cpu and GPUs", hint="a run computes on one kind of device"
        )
    why = "no accelerator in use" if kind == "cpu" else f"devices: {names}"
    return ResolvedHosts(Topology(hosts=tuple(hosts)), reason, groups, kind, why)


def _all_cpu(groups: Sequence[DeviceGroup]) -> bool:
    return all(group.device.name == CPU_NAME for group in groups)


def _localhost(slots: tuple[str, ...]) -> tuple[Host, ...]:
    return (Host(name="localhost", slots=slots),)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
