"""The way to reach this machine: the agent as a child process. No ssh, no other program."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.devices import may_have_gpu, probe_inventory
from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import Host, Topology, is_this_machine
from dslaunch.launch import agent
from dslaunch.launch.carried import loader_argv, packed_agent
from dslaunch.launch.orders import accelerator, encode_orders
from dslaunch.launch.text import printable


def build_agent_command(
    host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The Command that starts the agent here, its orders on stdin.

    ``-I -S``: neither the user's PYTHONPATH nor site-packages are imported, so it
    starts in tens of milliseconds and nothing of theirs can break it.
    ``within``: the words that lead into a container, which may not have our files.
    """
    if within:
        return Command(argv=(*within, *loader_argv()), stdin=packed_agent() + encode_orders(orders))
    return Command(argv=(sys.executable, "-I", "-S", agent.__file__), stdin=encode_orders(orders))


def check_hosts(topology: Topology) -> None:
    """Raises ConfigError where a host is not this machine: ranks must not silently start elsewhere."""
    for host in topology.hosts:
        if topology.num_nodes > 1 or not is_this_machine(host.name):
            raise ConfigError(
                f"host {host.name} cannot be reached: a local launch starts ranks on this machine alone; "
                "nothing was started",
                hint="name the hosts with --hostfile and leave --via (launch.via) out",
            )


def check_program(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Raises EnvironmentNotReady where the ranks' program or working directory is not there."""
    path = plan.env.get("PATH", environ.get("PATH", os.defpath))
    if not os.path.isdir(agent.to_bytes(plan.cwd)):
        raise EnvironmentNotReady(
            f"no working directory {printable(plan.cwd)}; nothing was started",
            hint="create it, or give launch.cwd",
        )
    try:
        agent.find_program(agent.to_bytes(plan.argv[0]), agent.to_bytes(path), agent.to_bytes(plan.cwd))
    except agent.Refusal as refusal:
        raise EnvironmentNotReady(
            f"{printable(refusal.message)}; nothing was started", hint=refusal.hint
        ) from None


def missing_slots(host: Host, ids: Sequence[str]) -> list[str]:
    """The slots without a device among ``ids``. Of UUIDs there is no list: let pass if it has any."""
    devices = agent.devices_of(host.slots, host.all_slots, ids)
    return [slot for slot, device in devices.items() if device is None and (slot.isdecimal() or not ids)]


def check_devices(
    plan: LaunchPlan, environ: Mapping[str, str], *, source: str | None = None, root: Path = Path("/")
) -> None:
    """Raises EnvironmentNotReady where a plan for GPUs is to start on a machine that has not got them.

    A plan may have been made for another machine: ``source`` is where that is written. A machine that
    has a GPU but no list of them (WSL) is let pass: each rank looks for itself.
    """
    if accelerator(plan) != "cuda":  # of other vendors' devices there is no list
        return
    if not probe_inventory({}, root=root).accelerators and may_have_gpu(root):
        return
    seen = {name: value for name, value in {**environ, **plan.env}.items() if name != "DS_ACCELERATOR"}
    ids = [accelerator.id for accelerator in probe_inventory(seen, root=root).accelerators]
    if missing := [slot for host in plan.topology.hosts for slot in missing_slots(host, ids)]:
        shown = f"{len(ids)} ({', '.join(ids)})" if ids else "none"
        raise EnvironmentNotReady(
            f"the plan is for GPU {missing[0]}, but this machine shows {shown}; nothing was started",
            hint=f"start it where they are, or plan for this machine: {_without_gpus(source)}{_fewer(plan)}",
        )


def _fewer(plan: LaunchPlan) -> str:
    """What else to give where there would be more ranks than cores for them."""
    cores, ranks = os.cpu_count() or 1, max(len(host.slots) for host in plan.topology.hosts)
    return f" --num-gpus-per-node {cores} ({ranks} ranks would share {cores} cores)" * (ranks > cores)


def _without_gpus(source: str | None) -> str:
    """How to plan for a machine without GPUs, where the devices are written in ``source``."""
    if source is None or source in ("derived", "default"):
        return "give --gpu cpu"
    name = source if source == "--gpu" else f"cluster.gpu ({source})"
    return f"leave {name} out, or give --gpu cpu"
