"""YAML text -> plain values, and for each of them where and how it was written.

Read with ``yaml.compose``, not ``yaml.load``: the positions are needed for
error messages, and the text of a scalar for saying that ``1e-5`` is text to
YAML, that ``no`` is a truth value, or that a number was quoted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from dslaunch.core.errors import ConfigError

KeyPath = tuple["str | int", ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_MAX_NODES = 100_000  # aliases of aliases can turn one screen of text into gigabytes


@dataclass(frozen=True)
class Mark:
    """Where a value was written (``run.yaml:7``, ``--set``) and, for a scalar, its very text.

    ``raw``: the value of a flag of its own, which is no YAML and is taken as it is.
    """

    source: str
    text: str = ""
    quoted: bool = False
    line: int = 0
    raw: bool = False


@dataclass
class Tree:
    """Values (dict, tuple and scalars) with the mark of each key path, and what is wrong so far.

    ``name`` is the file's; empty where there is none.
    """

    value: dict[str, Any] = field(default_factory=dict)
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    problems: list[tuple[int, ConfigError]] = field(default_factory=list)
    name: str = ""


def key_text(path: KeyPath) -> str:
    """``("data", "train", 0, "path")`` -> ``data.train[0].path``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_yaml(text: str, name: str) -> Tree:
    """Parse the text of a run file called ``name``.

    Problems that leave the rest readable (duplicate keys, tags) are collected
    in ``Tree.problems``. Raises ConfigError where the text is no YAML or no mapping.
    """
    node = _compose(text, name)
    tree = Tree(name=name)
    if node is None:
        return tree
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: a run file is a mapping of keys to values")
    try:
        tree.value = _Walker(tree, name).mapping(node, ())
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    return tree


def parse_value(text: str, source: str, path: KeyPath) -> Tree:
    """Parse the value of ``--set key=value``; ``Tree.value`` is ``{"": value}`` under ``path``'s marks."""
    tree = Tree()
    try:
        node = _compose(text, source)
    except ConfigError as error:
        problem = error.message.partition(": ")[2]
        message = f"{source}: {key_text(path)}: {text!r} is not readable as YAML: {problem}"
        raise ConfigError(message, hint="put quotes around text") from None
    walker = _Walker(tree, source, with_lines=False)
    try:
        tree.value = {"": None if node is None else walker.value(node, path)}
    except RecursionError:
        raise ConfigError(f"{source}: {key_text(path)}: nested too deeply") from None
    tree.marks.setdefault(path, Mark(source))
    return tree


def _compose(text: str, name: str) -> Any:
    try:
        return yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(text, name, error) from None
    except yaml.reader.ReaderError as error:
        line = text[: int(error.position)].count("\n") + 1
        raise ConfigError(f"{name}:{line}: not readable as YAML: {error.reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None


def _syntax_error(text: str, name: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if mark else name
    tabs = [
        i + 1 for i, line in enumerate(text.split("\n")) if "\t" in line[: len(line) - len(line.lstrip())]
    ]
    if tabs:
        lines = ", ".join(map(str, tabs[:10])) + (", ..." if len(tabs) > 10 else "")
        plural = "s" if len(tabs) > 1 else ""
        return ConfigError(
            f"{name}:{tabs[0]}: a tab indents line{plural} {lines}; YAML wants spaces",
            hint="replace each leading tab by spaces",
        )
    problem = error.problem or "not readable as YAML"
    if "expected a single document" in f"{error.context} {problem}":
        problem = "a second document begins (`---`); a run file holds one"
    context = f" ({error.context})" if error.context and "document" not in error.context else ""
    return ConfigError(
        f"{where}: {problem}{context}", hint="check the indentation and quotes around this line"
    )


class _Walker:
    """Turns composed nodes into values and records their marks."""

    def __init__(self, tree: Tree, name: str, *, with_lines: bool = True) -> None:
        self.tree = tree
        self.name = name
        self.with_lines = with_lines
        self.open_nodes: set[int] = set()
        self.num_nodes = 0

    def source(self, node: Any) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.with_lines else self.name

    def line(self, node: Any) -> int:
        return node.start_mark.line + 1 if self.with_lines else 0

    def problem(self, node: Any, message: str, hint: str | None = None) -> None:
        error = ConfigError(f"{self.source(node)}: {message}", hint=hint)
        self.tree.problems.append((self.line(node), error))

    def value(self, node: Any, path: KeyPath) -> Any:
        self._guard(node)
        if isinstance(node, yaml.ScalarNode):
            quoted = bool(node.style)  # "" or None when plain
            self.tree.marks[path] = Mark(self.source(node), node.value, quoted, self.line(node))
            return self.scalar(node, path)
        self.tree.marks.setdefault(path, Mark(self.source(node), line=self.line(node)))
        if node.tag not in (f"{_TAG}seq", f"{_TAG}map"):
            self.problem(node, f"{key_text(path)}: the tag {node.tag.removeprefix(_TAG)!r} is not supported")
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return tuple(self.value(item, (*path, i)) for i, item in enumerate(node.value))
            return self.mapping(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, Any] = {}
        for key_node, value_node in self._merged(node):
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, f"a key under {key_text(path) or 'the top level'} is not plain text")
                continue
            key = key_node.value
            here = (*path, key)
            if key in first:
                line = first[key].start_mark.line + 1
                self.problem(
                    key_node,
                    f"{key_text(here)} is given twice, first in line {line}",
                    hint=f"keep one of the two lines of {key}",
                )
                continue
            first[key] = key_node
            result[key] = self.value(value_node, here)
            if not isinstance(value_node, yaml.ScalarNode):
                # The line of a section is where its key stands, not its first entry.
                self.tree.marks[here] = Mark(self.source(key_node), line=self.line(key_node))
        return result

    def _merged(self, node: Any) -> list[tuple[Any, Any]]:
        """The entries of a mapping with ``<<: *anchor`` merged in; own keys win."""
        own = [(k, v) for k, v in node.value if k.tag != f"{_TAG}merge"]
        names = {k.value for k, _ in own if isinstance(k, yaml.ScalarNode)}
        merged: list[tuple[Any, Any]] = []
        for key, value in node.value:
            if key.tag != f"{_TAG}merge":
                continue
            for other in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(other, yaml.MappingNode) or id(other) in self.open_nodes or other is node:
                    self.problem(key, "`<<` takes a mapping or a list of them")
                    continue
                self._guard(other)
                for inner_key, inner_value in self._merged(other):
                    if inner_key.value not in names:
                        names.add(inner_key.value)
                        merged.append((inner_key, inner_value))
        return merged + own

    def _guard(self, node: Any) -> None:
        self.num_nodes += 1
        if id(node) in self.open_nodes:
            raise ConfigError(f"{self.source(node)}: an alias refers to the mapping or list that it is in")
        if self.num_nodes > _MAX_NODES:
            raise ConfigError(f"{self.name}: more than {_MAX_NODES} values once its aliases are expanded")

    def scalar(self, node: Any, path: KeyPath) -> Any:
        tag, text = node.tag.removeprefix(_TAG), node.value
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() in ("yes", "true", "on")
        if tag == "int":
            # Octal 010, hexadecimal and sexagesimal 1:30 stay text: nobody means them here.
            return int(text.replace("_", "")) if _DECIMAL.fullmatch(text) else text
        if tag == "float":
            return _parse_float(text)
        if tag not in ("str", "timestamp", "value", "merge"):
            self.problem(node, f"{key_text(path)}: the tag {tag!r} is not supported", hint="remove the tag")
        return text


def _parse_float(text: str) -> Any:
    lowered = text.lower().replace("_", "")
    if lowered.lstrip("+-") in (".inf", ".nan"):
        return math.nan if lowered.endswith("nan") else math.inf * (-1 if lowered[0] == "-" else 1)
    try:
        return float(lowered)
    except ValueError:  # sexagesimal 1:30.5
        return text
