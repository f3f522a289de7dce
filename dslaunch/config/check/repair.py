"""Apply the changes that findings propose, and write the config back as plain JSON."""

from __future__ import annotations

import copy
import difflib
import json
import re
from dataclasses import dataclass
from typing import Any

from dslaunch.config.check import CheckedConfig, Target, check_config
from dslaunch.core.finding import Edit, Finding, KeyPath, encodable

_ROUNDS = 6


@dataclass(frozen=True)
class Repaired:
    """``text``: the config as plain JSON. ``done``: the findings that were mended. ``left``: what remains."""

    text: str
    done: tuple[Finding, ...]
    left: CheckedConfig


def repair_config(text: str, target: Target) -> Repaired | None:
    """Mend what can be mended without a choice; None where the text cannot be read at all.

    A mended key may uncover another finding, so this goes round until nothing changes.
    Advice is left alone. Remarks that are no keys are lost with any change: JSON has none.
    """
    checked = check_config(text, target)
    if checked.value is None:
        return None
    indent = _indent(text)
    done: list[Finding] = []
    for _ in range(_ROUNDS):
        assert checked.value is not None
        value = copy.deepcopy(checked.value)
        _restore_decimals(value, checked.document.decimals)
        mended = [f for f in checked.findings if f.edits and f.severity != "info" and _apply(value, f.edits)]
        if not mended:
            break
        done += mended
        text = encodable(json.dumps(value, indent=indent, ensure_ascii=False)) + "\n"
        checked = check_config(text, target)
    return Repaired(text, tuple(done), checked)


def show_diff(before: str, after: str, name: str) -> str:
    """A unified diff; empty where nothing changed."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, f"{name} (mended)"
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def _indent(text: str) -> int | str:
    match = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    if match is None:
        return 2
    return "\t" if "\t" in match[1] else min(len(match[1]), 8)


def _restore_decimals(value: dict[str, Any], decimals: set[KeyPath]) -> None:
    """1.0 stays 1.0, though hjson reads it as 1. A key written twice may hold something else by now."""
    for path in decimals:
        holder = _holder(value, path)
        try:
            number = holder[path[-1]]
        except (TypeError, KeyError, IndexError):
            continue
        if type(number) is int and abs(number) < 2**53:  # beyond, a float may be another number
            holder[path[-1]] = float(number)


def _apply(value: dict[str, Any], edits: tuple[Edit, ...]) -> bool:
    """Whether all of a finding's edits could be made; they are made on ``value``."""
    made = [_apply_one(value, edit) for edit in edits]
    return all(made)


def _apply_one(value: dict[str, Any], edit: Edit) -> bool:
    if not edit.path:
        return True  # the whole text: writing it as JSON is the repair
    if edit.action == "set":
        holder = _holder(value, edit.path, make=True)
        if holder is None:
            return False
        holder[edit.path[-1]] = edit.value
        return True
    holder = _holder(value, edit.path)
    if holder is None or (isinstance(holder, dict) and edit.path[-1] not in holder):
        return False
    if edit.action == "delete":
        del holder[edit.path[-1]]
        return True
    return _rename(value, holder, edit.path, edit.value)


def _rename(value: dict[str, Any], holder: Any, old: KeyPath, new: KeyPath) -> bool:
    target = _holder(value, new, make=True)
    if not isinstance(holder, dict) or not isinstance(target, dict) or new[-1] in target:
        return False
    if target is holder:  # keep its place among its neighbours
        items = [(new[-1] if name == old[-1] else name, item) for name, item in holder.items()]
        holder.clear()
        holder.update(items)
    else:
        target[new[-1]] = holder.pop(old[-1])
    return True


def _holder(value: Any, path: KeyPath, *, make: bool = False) -> Any:
    """The mapping or list that holds the last part of a path; None where there is none."""
    for part in path[:-1]:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, dict):
            if part not in value and make:
                value[part] = {}
            value = value.get(part)
        else:
            return None
    return value if isinstance(value, (dict, list)) else None
