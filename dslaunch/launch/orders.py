"""LaunchPlan -> what one host's agent is told: argv, environment, ranks, devices. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslaunch.core.command import RESERVED_VARIABLES, check_argv, check_env
from dslaunch.core.devices import accelerator_of
from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.packages import COMPARED
from dslaunch.core.plan import LaunchPlan, Via
from dslaunch.core.run_dir import RunDir, rank_log_name
from dslaunch.core.topology import Host, RankPlace, is_this_machine, master_fault
from dslaunch.launch.agent import PROTOCOL, cpu_key
from dslaunch.launch.container import without_the_images_own
from dslaunch.launch.jit_cache import cache_of, torch_extensions_dir
from dslaunch.launch.ports import port_seed

_LOOKED_UP = 16  # hosts of a launch, at most, whose names are looked up
_PEERS_TRIED = 8  # names of other hosts that host 0 looks up to find its own address
_FORWARDED = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL",
    "TZ", "TMPDIR", "XDG_CACHE_HOME", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "TOKENIZERS_PARALLELISM",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "MAX_JOBS", "CC", "CXX",
)  # fmt: skip
_FORWARDED_PREFIXES = (
    "CONDA_", "DS_", "DSLAUNCH_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_",
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "MPI_", "OMP_", "MKL_", "KMP_", "BNB_", "WANDB_", "MLFLOW_",
    "NVIDIA_TF32", "NVTE_",
)  # fmt: skip
# Interfaces differ from host to host; --env sends these all the same.
_NEVER_FORWARDED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# By which a process sees some of a vendor's devices alone. Of NVIDIA's and AMD's the agent sees which it is.
RESTART_COUNT = "DSLAUNCH_RESTART_COUNT"  # which start of a launch the ranks are of; unset in the first
VISIBLE = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


def accelerator(plan: LaunchPlan) -> str:
    """What DS_ACCELERATOR is for the ranks: ``cpu``, ``cuda``, ``xpu``, ``npu`` or ``hpu``."""
    return "cpu" if plan.device_type == "cpu" else accelerator_of(plan.devices)


def check_launch(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """What can be known wrong before anything starts.

    Raises ConfigError for words no process can be given, a master_addr that is none, a variable that is ours
    to set or a DS_ACCELERATOR that is not the plan's; EnvironmentNotReady where a
    secret is named but not set here.
    """
    check_argv(plan.argv, "launch")
    several = plan.topology.num_nodes > 1 and plan.via != "local"
    if plan.master_addr is not None and (fault := master_fault(plan.master_addr, meet_elsewhere=several)):
        raise ConfigError(f"master_addr {fault[0]}; nothing was started", hint=fault[1])
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
    if "DS_ACCELERATOR" in (*plan.env, *plan.secret_env) and given != accelerator(plan):
        raise ConfigError(
            f"launch.env: DS_ACCELERATOR is {given!r}, but the plan is for {accelerator(plan)}",
            hint="leave it out, it is set to that; with a run file --gpu cpu plans for the CPU",
        )


def build_orders(
    plan: LaunchPlan,
    node_rank: int,
    *,
    environ: Mapping[str, str],
    elsewhere: bool = False,
    leased_port: int | None = None,
    witness: Mapping[str, Any] | None = None,
    needs_cache: bool = False,
    common: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The orders of the agent on host ``node_rank``; agent.py tells the meaning of each key.

    ``environ`` is the launcher's environment: the source of secrets, and of
    choices that the user made there already (TORCH_EXTENSIONS_DIR). ``elsewhere``: the
    host is not this machine, so what its ranks should have of that environment is sent.
    ``leased_port``: the master port, where this machine is host 0 and has it reserved.
    ``needs_cache``: nothing can start where the cache cannot be written. ``common``: what
    :func:`common_orders` says of the same, for who asks for many hosts.
    """
    host, logs = plan.topology.hosts[node_rank], str(RunDir(Path(plan.run_dir)).logs)
    common = common_orders(plan, environ, elsewhere=elsewhere) if common is None else common
    return {
        **common,
        "host": host.name,
        "visible_devices": _devices(plan, host),
        "witness": witness,
        "cache": {**common["cache"], "needed": needs_cache},
        "meet": _meet(plan, leased_port, environ) if node_rank == 0 else None,
        "ranks": [
            {
                "rank": place.rank,
                "env": _rank_env(plan, place),
                "args": [f"{plan.local_rank_arg}={place.local_rank}"] if plan.local_rank_arg else [],
                "log": os.path.join(logs, rank_log_name(place.rank)),
                "show": "all" if place.rank == 0 else "errors",
            }
            for place in plan.topology.ranks_on(node_rank)
        ],
    }


def common_orders(plan: LaunchPlan, environ: Mapping[str, str], *, elsewhere: bool) -> dict[str, Any]:
    """What of the orders is the same for all hosts that are ``elsewhere``, or for all that are not."""
    env = common_env(plan, environ)
    if plan.container is not None:
        env = {**without_the_images_own(forwarded(environ)), **env}
    elif elsewhere and plan.via != "slurm":  # srun takes all of it along
        env = {**forwarded(environ), **env}
    return {
        "protocol": PROTOCOL,
        "argv": list(plan.argv),
        "cwd": plan.cwd,
        "env": {**env, **{name: environ[name] for name in plan.secret_env}},
        "auto_threads": True,
        "ops_cpu": cpu_key() if _ops_are_ours(plan, environ) else None,
        "cache": {"path": cache_of(plan, environ)},
        "packages": list(COMPARED),
        "host_timeout_s": plan.host_timeout_s if elsewhere else None,
        "failure_grace_s": plan.failure_grace_s,
        "checkpoint_grace_s": plan.checkpoint_grace_s,
    }


def is_elsewhere(plan: LaunchPlan, host: Host) -> bool:
    """Whether the agent of ``host`` is no child of the launcher: its process ids are then not ours to use."""
    return plan.container is not None or way_to(plan, host) != "local"


def way_to(plan: LaunchPlan, host: Host) -> Via:
    """How ``host`` is reached. This machine, where it is among those of an ssh launch, needs no ssh.

    Of many hosts not each one is looked up, which may take a second for each: one that is
    this machine under a name that it does not go by itself is then reached as the others are.
    """
    if plan.via != "ssh":
        return plan.via
    here = is_this_machine(host.name, look_up=plan.topology.num_nodes <= _LOOKED_UP)
    return "local" if here else "ssh"


def encode_orders(orders: Mapping[str, Any]) -> bytes:
    """One line of JSON for the agent's stdin. ASCII: bytes that are no UTF-8 travel as escapes."""
    return json.dumps(orders).encode("ascii") + b"\n"


def common_env(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """What is set alike for all ranks, besides their places and secrets."""
    env = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "DSLAUNCH_RUN_DIR": plan.run_dir}
    # Also for GPUs, also over one that is set: DeepSpeed without it falls back to the CPU in silence.
    env["DS_ACCELERATOR"] = accelerator(plan)
    if accelerator(plan) == "cuda" and "CUDA_DEVICE_ORDER" not in environ:
        # Slot ids count as /proc and nvidia-smi do. CUDA's own default puts the fastest GPU first.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if _ops_are_ours(plan, environ):
        env["TORCH_EXTENSIONS_DIR"] = str(torch_extensions_dir(plan.argv[0], environ, plan.cwd))
    return {**env, **plan.env}


def _ops_are_ours(plan: LaunchPlan, environ: Mapping[str, str]) -> bool:
    """Whether we say where JIT-built ops are kept: nobody else does, and images have places of their own."""
    name = "TORCH_EXTENSIONS_DIR"
    return plan.container is None and name not in plan.env and not environ.get(name)


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on another machine get of the launcher's environment: all that is known to matter to them.

    Nothing that says what this machine is (HOSTNAME, DISPLAY, SLURM_*, CUDA_VISIBLE_DEVICES).
    """
    chosen = (n for n in environ if n in _FORWARDED or n.startswith(_FORWARDED_PREFIXES))
    return {name: environ[name] for name in chosen if name not in _NEVER_FORWARDED}


def _devices(plan: LaunchPlan, host: Host) -> dict[str, Any] | None:
    if plan.device_type == "cpu":
        return None
    variable = VISIBLE.get(accelerator(plan))
    return {"slots": list(host.slots), "of": list(host.all_slots), "variable": variable}


def _meet(plan: LaunchPlan, leased_port: int | None, environ: Mapping[str, str]) -> dict[str, Any]:
    peers = [host.name for host in plan.topology.hosts[1:]]
    return {
        "peers": peers[:_PEERS_TRIED],
        "addr": plan.master_addr,
        "port": leased_port or plan.master_port,
        "leased": leased_port is not None,
        "seed": port_seed(environ, plan.env.get(RESTART_COUNT, "0")),
    }


def _rank_env(plan: LaunchPlan, place: RankPlace) -> dict[str, str]:
    topology = plan.topology
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "LOCAL_SIZE": str(place.local_world_size),
        "CROSS_RANK": str(place.node_rank),
        "CROSS_SIZE": str(topology.num_nodes),
    }
