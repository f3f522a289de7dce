"""What keeps a run from starting here for want of host memory, and what it was to take of it."""

from __future__ import annotations

import dataclasses
import signal
from typing import TYPE_CHECKING

from dslaunch.cli.talk import say

if TYPE_CHECKING:
    from dslaunch.config.memory.setup import Setup
    from dslaunch.core.plan import RunPlan


def check_host_memory(plan: RunPlan) -> None:
    """Raises EnvironmentNotReady where this host cannot hold what its ranks keep between two steps.

    Only that sum is certain: what is offloaded, and on a CPU weights, gradients and states. Activations,
    libraries and loading are estimates, and of other hosts nothing is known: ``dslaunch plan`` shows those.
    """
    needed, offered = _certain_bytes(plan), _offered_bytes()
    if offered is None or needed <= offered:
        return
    from dslaunch.core.errors import EnvironmentNotReady

    what = "the ranks keep" if plan.launch.device_type == "cpu" else "is offloaded"
    raise EnvironmentNotReady(
        f"this host cannot hold what {what} between two steps: {needed / 2**30:.1f} GiB, and a job may use"
        f" {offered / 2**30:.1f} GiB here; nothing was started",
        hint="dslaunch plan with the same arguments shows the sum and what would fit",
    )


def say_what_was_planned(plan: RunPlan, exit_code: int) -> None:
    """One more line of the last block where a rank was killed: often for want of memory."""
    if exit_code == 128 + signal.SIGKILL and (words := host_memory_in_words(plan)) is not None:
        say(f"  planned      {words}")  # as the block is


def host_memory_in_words(plan: RunPlan) -> str | None:
    """What the memory plan says of the fullest host; None where the model's sizes are not known."""
    setup = _setup_of(plan)
    if setup is None:
        return None
    from dslaunch.config.memory.items import ON_DISK
    from dslaunch.config.memory.planner import plan_memory

    memory = plan_memory(setup, None)
    away = [item for item in memory.host if item.name.endswith("(offloaded)") and ON_DISK not in item.when]
    of_it = f", {sum(item.size for item in away) / 2**30:.2f} GiB of it offloaded" if away else ""
    peak = f"{memory.host_peak_bytes / 2**30:.2f} GiB of memory on the fullest host"
    return f"{peak} when {memory.host_phase}{of_it}; dslaunch plan shows the sum"


def _offered_bytes() -> int | None:
    from dslaunch.core.host_memory import local_memory_bytes

    return local_memory_bytes()


def _certain_bytes(plan: RunPlan) -> int:
    """0 where no rank runs here, nothing lies in its memory, or the model's sizes are not known."""
    from dslaunch.launch.orders import is_elsewhere

    launch = plan.launch
    ranks = [len(host.slots) for host in launch.topology.hosts if not is_elsewhere(launch, host)]
    zero = plan.ds_config.get("zero_optimization") or {}
    offloads = [zero.get(part) for part in ("offload_optimizer", "offload_param")]
    if not ranks or (plan.launch.device_type != "cpu" and not any(offloads)):
        return 0
    from dslaunch.config.memory.planner import resting_on_host

    setup = _setup_of(plan)
    return 0 if setup is None else resting_on_host(dataclasses.replace(setup, ranks_per_host=sum(ranks)))


def _setup_of(plan: RunPlan) -> Setup | None:
    from dslaunch.cli.plan_memory import local_model
    from dslaunch.config.memory.model import load_model_facts
    from dslaunch.config.memory.of_run import setup_of_run
    from dslaunch.core.errors import ConfigError

    path = local_model(plan.model.kind, plan.model.path, plan.model.revision)
    if path is None:
        return None
    try:
        return setup_of_run(plan, load_model_facts(path))
    except ConfigError:  # the worker's to tell, with all that it knows
        return None
