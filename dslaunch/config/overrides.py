"""Values from the command line, put over those of the run file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dslaunch.config.problems import fields_at
from dslaunch.config.yaml_tree import KeyPath, Mark, Tree, key_text, parse_value
from dslaunch.core.errors import ConfigError

_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
SET = "--set"


@dataclass(frozen=True)
class Override:
    """A value from the command line: ``source`` is ``--set`` or the flag's own name."""

    path: KeyPath
    value: Any
    source: str


def parse_override(text: str) -> tuple[KeyPath, Tree]:
    """``a.b[0].c=value`` -> key path and value. Raises ConfigError where it has another form."""
    key, equals, value = text.partition("=")
    key = key.strip()
    parts = tuple(name if name else int(index) for name, index in _PART.findall(key))
    if not equals or not parts or key_text(parts) != key:
        raise ConfigError(
            f"{SET} {text!r} is not of the form key=value",
            hint=f"write for example {SET} optimizer.lr=1e-4",
        )
    if not value.strip():
        raise ConfigError(
            f"{SET}: {key} has no value after the =",
            hint=f"write {SET} {key}=null for the default, {SET} '{key}=\"\"' for empty text",
        )
    return parts, parse_value(value, SET, parts)


def put_override(tree: Tree, kind: type[BaseModel], text: str) -> None:
    """Apply one ``--set`` to what will be a ``kind``; the value ``null`` takes the key away.

    Raises ConfigError where the text has another form, or as :func:`put_value` does.
    """
    path, parsed = parse_override(text)
    tree.problems += parsed.problems
    value = parsed.value[""]
    if value is None and _written(tree.value, path):
        _unset(tree, path)
    elif value is None and path[-1] in fields_at(kind, [part for part in path[:-1] if isinstance(part, str)]):
        return  # a key that is not written has nothing to take away
    else:
        put_value(tree, path, value, parsed.marks)


def put_flag(tree: Tree, flag: Override) -> None:
    """Apply the value of a flag of its own. Raises ConfigError as :func:`put_override` does."""
    put_value(tree, flag.path, flag.value, {flag.path: Mark(flag.source, str(flag.value), raw=True)})


def put_value(tree: Tree, path: KeyPath, value: Any, marks: Mapping[KeyPath, Mark]) -> None:
    """Set a value, making the sections above it where nothing is written yet.

    A text that stands for a section (``model: X``, ``offload_param: cpu``) becomes
    that section. Marks of what is replaced are dropped. Raises ConfigError where the
    path leads through another plain value, or to a list entry that is not there.
    """
    source = marks[path].source
    tree.value = _with(tree, tree.value, (), path, value, source)
    for old in [p for p in tree.marks if p[: len(path)] == path]:
        del tree.marks[old]
    tree.marks.update(marks)
    for length in range(1, len(path)):
        tree.marks.setdefault(path[:length], Mark(source))


def _with(tree: Tree, container: Any, above: KeyPath, rest: KeyPath, value: Any, source: str) -> Any:
    """``container`` (at ``above``) with ``value`` at ``rest`` below it."""
    if not rest:
        return value
    head, here = rest[0], (*above, rest[0])
    container = _unfolded(tree, container, above, head)
    if isinstance(head, int):
        items = _entries(tree, container, here, source)
        items[head] = _with(tree, items[head], here, rest[1:], value, source)
        return tuple(items)
    if container is not None and not isinstance(container, dict):
        raise _leads_through(tree, container, above, (*above, *rest), source)
    mapping = dict(container or {})
    mapping[head] = _with(tree, mapping.get(head), here, rest[1:], value, source)
    return mapping


def _unfolded(tree: Tree, container: Any, above: KeyPath, head: str | int) -> Any:
    """A shorthand written out: text for a section with a path or device, one source for a list of one."""
    sources = above in (("data", "train"), ("data", "eval"))
    if isinstance(head, int) and sources and isinstance(container, (str, dict)):
        for old in [p for p in tree.marks if p[: len(above)] == above]:
            _move_mark(tree, old, (*above, 0, *old[len(above) :]))
        return (container,)
    entry = above[:2] in (("data", "train"), ("data", "eval")) and len(above) == 3
    if not isinstance(container, str) or not isinstance(head, str):
        return container
    offload = above in (("zero_optimization", "offload_optimizer"), ("zero_optimization", "offload_param"))
    if offload or above == ("model",) or sources or entry:
        key = "device" if offload else "path"
        _move_mark(tree, above, (*above, key))
        return {key: container}
    return container


def _move_mark(tree: Tree, old: KeyPath, new: KeyPath) -> None:
    """What was written at ``old`` now stands at ``new``; ``old`` is the section around it."""
    mark = tree.marks.get(old)
    if mark is not None:
        tree.marks[new] = mark
        tree.marks[old] = Mark(mark.source, line=mark.line)


def _entries(tree: Tree, container: Any, here: KeyPath, source: str) -> list[Any]:
    above, index = here[:-1], here[-1]
    if container is not None and not isinstance(container, tuple):
        raise _leads_through(tree, container, above, here, source)
    items = list(container or ())
    assert isinstance(index, int)
    if index >= len(items):
        counted = f"{key_text(above)} has {len(items)}"
        raise ConfigError(
            f"{source}: there is no entry [{index}]: {counted}", hint=f"write {key_text(above)}=[...]"
        )
    return items


def _leads_through(tree: Tree, value: Any, above: KeyPath, path: KeyPath, source: str) -> ConfigError:
    mark = tree.marks.get(above)
    key = key_text(above)
    written = f" ({mark.source})" if mark else ""
    if isinstance(value, tuple):
        what, hint = f"a list{written}", f"name the entry: {source} {key}[0]..."
    elif isinstance(value, dict):
        what, hint = f"a section{written}", f"name a key below it: {source} {key}.KEY=..."
    else:
        shown = mark.text if mark and mark.text else value
        what, hint = f"{shown}{written}, with no keys below it", f"write {source} {key}=..."
    return ConfigError(f"{source}: {key_text(path)}: {key} is {what}", hint=hint)


def _written(value: Any, path: KeyPath) -> bool:
    """Whether the tree holds a mapping's key at ``path``, so that ``null`` can take it away."""
    for part in path[:-1]:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(value, dict) and path[-1] in value


def _unset(tree: Tree, path: KeyPath) -> None:
    """Take a key away, as if it had not been written."""

    def without(container: Any, rest: KeyPath) -> Any:
        if isinstance(container, tuple):
            return tuple(without(v, rest[1:]) if i == rest[0] else v for i, v in enumerate(container))
        if len(rest) == 1:
            return {k: v for k, v in container.items() if k != rest[0]}
        return {k: without(v, rest[1:]) if k == rest[0] else v for k, v in container.items()}

    tree.value = without(tree.value, path)
    for old in [p for p in tree.marks if p[: len(path)] == path]:
        del tree.marks[old]
