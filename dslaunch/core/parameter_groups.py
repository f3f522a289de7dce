"""Patterns of an optimizer's parameter groups, and which trained parameters they mean. Pure.

The plan matches them with the names in the weights' headers, the ranks with the model itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import OptimizerPlan

_LORA_B = (".lora_B.", ".lora_embedding_B.")


class Match(NamedTuple):
    """``names``: those of a pattern that no pattern before it has taken, in the model's order."""

    key: str
    pattern: str
    names: tuple[str, ...]
    lr: float | None
    weight_decay: float | None


def match_groups(names: Sequence[str], optimizer: OptimizerPlan) -> list[Match]:
    """What each pattern of ``optimizer`` with a rate or decay of its own means among the trained ``names``.

    None for a rate or decay: the usual one. Raises ConfigError where a pattern matches nothing,
    or only what an earlier group with other settings has taken.
    """
    taken: dict[str, Match] = {}
    found = []
    for index, group in enumerate(optimizer.groups):
        for pattern in group.match:
            key = f"optimizer.groups[{index}].match"
            matched = match_names(pattern, names, key)
            match = Match(
                key, pattern, tuple(n for n in matched if n not in taken), group.lr, group.weight_decay
            )
            if not match.names and not all(taken[name][3:] == match[3:] for name in matched):
                raise ConfigError(
                    f"{key} {pattern!r}: an earlier group has all that it matches",
                    hint="put the narrower pattern first",
                )
            taken |= dict.fromkeys(match.names, match)
            found.append(match)
    if optimizer.loraplus_lr_ratio is not None:
        key = "optimizer.loraplus_lr_ratio"
        matched = [name for name in names if any(part in name for part in _LORA_B)]
        if not matched:
            raise ConfigError(f"{key}: the adapter has no B matrices to train")
        lr = optimizer.lr * optimizer.loraplus_lr_ratio
        found.append(Match(key, "*lora_B*", tuple(n for n in matched if n not in taken), lr, None))
    return found


def match_names(pattern: str, names: Sequence[str], key: str) -> list[str]:
    """The ``names`` that a shell's ``pattern`` matches as a whole. Raises ConfigError where there is none."""
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
        hint = f"patterns are of whole names, such as {near[0]}" if near else None
        raise ConfigError(f"{key} {pattern!r} matches no trained parameter", hint=hint)
    return matched
