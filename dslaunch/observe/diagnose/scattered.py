"""Lines of one shape amid others that change: each is found by its word, and the talk between is passed over.

Every line with one of the scanner's words in it is looked at. Where it is no row, says something and is no
mark of a step, the reading ends before it, and it is read as any other line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dslaunch.observe.diagnose.columns import LONGEST, Rows, columns_of, is_as_parsed, pattern_of
from dslaunch.observe.diagnose.shapes import Record, bar_in, parse, ranks_in
from dslaunch.observe.diagnose.source import AHEAD, ANCHORS, Found, text_before

_WORD = b"loss"
_OTHERS = tuple(anchor for anchor in ANCHORS if anchor != _WORD)


@dataclass
class Scattered:
    """``names``: of the numbers that the pattern's groups hold, in their order."""

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    has_bar_before: bool
    _block: bytes = b""
    _next: dict[bytes, int] = field(default_factory=dict)  # where each of the other words stands next

    @classmethod
    def learn(cls, found: Found, record: Record) -> Scattered | None:
        """The shape of a line of numbers; None where it cannot be told."""
        text = found.text
        whole = found.block[found.end - len(text) : found.end] == text
        if record.kind != "metrics" or _WORD not in text or len(text) > LONGEST or not whole:
            return None
        wanted = {span: name for name, span in (record.spans or {}).items() if span[0] >= 0}
        fixed = ranks_in(text)
        if len(fixed) == 1:
            wanted[fixed.pop()] = "rank"
        pattern = pattern_of(text, wanted, fixed)
        if pattern is None:
            return None
        return cls(*pattern, has_bar_before="step" not in pattern[1] and "bar" not in pattern[1])

    def read(self, found: Found, record: Record, lead: int | None) -> Rows | None:
        """The rows after ``found``, used up; None where there are none."""
        if record.kind != "metrics" or ("rank" in self.names and lead is None):
            return None
        walk = _Walk(self, found, record, lead)
        walk.go()
        rows = self._rows(walk, record)
        if rows is None or not is_as_parsed(rows, found, walk.since):
            self._block = b""  # what was passed over is read again
            return None
        found.use(walk.place - found.end)
        return rows

    def _rows(self, walk: _Walk, record: Record) -> Rows | None:
        columns = columns_of(self.names, walk.matches) if walk.matches else None
        if columns is None or 0 in columns.get("bar", ()):
            return None
        if any(walk.bars):
            columns["bar"] = walk.bars
        return Rows(record, columns, walk.matches, walk.lines, walk.num_others, walk.marks)

    def other_after(self, block: bytes, place: int, end: int) -> int:
        """Where the next of the other words stands, at ``place`` or after it; ``end`` where none does."""
        if block is not self._block:
            self._block, self._next = block, dict.fromkeys(_OTHERS, -1)
        for word, at in self._next.items():
            if at < place:
                at = block.find(word, place, end)
                self._next[word] = at if at >= 0 else end
        return min(self._next.values())


class _Walk:
    """One reading: row after row, up to a line that says something else or to the end of the block."""

    def __init__(self, shape: Scattered, found: Found, record: Record, lead: int | None) -> None:
        self._shape, self._found = shape, found
        self._rank = b"%d" % lead if lead is not None and "rank" in shape.names else None
        self._feeds = record.line - 1  # before the place that is looked at
        self.matches: list[re.Match[bytes]] = []
        self.lines: list[int] = []
        self.bars: list[int | None] = []
        self.marks: dict[int, list[Record]] = {}
        self.num_others = 0  # rows of other ranks
        self.since = self.place = found.end  # where the line before the last row ended; where the reading did

    def go(self) -> None:
        block, shape = self._found.block, self._shape
        find, last_of, count, match_at = block.find, block.rfind, block.count, shape.pattern.match
        group = shape.names.index("rank") + 1 if self._rank is not None else 0
        place = counted = self.place
        end = max(place, len(block) - AHEAD)  # what is after a line must be there: it may have been wrapped
        hit = other = -1
        while True:
            if hit < place:
                hit = find(_WORD, place, end)
                hit = end if hit < 0 else hit
            if other < place:
                other = shape.other_after(block, place, end)
            first = hit if hit < other else other
            begin = last_of(b"\n", place, first) + 1
            if first == end or not begin:
                break
            self._feeds += count(b"\n", counted, begin)
            counted = begin
            match = match_at(block, begin)
            if match is None:
                line_end = self._pass_over(place, first)
                if line_end is None:
                    break
                place = line_end
                continue
            bar = bar_in(text_before(block, begin, place)) if shape.has_bar_before else None
            if group and match[group] != self._rank:
                if bar is not None:
                    break  # it tells the step of all ranks
                self.num_others += 1
            else:
                self.matches.append(match)
                self.lines.append(self._feeds + 1)
                self.bars.append((int(bar[1]) or None) if bar is not None else None)
                self.since = place
            place = match.end()
        self.place = place

    def _pass_over(self, place: int, hit: int) -> int | None:
        """The end of a line that says nothing, or only that a step is over; None where it says more."""
        block = self._found.block
        newline, cr = block.find(b"\n", hit), block.find(b"\r", hit)
        end = min(at for at in (newline, cr, len(block)) if at >= 0)
        begin = max(block.rfind(b"\n", place, hit), block.rfind(b"\r", place, hit)) + 1
        if not begin or end - begin > LONGEST:
            return None
        line = Found(self._feeds + 1, block[begin:end], text_before(block, begin, place), block, end, place)
        records = parse(line)
        if line.used or any(record.kind != "mark" for record in records):
            return None
        if records:
            self.marks.setdefault(len(self.matches), []).extend(records)
        return end
