"""Many lines of one shape, one after the other, read at once.

A log of a gigabyte may have ten million lines that differ in their numbers only. Once such a line has been
parsed, it is a pattern for those that follow it: the text as it stands, numbers free. What is between two
of them (a progress bar, the talk of a library) belongs to the pattern. Where it does not fit, lines are
parsed one by one as ever, so this changes nothing but the time that it takes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dslaunch.observe.diagnose.facts import Place
from dslaunch.observe.diagnose.shapes import Record, parse, ranks_in
from dslaunch.observe.diagnose.source import Found, text_before
from dslaunch.observe.diagnose.story import Story

_NUMBER = rb"[-+\d.eE]+"
_TOKEN = re.compile(rb"[-+.eE\d]*\d[-+.eE\d]*| +")
_LONGEST = 4096  # of one line and what is between it and the one before
_FEWEST = 8
_MOST_WAITING = 1023
_EDGE = 12  # rows, more than the lines in a row that a verdict looks at
_INTEGERS = ("step", "bar", "skipped", "rank")


@dataclass(frozen=True)
class Rows:
    """Lines that follow one another: a column for each number that they name."""

    first: Record  # the line before them, whose shape they have
    columns: dict[str, list[Any]]
    matches: list[re.Match[bytes]]
    places: Sequence[int]  # of each, among all the lines that were read
    num_others: int  # lines of other ranks, which say the same
    lines_each: int

    def __len__(self) -> int:
        return len(self.matches)

    def record(self, index: int) -> Record:
        """One of them, as it would have been parsed."""
        whole = self.matches[index].group()
        text = whole[max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1 :]
        line = self.first.line + (self.places[index] + 1) * self.lines_each
        first = self.first
        record = Record(first.kind, line, rank=first.rank, name=first.name, second=first.second, text=text)
        for name, column in self.columns.items():
            setattr(record, name, column[index])
        return record


class RowReader:
    """Reads the rows that follow a line of numbers. One for each log."""

    def __init__(self) -> None:
        self._shape: _Shape | None = None
        self._after_numbers = False
        self._waiting = self._wait = 0  # lines to let pass before the next shape is tried

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
        rows = self._shape.read(found, records[0], lead) if self._shape is not None else None
        if rows is None and learns:
            if self._waiting:
                self._waiting -= 1
                return None
            self._shape = _learn(found, records[0])
            rows = self._shape.read(found, records[0], lead) if self._shape is not None else None
            self._wait = 0 if rows is not None else min(2 * self._wait + 1, _MOST_WAITING)
            self._waiting = self._wait
        return rows


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
        places: Sequence[int] = range(count)
        if count < _FEWEST:
            return None
        end = matches[-1].end()
        if lead is not None and "rank" in self.names:
            matches, places = self._of_rank(matches, b"%d" % lead)
        texts = zip(*[match.groups() for match in matches], strict=True)
        try:
            columns: dict[str, list[Any]] = {
                name: list(map(int if name in _INTEGERS else float, column))
                for name, column in zip(self.names, texts, strict=True)
            }
        except ValueError:
            return None  # signs and dots that are no number
        if 0 in columns.get("bar", ()):
            return None  # a bar at 0 tells no step
        rows = Rows(record, columns, matches, places, count - len(matches), self.lines_each)
        if matches and not _is_as_parsed(rows, found):
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
    if len(period) > _LONGEST or b"\x1b" in found.text or not period.endswith(found.text):
        return None
    wanted = {(begin + start, begin + end): name for name, (start, end) in (record.spans or {}).items()}
    fixed = [(begin + start, begin + end) for start, end in ranks_in(found.text)]
    if len(fixed) == 1:  # else which of them it is cannot be told by the number alone
        wanted[fixed.pop()] = "rank"
    parts, names, done = [], [], 0
    for token in _TOKEN.finditer(period):
        parts.append(re.escape(period[done : token.start()]))
        done = token.end()
        if token.span() in wanted:
            names.append(wanted[token.span()])
            parts.append(b"(" + _NUMBER + b")")
        elif any(start < token.end() and token.start() < end for start, end in fixed):
            parts.append(re.escape(token.group()))
        else:
            parts.append(b" +" if token.group().isspace() else _NUMBER)
    if len(names) != len(wanted):
        return None
    parts.append(re.escape(period[done:]))
    pattern = re.compile(b"".join(parts) + rb"(?=[\r\n])")
    return _Shape(record.kind, record.name, pattern, tuple(names), period.count(b"\n"))


def _is_as_parsed(rows: Rows, found: Found) -> bool:
    """Whether the last row, parsed like any other line, says what its columns say."""
    last, match = rows.record(len(rows) - 1), rows.matches[-1]
    whole = match.group()
    begin = len(whole) - len(last.text)
    alone = Found(last.line, last.text, text_before(whole, begin, 0), found.block, match.end(), -1)
    parsed = parse(alone)
    return len(parsed) == 1 and replace(parsed[0], spans=None, second=last.second) == last


def add_rows(story: Story, rows: Rows, file: str) -> None:
    """Have ``story`` take all rows, with the effect that adding each record has.

    What is plain is added at once: numbers that are finite, steps that rise, a scale that stays, norms that
    differ. The lines around all else are added one by one, and so is what stands at either end.
    """
    story.known += rows.num_others
    if len(rows) <= 3 * _EDGE or rows.first.kind != "metrics":
        _add_each(story, rows, range(len(rows)), file)
        return
    begin, special = 0, _special(rows.columns)
    for end in [*(special if special is not None else range(len(rows))), len(rows)]:
        if end - begin > 3 * _EDGE:
            _add_each(story, rows, range(begin, begin + _EDGE), file)
            _add_plain(story, rows, begin + _EDGE, end - _EDGE, file)
            begin = end - _EDGE
        _add_each(story, rows, range(begin, min(end + 1, len(rows))), file)
        begin = end + 1


def _add_each(story: Story, rows: Rows, indices: range, file: str) -> None:
    for index in indices:
        story.add(rows.record(index), file)


def _add_plain(story: Story, rows: Rows, begin: int, end: int, file: str) -> None:
    columns = {name: column[begin:end] for name, column in rows.columns.items()}

    def place(index: int) -> Place:
        record = rows.record(begin + index)
        step = record.step if record.step is not None else record.bar
        return Place(file, record.line, step, record.text[:300])

    story.add_plain(columns, place)


def _special(columns: dict[str, list[Any]]) -> list[int] | None:
    """The rows that are not plain; None: nearly all of them."""
    found: set[int] = set()
    for name, column in columns.items():
        if name in ("loss", "norm", "scale") and (max(column) == math.inf or min(column) == -math.inf):
            return None
        following = column[1:]
        if name == "loss" and 0.0 in column:
            found.update(index for index, value in enumerate(column) if value == 0)
        elif name == "skipped" and any(column):
            found.update(index for index, value in enumerate(column) if value)
        elif name == "scale":
            found.update(_where(operator.ne, column, following))
        elif name == "step":
            found.update(_where(operator.ge, column, following))
        elif name == "bar":
            found.update(_where(operator.gt, column, following))
        elif name == "norm" and _has_run(column, following):
            return None
    if "loss" not in columns and not ("step" in columns or "bar" in columns):
        return None  # nothing tells how many steps went by
    return sorted(found) if len(found) * 3 * _EDGE < len(next(iter(columns.values()))) else None


def _has_run(column: list[Any], following: list[Any]) -> bool:
    """Whether many neighbours are the same, but not all."""
    if column.count(column[0]) == len(column):
        return False
    return b"\1" * (_EDGE - 3) in bytes(map(operator.eq, column, following))


def _where(holds: Callable[[Any, Any], bool], column: list[Any], following: list[Any]) -> list[int]:
    """The rows before which ``holds`` is true of two neighbours."""
    if not any(map(holds, column, following)):
        return []
    return [index + 1 for index, pair in enumerate(zip(column, following, strict=False)) if holds(*pair)]
