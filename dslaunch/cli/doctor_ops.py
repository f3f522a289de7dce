"""``dslaunch doctor --build-ops``: DeepSpeed's compiled ops, built on every host before a run needs them."""

from __future__ import annotations

import dataclasses
import os
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dslaunch.core.plan import LaunchPlan

# Without a run file: DeepSpeed's Adam, with offload too. On CPUs it takes minutes, and torch's is as good.
_USUAL = {"cpu": (), "cuda": ("FusedAdamBuilder", "CPUAdamBuilder")}


def ops_to_build(device_type: str, ds_config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The builder classes of the optimizer's ops. The op that joins ranks on a CPU is always built."""
    if ds_config is None:
        return _USUAL[device_type]
    from dslaunch.train.jit_ops import optimizer_ops

    return optimizer_ops(ds_config)


def build_ops(launch: LaunchPlan, ops: tuple[str, ...]) -> int:
    """Start the build once on each host of ``launch``, as its ranks would be; returns the exit code.

    Hosts that share the cache and are of one CPU wait for each other, and find the ops built.
    The logs stay in the cache, for a container in the run's directory, which it sees: an error of the
    compiler can be read there.
    """
    from pathlib import Path

    from dslaunch.core.run_dir import cache_dir
    from dslaunch.core.topology import Topology
    from dslaunch.launch.supervisor import supervise

    now = datetime.now(timezone.utc)
    top = cache_dir(os.environ).absolute() if launch.container is None else Path(launch.run_dir).parent
    folder = top / "build-ops" / f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}"
    hosts = tuple(dataclasses.replace(host, slots=host.slots[:1]) for host in launch.topology.hosts)
    plan = dataclasses.replace(
        launch,
        argv=(launch.argv[0], "-m", "dslaunch.train.build_ops", *ops),
        topology=Topology(hosts=hosts),
        run_dir=str(folder),
    )
    outcome = supervise(plan, events=None, out=sys.stderr.buffer, err=sys.stderr.buffer)
    if outcome.exit_code == 0:
        talk(f"built on {len(hosts)} host{'s' if len(hosts) > 1 else ''}; logs in {folder}")
    return outcome.exit_code
