"""Many lines of one shape as columns of numbers, and how a story takes them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dslaunch.observe.diagnose.facts import Place
from dslaunch.observe.diagnose.shapes import Record, parse
from dslaunch.observe.diagnose.source import Found, text_before
from dslaunch.observe.diagnose.story import Story

LONGEST = 4096  # of a shape: one line, or one with what is between it and the line before
_NUMBER = rb"[-+\d.eE]+"
_ANY, _WITH_POINT = rb"([-+\d.eE]+)", rb"([-+\d]+\.[-+\d.eE]*)"
_TOKEN = re.compile(rb"[-+.eE\d]*\d[-+.eE\d]*| +")
_EDGE = 12  # rows, more than the lines in a row that a verdict looks at
_INTEGERS = ("step", "bar", "skipped", "rank")


@dataclass(frozen=True)
class Rows:
    """Lines of one shape: a column for each number that they name."""

    first: Record  # the line before them, whose shape they have
    columns: dict[str, list[Any]]
    matches: list[re.Match[bytes]]
    lines: Sequence[int]  # the number of each one's line
    num_others: int = 0  # lines of other ranks, which say the same
    marks: Mapping[int, Sequence[Record]] = field(default_factory=dict)  # by the row before which they stand

    def __len__(self) -> int:
        return len(self.matches)

    def record(self, index: int) -> Record:
        """One of them, as it would have been parsed."""
        whole = self.matches[index].group()
        text = whole[max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1 :]
        first, line = self.first, self.lines[index]
        record = Record(first.kind, line, rank=first.rank, name=first.name, second=first.second, text=text)
        for name, column in self.columns.items():
            setattr(record, name, column[index])
        return record


def pattern_of(
    text: bytes, wanted: Mapping[tuple[int, int], str], fixed: Sequence[tuple[int, int]]
) -> tuple[re.Pattern[bytes], tuple[str, ...]] | None:
    """``text`` as it stands with its numbers free, and the names of its groups: the ``wanted`` numbers.

    Those in ``fixed`` are not free. None where a wanted one is no number by itself.
    """
    parts, names, done = [], [], 0
    for token in _TOKEN.finditer(text):
        parts.append(re.escape(text[done : token.start()]))
        done = token.end()
        if token.span() in wanted:
            name = wanted[token.span()]
            names.append(name)
            parts.append(_WITH_POINT if name == "loss" and _is_bare(text[: token.start()]) else _ANY)
        elif any(start < token.end() and token.start() < end for start, end in fixed):
            parts.append(re.escape(token.group()))
        else:
            parts.append(b" +" if token.group().isspace() else _NUMBER)
    if len(names) != len(wanted):
        return None
    parts.append(re.escape(text[done:]))
    return re.compile(b"".join(parts) + rb"(?=[\r\n])"), tuple(names)


def _is_bare(head: bytes) -> bool:
    """Whether only a blank is between the word and its number: then a whole number is no loss."""
    return not head.rstrip(b" \t'\"").endswith((b":", b"="))


def columns_of(names: Sequence[str], matches: Iterable[re.Match[bytes]]) -> dict[str, list[Any]] | None:
    """The numbers in the groups of ``matches``; None where one is signs and dots that are no number."""
    texts = zip(*[match.groups() for match in matches], strict=True)
    try:
        return {
            name: list(map(int if name in _INTEGERS else float, column))
            for name, column in zip(names, texts, strict=True)
        }
    except ValueError:
        return None


def is_as_parsed(rows: Rows, found: Found, since: int) -> bool:
    """Whether the last row, parsed like any other line, says what its columns say."""
    last, match = rows.record(len(rows) - 1), rows.matches[-1]
    begin = match.end() - len(last.text)
    before = text_before(found.block, begin, since)
    alone = Found(last.line, last.text, before, found.block, match.end(), -1)
    parsed = parse(alone)
    return len(parsed) == 1 and replace(parsed[0], spans=None, second=last.second) == last


def add_rows(story: Story, rows: Rows, file: str) -> None:
    """Have ``story`` take all rows, with the effect that adding each record has.

    What is plain is added at once: numbers that are finite, steps that rise, a scale that stays, norms that
    differ. The lines around all else are added one by one, and so is what stands at either end.
    """
    story.known += rows.num_others
    is_long = len(rows) > 3 * _EDGE and rows.first.kind == "metrics"
    special = _special(rows.columns) if is_long else None
    if special is None:
        _add_each(story, rows, range(len(rows)), file)
    else:
        _add_between(story, rows, [*special, len(rows)], file)
    for mark in rows.marks.get(len(rows), ()):
        story.add(mark, file)


def _add_between(story: Story, rows: Rows, ends: list[int], file: str) -> None:
    begin = 0
    for end in ends:
        if end - begin > 3 * _EDGE:
            _add_each(story, rows, range(begin, begin + _EDGE), file)
            _add_plain(story, rows, begin + _EDGE, end - _EDGE, file)
            begin = end - _EDGE
        _add_each(story, rows, range(begin, min(end + 1, len(rows))), file)
        begin = end + 1


def _add_each(story: Story, rows: Rows, indices: range, file: str) -> None:
    for index in indices:
        for mark in rows.marks.get(index, ()):
            story.add(mark, file)
        story.add(rows.record(index), file)


def _add_plain(story: Story, rows: Rows, begin: int, end: int, file: str) -> None:
    columns = {name: column[begin:end] for name, column in rows.columns.items()}
    marks = {index - begin: found for index, found in rows.marks.items() if begin <= index < end}

    def place(index: int) -> Place:
        record = rows.record(begin + index)
        step = record.step if record.step is not None else record.bar
        return Place(file, record.line, step, record.text[:300])

    story.add_plain(columns, place, marks)


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
        elif name == "bar" and None not in column:
            found.update(_where(operator.gt, column, following))
        elif name == "norm" and _has_run(column, following):
            return None
    if "loss" not in columns and not ("step" in columns or None not in columns.get("bar", (None,))):
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
