"""Which parameter a blamed module owes its name to, and which parameter's gradient broke first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from dslaunch.train.checkpoint.trained import held_values
from dslaunch.train.dist import gather_objects
from dslaunch.train.replay.measure import measure
from dslaunch.train.replay.probe import Event


def widest_parameters(model: torch.nn.Module, modules: Collection[str]) -> dict[str, dict[str, Any]]:
    """Of each module the parameter of its own whose values reach furthest, and how far. Collective.

    At stage 3 each rank looks at its share. ``absmax`` is None for packed weights, and on NVMe.
    """
    reach: dict[tuple[str, str], float | None] = {}
    for of_rank in gather_objects(_reach(model, modules)):
        for key, absmax in of_rank.items():
            reach[key] = max(filter(lambda value: value is not None, (absmax, reach.get(key))), default=None)
    widest: dict[str, dict[str, Any]] = {}
    for (module, name), absmax in sorted(reach.items(), key=lambda item: -1 if item[1] is None else item[1]):
        widest[module] = {"name": name, "absmax": absmax}
    return widest


def _reach(model: torch.nn.Module, modules: Collection[str]) -> dict[tuple[str, str], float | None]:
    found: dict[tuple[str, str], float | None] = {}
    for module_name, module in model.named_modules():
        if module_name in modules:
            for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
                held = held_values(parameter)
                can = held is not None and held.is_floating_point() and held.numel()
                found[module_name, name] = measure(held).absmax if held is not None and can else None
    return found


def first_gradient(events: Sequence[Event]) -> dict[str, Any] | None:
    """The first gradient of a parameter in the backward that is not finite: name and range."""
    bad = (e for e in events if e.kind == "gradient of parameter" and not e.range.is_finite)
    first = next(bad, None)
    return None if first is None else {"parameter": first.name, **first.range.to_json()}
