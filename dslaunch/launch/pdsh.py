"""The way to other machines by pdsh: one for each host, with ssh or what PDSH_RCMD_TYPE names.

pdsh hands stdin to no host, rewrites ``%`` in words, and its exit code is not to be relied on. So nothing
of the user's is on its command line: agent and orders go by a file in the run directory, which all hosts
have to see and only its owner can read, and the agent connects back to bridge.py for all else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import bridge, mpi, relay
from dslaunch.launch.carried import REFUSE_OLD_PYTHON, packed, packed_agent
from dslaunch.launch.orders import encode_orders
from dslaunch.launch.ssh import quoted

# For the inner sh; bridge.py puts in the path of a file.
_SHELL = 'p=$0; [ -x "$p" ] || p=python3; exec "$p" -I -S -c "$1" "$2"'
_LOADER = (
    f"import base64,os,sys,zlib;{REFUSE_OLD_PYTHON}"
    "p=bytes.fromhex(sys.argv[1]);os.path.exists(p) or sys.exit("
    '"the run directory is not seen here: --via pdsh needs one that all hosts share, --via ssh does not");'
    'FILE=open(p,"rb");os.unlink(p);'
    'exec(compile(zlib.decompress(base64.b64decode(FILE.readline())),"relay.py","exec"))'
)
WORTH_ANOTHER_TRY = mpi.WORTH_ANOTHER_TRY


def build_agent_command(
    host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str] = ()
) -> Command:
    """The command of the bridge that starts the agent on ``host`` by pdsh, ``within`` a container there."""
    words = (*within, "/bin/sh", "-c", _SHELL, sys.executable, _LOADER, bridge.PATH_IN_HEX)
    remote = " ".join(["exec", *map(quoted, words)]).replace("%", "%%")
    request = {
        "command": ["pdsh", "-S", "-N", "-f", "1", "-t", "15", "-w", host.name, remote],
        "folder": orders["env"]["DSLAUNCH_RUN_DIR"],
        "host": host.name,
        "relay": packed(Path(relay.__file__).read_bytes()).decode("ascii"),
    }
    options = "-o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3"
    asked = environ.get("PDSH_SSH_ARGS_APPEND", "")
    return Command(
        argv=(sys.executable, "-I", "-S", str(bridge.__file__)),
        env={
            "PDSH_RCMD_TYPE": environ.get("PDSH_RCMD_TYPE") or "ssh",  # Debian's own default is rsh
            "PDSH_SSH_ARGS_APPEND": f"{asked} {options}".strip(),
        },
        stdin=json.dumps(request).encode("ascii") + b"\n" + packed_agent() + encode_orders(orders),
    )


def command_of_pdsh(bridging: Command) -> Command:
    """For a reader: the pdsh that the bridge of :func:`build_agent_command` starts."""
    request = json.loads((bridging.stdin or b"").partition(b"\n")[0])
    return Command(argv=tuple(request["command"]), env=bridging.env)


def check_hosts(topology: Topology, environ: Mapping[str, str]) -> None:
    """Raises EnvironmentNotReady where there is no pdsh, ConfigError for a host that it has no word for."""
    mpi.find_program(
        ("pdsh",), environ, "install pdsh, or --via ssh (launch.via), which needs no more than ssh"
    )
    mpi.check_names(topology, "pdsh")
