"""Keys of the table in words, for ``dslaunch explain``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from dslaunch.config.schema import VERSION, VERSIONS, Key, find_key, key_table, nearest_keys, section_keys
from dslaunch.config.schema.arguments import Argument
from dslaunch.config.schema.optimizers import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES
from dslaunch.core.errors import ConfigError

_TYPES = {
    "int": "whole number",
    "number": "number",
    "bool": "true or false",
    "str": "text",
    "list": "list",
    "texts": "list of texts",
    "never": "no value is accepted",
    "choice": "one of",
    "any": "any value",
    "strict": "section; DeepSpeed refuses an unknown key in it",
    "section": "section; DeepSpeed ignores an unknown key in it",
    "open": "section with keys of its own",
    "removed": "removed",
}


def named_keys(text: str) -> list[Key]:
    """The same, empty where there is none."""
    text = text.strip().strip('"')
    if (key := find_key(text)) is not None:
        return [key]
    return [key for key in key_table().values() if text in (key.name, key.also)]


def keys_named(text: str) -> list[Key]:
    """The key of a path, or all keys of a name. Raises ConfigError, with the nearest, where there is none."""
    if named := named_keys(text):
        return named
    text = text.strip().strip('"')
    near = nearest_keys(text)
    hint = f"did you mean {near[0]}?" if near else "dslaunch explain --list shows every key"
    raise ConfigError(f"{text!r} is no key of a DeepSpeed config", hint=hint)


def describe(key: Key) -> list[str]:
    """Lines about one key: type, default, where it acts, versions, effect, and what stands in a section."""
    lines = [key.path, *(f"  {name:<9} {text}" for name, text in _facts(key)), ""]
    lines += textwrap.wrap(key.effect, 96, initial_indent="  ", subsequent_indent="  ")
    children = [child for name, child in section_keys(key.path).items() if name == child.name]
    if children:
        lines += ["", "  keys", *(f"    {child.name:<36} {_type(child)}" for child in children)]
    if key.path == "optimizer.params":
        lines += ["", *_arguments({found.name: found.params for found in OPTIMIZERS.values()})]
    if key.path == "scheduler.params":
        lines += ["", *_arguments({**SCHEDULES, **TORCH_SCHEDULES})]
    return lines


def describe_argument(argument: Argument) -> list[str]:
    """Lines about an argument such as ``optimizer.params.lr``."""
    facts = {
        "section": argument.section,
        "type": argument.type,
        "default": argument.default.strip("()"),
        "taken by": ", ".join(argument.taken_by),
    }
    lines = [argument.path]
    for name, text in facts.items():
        lines += textwrap.wrap(text, 96, initial_indent=f"  {name:<9} ", subsequent_indent=" " * 12)
    return [*lines, "", *textwrap.wrap(argument.effect, 96, initial_indent="  ", subsequent_indent="  ")]


def argument_json(argument: Argument) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "key": argument.path,
        "section": argument.section,
        "type": argument.type,
        "default": argument.default,
        "taken_by": list(argument.taken_by),
        "effect": argument.effect,
    }


def key_json(key: Key) -> dict[str, Any]:
    """One key for ``--json``."""
    return {
        "key": key.path,
        "section": key.section,
        "type": key.type,
        "range": list(key.range),
        "default": key.default or None,
        "stages": list(key.stages),
        "replaced_by": key.replaced_by or None,
        "also": key.also or None,
        "since": key.since or None,
        "removed": key.removed or None,
        "effect": key.effect,
    }


def listed(section: str | None) -> list[str]:
    """One line for each key, of one section where it is given."""
    lines = []
    for key in key_table().values():
        if section is None or key.path == section or key.path.startswith(f"{section}."):
            default = f"  [{key.default}]" if key.default and not key.is_section else ""
            lines.append(f"{key.path:<64} {_type(key)}{default}")
    return lines


def _facts(key: Key) -> Iterator[tuple[str, str]]:
    yield "section", key.section or "top level"
    yield "type", _type(key)
    if not key.is_section and key.type != "removed":
        yield "default", key.default or "none: it acts as if off"
    if key.stages:
        yield "acts at", f"ZeRO stage {', '.join(map(str, key.stages))}; ignored at others"
    if key.also:
        yield "also", f"{key.also} is accepted too"
    if key.replaced_by:
        yield "use", key.replaced_by
    yield "versions", _versions(key)


def _versions(key: Key) -> str:
    if key.removed:
        ends = "refused" if key.type == "removed" else "ignored"
        return f"{ends} by {key.removed}; {VERSIONS[VERSIONS.index(key.removed) - 1]} still had it"
    if key.since:
        before = VERSIONS[VERSIONS.index(key.since) - 1]
        return f"in {key.since}, not yet in {before}; described as of {VERSION}"
    return f"{VERSIONS[0]} or earlier; described as of {VERSION}"


def _type(key: Key) -> str:
    word = _TYPES[key.type]
    if key.type == "choice":
        return f"{word} {', '.join(key.range)}"
    bounds = " and ".join(key.range) if key.range and key.range[0][0] in "<>" else ", ".join(key.range)
    return f"{word} {bounds}".strip()


def _arguments(tables: dict[str, frozenset[str]]) -> Iterator[str]:
    for name, params in tables.items():
        text = f"{name}: {', '.join(sorted(params))}"
        yield from textwrap.wrap(text, 96, initial_indent="  ", subsequent_indent="      ")
