"""What two DeepSpeed configs make DeepSpeed do differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.config.check.context import default_value
from dslaunch.config.check.keys import is_comment
from dslaunch.config.schema import find_key

_OVERLAP = "zero_optimization.overlap_comm"  # left out it depends on the stage


@dataclass(frozen=True)
class Difference:
    """A key and what each config makes of it. ``None``: not there, and no default is known."""

    key: str
    a: Any
    b: Any

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "a": self.a, "b": self.b}


def compare_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """The keys whose effective values differ, defaults and old names taken into account, in key order."""
    first, second = effective_values(a), effective_values(b)
    different = []
    for key in [*first, *(key for key in second if key not in first)]:
        left, right = (values.get(key, default_value(key)) for values in (first, second))
        if left != right or isinstance(left, bool) != isinstance(right, bool):
            different.append(Difference(key, left, right))
    return sorted(different, key=lambda item: item.key)


def effective_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Key path -> value of every leaf, under today's names; remarks are left out."""
    values: dict[str, Any] = {}
    for path, value in _leaves(config, ""):
        for key, meaning in _today(path, value):
            values[key] = meaning
    if values.get(_OVERLAP) is None:
        values[_OVERLAP] = values.get("zero_optimization.stage", 0) == 3
    return values


def _leaves(block: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        path = f"{section}.{name}" if section else name
        known = find_key(path)
        if known is None and is_comment(name):
            continue
        path = known.path if known is not None else path
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value


def _today(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an old key means now."""
    if path == "zero_optimization":
        yield "zero_optimization.stage", int(bool(value))
    elif path in ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"):
        name = "offload_param" if path.endswith("param") else "offload_optimizer"
        yield f"zero_optimization.{name}.device", "cpu" if value else "none"
    elif path.startswith("bfloat16."):
        yield path.replace("bfloat16.", "bf16.", 1), value
    else:
        known = find_key(path)
        yield (known.replaced_by if known is not None and known.deprecated else path), value
