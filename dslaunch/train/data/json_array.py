"""A JSON array read element by element, in memory of one element, with line numbers."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator
from typing import IO

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.records import Record

_CHUNK_BYTES = 1 << 20
_LONGEST_CUT = 16  # characters of a number, literal or escape that the window's end may cut
_SPACE = " \t\r\n"


def iterate_json_array(stream: IO[bytes], name: str) -> Iterator[Record]:
    """The elements of the one JSON array in ``stream``, each with ``name:line`` of its first character.

    Many arrays are one line, so a record's number (from 1) stands there too.

    Raises ConfigError with the line where the text stops being a JSON array.
    """
    text = _Window(stream, name)
    text.expect("[")
    if text.peek() == "]":
        text.expect("]")
    else:
        for number in itertools.count(1):
            text.skip_space()
            where = f"{name}:{text.line} record {number}"
            yield Record(where, text.take_value())
            if text.peek() == "]":
                text.expect("]")
                break
            text.expect(",")
    if text.peek():
        raise text.problem("text after the end of the array")


class _Window:
    """The part of the file that is being decoded, and the line it starts on."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.line = 1
        self._name = name
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the window's first line that stand before the window
        self._ended = False

    def peek(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        self.skip_space()
        return self._text[self._at : self._at + 1]

    def expect(self, character: str) -> None:
        found = self.peek()
        if found != character:
            shown = repr(found) if found else "the end of the file"
            raise self.problem(f"expected {character!r}, found {shown}")
        self._at += 1

    def skip_space(self) -> None:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self.line += self._text[self._at] == "\n"
                self._at += 1
            if self._at < len(self._text) or not self._read_more(_CHUNK_BYTES):
                return

    def take_value(self) -> object:
        """Decode one JSON value. A value cut by the window's end is tried again with twice the text."""
        more = _CHUNK_BYTES
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError) and self._is_cut(error) and self._read_more(more):
                    more *= 2
                    continue
                raise self._decode_problem(error) from None
            # A number at the window's end may go on in the next chunk.
            if end == len(self._text) and self._read_more(more):
                continue
            self.line += self._text.count("\n", self._at, end)
            self._at = end
            return value

    def problem(self, text: str, at: int | None = None) -> ConfigError:
        """``at``: where in the window; in place of where reading is."""
        column = self._column(self._at if at is None else at)
        return ConfigError(f"{self._name}:{self.line}:{column}: not a JSON array of records: {text}")

    def _column(self, at: int) -> int:
        newline = self._text.rfind("\n", 0, at)
        return at - newline if newline >= 0 else self._before + at + 1

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        # Without this, one real mistake would read the rest of a large file into memory.
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_CUT

    def _decode_problem(self, error: json.JSONDecodeError | RecursionError) -> ConfigError:
        if isinstance(error, RecursionError):
            return self.problem("nested too deeply to be read")
        started = self.line
        self.line += self._text.count("\n", self._at, error.pos)
        return self.problem(f"{error.msg} (in the record that starts on line {started})", error.pos)

    def _read_more(self, num_bytes: int) -> bool:
        if self._ended:
            return False
        try:
            raw = self._stream.read(num_bytes)
            self._ended = not raw
            text = self._decode(raw, final=self._ended)
        except UnicodeDecodeError:
            self.line += self._text.count("\n", self._at)
            raise self.problem("not UTF-8 text from about here on") from None
        except (OSError, EOFError) as error:
            raise ConfigError(f"data file {self._name} cannot be read: {error}") from None
        if self._ended and not text:
            return False  # the text stays where it is: an error's position refers to it
        self._before = self._column(self._at) - 1
        self._text = self._text[self._at :] + text
        self._at = 0
        return True
