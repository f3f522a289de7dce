"""ZenFlow and ``compute_grad_norm``: what DeepSpeed's optimizers of stages 1 and 2 refuse beside them.

Each was run with 0.19.8; of ZenFlow at stage 3, which needs a GPU, only what its code shares with them.
"""

from __future__ import annotations

from dslaunch.config.check.context import PARENT, Checker
from dslaunch.core.finding import KeyPath

_ZENFLOW = (PARENT, "zenflow")
_NORM = (PARENT, "compute_grad_norm")


def check_zenflow(checker: Checker) -> None:
    """Offload, optimizer and intervals that ZenFlow needs."""
    if not isinstance(checker.get(*_ZENFLOW), dict):
        return
    if checker.stage == 0:
        _refuse(checker, _ZENFLOW, "stage", "stops the first step at stage 0", "set the stage to 1 or 2")
        return  # said as ignored, too: its other rules do not matter
    if checker.stage in (1, 2) and checker.offload("offload_optimizer") == "none":
        message = "needs offload_optimizer: DeepSpeed stops at start"
        _refuse(checker, _ZENFLOW, "needs", message, 'add "offload_optimizer": {"device": "cpu"}')
    kind = str(checker.get("optimizer", "type") or "").lower()
    if checker.stage and (kind not in ("adam", "adamw") or checker.on("optimizer", "params", "torch_adam")):
        message = "goes with an optimizer section of DeepSpeed's own Adam alone: DeepSpeed stops"
        _refuse(checker, _ZENFLOW, "needs", message, "use AdamW without torch_adam")
    if checker.get("managed_gradient_accumulation") is False:
        path, message = ("managed_gradient_accumulation",), "false with zenflow stops the first step"
        _refuse(checker, path, "contradiction", message, "leave it out")
    _check_intervals(checker)


def _check_intervals(checker: Checker) -> None:
    select, update = checker.get(*_ZENFLOW, "select_interval"), checker.get(*_ZENFLOW, "update_interval")
    strategy = checker.get(*_ZENFLOW, "select_strategy") or "auto"
    path = (*_ZENFLOW, "select_interval")
    if strategy == "auto" and isinstance(select, int):
        message = "a number goes with select_strategy step or epoch: DeepSpeed stops at start"
        _refuse(checker, path, "contradiction", message, 'leave it out, or set select_strategy to "step"')
    elif strategy != "auto" and select is None and path not in checker.bad:
        message = f"select_strategy {strategy} needs a number for select_interval: DeepSpeed stops at start"
        _refuse(checker, (*_ZENFLOW, "select_strategy"), "needs", message, "set select_interval")
    elif strategy == "step" and isinstance(update, int) and isinstance(select, int) and 0 < select < update:
        message = f"{select} is below update_interval {update}: DeepSpeed stops at start"
        _refuse(checker, path, "contradiction", message, f"set it to {update} or more")


def check_compute_norm(checker: Checker) -> None:
    """``compute_grad_norm: false``, which needs that nothing asks for the norm."""
    if checker.get(*_NORM) is not False:
        return
    message = ""
    if checker.stage in (0, 3):
        _refuse(checker, _NORM, "stage", "false is allowed at stages 1 and 2 only", "leave it out")
    elif (checker.number("gradient_clipping") or 0) > 0:
        written = "" if checker.has("gradient_clipping") else ", which is 1.0 where it is left out"
        message = f"false while gradient_clipping is on{written}: DeepSpeed stops at start"
    elif checker.offload("offload_optimizer") != "none":
        message = "false with offload_optimizer: DeepSpeed stops at start"
    elif checker.has_own_accumulator:
        message = "false with bf16 at stage 1 and data_types.grad_accum_dtype fp32: DeepSpeed stops at start"
    if message:
        _refuse(checker, _NORM, "contradiction", message, "leave it out, or set gradient_clipping to 0")


def _refuse(checker: Checker, path: KeyPath, code: str, message: str, hint: str) -> None:
    checker.report(code, "error", path, message, hint)
