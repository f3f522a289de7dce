"""Read a DeepSpeed config as DeepSpeed reads it (hjson), with the place of every key and value.

DeepSpeed 0.19.8 opens a config with the hjson library, which forgives what JSON does
not: comments, commas that are missing or too many, keys and texts without quotes, braces
left out. That library keeps no positions and is not on a login node, so this is a reader of
our own for the same language. Where it was written strictly enough for ``json``, the
Hugging Face Trainer reads it too; each place where it was not is kept as a deviation.

Held against hjson 3.1 by tests/config/test_hjson_reader.py.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"[\t ]*(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*")
_STOP = re.compile(r"[,}\]#\r\n]|//|/\*")
_STRING_PART = re.compile(r"[^\"'\\\x00-\x1f]+")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}


class HjsonError(ValueError):
    """The text is not hjson: what is wrong and the offset where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message, self.offset = message, offset


@dataclass(frozen=True)
class Deviation:
    """One place that strict JSON refuses. ``kind``: comment, comma, quotes, braces, string, bom."""

    kind: str
    offset: int
    text: str
    path: Path


@dataclass
class Document:
    """What a text says, and where. ``keys`` and ``values`` map a path to offsets."""

    text: str
    value: Any = None
    keys: dict[Path, int] = field(default_factory=dict)
    values: dict[Path, int] = field(default_factory=dict)
    unquoted: dict[Path, str] = field(default_factory=dict)
    decimals: set[Path] = field(default_factory=set)  # whole numbers that are written like 1.0
    duplicates: list[Path] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)
    _lines: list[int] | None = None

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1."""
        if self._lines is None:
            self._lines = [0, *(match.end() for match in re.finditer("\n", self.text))]
        line = bisect.bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1

    def place(self, path: Path) -> tuple[int, int] | None:
        """Line and column of a key, else of the nearest section above it that is written."""
        while path:
            offset = self.keys.get(path, self.values.get(path))
            if offset is not None:
                return self.position(offset)
            path = path[:-1]
        return None


def read_hjson(text: str) -> Document:
    """Parse ``text`` as hjson 3.1 does. Raises HjsonError where that library raises."""
    return _Reader(text.replace("\r\n", "\n").replace("\r", "\n")).read()


class _Reader:
    """One pass over the text; ``at`` is the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.document = Document(text)

    def read(self) -> Document:
        document = self.document
        if self.text.startswith("\ufeff"):
            self._deviate("bom", 0, "\ufeff", ())
            self.at = 1
        first = self._next(())
        if first == "":
            document.value = {}
            return document
        if first in "{[":
            document.value = self._value(())
        else:
            document.value = self._unbraced()
        if self._next(()) != "":
            raise HjsonError("there is more text after the end of the config", self.at)
        return document

    def _unbraced(self) -> Any:
        start = self.at
        self._deviate("braces", start, "", ())
        try:
            return self._object((), braces=False)
        except HjsonError:
            failed, self.at = self.at, start
            try:
                value = self._value(())
            except HjsonError:
                self.at = failed
            else:
                return value
            raise

    def _deviate(self, kind: str, offset: int, text: str, path: Path) -> None:
        self.document.deviations.append(Deviation(kind, offset, text, path))

    def _next(self, path: Path) -> str:
        """Skip white space and comments; the character that follows, or ``""`` at the end."""
        text = self.text
        while True:
            match = _SPACE.match(text, self.at)
            assert match is not None
            self.at = match.end()
            char = text[self.at : self.at + 1]
            if char == "#" or text.startswith("//", self.at):
                self._deviate("comment", self.at, char, path)
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith("/*", self.at):
                self._deviate("comment", self.at, "/*", path)
                end = text.find("*/", self.at + 2)
                if end < 0:
                    raise HjsonError("a comment that begins with /* is never closed", self.at)
                self.at = end + 2
            else:
                return char

    def _value(self, path: Path) -> Any:
        self.document.values[path] = self.at
        char = self.text[self.at : self.at + 1]
        if char == "":
            raise HjsonError("the text ends where a value is expected", self.at)
        if char in "\"'":
            if self.text.startswith("'''", self.at):
                self._deviate("string", self.at, "'''", path)
                return self._block_string()
            if char == "'":
                self._deviate("quotes", self.at, "'", path)
            return self._string()
        if char == "{":
            self.at += 1
            return self._object(path)
        if char == "[":
            self.at += 1
            return self._array(path)
        return self._bare(path)

    def _object(self, path: Path, *, braces: bool = True) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self._next(path) == "}" and braces:
            self.at += 1
            return result
        while True:
            start = self.at
            name = self._key(path)
            here = (*path, name)
            if name in result:
                self.document.duplicates.append(here)
            self.document.keys[here] = start
            if self._next(path) != ":":
                raise HjsonError(f"a colon is missing after the key {name!r}", self.at)
            self.at += 1
            self._next(here)
            result[name] = self._value(here)
            if self._separator(path, "}" if braces else ""):
                return result

    def _array(self, path: Path) -> list[Any]:
        result: list[Any] = []
        first = self._next(path)
        if first == "]":
            self.at += 1
            return result
        if first == "":
            raise HjsonError("the text ends inside a list; ] is missing", self.at)
        while True:
            result.append(self._value((*path, len(result))))
            if self._separator(path, "]"):
                return result

    def _separator(self, path: Path, closing: str) -> bool:
        """The comma after an item and, where the mapping or list ends, its bracket: then True."""
        after_item = self.at
        char = self._next(path)
        comma = char == ","
        comma_at = self.at
        if comma:
            self.at += 1
            char = self._next(path)
        if char == closing:
            if comma:
                self._deviate("comma", comma_at, "too many", path)
            self.at += len(closing)
            return True
        if char == "":
            raise HjsonError(
                f"the text ends inside a mapping or list; {closing or 'a value'} is missing", self.at
            )
        if not comma:
            self._deviate("comma", after_item, "missing", path)
        return False

    def _key(self, path: Path) -> str:
        char = self._next(path)
        if char and char in "\"'":
            if char == "'":
                self._deviate("quotes", self.at, "'", path)
            return self._string()
        start = self.at
        match = re.compile(r"[^:{}\[\],]*").match(self.text, start)
        assert match is not None
        end = match.end()
        found = self.text[end : end + 1]
        if found == "":
            raise HjsonError("the text ends where a key is expected; } is missing", start)
        if found != ":":
            raise HjsonError(f"{found!r} where a key is expected", start)
        name = match.group().rstrip(" \t\n\r")
        if not name:
            raise HjsonError("a colon without a key before it", start)
        if re.search(r"[ \t\n\r]", name):
            raise HjsonError(f"white space in the key {name!r}, which has no quotes", start)
        self._deviate("quotes", start, name, path)
        self.at = end
        return name

    def _string(self) -> str:
        quote = self.text[self.at]
        start, parts = self.at, []
        self.at += 1
        while True:
            if (match := _STRING_PART.match(self.text, self.at)) is not None:
                parts.append(match.group())
                self.at = match.end()
            char = self.text[self.at : self.at + 1]
            if char == "":
                raise HjsonError("a text in quotes is never closed", start)
            self.at += 1
            if char == quote:
                return "".join(parts)
            if char in "\"'":
                parts.append(char)
            elif char == "\\":
                parts.append(self._escape())
            else:
                raise HjsonError("a line break or control character inside quotes", self.at - 1)

    def _escape(self) -> str:
        char = self.text[self.at : self.at + 1]
        if char in _ESCAPES and char:
            self.at += 1
            return _ESCAPES[char]
        code = self._code_unit()
        if 0xD800 <= code < 0xDC00 and self.text.startswith("\\u", self.at):
            mark = self.at
            self.at += 1
            low = self._code_unit()
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10 | low - 0xDC00))
            self.at = mark
        return chr(code)

    def _code_unit(self) -> int:
        match = re.compile(r"u([0-9a-fA-F]{4})").match(self.text, self.at)
        if match is None:
            raise HjsonError("a backslash that begins no known escape", self.at - 1)
        self.at = match.end()
        return int(match[1], 16)

    def _block_string(self) -> str:
        """A text between three apostrophes; the indentation of its first line is taken away."""
        line = self.text.rfind("\n", 0, self.at) + 1
        indent, start = self.at - line, self.at + 3
        end = self.text.find("'''", start)
        if end < 0:
            raise HjsonError("a text in ''' is never closed", self.at)
        body = self.text[start:end].lstrip(" \t")
        first, *rest = body.split("\n")
        lines = [] if first == "" and rest else [first]
        for text in rest:
            blank = len(text) - len(text.lstrip(" \t"))
            lines.append(text[min(blank, indent) :])
        self.at = end + 3
        joined = "\n".join(lines)
        return joined[:-1] if joined.endswith("\n") else joined

    def _bare(self, path: Path) -> Any:
        """A number or word; anything else is a text that runs to the end of the line, commas and all."""
        start = self.at
        if self.text[start] in "{}[],:":
            raise HjsonError(f"{self.text[start]!r} where a value is expected", start)
        search = start
        while True:
            stop = _STOP.search(self.text, search)
            end = stop.start() if stop else len(self.text)
            word = self.text[start:end].strip()
            if word in _WORDS:
                self.at = end
                return _WORDS[word]
            number = _NUMBER.match(self.text, start)
            if number is not None and number.end() == end:
                self.at = end
                value = _number(number, start)
                if number[2] and not number[3] and isinstance(value, int):
                    self.document.decimals.add(path)
                return value
            if stop is None or self.text[end] in "\r\n":
                self.at = end
                self.document.unquoted[path] = word
                self._deviate("string", start, word, path)
                return word
            search = stop.end() if self.text[end] != "/" else end + 1


def _number(match: re.Match[str], offset: int) -> int | float:
    """hjson makes a whole number of ``5e8``; json makes a float of it."""
    whole, fraction, exponent = match.groups()
    if not fraction and not exponent:
        try:
            return int(whole)
        except ValueError:  # Python's own limit for texts, which stops DeepSpeed as well
            raise HjsonError(f"a number of {len(whole)} digits", offset) from None
    value = float(whole + (fraction or "") + (exponent or ""))
    if value in (float("inf"), float("-inf")):
        raise HjsonError("a number that is too large", offset)
    return int(value) if abs(value) < 1e10 and int(value) == value else value
