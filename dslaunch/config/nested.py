"""Nested mappings as JSON has them: their leaves, and one put over another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]


def leaves(value: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Key path and value of everything that is not a mapping (an empty mapping counts as a value)."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from leaves(item, (*prefix, key))
        else:
            yield (*prefix, key), item


def holds(value: Any, path: Path) -> bool:
    """Whether ``path`` leads to a key of ``value``, a section or not."""
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the leaves of ``over`` put in; both are left as they are."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = listed(value)
    return merged


def listed(value: Any) -> Any:
    """A run file's tuples as lists, which is what JSON has."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, (tuple, list)) else value
