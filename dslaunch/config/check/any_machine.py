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
from dslaunch.core.devices import Inventory
from dslaunch.core.topology import Host, Topology

_WHY = "as the file says"


@dataclass(frozen=True)
class AnyMachine:
    """``facts`` and ``hosts`` to resolve a run file for, and the ``variants`` of it that may come true.

    What is wrong in all variants is wrong on any machine. ``problems``: what the file says wrongly
    of hosts and devices. ``world_known`` and ``devices_known``: they are not left to the machine
    that it will run on.
    """

    facts: Facts
    hosts: ResolvedHosts
    variants: tuple[LoadedSpec[RunSpec], ...]
    problems: list[Problem]
    world_known: bool

    @property
    def devices_known(self) -> bool:
        return self.hosts.groups is not None


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
    if hosts.device_type == "cpu":  # it is not said which, so not what it computes in
        hosts = dataclasses.replace(hosts, groups=None)
    known = said or target.world_size is not None
    return AnyMachine(bare, hosts, _find_variants(loaded, hosts), report.problems, known)


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
    open_ = loaded.spec.precision == "auto" and hosts.groups is None
    precisions = ("bf16", "fp16", "fp32") if open_ else (loaded.spec.precision,)
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
