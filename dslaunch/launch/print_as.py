"""The same ranks under another launcher: what one would type for the ``deepspeed`` command or torchrun.

Nothing here starts anything. As of DeepSpeed 0.19.8 (``launcher/runner.py``, ``multinode_runner.py``)
and torch 2.13 (``torch.distributed.run``).
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dslaunch.core.command import Command, holds_secret
from dslaunch.core.deepspeed_hostfile import render_deepspeed_hostfile
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.core.topology import Host, is_this_machine
from dslaunch.launch.agent import Refusal, is_loopback, own_address
from dslaunch.launch.orders import VISIBLE, accelerator, common_env, forwarded
from dslaunch.launch.record import RunFile

DEFAULT_PORT = 29500  # of both
_PDSH_FANOUT = 1024
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Printed:
    """``commands``: one for each host on which one is to be typed, by its name. ``files``: what they read,
    in the run directory. ``notes``: a sentence each, what the other launcher does not do or must be told.
    """

    commands: tuple[tuple[str, Command], ...]
    files: tuple[RunFile, ...]
    notes: tuple[str, ...]


class _Words(NamedTuple):
    """The ranks' command for a launcher that starts programs, scripts and modules by itself."""

    launcher: str
    kind: str  # "module", "script" or "program"
    target: str
    arguments: tuple[str, ...]


def print_for_deepspeed(plan: LaunchPlan, environ: Mapping[str, str]) -> Printed:
    """One command, to be typed on this machine. ``environ`` is the launcher's environment."""
    hosts, run_dir = plan.topology.hosts, RunDir(Path(plan.run_dir))
    rendered = render_deepspeed_hostfile(hosts)
    files = [RunFile(run_dir.deepspeed_hostfile, rendered.text)]
    over_pdsh = len(hosts) > 1 or not is_this_machine(hosts[0].name)
    addr, port = _meeting_point(plan)
    flags = ["--hostfile", str(run_dir.deepspeed_hostfile), *rendered.arguments]
    flags += [] if addr is None else ["--master_addr", addr]
    flags += ["--master_port", str(port), "--no_local_rank"]
    words = _words(plan, environ, "deepspeed")
    env, notes = common_env(plan, environ), [*_notes(plan, environ, "DeepSpeed"), *rendered.lost]
    if not over_pdsh:
        flags.append("--no_ssh_check")
        notes += [f"{name} must be set in the shell: no secret is printed" for name in plan.secret_env]
    else:
        # With one host in its hostfile it would start the ranks here.
        flags += ["--force_multi"] if len(hosts) == 1 else []
        text, lost = _env_file({**_open(forwarded(environ)), **env})
        files.append(RunFile(run_dir.deepspeed_env, text, is_private=True))
        notes += [*lost, *_pdsh_notes(plan, words, environ)]
        notes += [
            f"{name} is not written down: add a line {name}=... to {run_dir.deepspeed_env}"
            for name in _secrets(plan, environ)
        ]
        words = words._replace(target=_quoted(words.target), arguments=tuple(map(_for_pdsh, words.arguments)))
        env = {"DS_ENV_FILE": str(run_dir.deepspeed_env)}
    kind = {"module": ["--module"], "program": ["--no_python"], "script": []}[words.kind]
    argv = (words.launcher, *flags, *kind, words.target, *words.arguments)
    return Printed(
        commands=((os.uname().nodename, Command(argv=argv, env=env, cwd=plan.cwd)),),
        files=tuple(files),
        notes=tuple(notes),
    )


def print_for_torchrun(plan: LaunchPlan, environ: Mapping[str, str]) -> Printed:
    """A command for each host, to be typed there, at about the same time.

    Raises ConfigError where torchrun takes no such address.
    """
    hosts = plan.topology.hosts
    addr, port = _meeting_point(plan)
    words = _words(plan, environ, "torchrun")
    kind = {"module": ["-m"], "program": ["--no-python"], "script": []}[words.kind]
    notes = _notes(plan, environ, "torchrun")
    if addr is None:
        addr = hosts[0].name
        notes.append(f"{addr} is not known here: see that it leads to the first host from every host")
    if "%" in addr:  # torch/distributed/elastic/rendezvous/utils.py: not among the characters of a host
        raise ConfigError(
            f"torchrun takes no address that needs an interface's name: {addr}; nothing was written",
            hint="give --master-addr a name of the first host, or an address of it that is not link-local",
        )
    notes += [f"{name} must be set in the shell: no secret is printed" for name in _secrets(plan, environ)]
    if len(hosts) > 1:
        names = ", ".join(host.name for host in hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        notes.append(f"one line for each host, in this order: {names}; torchrun starts nothing elsewhere")
    commands = []
    for node_rank, host in enumerate(hosts):
        flags = [f"--nnodes={len(hosts)}", f"--nproc-per-node={len(host.slots)}", f"--node-rank={node_rank}"]
        argv = (words.launcher, *flags, f"--master-addr={addr}", f"--master-port={port}", *kind, words.target)
        env = {**common_env(plan, environ), **_devices(plan, host)}
        commands.append((host.name, Command(argv=(*argv, *words.arguments), env=env, cwd=plan.cwd)))
    return Printed(commands=tuple(commands), files=(), notes=tuple(notes))


PRINTERS: Mapping[str, Callable[[LaunchPlan, Mapping[str, str]], Printed]] = {
    "deepspeed": print_for_deepspeed,
    "torchrun": print_for_torchrun,
}


def with_local_rank(plan: LaunchPlan) -> LaunchPlan:
    """``plan`` with its --local-rank-arg put behind the command by a shell on the host.

    torchrun gives none, and deepspeed one that stands first and has an underscore.
    """
    if plan.local_rank_arg is None:
        return plan
    script = f'exec "$@" {plan.local_rank_arg}="$LOCAL_RANK"'
    return dataclasses.replace(plan, argv=("/bin/sh", "-c", script, "sh", *plan.argv), local_rank_arg=None)


# --- what both need -------------------------------------------------------------------------------


def _words(plan: LaunchPlan, environ: Mapping[str, str], launcher: str) -> _Words:
    """argv as a script or module where the launcher would run it with the very same Python.

    Both use the interpreter that they are installed for.
    """
    argv = plan.argv
    found = shutil.which(argv[0], path=plan.env.get("PATH", environ.get("PATH")))
    beside = Path(found).with_name(launcher) if found and _PYTHON.fullmatch(Path(found).name) else None
    if beside is not None and os.access(beside, os.X_OK):
        if len(argv) > 2 and argv[1] == "-m":
            return _Words(str(beside), "module", argv[2], argv[3:])
        if len(argv) > 1 and not argv[1].startswith("-"):
            return _Words(str(beside), "script", argv[1], argv[2:])
    ours = Path(sys.executable).with_name(launcher)
    path = str(ours) if os.access(ours, os.X_OK) else launcher
    return _Words(path, "program", argv[0], argv[1:])


def _meeting_point(plan: LaunchPlan) -> tuple[str | None, int]:
    """MASTER_ADDR as far as it can be known from here, and MASTER_PORT."""
    port = plan.master_port or DEFAULT_PORT
    hosts = plan.topology.hosts
    if plan.master_addr is not None:
        return plan.master_addr, port
    if len(hosts) == 1:
        return "127.0.0.1", port
    if is_this_machine(hosts[0].name):
        try:
            return own_address([host.name for host in hosts[1:9]]), port
        except Refusal:
            return None, port
    try:
        found = socket.getaddrinfo(hosts[0].name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # an alias of ssh's configuration
        return None, port
    return next((str(item[4][0]) for item in found if not is_loopback(str(item[4][0]))), None), port


def _notes(plan: LaunchPlan, environ: Mapping[str, str], launcher: str) -> list[str]:
    notes = []
    if plan.max_restarts:
        notes.append(f"max_restarts {plan.max_restarts}: {launcher} does not resume from a checkpoint")
    if "OMP_NUM_THREADS" not in {**environ, **plan.env}:
        notes.append("OMP_NUM_THREADS: set it with --env; dslaunch would give each rank its share of cores")
    return notes


def _secrets(plan: LaunchPlan, environ: Mapping[str, str]) -> list[str]:
    """Secrets that ranks would be given, by name."""
    elsewhere = [name for name, value in forwarded(environ).items() if holds_secret(name, value)]
    return list(dict.fromkeys([*plan.secret_env, *elsewhere]))


def _open(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not holds_secret(name, value)}


def _devices(plan: LaunchPlan, host: Host) -> dict[str, str]:
    """torchrun gives rank i of a host the i-th visible device."""
    first = tuple(map(str, range(len(host.slots))))
    if plan.device_type == "cpu" or host.slots == first:
        return {}
    return {VISIBLE.get(accelerator(plan), "CUDA_VISIBLE_DEVICES"): ",".join(host.slots)}


# --- through pdsh and the shell behind it ---------------------------------------------------------


def _quoted(word: str) -> str:
    """A word that DeepSpeed hands to pdsh as it is: that expands %, and a shell on the host reads it."""
    return shlex.quote(word).replace("%", "%%")


def _for_pdsh(word: str) -> str:
    """An argument of the script. One with a space gets double quotes by DeepSpeed, and only those escaped."""
    if " " not in word:
        return _quoted(word)
    return re.sub(r"([\\$`])", r"\\\1", word).replace("%", "%%")


def _env_file(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The lines of a DS_ENV_FILE, and what it cannot hold.

    DeepSpeed strips each value and puts one with special characters into double quotes;
    it becomes `export NAME=VALUE;`, goes through pdsh and is read by a shell on the host.
    """
    lines, lost = [], []
    for name, value in env.items():
        if not _NAME.fullmatch(name) or not value.isprintable() or value != value.strip():
            lost.append(f"{name}: DeepSpeed cannot pass it on (a line break, a blank at an end, or the like)")
            continue
        if re.search(r"[^\w@%+=:,./-]", value):
            value = re.sub(r'([\\$`"])', r"\\\1", value)
        lines.append(f"{name}={value}\n".replace("%", "%%"))
    return "".join(lines), lost


def _pdsh_notes(plan: LaunchPlan, words: _Words, environ: Mapping[str, str]) -> list[str]:
    notes = []
    if shutil.which("pdsh", path=environ.get("PATH")) is None:
        notes.append("DeepSpeed reaches hosts by pdsh, which is not installed here: apt-get install pdsh")
    for what, path in (("working directory", plan.cwd), ("interpreter", words.launcher)):
        if shlex.quote(path) != path or "%" in path:
            notes.append(f"the {what} {path} will not do: DeepSpeed does not quote it for the shells")
    if plan.topology.num_nodes > _PDSH_FANOUT:
        notes.append(f"DeepSpeed lets pdsh connect to {_PDSH_FANOUT} hosts at once: the others never start")
    return notes
