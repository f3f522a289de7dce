"""Text that may hold any bytes: always UTF-8 with surrogateescape inside, whatever the locale."""

from __future__ import annotations

import os
import re


def utf8(word: str) -> str:
    """A word as Python got it from the system (argv, a path), as UTF-8 with surrogateescape."""
    return os.fsencode(word).decode("utf-8", "surrogateescape")


def utf8_environ() -> dict[str, str]:
    """This process' environment as such text."""
    return {
        name.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in os.environb.items()
    }


_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a colour, a move of the cursor, an erased line
    r"|\x1b[\]PX^_].{0,200}?(?:\x07|\x1b\\)"  # a title, a link
    r"|\x1b.?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)


def without_controls(line: str) -> str:
    """A rank's line without what a terminal would act on: it could erase the words around it."""
    return _CONTROLS.sub("", line)


def printable(text: str) -> str:
    """For a message: bytes that are no UTF-8 become backslash escapes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def said(stderr: bytes, most: int, *, noise: bytes = b"") -> str:
    """What a program that led to a host complained of: the end of it, at most ``most`` characters.

    ``noise``: what came on its stdout, where an account that lets nobody in says so.
    Open MPI puts a page of advice, in a frame of dashes, behind what ssh said, and its own words in one.
    """
    text = re.sub(r"\A-{20,}\n", "", stderr.decode("utf-8", "surrogateescape").strip())
    own, frame, _ = text.partition("\n-----")
    words = printable((own if frame else text).strip()[-most:])
    there = printable(noise.decode("utf-8", "surrogateescape").strip()[-most:])
    return f"{words}; on its stdout: {there}" if words and there else words or there
