"""The way to other machines by ssh."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.topology import Host
from dslaunch.launch.carried import loader_argv, packed_agent
from dslaunch.launch.orders import encode_orders

# What ssh must do whatever the user's configuration says. All else (ProxyJump, keys, GSSAPI, ports,
# aliases) is the configuration's; a connection that the user keeps open (ControlPath) is used.
OPTIONS = {
    "BatchMode": "yes",  # no question that nobody would see
    "ConnectTimeout": "15",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",
    "ClearAllForwardings": "yes",
    "ForwardX11": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}
# On exit 255 ssh's own text holds one of these where another try may succeed (MaxStartups, a booting host).
WORTH_ANOTHER_TRY = (b"Connection refused", b"Connection reset", b"Connection closed by", b"kex_exchange")
# And what each of its refusals takes.
HINTS = {
    b"Host key verification failed": "connect by hand once (ssh HOST), or add its key to known_hosts",
    b"Permission denied (": "see that `ssh HOST true` asks nothing: ssh-copy-id HOST, or a running ssh-agent",
    b"Could not resolve hostname": "correct the name in the hostfile, or give it a HostName in ~/.ssh/config",
}
SILENT_HINT = (
    "see that `ssh HOST echo` ends well: a login script there may end the shell, wait, or read stdin"
)


def build_agent_command(
    host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The ssh command that starts the agent on ``host``, ``within`` a container there."""
    return build_command(host, packed_agent() + encode_orders(orders), within)


def build_command(host: Host, stdin: bytes, within: Sequence[str] = ()) -> Command:
    """The ssh command that runs a program on ``host``: ``packed`` first on its stdin (see carried.py)."""
    argv = ["ssh", "-T"]
    for name, value in OPTIONS.items():
        argv += ["-o", f"{name}={value}"]
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.user is not None:
        argv += ["-l", host.user]
    remote = " ".join(["exec", *map(quoted, (*within, *loader_argv()))])
    return Command(argv=(*argv, "--", host.name, remote), stdin=stdin)


def check_client(environ: Mapping[str, str]) -> None:
    """Raises EnvironmentNotReady where there is no ssh to start."""
    if shutil.which("ssh", path=environ.get("PATH", os.defpath)) is None:
        raise EnvironmentNotReady(
            "no ssh in PATH; nothing was started",
            hint="install an OpenSSH client; without one there are --via openmpi, mpich, and slurm in a job",
        )


def quoted(word: str) -> str:
    """Single quotes, which every shell reads alike; what some of them read in there stands outside."""
    return "'" + re.sub(r"['\\!]", lambda found: f"'\\{found[0]}'", word) + "'"
