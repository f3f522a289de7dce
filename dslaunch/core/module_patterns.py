"""Patterns of module names (``*norm*``, ``lm_head``) and which modules of a model they mean. Pure.

The plan matches them with the names in the weights' headers, the ranks with the model itself.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from dslaunch.core.errors import ConfigError

ALL_LINEAR = "all-linear"  # as a target of an adapter: all linear layers but the head
_SHOWN = 3


def head_beside_rows(head: str, embedding: str) -> ConfigError:
    """Of a head that is one with the embedding: peft (0.21) puts the rows in its copy, and fails on it."""
    key = "adapter.modules_to_save"
    return ConfigError(
        f"{key}: {head} is one with {embedding}, of which rows are trained: peft cannot train {head} besides",
        hint=f"leave {head} out, or train all of both: {key}: [{embedding}, {head}]",
    )


def match_modules(modules: Iterable[str], patterns: Sequence[str], key: str) -> dict[str, tuple[str, ...]]:
    """pattern -> the modules that it means, in the order of ``modules``; inner ones of a matched module not.

    ``modules``: dotted names. A pattern with ``*``, ``?`` or ``[`` is matched with the whole name as
    a shell does; a plain one is a whole name or its last parts (``norm`` means ``model.norm`` and
    ``layers.0.norm``). Raises ConfigError, with the nearest names, where one matches nothing.
    """
    names = list(dict.fromkeys(modules))
    found = {pattern: tuple(outermost(n for n in names if _fits(n, pattern))) for pattern in patterns}
    for pattern, matched in found.items():
        if not matched:
            raise ConfigError(
                f"{key}: {pattern!r} matches no module of the model", hint=_hint(pattern, names)
            )
    return found


def outermost(names: Iterable[str]) -> list[str]:
    """``names`` in their order, without those that lie inside another one of them."""
    given = list(dict.fromkeys(names))
    there = set(given)
    return [name for name in given if there.isdisjoint(_around(name))]


def _around(name: str) -> list[str]:
    """The modules that ``name`` lies in."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def modules_of(parameters: Iterable[str]) -> list[str]:
    """Every module with one of these parameters in it: ``a`` and ``a.b`` of ``a.b.weight``."""
    found: dict[str, None] = {}
    for parameter in parameters:
        for module in _around(parameter):
            found.setdefault(module)
    return list(found)


def preview(matched: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """(pattern, "3 modules", the first of them) for each pattern."""
    return [
        (
            pattern,
            f"{len(names)} module{'s' if len(names) > 1 else ''}",
            ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else ""),
        )
        for pattern, names in matched.items()
    ]


def _fits(name: str, pattern: str) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def _hint(pattern: str, names: Sequence[str]) -> str:
    last = list(dict.fromkeys(part for name in names for part in (name.rsplit(".", 1)[-1], name)))
    last = [name for name in last if not name.isdigit()]
    near = difflib.get_close_matches(pattern.strip("*"), last, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    parts = dict.fromkeys(name.rsplit(".", 1)[-1] for name in names)
    return f"its modules are called {', '.join(sorted(part for part in parts if not part.isdigit())[:12])}"
