"""Rendered text -> config, with the template's line for everything that is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from dslaunch.config.nested import Path
from dslaunch.core.errors import ConfigError
from dslaunch.core.templating import Rendered


def parse_rendered(rendered: Rendered) -> dict[str, Any]:
    """Parse rendered text strictly: no comments, no duplicate keys, no NaN.

    Raises ConfigError with the line of the template that wrote what is wrong.
    """
    text = rendered.text
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _not_json(rendered, error) from None
    except _NotStrictError as error:
        place = rendered.place(text.rfind(error.word))
        raise ConfigError(f"{place}: the rendered text is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{rendered.name}: the rendered text is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{rendered.place(0)}: the rendered text is JSON, but no object in braces")
    return value


def _not_json(rendered: Rendered, error: json.JSONDecodeError) -> ConfigError:
    text, at = rendered.text, error.pos
    if error.msg.startswith(("Expecting ',' delimiter", "Expecting property name")):
        at = max(len(text[:at].rstrip()) - 1, 0)  # the comma is missing, or too many, before what comes next
    line = text[text.rfind("\n", 0, at) + 1 :].split("\n", 1)[0].strip()
    near = f" near {line!r}" if line else ""
    return ConfigError(
        f"{rendered.place(at)}: the rendered text is not JSON: {error.msg}{near}",
        hint="write each value as {{ name | json }}, with a comma between two and none behind the last",
    )


def place_of(rendered: Rendered, path: Path) -> str:
    """``FILE:LINE`` of a key of the rendered config, else of the section that it would stand in."""
    from dslaunch.config.hjson_reader import read_hjson

    keys = read_hjson(rendered.text).keys
    while path:
        if path in keys:
            return rendered.place(keys[path])
        path = path[:-1]
    return rendered.name


def in_order(rendered: Rendered, problems: Iterable[ConfigError]) -> list[ConfigError]:
    """Problems of a template by its lines; first those of no line, or of a part that it includes."""
    place = re.compile(re.escape(rendered.name) + r":(\d+): ")

    def line(problem: ConfigError) -> int:
        match = place.match(problem.message)
        return int(match[1]) if match else 0

    return sorted(problems, key=line)


class _NotStrictError(ValueError):
    """Something that Python's json module lets pass; ``word`` is its text."""

    def __init__(self, message: str, word: str) -> None:
        super().__init__(message)
        self.word = word


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _NotStrictError(f"the key {twice!r} is there twice", json.dumps(twice, ensure_ascii=False))
    return result


def _no_constant(name: str) -> Any:
    raise _NotStrictError(f"{name} is not a JSON number", name)
