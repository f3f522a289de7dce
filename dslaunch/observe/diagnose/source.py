"""The lines of a log that may say something, found without looking at each line.

A log may be gigabytes, have no line feed for megabytes (progress bars), hold bytes that are no text, and
end in the middle. It is read in blocks, and ``bytes.find`` looks for a few words; only around them are lines
made. Memory does not depend on the log's size.
"""

from __future__ import annotations

import codecs
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from dslaunch.core.errors import ConfigError
from dslaunch.core.missing_path import not_found

STDIN = "-"
# One of these stands in every line that shapes.py can read, or in the first part of one that was wrapped.
ANCHORS = (
    b"loss",
    b"verflow",
    b"VERFLOW",
    b"kipping step",
    b"ttempted",
    b"hysteresis",
    b"skipped=",
    b"initial_scale_power",
    b"overlap_comm",
    b" iteration ",
)
_BLOCK = 1 << 20
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
AHEAD = 4096  # bytes after a line that must be there before it is read: it may have been wrapped
_BEHIND = 400  # bytes before a line that are kept: a progress bar may say which step it is
_WINDOW = 1 << 15
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")  # a colour, a move of the cursor
_LONGEST_ESCAPE = 32
_LONGEST = 8192  # a longer line is cut around the word that was found


class Found:
    """A line in which a word was found. ``number`` counts line feeds; a ``\\r`` also ends the text.

    ``before``: what was written between the last line found and this one (at most its end).
    It ends at ``end`` in ``block``; the line found before it ended at ``since``, or that is not known (-1).
    """

    __slots__ = ("before", "block", "end", "number", "since", "text", "used")

    def __init__(self, number: int, text: bytes, before: bytes, block: bytes, end: int, since: int) -> None:
        self.number, self.text, self.before = number, text, before
        self.block, self.end = block, end
        self.since = since
        self.used = 0

    def after(self) -> bytes:
        """What follows, line ends included, for a line that was wrapped."""
        return self.block[self.end : self.end + AHEAD]

    def use(self, size: int) -> None:
        """``size`` bytes of what follows belong to this line: they are not looked at again."""
        self.used = size


class LogFile:
    """One log: a path, or ``-`` for stdin; gzip is known by its first bytes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = "<stdin>" if path == STDIN else path
        self.lines = 0
        self.bytes_read = 0
        self.is_cut = False  # a gzip stream that ends in its middle

    def found(self) -> Iterator[Found]:
        """The lines with a word of ANCHORS in them. Raises ConfigError where it cannot be read."""
        scanner = _Scanner()
        block, start = b"", 0
        for data in _without_escapes(self._blocks()):
            block += data
            if len(block) - start < 2 * AHEAD:
                continue
            limit = _line_start(block, start, len(block) - AHEAD)
            yield from scanner.scan(block, start, limit)
            kept = max(0, scanner.stopped_at - _BEHIND - 1)  # one more: it tells whether a number is whole
            block, start = block[kept:], scanner.stopped_at - kept
            scanner.cut(kept)
        yield from scanner.scan(block, start, len(block))
        self.lines = scanner.number + (not block.endswith(b"\n") and len(block) > start)

    def _blocks(self) -> Iterator[bytes]:
        try:
            with (
                nullcontext(sys.stdin.buffer) if self.path == STDIN else Path(self.path).open("rb") as stream
            ):
                yield from _as_utf8(self._unpacked(stream))
        except FileNotFoundError:
            raise not_found("log", self.path, hint="give a log, a run directory or -") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot read {self.name}: {reason}") from None

    def _unpacked(self, stream: BinaryIO) -> Iterator[bytes]:
        data = stream.read(_BLOCK)
        if not data.startswith(b"\x1f\x8b"):
            while data:
                self.bytes_read += len(data)
                yield data
                data = stream.read(_BLOCK)
            return
        unpacker = zlib.decompressobj(31)
        while data:
            try:
                text = unpacker.decompress(data, _BLOCK)
            except zlib.error as error:
                if not self.bytes_read:
                    raise ConfigError(f"cannot read {self.name}: gzip: {error}") from None
                self.is_cut = True
                return
            self.bytes_read += len(text)
            yield text
            data = unpacker.unconsumed_tail or unpacker.unused_data
            if unpacker.eof:
                unpacker = zlib.decompressobj(31)  # gzip files may stand one after the other
                data = data or stream.read(_BLOCK)
                if not data.startswith(b"\x1f\x8b"):
                    return
            data = data or stream.read(_BLOCK)
        self.is_cut = not unpacker.eof


def _as_utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16, which PowerShell's ``>`` writes, is known by its first bytes."""
    decoder: codecs.IncrementalDecoder | None = None
    for number, block in enumerate(blocks):
        if number == 0 and block.startswith(_UTF16) and b"\0" in block[2:66]:  # else two odd bytes
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield block if decoder is None else decoder.decode(block).encode("utf-8", "replace")


def _without_escapes(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks without colours; a sequence that the end of a block cuts waits for the next."""
    begun = b""
    for block in blocks:
        data = begun + block if begun else block
        begun = b""
        if b"\x1b" in data:
            last = data.rfind(b"\x1b", max(0, len(data) - _LONGEST_ESCAPE))
            if last >= 0 and not _ESCAPE.match(data, last):
                data, begun = data[:last], data[last:]
            data = _ESCAPE.sub(b"", data)
        yield data
    if begun:
        yield begun


def text_before(block: bytes, begin: int, since: int) -> bytes:
    """What stands before a line, from ``since`` on or the end of that; a number is not cut in its middle."""
    if begin - _BEHIND <= since:
        return block[since:begin]
    return block[begin - _BEHIND : begin].lstrip(b"0123456789")


def _line_start(block: bytes, start: int, at: int) -> int:
    """The start of the last line that begins before ``at``; ``at`` where one line fills all of it."""
    newline = max(block.rfind(b"\n", start, at), block.rfind(b"\r", start, at))
    return newline + 1 if newline >= 0 else at


class _Scanner:
    """Finds the words in block after block; counts lines."""

    def __init__(self) -> None:
        self.number = 0  # line feeds before the place that is looked at
        self.stopped_at = 0  # in the block: all before it is done with
        self._done = -1  # in the block: where the last line found ended; negative where that is gone

    def cut(self, size: int) -> None:
        """The block has lost its first ``size`` bytes."""
        self.stopped_at -= size
        self._done = max(-1, self._done - size)

    def scan(self, block: bytes, start: int, limit: int) -> Iterator[Found]:
        """Lines that begin in ``block[start:limit]``; what stands after ``limit`` is only looked ahead to.

        In windows: what a line's reader uses up is then not searched.
        """
        self.stopped_at = start
        while self.stopped_at < limit:
            begin, end = self.stopped_at, limit
            if limit - begin > 2 * _WINDOW:
                end = _line_start(block, begin, begin + _WINDOW)
            yield from self._window(block, begin, end)

    def _window(self, block: bytes, start: int, limit: int) -> Iterator[Found]:
        find, count = block.find, block.count
        hits = {anchor: find(anchor, start, limit) for anchor in ANCHORS}
        hits = {anchor: hit for anchor, hit in hits.items() if hit >= 0}
        counted = done = line_start = start
        newline = cr = -2  # the next ones after the hit
        while hits:
            hit = min(hits.values())
            fresh = count(b"\n", counted, hit)
            if fresh:
                line_start = block.rfind(b"\n", counted, hit) + 1
                self.number += fresh
            begin = max(line_start, block.rfind(b"\r", max(line_start, counted), hit) + 1, done)
            counted = hit
            if newline < hit and newline != -1:
                newline = find(b"\n", hit)
            if cr < hit and cr != -1:
                cr = find(b"\r", hit)
            end = newline if newline >= 0 else len(block)
            if 0 <= cr < end:
                end = cr
            if end - begin > _LONGEST:
                begin, end = max(begin, hit - _LONGEST), min(end, hit + _LONGEST)
            before = text_before(block, begin, max(self._done, 0))
            found = Found(self.number + 1, block[begin:end], before, block, end, self._done)
            yield found
            self._done = done = end + found.used
            for anchor, place in list(hits.items()):
                if place < done:
                    place = find(anchor, done, limit)
                    if place < 0:
                        del hits[anchor]
                    else:
                        hits[anchor] = place
        self.stopped_at = max(limit, done)
        self.number += count(b"\n", counted, self.stopped_at)
