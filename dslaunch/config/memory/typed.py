"""How a change of a setup is typed after a command: ``--set`` for a run file, else the flags for scripts.

``--set KEY=VALUE`` is known to every verb that takes a run file; the flags to ``plan`` and ``gen-config``.
"""

from __future__ import annotations

from dslaunch.config.memory.setup import Setup
from dslaunch.config.zero import ACTING_STAGES, OFFLOADS
from dslaunch.core.batch_size import ACCUMULATION, MICRO

STAGE = "zero_optimization.stage"
CHECKPOINTING = "model.gradient_checkpointing"
MAX_LENGTH = "data.max_length"
_FLAGS = {
    STAGE: "--zero-stage",
    CHECKPOINTING: "--gradient-checkpointing",
    MAX_LENGTH: "--max-length",
    MICRO: "--train-micro-batch-size-per-gpu",
    ACCUMULATION: "--gradient-accumulation-steps",
    "zero_optimization.offload_optimizer": "--offload-optimizer",
    "zero_optimization.offload_param": "--offload-param",
}


def typed(setup: Setup, key: str, value: int | str | bool | None) -> str:
    """What sets ``key`` of the run file to ``value``; None takes it away."""
    flag = None if setup.in_run_file else _FLAGS.get(key)
    if flag is None:
        text = "null" if value is None else "true" if value is True else value
        return f"--set {key}={text}"
    return flag if value is True else f"{flag} {'none' if value is None else value}"


def typed_difference(old: Setup, new: Setup) -> tuple[str, ...]:
    """What leads from ``old`` to ``new``, each change in one text."""
    changes = []
    if new.zero_stage != old.zero_stage:
        changes.append(" ".join((typed(old, STAGE, new.zero_stage), *_without_ignored(old, new.zero_stage))))
    if new.gradient_checkpointing and not old.gradient_checkpointing:
        changes.append(typed(old, CHECKPOINTING, True))
    if new.micro_batch != old.micro_batch:  # both, so that it fits whichever of the three sizes are written
        sizes = ((MICRO, new.micro_batch), (ACCUMULATION, new.accumulation))
        changes.append(" ".join(typed(old, key, size) for key, size in sizes))
    if new.zero.reduce_bucket_size != old.zero.reduce_bucket_size:
        changes.append(typed(old, "zero_optimization.reduce_bucket_size", new.zero.reduce_bucket_size))
    for name in OFFLOADS:
        after = getattr(new.zero, name)
        if after != getattr(old.zero, name):
            changes.append(typed(old, f"zero_optimization.{name}", after))
    return tuple(changes)


def _without_ignored(setup: Setup, stage: int) -> list[str]:
    """Takes away the keys that are written and that ``stage`` ignores, which would be an error."""
    ignored = [
        key
        for key, stages in ACTING_STAGES.items()
        if key in setup.zero.written and stage not in stages and key not in OFFLOADS
    ]
    return [typed(setup, f"zero_optimization.{key}", None) for key in ignored]
