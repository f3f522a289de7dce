"""What ``--dry-run`` shows of a launch: the very orders that each host would get, and what starts them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dslaunch.core.command import Command
    from dslaunch.core.plan import LaunchPlan, Via
    from dslaunch.core.topology import Host
    from dslaunch.launch.record import RecordedPlan

_ALL_SHOWN = 16  # hosts; of more the text has the first
_SHOWN = 2


def show(plan: RecordedPlan, launch: LaunchPlan, *, as_json: bool) -> None:
    """What would be started: the very orders and commands, with secrets and the port left open.

    Of many hosts the text tells the first in full and what is alike of the others; the JSON object has all.
    ``launch``: what the ranks run, where that is another argv than the plan's own.
    """
    from dslaunch.core.command import quote

    if as_json:
        click.echo(json.dumps({"schema_version": 1, "dry_run": True, **start_json(plan, launch)}))
        return
    hosts = launch.topology.hosts
    shown = _starts(launch, hosts if len(hosts) <= _ALL_SHOWN else hosts[:_SHOWN])
    click.echo(f"run directory {quote(launch.run_dir)}  (nothing is started or written)")
    for orders, starter in shown:
        _show_host(orders, launch, starter)
    if len(shown) < len(hosts):
        _show_others(launch, len(shown))


def start_json(plan: RecordedPlan, launch: LaunchPlan) -> dict[str, Any]:
    """The same of all hosts as one object."""
    from dslaunch.core.plan import to_json

    starts = _starts(launch, launch.topology.hosts)
    commands = [
        {"host": orders["host"], "argv": list(starter.argv), "env": dict(starter.env)}
        for orders, starter in starts
    ]
    return {"plan": to_json(plan), "hosts": [orders for orders, _ in starts], "commands": commands}


def _starts(launch: LaunchPlan, hosts: Sequence[Host]) -> list[tuple[dict[str, Any], Command]]:
    """For each of the first ``hosts`` its orders, and what starts its agent."""
    from dslaunch.core.command import holds_secret
    from dslaunch.launch.orders import build_orders, check_launch, common_orders, is_elsewhere
    from dslaunch.launch.text import utf8_environ

    environ = utf8_environ()
    check_launch(launch, environ)
    secret = [name for name, value in environ.items() if holds_secret(name, value)]
    environ.update(dict.fromkeys((*launch.secret_env, *secret), "(taken from the environment at start)"))
    common = {there: common_orders(launch, environ, elsewhere=there) for there in (False, True)}
    starts = []
    for node_rank, host in enumerate(hosts):
        there = is_elsewhere(launch, host)
        orders = build_orders(launch, node_rank, environ=environ, elsewhere=there, common=common[there])
        starts.append((orders, _starter(launch, host, orders, environ)))
    return starts


def _show_others(launch: LaunchPlan, first: int) -> None:
    """Hosts from ``first`` on: those that follow each other and are alike in one line."""
    from dslaunch.launch.ends import list_ranks
    from dslaunch.launch.orders import way_to

    click.echo("\nand likewise, with their own names and ranks (--json has the orders of each)\n")
    hosts = launch.topology.hosts[first:]
    rank = sum(len(host.slots) for host in launch.topology.hosts[:first])

    def kind(host: Host) -> tuple[Via, str | None, int | None, tuple[str, ...]]:
        return way_to(launch, host), host.user, host.port, host.slots

    for (way, user, port, slots), alike in itertools.groupby(hosts, key=kind):
        group = [host.name for host in alike]
        ranks = range(rank, rank + len(group) * len(slots))
        names = group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}, {len(group)} hosts"
        login = (f", user {user}" if user else "") + (f", port {port}" if port else "")
        click.echo(f"  {names} by {way}{login}: slots {','.join(slots)}, {list_ranks(ranks)}")
        rank = ranks.stop


def _starter(launch: LaunchPlan, host: Host, orders: dict[str, Any], environ: Mapping[str, str]) -> Command:
    """What starts the host's agent, by the way to it; what goes to its stdin is the orders."""
    from dslaunch.launch import pdsh
    from dslaunch.launch.container import enter_words
    from dslaunch.launch.orders import way_to
    from dslaunch.launch.startup import LAUNCHERS

    way = way_to(launch, host)
    command = LAUNCHERS[way](host, orders, environ, enter_words(launch))
    if way == "pdsh":
        command = pdsh.command_of_pdsh(command)
    return dataclasses.replace(command, stdin=None)


def _show_host(orders: dict[str, Any], launch: LaunchPlan, starter: Command) -> None:
    from dslaunch.core.command import quote, shell_text

    one = launch.topology.num_nodes == 1
    addr = launch.master_addr or ("127.0.0.1" if one else "(host 0's address on the way to the others)")
    port = launch.master_port or "(a free port, found at start)"
    click.echo(f"\nhost {orders['host']}, where the agent is started by\n\n  {starter.shell_text()}\n")
    click.echo(f"and in {quote(orders['cwd'])} each rank runs\n")
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
