"""Many lines of one shape, read at once.

A log of a gigabyte may have ten million lines that differ in their numbers only. Once such a line has been
parsed, it is a pattern for those that follow it: the text as it stands, numbers free. What is between two
of them (a progress bar, the talk of a library) belongs to the pattern; where that changes from line to line,
:mod:`scattered` finds them in it. Where neither fits, lines are parsed one by one as ever, so this changes
nothing but the time that it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dslaunch.observe.diagnose.columns import LONGEST, Rows, columns_of, is_as_parsed, pattern_of
from dslaunch.observe.diagnose.scattered import Scattered
from dslaunch.observe.diagnose.shapes import Record, ranks_in
from dslaunch.observe.diagnose.source import Found
from dslaunch.observe.diagnose.story import Story

_FEWEST = 8
_MOST_WAITING = 1023


class _Reader(Protocol):
    def read(self, found: Found, record: Record, lead: int | None) -> Rows | None: ...


class _Learned:
    """One way to read rows, and the shape that it has learned."""

    def __init__(self, learn: Callable[[Found, Record], _Reader | None]) -> None:
        self._learn = learn
        self._shape: _Reader | None = None
        self._waiting = self._wait = 0  # lines to let pass before the next shape is tried

    def read(self, found: Found, record: Record, lead: int | None, learns: bool) -> Rows | None:
        rows = self._shape.read(found, record, lead) if self._shape is not None else None
        if rows is None and learns:
            if self._waiting:
                self._waiting -= 1
                return None
            self._shape = self._learn(found, record)
            rows = self._shape.read(found, record, lead) if self._shape is not None else None
            self._wait = 0 if rows is not None else min(2 * self._wait + 1, _MOST_WAITING)
            self._waiting = self._wait
        return rows


class RowReader:
    """Reads the rows that follow a line of numbers. One for each log."""

    def __init__(self) -> None:
        self._periodic, self._scattered = _Learned(_learn), _Learned(Scattered.learn)
        self._after_numbers = False

    def following(self, found: Found, records: list[Record], story: Story) -> Rows | None:
        """What follows ``found`` and has its shape, used up; None where that is little or nothing.

        Where each line names its rank, those of the rank that counts for ``story``.
        """
        is_numbers = len(records) == 1 and records[0].spans is not None and not found.used
        learns = is_numbers and self._after_numbers and found.since >= 0
        self._after_numbers = is_numbers
        if not is_numbers:
            return None
        lead = story.lead_of(records[0].kind)
        rows = self._periodic.read(found, records[0], lead, learns)
        return rows if rows is not None else self._scattered.read(found, records[0], lead, is_numbers)


@dataclass(frozen=True)
class _Shape:
    """``names``: of the numbers that the pattern's groups hold, in their order."""

    kind: str
    name: str
    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    lines_each: int

    def read(self, found: Found, record: Record, lead: int | None) -> Rows | None:
        if record.kind != self.kind or record.name != self.name:
            return None
        # Undocumented, and used by the re module itself: matches that touch each other.
        scanner = self.pattern.scanner(found.block, found.end)  # type: ignore[attr-defined]
        matches: list[re.Match[bytes]] = list(iter(scanner.match, None))
        count = len(matches)
        if count < _FEWEST:
            return None
        end = matches[-1].end()
        places: Sequence[int] = range(count)
        if lead is not None and "rank" in self.names:
            matches, places = self._of_rank(matches, b"%d" % lead)
        columns = columns_of(self.names, matches)
        if columns is None or 0 in columns.get("bar", ()):
            return None  # a bar at 0 tells no step
        lines = [record.line + (place + 1) * self.lines_each for place in places]
        rows = Rows(record, columns, matches, lines, count - len(matches))
        if matches and not is_as_parsed(rows, found, matches[-1].start()):
            return None
        found.use(end - found.end)
        return rows

    def _of_rank(
        self, matches: list[re.Match[bytes]], rank: bytes
    ) -> tuple[list[re.Match[bytes]], Sequence[int]]:
        group = self.names.index("rank") + 1
        kept = [place for place, match in enumerate(matches) if match[group] == rank]
        return [matches[place] for place in kept], kept


def _learn(found: Found, record: Record) -> _Shape | None:
    """The shape of a line and of what is between it and the one before. None where it cannot be told."""
    period = found.block[found.since : found.end]
    begin = len(period) - len(found.text)
    if len(period) > LONGEST or not period.endswith(found.text):
        return None
    wanted = {(begin + start, begin + end): name for name, (start, end) in (record.spans or {}).items()}
    fixed = [(begin + start, begin + end) for start, end in ranks_in(found.text)]
    if len(fixed) == 1:  # else which of them it is cannot be told by the number alone
        wanted[fixed.pop()] = "rank"
    found_pattern = pattern_of(period, wanted, fixed)
    if found_pattern is None:
        return None
    return _Shape(record.kind, record.name, *found_pattern, period.count(b"\n"))
