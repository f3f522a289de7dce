"""Patterns of host names as clusters write them: ``node-[1-4,7]``, ``gpu-[001-128]``, ``a100-*``."""

from __future__ import annotations

import re
from collections.abc import Callable

from dslaunch.core.errors import ConfigError

_SPECIAL = re.compile(r"(\[[^\]]*\]|[*?\[\]])")
_DIGITS = 9
_RANGE = re.compile(rf"([0-9]{{1,{_DIGITS}}})(?:-([0-9]{{1,{_DIGITS}}}))?")


def host_matcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a host's name fits ``pattern``.

    Brackets hold numbers and ranges joined by commas; a range that is written with
    leading zeros wants them in the name. ``*`` is any text, ``?`` one character.
    Raises ConfigError where the brackets hold anything else.
    """
    regex, brackets = "", []
    for part in _SPECIAL.split(pattern):
        if part in ("*", "?"):
            regex += "." + part.replace("?", "")
        elif part.startswith("[") and part.endswith("]") and len(part) > 1:
            brackets.append(_ranges(part, pattern))
            regex += "([0-9]+)"
        elif part in ("[", "]"):
            raise _wrong(pattern, f"{part} without its other half")
        else:
            regex += re.escape(part)
    compiled = re.compile(regex)

    def fits(name: str) -> bool:
        found = compiled.fullmatch(name)
        return found is not None and all(
            any(_within(number, *limits) for limits in ranges)
            for number, ranges in zip(found.groups(), brackets, strict=True)
        )

    return fits


def _ranges(bracket: str, pattern: str) -> list[tuple[int, int, int]]:
    """(first, last, least number of digits) of each part."""
    found = []
    for part in bracket[1:-1].split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise _wrong(pattern, f"{part.strip() or bracket} is no number or range")
        found.append((int(first), int(last), len(first) if first.startswith("0") else 1))
    return found


def _within(number: str, first: int, last: int, digits: int) -> bool:
    if len(number) > _DIGITS:
        return False
    return first <= int(number) <= last and number == f"{int(number):0{digits}d}"


def _wrong(pattern: str, why: str) -> ConfigError:
    return ConfigError(f"host pattern {pattern!r}: {why}", hint="write node-[1-4,7], node-[01-16] or node-*")
