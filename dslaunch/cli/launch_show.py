"""What ``--dry-run`` shows of a launch: the very orders that each host would get."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dslaunch.core.plan import LaunchPlan
    from dslaunch.launch.record import RecordedPlan


def show(plan: RecordedPlan, launch: LaunchPlan, *, as_json: bool) -> None:
    """What would be started: the very orders, with secrets and the port left open.

    ``launch``: what the ranks run, where that is another argv than the plan's own.
    """
    from dslaunch.core.command import holds_secret, quote, shell_text
    from dslaunch.core.plan import to_json
    from dslaunch.launch.container import enter_words
    from dslaunch.launch.orders import build_orders, check_launch, is_elsewhere
    from dslaunch.launch.text import utf8_environ

    environ = utf8_environ()
    check_launch(launch, environ)
    secret = [name for name, value in environ.items() if holds_secret(name, value)]
    environ.update(dict.fromkeys((*launch.secret_env, *secret), "(taken from the environment at start)"))
    hosts = [
        build_orders(launch, node_rank, environ=environ, elsewhere=is_elsewhere(launch, host))
        for node_rank, host in enumerate(launch.topology.hosts)
    ]
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "dry_run": True, "plan": to_json(plan), "hosts": hosts}))
        return
    click.echo(f"run directory {quote(launch.run_dir)}  (nothing is started or written)")
    if within := enter_words(launch):
        click.echo(f"on each host inside of {shell_text(within)} ...")
    for orders in hosts:
        _show_host(orders, launch)


def _show_host(orders: dict[str, Any], launch: LaunchPlan) -> None:
    from dslaunch.core.command import quote, shell_text

    one = launch.topology.num_nodes == 1
    addr = launch.master_addr or ("127.0.0.1" if one else "(host 0's address on the way to the others)")
    port = launch.master_port or "(a free port, found at start)"
    click.echo(f"\nhost {orders['host']}, in {quote(orders['cwd'])}, each rank runs\n")
    last = f" {launch.local_rank_arg}=LOCAL_RANK" if launch.local_rank_arg else ""
    click.echo(f"  {shell_text(orders['argv'])}{last}\n\nwith, added to the environment,\n")
    for name, value in orders["env"].items():
        click.echo(f"  {name}={quote(value)}")
    click.echo(f"  MASTER_ADDR={addr}\n  MASTER_PORT={port}")
    if orders["visible_devices"]:
        devices = ",".join(orders["visible_devices"]["slots"])
        click.echo(f"  CUDA_VISIBLE_DEVICES={devices}  (within those visible there; AMD: HIP_ or ROCR_...)")
    if "OMP_NUM_THREADS" not in {*orders["env"], *os.environ}:
        click.echo(f"  OMP_NUM_THREADS=(cores there / {len(orders['ranks'])} ranks)")
    for rank in orders["ranks"]:
        click.echo(f"\nrank {rank['rank']}, log {quote(rank['log'])}")
        click.echo("  " + " ".join(f"{name}={quote(value)}" for name, value in rank["env"].items()))
