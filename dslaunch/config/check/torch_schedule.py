"""Schedules of torch that a config names: DeepSpeed 0.19.8 hands them an optimizer that few of them take."""

from __future__ import annotations

from dslaunch.config.check.context import Checker
from dslaunch.config.schema.optimizers import NEEDED, NO_JSON


def check_torch_schedule(checker: Checker, name: str) -> None:
    """Where it stops at start, and where it follows something else than was meant."""
    path = ("scheduler", "type")
    wrapped = checker.stage or checker.precision in ("fp16", "bf16")
    if checker.stage is not None and wrapped:
        at = f"stage {checker.stage}" if checker.stage else f"{checker.precision} at stage 0"
        checker.report(
            "scheduler-type",
            "error",
            path,
            f"{name} is a schedule of torch, which refuses DeepSpeed's optimizer of {at}: it stops at start",
            "use a schedule of DeepSpeed (WarmupLR, WarmupDecayLR, WarmupCosineLR), or pass one of your own"
            " to deepspeed.initialize",
        )
        return
    params = checker.block("scheduler", "params")
    for key in NO_JSON:
        if params.get(key) is not None or (key in params and key in NEEDED.get(name, ())):
            message = f"{name} wants objects of Python here, which no JSON holds: it stops at start"
            hint = "pass a schedule of your own to deepspeed.initialize"
            checker.report("scheduler-type", "error", ("scheduler", "params", key), message, hint)
    length = params.get("total_steps") or (params.get("epochs") and params.get("steps_per_epoch"))
    if name == "OneCycleLR" and not length and ("scheduler", "params", "total_steps") not in checker.bad:
        checker.report(
            "needs", "error", ("scheduler", "params"), f"{name} needs total_steps", "add total_steps"
        )
    if name == "ReduceLROnPlateau":
        checker.report(
            "risky",
            "warning",
            path,
            "DeepSpeed gives it train_batch_size as its loss, and the rate falls every `patience` steps",
            "step a schedule of your own with the loss",
        )
