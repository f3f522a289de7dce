"""Slurm's compact lists: ``gpu[001-003,7],x`` to host names, ``2(x3),1`` to numbers.

Read here, because ``scontrol show hostnames`` asks for a Slurm configuration, which a
container or a login node may lack. What is wrong is named with its column.
"""

from __future__ import annotations

import itertools
import math
import re

from dslaunch.core.errors import HostfileError
from dslaunch.core.topology import HOST_NAME

MAX_HOSTS = 65536  # as in Slurm; a typing mistake must not fill the memory

_RANGE = re.compile(r"(?P<low>[0-9]+)(?:-(?P<high>[0-9]+))?")
_PART = re.compile(r"\[[^\]]*\]|[^\[]+")
_COUNT = re.compile(r"(?P<value>[0-9]{1,6})(?:\(x(?P<times>[0-9]{1,6})\))?")


def expand_nodelist(text: str, what: str) -> tuple[str, ...]:
    """The hosts of a compact list, in its order; of several brackets in a name the last counts fastest.

    ``what`` is where the list is from, for messages. Numbers keep the zeros that the
    low end of their range has. Raises HostfileError with the column.
    """
    names: list[str] = []
    for start, entry in _split_entries(text, what):
        parts = [_expand_part(part.group(), what, start + part.start()) for part in _PART.finditer(entry)]
        if len(names) + math.prod(map(len, parts)) > MAX_HOSTS:
            raise _error(what, start, f"with {_shown(entry)} it is more than {MAX_HOSTS} hosts")
        for pieces in itertools.product(*parts):
            name = "".join(pieces)
            if not HOST_NAME.fullmatch(name):
                raise _error(what, start, f"{_shown(name)} is not a host name")
            names.append(name)
    return tuple(names)


def expand_counts(text: str, what: str) -> tuple[int, ...]:
    """``2(x3),1`` -> 2, 2, 2, 1: one number a node. Raises HostfileError with the column."""
    counts: list[int] = []
    column = 1
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or len(counts) + int(match["times"] or 1) > MAX_HOSTS:
            raise _error(what, column, f"{_shown(part)} is not a number or NUMBER(xTIMES)")
        counts += [int(match["value"])] * int(match["times"] or 1)
        column += len(part) + 1
    return tuple(counts)


def _split_entries(text: str, what: str) -> list[tuple[int, str]]:
    """(column, entry) of each part between commas that are outside of brackets."""
    entries = []
    start, opened = 0, 0
    for at, char in enumerate(text + ","):
        if char == "[":
            if opened:
                raise _error(what, at + 1, "a bracket inside of brackets")
            opened = at + 1
        elif char == "]":
            if not opened:
                raise _error(what, at + 1, "']' without '['")
            opened = 0
        elif char == "," and (not opened or at == len(text)):
            if opened:
                raise _error(what, opened, "'[' is not closed")
            if at == start:
                raise _error(what, at + 1, "a host name is missing")
            entries.append((start + 1, text[start:at]))
            start = at + 1
    return entries


def _expand_part(part: str, what: str, column: int) -> list[str]:
    if not part.startswith("["):
        return [part]
    values: list[str] = []
    column += 1
    for piece in part[1:-1].split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _error(what, column, f"{_shown(piece)} is not a number or LOW-HIGH")
        values += _expand_range(match["low"], match["high"] or match["low"], what, column)
        column += len(piece) + 1
    return values


def _expand_range(low: str, high: str, what: str, column: int) -> list[str]:
    if len(low) > 12 or len(high) > 12:
        raise _error(what, column, "a number of more than 12 digits")
    first, last = int(low), int(high)
    if first > last:
        raise _error(what, column, f"the range {low}-{high} runs backwards")
    if high.startswith("0") and len(high) != len(low):
        raise _error(what, column, f"the ends of {low}-{high} differ in their zeros")
    if last - first >= MAX_HOSTS:
        raise _error(what, column, f"{low}-{high} is more than {MAX_HOSTS} hosts")
    return [f"{number:0{len(low)}d}" for number in range(first, last + 1)]


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57] + "...")


def _error(what: str, column: int, text: str) -> HostfileError:
    return HostfileError(f"{what}:{column}: {text}")
