"""LaunchPlan -> what one host's agent is told: argv, environment, ranks, devices. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslaunch.core.command import RESERVED_VARIABLES, check_argv, check_env
from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.core.topology import RankPlace
from dslaunch.launch.agent import PROTOCOL
from dslaunch.launch.jit_cache import torch_extensions_dir


def check_launch(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """What can be known wrong before anything starts.

    Raises ConfigError for words no process can be given, a variable that is ours
    to set or a DS_ACCELERATOR that is not the plan's; EnvironmentNotReady where a
    secret is named but not set here.
    """
    check_argv(plan.argv, "launch")
    check_env(plan.env, "launch.env")
    for name in (*plan.env, *plan.secret_env):
        if name in RESERVED_VARIABLES:
            raise ConfigError(
                f"launch.env: {name} is set by dslaunch for each rank",
                hint="use cluster.master_addr and cluster.master_port for those two; leave the others out",
            )
    for name in plan.secret_env:
        if name not in environ:
            raise EnvironmentNotReady(
                f"{name} is to be passed to the ranks but is not set here; nothing was started",
                hint=f"export {name} first, or take it out of launch.secret_env (--env)",
            )
    given = plan.env.get("DS_ACCELERATOR", environ.get("DS_ACCELERATOR"))
    if "DS_ACCELERATOR" in (*plan.env, *plan.secret_env) and given != plan.device_type:
        raise ConfigError(
            f"launch.env: DS_ACCELERATOR is {given!r}, but the plan is for {plan.device_type}",
            hint="leave it out, it is set to that; with a run file --gpu cpu plans for the CPU",
        )


def build_orders(
    plan: LaunchPlan, node_rank: int, *, master_port: int | str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The orders of the agent on host ``node_rank``; agent.py tells the meaning of each key.

    ``environ`` is the launcher's environment: the source of secrets, and of
    choices that the user made there already (TORCH_EXTENSIONS_DIR). ``master_port``
    is text only in a dry run, which looks for no port.
    """
    host = plan.topology.hosts[node_rank]
    return {
        "protocol": PROTOCOL,
        "host": host.name,
        "argv": list(plan.argv),
        "cwd": plan.cwd,
        "env": {**_common_env(plan, environ), **{name: environ[name] for name in plan.secret_env}},
        "visible_devices": list(host.slots) if plan.device_type == "cuda" else None,
        "auto_threads": True,
        "failure_grace_s": plan.failure_grace_s,
        "checkpoint_grace_s": plan.checkpoint_grace_s,
        "ranks": [
            {
                "rank": place.rank,
                "env": _rank_env(plan, place, master_port),
                "log": str(RunDir(Path(plan.run_dir)).rank_log(place.rank)),
                "show": "all" if place.rank == 0 else "errors",
            }
            for place in plan.topology.ranks()
            if place.node_rank == node_rank
        ],
    }


def encode_orders(orders: Mapping[str, Any]) -> bytes:
    """One line of JSON for the agent's stdin. ASCII: bytes that are no UTF-8 travel as escapes."""
    return json.dumps(orders).encode("ascii") + b"\n"


def _common_env(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    env = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "DSLAUNCH_RUN_DIR": plan.run_dir}
    # Also for GPUs, also over one that is set: DeepSpeed without it falls back to the CPU in silence.
    env["DS_ACCELERATOR"] = plan.device_type
    if plan.device_type == "cuda" and "CUDA_DEVICE_ORDER" not in environ:
        # Slot ids count as /proc and nvidia-smi do. CUDA's own default puts the fastest GPU first.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if not environ.get("TORCH_EXTENSIONS_DIR"):
        env["TORCH_EXTENSIONS_DIR"] = str(torch_extensions_dir(plan.argv[0], environ, plan.cwd))
    return {**env, **plan.env}


def _rank_env(plan: LaunchPlan, place: RankPlace, master_port: int | str) -> dict[str, str]:
    topology = plan.topology
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": plan.master_addr or "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "LOCAL_SIZE": str(place.local_world_size),
        "CROSS_RANK": str(place.node_rank),
        "CROSS_SIZE": str(topology.num_nodes),
    }
