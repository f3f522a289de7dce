"""Hostfiles: every line that is wrong, and hosts that the others may not find."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dslaunch.config.check.places import finding_of
from dslaunch.core.finding import Finding
from dslaunch.core.hostfile import read_hostfile
from dslaunch.core.topology import Host

_MOST_ERRORS = 100
_LOCAL = ("localhost", "127.0.0.1", "::1")


def check_hostfile(path: str, text: str) -> tuple[Finding, ...]:
    """All findings about a hostfile's text, in its order. ``path`` is for messages."""
    hosts, errors = read_hostfile(text, path)
    found = [finding_of(error, "hostfile", path) for error in errors[:_MOST_ERRORS]]
    return tuple(sorted([*found, *_check_names(hosts)], key=lambda finding: finding.line or 0))


def _check_names(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Names that only one machine knows, and names beside addresses."""
    names = [host.name for host in hosts]
    if len(names) > 1 and (local := [name for name in names if name in _LOCAL]):
        message = f"{local[0]} stands beside other hosts: they would look for it on themselves"
        yield Finding("hostfile", "warning", "", message, hint="write the name that the others know")
    numeric = [name for name in names if re.fullmatch(r"[\d.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:]*", name)]
    if 0 < len(numeric) < len(names):
        message = f"{numeric[0]} stands beside names: a machine listed both ways would be taken for two"
        yield Finding("hostfile", "info", "", message, hint="use names alone, or addresses alone")
