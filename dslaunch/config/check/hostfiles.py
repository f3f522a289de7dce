"""Hostfiles: every line that is wrong, and hosts that the others may not find."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dslaunch.config.check.places import finding_of
from dslaunch.core.errors import HostfileError
from dslaunch.core.finding import Finding
from dslaunch.core.hostfile import parse_hostfile
from dslaunch.core.topology import Host

_MOST_ERRORS = 100  # each costs a pass over the file
_LOCAL = ("localhost", "127.0.0.1", "::1")


def check_hostfile(path: str, text: str) -> tuple[Finding, ...]:
    """All findings about a hostfile's text, in its order. ``path`` is for messages."""
    errors, hosts = _parse_all(path, text)
    found = [*errors, *_check_names(hosts)]
    return tuple(sorted(found, key=lambda finding: finding.line or 0))


def _parse_all(path: str, text: str) -> tuple[list[Finding], Sequence[Host]]:
    """The error of each wrong line, found by leaving out the lines that are known to be wrong."""
    lines = text.split("\n")
    errors: list[Finding] = []
    while len(errors) < _MOST_ERRORS:
        try:
            return errors, parse_hostfile("\n".join(lines), path)
        except HostfileError as error:
            finding = finding_of(error, "hostfile", path)
            if finding.line is None:  # no host is left
                return errors or [finding], ()
            errors.append(finding)
            lines[finding.line - 1] = ""
    return errors, ()


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
