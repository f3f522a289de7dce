"""Errors and notes of other parts of dslaunch as findings: ``FILE:LINE:COLUMN: text`` taken apart."""

from __future__ import annotations

import re

from dslaunch.core.errors import ConfigError
from dslaunch.core.finding import Finding

_PLACE = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::(?P<column>\d+))?: (?P<text>.*)$", re.DOTALL)
_KEY = re.compile(r"(?:unknown key )?([\w.\[\]-]+)(?=[:;,]|$)")


def finding_of(error: ConfigError, code: str, path: str) -> Finding:
    """An error about the file ``path``, with line, column and key where its message has them."""
    match = _PLACE.match(error.message)
    if match is None:
        message = error.message.removeprefix(f"{path}: ").removeprefix(f"{path} ")
        return Finding(code, "error", "", message, hint=error.hint)
    column = int(match["column"]) if match["column"] else None
    key = _KEY.match(match["text"])
    name = key[1] if key else ""
    return Finding(code, "error", name, match["text"], int(match["line"]), column, error.hint)


def finding_of_note(note: str) -> Finding:
    """A note for the user, as advice."""
    match = _PLACE.match(note)
    if match is None:
        return Finding("note", "info", "", note)
    return Finding("note", "info", "", match["text"], int(match["line"]))
