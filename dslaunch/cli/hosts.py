"""dslaunch hosts: the hosts and slots of a hostfile, of a batch job or of this machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from dslaunch.config.facts import Facts
    from dslaunch.config.hosts import ResolvedHosts
    from dslaunch.core.topology import Host, Topology

SCHEMA_VERSION = 1


@click.command("hosts", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", required=False, metavar="[FILE]")
@options.cluster_options
@options.json_option
@click.option(
    "-o", "--output", metavar="FILE", help="Write a hostfile for the deepspeed command (-: stdout)."
)
@options.force_option
def command(file: str | None, as_json: bool, output: str | None, force: bool, **flags: Any) -> None:
    """Show the hosts and slots of a hostfile (-: stdin), or, without FILE, of this job or machine.

    They are the hosts that a run would have. Inside of a batch job (Slurm, PBS, LSF, SGE) they are
    read from its environment; the scheduler is not asked.
    """
    from dslaunch.core.errors import ConfigError

    if as_json and output == "-":
        raise ConfigError("--json and -o - both write to stdout", hint="give -o a file")
    hosts = _resolve(file, flags)
    topology = hosts.topology
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    talk(f"{nodes}, world size {topology.world_size}; {hosts.topology_reason}")
    if output is not None:
        _write(topology.hosts, output, force=force)
    if as_json:
        click.echo(json.dumps(hosts_report(topology), indent=2))
    elif output is None:
        click.echo("\n".join(host_lines(topology.hosts)))


def hosts_report(topology: Topology) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hosts": [
            {"name": host.name, "user": host.user, "port": host.port, "slots": list(host.slots)}
            for host in topology.hosts
        ],
        "world_size": topology.world_size,
    }


def host_lines(hosts: Sequence[Host]) -> list[str]:
    """A line for each host: its ranks, the host as a hostfile has it, its slots."""
    from dslaunch.core.hostfile import host_text

    rows = [("ranks", "host", "slots")]
    rank = 0
    for host in hosts:
        last = rank + len(host.slots) - 1
        rows.append((f"{rank}-{last}" if last > rank else f"{rank}", host_text(host), ",".join(host.slots)))
        rank = last + 1
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{ranks:<{widths[0]}}  {host:<{widths[1]}}  {slots}" for ranks, host, slots in rows]


def _write(hosts: Sequence[Host], output: str, *, force: bool) -> None:
    from dslaunch.core.deepspeed_hostfile import render_deepspeed_hostfile

    rendered = render_deepspeed_hostfile(hosts)
    options.write_output(rendered.text, output, force=force)
    if rendered.arguments:
        words = shlex.join(rendered.arguments)
        options.show_notes((f"its hostfile has counts alone, so add to the deepspeed command: {words}",))
    options.show_notes(rendered.lost)


def _resolve(file: str | None, flags: dict[str, Any]) -> ResolvedHosts:
    import os
    from pathlib import Path

    from dslaunch.config.facts import probe_facts
    from dslaunch.config.hosts import resolve_hosts
    from dslaunch.config.load import load_flags
    from dslaunch.core.errors import ConfigError

    if file is not None and flags["hostfile"] is not None:
        raise ConfigError(
            f"{file} and --hostfile {flags['hostfile']} are both given", hint="give one of them"
        )
    path = file or flags["hostfile"]
    loaded = load_flags((), options.flag_overrides({**flags, "hostfile": None if path == "-" else path}))
    facts = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    if path == "-":
        facts = _with_stdin(facts)
    for problem in (facts.hostfile_problem, facts.allocation_problem):
        if problem is not None:
            raise problem
    return resolve_hosts(loaded.spec.cluster, facts)


def _with_stdin(facts: Facts) -> Facts:
    """``facts`` with the hostfile that stands on stdin."""
    import dataclasses
    import sys

    from dslaunch.config.facts import PathFact, parse_all
    from dslaunch.config.load import decode

    hosts = parse_all(decode(sys.stdin.buffer.read(), "<stdin>"), "<stdin>")
    fact = PathFact("file", "stdin")
    paths = {"cluster.hostfile": fact}
    return dataclasses.replace(facts, hosts=hosts, allocation_problem=None, paths=paths)
