"""The way to other machines by ssh: the agent's text and its orders go over stdin."""

from __future__ import annotations

import base64
import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.topology import Host
from dslaunch.launch import agent
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

# Fit for sh, csh and fish alike: no quote, dollar, backslash or exclamation mark inside single quotes
# that any of them would touch. $0 and $1 are for the inner sh.
_SHELL = 'p=$0; [ -x "$p" ] || p=python3; exec "$p" -I -S -c "$1"'
# The first line of stdin is the program, read byte by byte so that what follows is left for it.
LOADER = (
    'import base64,zlib;f=open(0,"rb",0,closefd=False);'
    'exec(compile(zlib.decompress(base64.b64decode(f.readline())),"agent.py","exec"))'
)


def build_agent_command(host: Host, orders: dict[str, Any]) -> Command:
    """The ssh command that starts the agent on ``host``."""
    return build_command(host, _packed_agent() + encode_orders(orders))


def build_command(host: Host, stdin: bytes) -> Command:
    """The ssh command that runs a program on ``host``: :func:`packed` first on its stdin.

    It runs under the launcher's own Python, or ``python3`` where that is not there:
    it may need the standard library of 3.8 only. The ranks' program is another matter.
    """
    argv = ["ssh", "-T"]
    for name, value in OPTIONS.items():
        argv += ["-o", f"{name}={value}"]
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.user is not None:
        argv += ["-l", host.user]
    remote = f"exec /bin/sh -c {_quoted(_SHELL)} {_quoted(sys.executable)} {_quoted(LOADER)}"
    return Command(argv=(*argv, "--", host.name, remote), stdin=stdin)


def packed(text: bytes) -> bytes:
    """A program's text as the line that LOADER reads."""
    return base64.b64encode(zlib.compress(text, 9)) + b"\n"


def check_client(environ: Mapping[str, str]) -> None:
    """Raises EnvironmentNotReady where there is no ssh to start."""
    if shutil.which("ssh", path=environ.get("PATH", os.defpath)) is None:
        raise EnvironmentNotReady("no ssh in PATH; nothing was started", hint="install an OpenSSH client")


@cache
def _packed_agent() -> bytes:
    return packed(Path(agent.__file__).read_bytes())


def _quoted(word: str) -> str:
    """Single quotes, which every shell reads alike; one inside (in a path) as sh, csh and fish have it."""
    return "'" + word.replace("'", "'\\''") + "'"
