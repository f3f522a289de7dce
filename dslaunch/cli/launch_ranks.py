"""Where the ranks of ``dslaunch launch -- COMMAND`` run, and how they are reached."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from dslaunch.cli.launch_request import LaunchRequest
    from dslaunch.core.plan import Via
    from dslaunch.core.topology import Host, Topology


class Ranks(NamedTuple):
    """What of a plan says where its ranks run."""

    device_type: Literal["cpu", "cuda"]
    topology: Topology
    via: Via
    spares: tuple[Host, ...]
    devices: tuple[str, ...] = ()  # names of GPUs, where somebody said them


def choose_ranks(request: LaunchRequest) -> Ranks:
    """For a command: from flags alone, this machine and the batch job that we are in.

    Raises ConfigError where there are none, or not as many as asked for.
    """
    from dslaunch.core.allocation import probe_allocation
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import Via

    ways: tuple[Via, ...] = get_args(Via)
    asked = next((way for way in ways if way == request.via), None)
    if asked is None and request.via not in (None, "auto"):
        raise ConfigError(f"--via {request.via!r} is not one of auto, {', '.join(ways)}")
    names = ("hostfile", "include", "exclude", "num_nodes", "gpu", "inventory")
    flags = {name: getattr(request, name) for name in names}
    job = None if request.via == "local" or request.hostfile is not None else probe_allocation(os.environ)
    if job is None and all(value is None for value in flags.values()):
        return Ranks(*_local_ranks(request.num_gpus_per_node), asked or "local", ())

    from dslaunch.cli.options import flag_overrides, show_notes
    from dslaunch.config.facts import probe_facts
    from dslaunch.config.hosts import choose_via, resolve_hosts
    from dslaunch.config.load import load_flags

    loaded = load_flags((), flag_overrides({**flags, "num_gpus_per_node": request.num_gpus_per_node}))
    facts = dataclasses.replace(
        probe_facts(loaded, cwd=Path.cwd(), environ=os.environ), allocation=job, allocation_problem=None
    )
    for problem in (facts.hostfile_problem, facts.inventory_problem):
        if problem is not None:
            raise problem
    hosts = resolve_hosts(loaded.spec.cluster, facts)
    if job is not None:
        show_notes((f"hosts: {hosts.topology_reason}",))
    via, why = choose_via(hosts, facts) if asked is None else (asked, "")
    if why and via != "local":
        show_notes((f"launch.via {via}: {why}",))
    return Ranks(hosts.device_type, hosts.topology, via, hosts.spares, hosts.gpu_names)


def _local_ranks(num_ranks: int | None) -> tuple[Literal["cpu", "cuda"], Topology]:
    """This machine's slots: its accelerators, or as many CPU ranks as are asked for."""
    from dslaunch.core.devices import probe_inventory
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.topology import Host, Topology, local_topology

    ids = tuple(item.id for item in probe_inventory(os.environ).accelerators)
    if not ids:
        if num_ranks is None:
            raise ConfigError(
                "no accelerator found on this machine, so the number of ranks is not known",
                hint="say it: --num-gpus-per-node 2 (it starts that many ranks on the CPU)",
            )
        return "cpu", local_topology(num_ranks)
    if num_ranks is not None and num_ranks > len(ids):
        raise ConfigError(
            f"--num-gpus-per-node {num_ranks}: this machine shows {len(ids)} accelerators ({', '.join(ids)})",
            hint=f"use {len(ids)} or fewer, or set DS_ACCELERATOR=cpu for ranks on the CPU",
        )
    return "cuda", Topology(hosts=(Host(name="localhost", slots=ids[:num_ranks]),))
