"""The machine that a run file is checked for: what the file and the flags say of it, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dslaunch.config.check.target import Target
from dslaunch.config.facts import Facts
from dslaunch.config.host_devices import DeviceGroup, check_gpu, groups_of_any_host, groups_of_names
from dslaunch.config.hosts import ResolvedHosts, hosts_with_devices, resolve_hosts
from dslaunch.config.load import LoadedSpec
from dslaunch.config.report import Problem, Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.config.zero import OFFLOADS, offload_device
from dslaunch.core.devices import CPU_NAME, Device, Inventory
from dslaunch.core.topology import Host, Topology

_WHY = "as the file says"


Variant = tuple[LoadedSpec[RunSpec], ResolvedHosts]


@dataclass(frozen=True)
class AnyMachine:
    """``facts`` to resolve a run file with, and the ``variants`` of it and its hosts that may come true.

    What is wrong in all variants is wrong on any machine. ``problems``: what the file says wrongly
    of hosts and devices. ``world_known`` and ``devices_known``: they are not left to the machine
    that it will run on.
    """

    facts: Facts
    variants: tuple[Variant, ...]
    problems: list[Problem]
    world_known: bool
    devices_known: bool


def assume_machine(loaded: LoadedSpec[RunSpec], facts: Facts, target: Target) -> AnyMachine:
    """What ``loaded`` is checked for. The ``target``'s world size and devices win over the file's."""
    cluster = loaded.spec.cluster
    bare = dataclasses.replace(facts, inventory=Inventory((), facts.inventory.cpu), local_names=())
    if target.devices is not None:
        cluster = cluster.model_copy(update={"gpu": None, "inventory": None})
        bare = dataclasses.replace(bare, inventories=None, inventory_problem=None)
    report = Report(loaded)
    groups = _find_groups(cluster, bare, target, report)
    if facts.hostfile_problem is not None:
        report.add("cluster.hostfile", facts.hostfile_problem)
    hosts = _find_hosts(cluster, bare, report) if facts.hosts is not None else None
    said = hosts is not None or None not in (cluster.num_nodes, cluster.num_gpus_per_node)
    if hosts is None or target.world_size is not None:
        count = target.world_size or _smallest_world(loaded.spec)
        hosts = dataclasses.replace(hosts or _nothing_known(), topology=_ranks(count))
    if groups is not None:
        with report.catching("cluster.gpu"):
            hosts = hosts_with_devices(hosts.topology.hosts, _WHY, groups)
    devices_known = hosts.groups is not None and hosts.device_type != "cpu"
    on_gpus = facts.hosts is not None or (cluster.num_nodes or 1) > 1  # unless they are said to be CPUs
    kinds = [hosts] if on_gpus or groups is not None else [hosts, _on_cpu(hosts)]
    kinds = [_on_cpu(kind) if kind.device_type == "cpu" else kind for kind in kinds]
    return AnyMachine(
        facts=bare,
        variants=tuple((variant, kind) for kind in kinds for variant in _find_variants(loaded, kind)),
        problems=report.problems,
        world_known=said or target.world_size is not None,
        devices_known=devices_known,
    )


def _find_groups(
    cluster: ClusterSpec, facts: Facts, target: Target, report: Report
) -> tuple[DeviceGroup, ...] | None:
    """The devices that are named for the hosts alike, or for any of them; None where none are."""
    if target.devices is not None:
        return tuple(map(DeviceGroup, target.devices))
    if cluster.gpu is not None and cluster.inventory is not None:
        report.fail("cluster.inventory", "cluster.inventory: cluster.gpu is given too", "keep one of the two")
    if facts.inventory_problem is not None:
        report.add("cluster.inventory", facts.inventory_problem)
    with report.catching("cluster.gpu"):
        check_gpu(cluster.gpu)
        if facts.hosts is not None and (isinstance(cluster.gpu, Mapping) or facts.inventories is not None):
            return None  # said host by host, and the hosts are known
        if facts.inventories is not None:
            return groups_of_any_host(facts.inventories)
        if cluster.gpu:
            return groups_of_names(_names(cluster.gpu))
    return None


def _names(gpu: Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    return tuple(gpu.values() if isinstance(gpu, Mapping) else gpu)


def _find_hosts(cluster: ClusterSpec, facts: Facts, report: Report) -> ResolvedHosts | None:
    if report.problems:
        return None
    with report.catching("cluster"):
        return resolve_hosts(cluster, facts, runs_here=False)
    return None


def _nothing_known() -> ResolvedHosts:
    return ResolvedHosts(_ranks(1), _WHY, None, "cuda", _WHY)


def _on_cpu(hosts: ResolvedHosts) -> ResolvedHosts:
    """The same with CPUs. Which ones is not known, so nothing is said against what they compute in."""
    able = Device(CPU_NAME, "", fp16="yes", bf16="yes")
    return dataclasses.replace(hosts, device_type="cpu", groups=(DeviceGroup(able),))


def _ranks(count: int) -> Topology:
    return Topology(hosts=(Host(name="localhost", slots=tuple(map(str, range(count)))),))


def _smallest_world(spec: RunSpec) -> int:
    """The number of ranks that the file says, else the smallest that its batch sizes allow."""
    told = (spec.cluster.num_nodes, spec.cluster.num_gpus_per_node)
    train, micro, steps = (
        spec.train_batch_size,
        spec.train_micro_batch_size_per_gpu,
        spec.gradient_accumulation_steps,
    )
    unit = (told[0] or 1) * (told[1] or 1)
    if train is None or micro is None or steps is None or None not in told:
        return unit
    return unit if train % (micro * steps * unit) else train // (micro * steps)


def _find_variants(loaded: LoadedSpec[RunSpec], hosts: ResolvedHosts) -> tuple[LoadedSpec[RunSpec], ...]:
    """``loaded`` with each value that an ``auto`` may become; stages 1 and 3, between them every key acts."""
    zero = loaded.spec.zero_optimization
    offloads = {name: None for name in OFFLOADS if offload_device(zero, name) == "auto"}
    stages: tuple[Any, ...] = (1, 3) if zero.stage == "auto" else (zero.stage,)
    precisions: tuple[str, ...] = (loaded.spec.precision,)
    if precisions == ("auto",) and (hosts.groups is None or hosts.device_type == "cpu"):
        precisions = ("bf16", "fp32") if hosts.device_type == "cpu" else ("bf16", "fp16", "fp32")
    return tuple(
        _with(
            loaded,
            precision=precision,
            zero_optimization=zero.model_copy(update={"stage": stage, **offloads}),
        )
        for precision in precisions
        for stage in stages
    )


def _with(loaded: LoadedSpec[RunSpec], **update: Any) -> LoadedSpec[RunSpec]:
    return dataclasses.replace(loaded, spec=loaded.spec.model_copy(update=update))
