"""Offload to a disk: how many buffers DeepSpeed's swapping takes. Each number was run with 0.19.8."""

from __future__ import annotations

from dslaunch.config.check.context import PARENT, Checker
from dslaunch.core.finding import Edit

_STATES = {"adam": 2, "adamw": 2, "lion": 1, "adagrad": 1}  # fp32 tensors of an optimizer per parameter


def check_nvme(checker: Checker) -> None:
    """The rules of stage 3; below it states stay in CPU memory, which is said elsewhere."""
    if checker.stage == 3 and checker.offload("offload_optimizer") == "nvme":
        _check_state_buffers(checker)


def _check_state_buffers(checker: Checker) -> None:
    """A buffer for the weights, for the gradients and for each state of a sub-group, of two in a pipeline."""
    path = (PARENT, "offload_optimizer", "buffer_count")
    kind = str(checker.get("optimizer", "type") or "").lower()
    states = _STATES.get(kind, 0)
    if kind == "sgd" and checker.get("optimizer", "params", "momentum"):
        states = 1
    needed, count = states + 2, checker.get(*path)
    if isinstance(count, int) and count < needed:
        checker.report(
            "needs",
            "error",
            path,
            f"{count} is too few: a step needs {needed} buffers (weights, gradients"
            + (f" and {states} of the optimizer's states)" if states else ")")
            + ", and DeepSpeed stops in the first or the second",
            f"set it to {needed} or more",
            fix=f"write {needed}",
            edits=(Edit("set", path, needed),),
        )
        return
    pipelines = [name for name in ("pipeline_read", "pipeline_write") if checker.on(*path[:2], name)]
    used = checker.number(*path)
    if pipelines and kind and used is not None and used < 2 * needed:
        checker.report(
            "needs",
            "warning",
            (*path[:2], pipelines[0]),
            f"it takes the buffers of two sub-groups at once, {2 * needed}, and buffer_count is {used:g}:"
            " DeepSpeed stops in the first steps of a rank that has several",
            f"set buffer_count to {2 * needed}",
            fix=f"write buffer_count {2 * needed}",
            edits=(Edit("set", path, 2 * needed),),
        )
