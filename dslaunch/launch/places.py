"""After a time-out: where each rank was, and so for which of them the others waited. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dslaunch.launch.ends import RankEnd, list_ranks
from dslaunch.launch.symptoms import waited_in

_ANSWER = re.compile(r"^dslaunch: rank \d+ is (.+)$")  # see dslaunch.train.whereabouts
_STATES = {
    "T": "its process was stopped (SIGSTOP)",
    "t": "its process was held by a debugger",
    "D": "its process was stuck in the kernel, on a disk or a device that did not answer",
}
_SHOWN = 8


def describe_places(ends: Iterable[RankEnd]) -> list[str]:
    """A line for each place, with its ranks; those that did not wait come first, for they were waited for."""
    groups: dict[tuple[bool, str], list[RankEnd]] = {}
    for end in ends:
        groups.setdefault(_place(end), []).append(end)
    shown = [f"{_who(groups[place])}: {place[1]}" for place in sorted(groups, key=lambda place: place[0])]
    more = len(shown) - _SHOWN
    return [*shown[:_SHOWN], f"and {more} more"] if more > 1 else shown


def _who(ends: list[RankEnd]) -> str:
    return f"rank {ends[0].rank} on {ends[0].host}" if len(ends) == 1 else list_ranks([e.rank for e in ends])


def _place(end: RankEnd) -> tuple[bool, str]:
    """Whether it waited for others, as far as is known, and where it was."""
    if end.state in _STATES:
        return False, _STATES[end.state]
    for line in reversed(end.tail):
        if (match := _ANSWER.match(line)) is not None:
            return "waiting in" in match[1], match[1]
    if (collective := waited_in(end.tail)) is not None:
        return True, f"waiting in {collective}"
    return False, f"the last that it wrote: {end.last}" if end.last else "it wrote nothing"
