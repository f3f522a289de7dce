"""What the ways to other machines have in common whose programs know hosts by name alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.topology import Topology

WORTH_ANOTHER_TRY = (b"Connection refused", b"Connection reset", b"Connection closed by", b"kex_exchange")


def find_program(names: Sequence[str], environ: Mapping[str, str], hint: str) -> str:
    """The first of ``names`` that is in PATH. Raises EnvironmentNotReady where none is."""
    path = environ.get("PATH", os.defpath)
    found = next((name for name in names if shutil.which(name, path=path)), None)
    if found is None:
        raise EnvironmentNotReady(f"no {' or '.join(names)} in PATH; nothing was started", hint=hint)
    return found


def check_names(topology: Topology, program: str) -> None:
    """Raises ConfigError for a host that ``program`` has no word for."""
    for host in topology.hosts:
        if host.user is not None or host.port is not None or ":" in host.name:
            raise ConfigError(
                f"host {host.name}: {program} takes names without user, port or IPv6; nothing was started",
                hint="set User and Port for a name in ~/.ssh/config, or --via ssh (launch.via)",
            )
