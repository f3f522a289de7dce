"""The arguments of optimizers and schedules in words: what stands in their ``params``.

Which constructor takes which is in optimizers.py; the rows are in arguments.txt beside this file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dslaunch.config.schema.optimizers import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES

_KINDS = ("whole number", "number", "true or false", "list of two numbers", "list")
_SPAN = re.compile(r"(from|above) (\S+) to (below )?(\S+)")


@dataclass(frozen=True)
class Argument:
    """One row. ``default``: in brackets where the constructors differ."""

    path: str
    type: str
    default: str
    effect: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """``number``, ``whole number``, ``true or false``, ``list of two numbers``, ``list`` or ``text``."""
        return next((kind for kind in _KINDS if self.type.startswith(kind)), "text")

    @property
    def bounds(self) -> tuple[str, ...]:
        """``number from 0 to below 1`` -> ``(">=0", "<1")``."""
        if self.kind in ("text", "list", "true or false"):
            return ()
        rest = self.type.removeprefix(self.kind).strip()
        if span := _SPAN.fullmatch(rest):
            return (">" if span[1] == "above" else ">=") + span[2], ("<" if span[3] else "<=") + span[4]
        return tuple(rest.split(" and ")) if rest else ()

    @property
    def taken_by(self) -> tuple[str, ...]:
        """The optimizers or schedules that have it."""
        section, _, name = self.path.partition(".params.")
        tables = {
            "optimizer": {o.name: o.params for o in OPTIMIZERS.values()},
            "scheduler": {**SCHEDULES, **TORCH_SCHEDULES},
        }
        return tuple(owner for owner, params in tables[section].items() if name in params)


@functools.cache
def argument_table() -> Mapping[str, Argument]:
    """Every argument by its path, such as ``optimizer.params.lr``."""
    text = Path(__file__).with_name("arguments.txt").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line and not line.startswith("#")]
    return {path: Argument(path, type_, default, effect) for path, type_, default, effect in rows}


def find_argument(text: str) -> Argument | None:
    """The argument of a path, or of its last part alone; None where no constructor has it."""
    text, table = text.strip().strip('"'), argument_table()
    if text in table:
        return table[text]
    return next((found for path, found in table.items() if path.rpartition(".")[2] == text), None)
