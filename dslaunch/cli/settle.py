"""Values that are left to the memory plan, settled for a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dslaunch.config.facts import Facts
    from dslaunch.config.load import LoadedSpec
    from dslaunch.core.errors import ConfigError


def settle_auto(
    loaded: LoadedSpec[Any],
    facts: Facts,
    training: Mapping[str, Any] | None = None,
    *,
    for_json: bool = False,
) -> LoadedSpec[Any]:
    """``loaded`` without an ``auto`` that the memory plan settles.

    ``for_json``: one that the DeepSpeed JSON does not depend on may stay. ``training``: the flags of
    :func:`training_options`, where there is no run file.
    Raises ConfigError where the model or the devices are not known here, or nothing fits.
    """
    from dslaunch.config.zero import auto_keys, auto_zero_keys

    if not (auto_zero_keys if for_json else auto_keys)(loaded.spec):
        for name in training or ():
            raise _without_auto(name)
        return loaded
    from dslaunch.cli.plan_memory import model_facts, training_of
    from dslaunch.config.zero_auto import settle_zero

    return settle_zero(loaded, facts, model_facts(loaded, facts), training_of(training or {}))


def _without_auto(flag: str) -> ConfigError:
    from dslaunch.core.errors import ConfigError

    return ConfigError(
        f"--{flag.replace('_', '-')} is not in the DeepSpeed JSON: it only helps to choose a stage",
        hint="add --zero-stage auto, or leave it out",
    )
