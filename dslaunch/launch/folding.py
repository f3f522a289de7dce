"""Fewer lines on stderr: what many ranks say alike is one line, a progress bar its last state. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dslaunch.core.topology import span, without_rank

Write = Callable[[bytes, "Callable[[], None] | None"], None]
NEVER = float("inf")

_FIRST_S, _LONGEST_S = 0.3, 60.0  # how long a line waits for others to say it too
_KNOWN = 256  # lines that are remembered, for when they come again
_SPANS_SHOWN = 6
# What one can still read. Lines on top of it are told by what they have in common, and later.
_MOST, _MOST_S = 20, 10.0
_EXCESS_S = 3.0
_NUMBER = re.compile(rb"0x[0-9a-fA-F]+|\d[\d.,:]*")
_BAR_S = 30.0  # how often a bar that goes on shows where it is


@dataclass
class _Line:
    """A line that waits, with those who have said it."""

    text: bytes
    due: float
    hosts: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    alike: int = 0  # other lines that are told with it

    def take(self, other: _Line) -> None:
        """Tell ``other`` with this one."""
        self.hosts |= other.hosts
        self.ranks |= other.ranks
        self.alike += 1 + other.alike

    def render(self) -> bytes:
        ranks = span(sorted(self.ranks), _SPANS_SHOWN)
        if len(self.hosts) == 1:
            who = f"{next(iter(self.hosts))}:{ranks}"
        else:
            who = f"{len(self.hosts)} hosts, ranks {ranks}"
        times = f" ({self.count} times)" if self.count > len(self.ranks) and not self.alike else ""
        more = f" (and {self.alike} lines alike, with other numbers)" if self.alike else ""
        return f"{who}{times}| ".encode("utf-8", "surrogateescape") + self.text + more.encode() + b"\n"


class LineFolder:
    """Lines of many ranks, each shown once for all that say it within a moment.

    A line that keeps coming waits twice as long each time, up to a minute. Of more than 20 lines in ten
    seconds the others wait for those that differ from them by numbers alone, and are one line with them; of
    more than 20 such kinds the others are only counted. ``write`` gets text, and what to call when it is
    out; ``deadline`` is when :meth:`flush` is due (monotonic time).
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: dict[bytes, _Line] = {}
        self.has_left_out = False  # whether some line was not shown as it is
        self._excess: dict[bytes, _Line] = {}  # by what lines have in common
        self._shown_at: deque[float] = deque(maxlen=_MOST)  # when the last lines were due that were shown
        self._known: OrderedDict[bytes, tuple[float, float]] = (
            OrderedDict()
        )  # when it is due, how long it waits

    @property
    def deadline(self) -> float:
        lines = itertools.chain(self._waiting.values(), self._excess.values())
        return min((line.due for line in lines), default=NEVER)

    def add(self, host: str, rank: int, text: bytes, on_written: Callable[[], None], now: float) -> None:
        """One line of one rank, without its end."""
        key = without_rank(text, rank)
        line = self._waiting.get(key)
        if line is None:
            line = self._waiting[key] = _Line(text, now + self._wait_s(key, now))
        line.hosts.add(host)
        line.ranks.add(rank)
        line.count += 1
        self._write(b"", on_written)  # what waits is one line, however many say it

    def flush(self, now: float = NEVER) -> None:
        """Show what is due by ``now``, in the order in which it came."""
        for line in _pop_due(self._waiting, now):
            full = len(self._shown_at) == _MOST and line.due - self._shown_at[0] < _MOST_S
            if not full:
                self._shown_at.append(line.due)
                self._write(line.render(), None)
                continue
            self.has_left_out = True
            kind = _NUMBER.sub(b"0", line.text)
            if kind in self._excess:
                self._excess[kind].take(line)
            else:
                self._excess[kind] = dataclasses.replace(line, due=line.due + _EXCESS_S)
        self._show_excess(_pop_due(self._excess, now))

    def _show_excess(self, lines: list[_Line]) -> None:
        for line in lines[:_MOST]:
            self._write(line.render(), None)
        if others := lines[_MOST:]:
            count = sum(1 + line.alike for line in others)
            ranks = span(sorted(set().union(*(line.ranks for line in others))), _SPANS_SHOWN)
            self._write(f"{count} other lines of ranks {ranks}: see their logs\n".encode(), None)

    def _wait_s(self, key: bytes, now: float) -> float:
        due, wait_s = self._known.pop(key, (0.0, 0.0))
        again = wait_s > 0 and now - due < _LONGEST_S
        wait_s = min(2 * wait_s, _LONGEST_S) if again else _FIRST_S
        self._known[key] = (now + wait_s, wait_s)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return wait_s


def _pop_due(lines: dict[bytes, _Line], now: float) -> list[_Line]:
    return [lines.pop(key) for key in [key for key, line in lines.items() if line.due <= now]]


class BarFilter:
    """A stream with progress bars, made fit for a file: what a carriage return overwrites is left out.

    A bar that goes on is shown as a line every half minute. All else passes through at once, as it is.
    """

    def __init__(self) -> None:
        self._held = b""  # an unfinished line with a bar in it, its last state alone
        self._column = False  # whether an unfinished line has been let through
        self._next_s = NEVER

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to show (monotonic time)."""
        return self._next_s if self._held else NEVER

    def feed(self, data: bytes, now: float) -> bytes:
        """What is to be written of ``data``, and of what was held."""
        *lines, rest = (self._held + data).split(b"\n")
        self._held = b""
        shown = b"".join(self._finish(line) for line in lines)
        if lines:
            self._next_s = NEVER
        if b"\r" not in rest:
            self._column = bool(rest) or (self._column and not lines)
            return shown + rest
        self._held = b"\r" + _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        self._next_s = min(self._next_s, now + _BAR_S)
        return shown

    def tick(self, now: float) -> bytes:
        """Where an unfinished bar is, if it is time to say so. At the end: ``tick(NEVER)``."""
        if not self._held or now < self._next_s:
            return b""
        self._next_s = now + _BAR_S
        held = self._held
        if now == NEVER:
            self._held = b""
        return self._finish(held)

    def _finish(self, line: bytes) -> bytes:
        text, end = (line[:-1], b"\r\n") if line.endswith(b"\r") else (line, b"\n")
        if b"\r" not in text:
            self._column = False
            return text + end
        state = _last_state(text)
        before = b"\n" if self._column else b""
        self._column = False
        return before + state + b"\n" if state else before


def _last_state(line: bytes) -> bytes:
    """What a bar shows in the end; empty where it was wiped away."""
    last = next((part for part in reversed(line.split(b"\r")) if part), b"")
    return last if last.strip() else b""
