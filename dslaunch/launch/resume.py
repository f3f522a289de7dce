"""Going on with a run: the recorded plan holds; only how it is launched and what it writes may change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import RunPlan, to_json

_MAY_CHANGE = ("launch", "output", "origins", "schema_version")
_SHOWN = 12


def resolve_resumed(recorded: RunPlan, asked: RunPlan) -> RunPlan:
    """The recorded plan with the launch and output that are asked for now.

    Raises ConfigError, showing each differing key with both values, where the
    run file now means another training run than the one in the run directory.
    """
    differing = list(_differences(_identity(recorded), _identity(asked), ""))
    # The DeepSpeed JSON follows from the plan: show it only where nothing else explains the change.
    own = [line for line in differing if not line.startswith("ds_config.")] or differing
    if own:
        more = f"\n  and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        shown = "".join(f"\n  {line}" for line in own[:_SHOWN])
        raise ConfigError(
            f"the run file no longer means the run in {recorded.launch.run_dir}; "
            f"nothing was started. What differs:{shown}{more}",
            hint="put these back, or start a new run with another --run-dir; to start it from these weights,"
            " dslaunch export them and give that as model.path",
        )
    return dataclasses.replace(recorded, launch=asked.launch, output=asked.output, origins=asked.origins)


def _identity(plan: RunPlan) -> dict[str, Any]:
    return {key: value for key, value in to_json(plan).items() if key not in _MAY_CHANGE}


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path}: recorded {json.dumps(old)}, now {json.dumps(new)}"
