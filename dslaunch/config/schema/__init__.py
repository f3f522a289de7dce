"""The DeepSpeed key table: one reviewed file, shared by ``check``, ``explain`` and ``gen-config``.

    find_key("zero_optimization.stage").default     -> "0"
    section_keys("fp16")                            -> the keys that stand in the section
    nearest_keys("gradient_cliping")                -> what may be meant

The rows are in keys.txt beside this file. No torch: the table is data.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.19.8"
VERSIONS = ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.3", "0.19.0", VERSION)
SECTION_TYPES = frozenset({"strict", "section", "open"})


@dataclass(frozen=True)
class Key:
    """One row of the table; the columns are explained at the top of keys.txt."""

    path: str
    type: str
    range: tuple[str, ...]
    default: str
    stages: tuple[int, ...]
    replaced_by: str
    also: str
    since: str
    removed: str
    effect: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> str:
        """The path of the section it stands in; empty at the top."""
        return self.path.rpartition(".")[0]

    @property
    def is_section(self) -> bool:
        return self.type in SECTION_TYPES

    @property
    def deprecated(self) -> bool:
        """Still read, but under a new name."""
        return bool(self.replaced_by) and not self.removed


@functools.cache
def key_table() -> Mapping[str, Key]:
    """Every key by its path, in the table's order."""
    table = {}
    text = Path(__file__).with_name("keys.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key = _parse_row(line)
            table[key.path] = key
    return table


@functools.cache
def _children() -> Mapping[str, Mapping[str, Key]]:
    found: dict[str, dict[str, Key]] = {"": {}}
    for key in key_table().values():
        names = found.setdefault(key.section, {})
        names[key.name] = key
        if key.also:
            names[key.also] = key
    return found


def section_keys(section: str) -> Mapping[str, Key]:
    """The keys of a section (``""``: the top) by every name that DeepSpeed accepts for them."""
    shared = {"bfloat16": "bf16"}  # the old name of a section has the keys of the new one
    return _children().get(shared.get(section, section), {})


def find_key(path: str) -> Key | None:
    """The key of a path; other accepted names are found too. None where there is none."""
    if (key := key_table().get(path)) is not None:
        return key
    section, _, name = path.rpartition(".")
    return section_keys(section).get(name)


def nearest_keys(text: str, *, count: int = 3) -> list[str]:
    """Paths that ``text`` (a path or the last part of one) may mean, best first."""
    import difflib

    text = text.strip(".")
    if not text:
        return []
    name = text.rpartition(".")[2]
    exact = [path for path, key in key_table().items() if name in (key.name, key.also)]
    if exact:
        return exact[:count]
    near = difflib.get_close_matches(text, key_table(), n=count, cutoff=0.75)
    by_name: dict[str, str] = {}
    for path, key in key_table().items():
        by_name.setdefault(key.name, path)
    near += [by_name[found] for found in difflib.get_close_matches(name, by_name, n=count, cutoff=0.75)]
    return list(dict.fromkeys(near))[:count]


def top_level_keys() -> frozenset[str]:
    """The top-level keys that DeepSpeed reads. It ignores any other without a word."""
    return frozenset(name for name, key in section_keys("").items() if not key.removed)


def _parse_row(line: str) -> Key:
    cells = [cell.strip() for cell in line.split("|")]
    path, type_, range_, default, stages, replaced, also, since, removed, effect = cells
    return Key(
        path=path,
        type=type_,
        range=tuple(range_.split(",")) if range_ else (),
        default=default,
        stages=tuple(int(stage) for stage in stages.split(",")) if stages else (),
        replaced_by=replaced,
        also=also,
        since=since,
        removed=removed,
        effect=effect,
    )
