"""Master weights, gradients and moments in 16 bit, and gradients that are added up at once.

Each needs an optimizer of DeepSpeed that knows of it; the others ignore it or stop. Read in
DeepSpeed 0.19.8: runtime/base_optimizer.py ``_configure_master_weights``, runtime/config.py
``_do_error_check`` and runtime/engine.py ``_do_optimizer_sanity_check``.
"""

from __future__ import annotations

from dslaunch.config.check.context import Checker

_Path = tuple[str, ...]

FP16_MASTERS = ("fp16", "fp16_master_weights_and_grads")


def check_master_weights(checker: Checker) -> None:
    """What the keys need, and where nothing reads them."""
    section = checker.bf16_section
    masters: _Path = (section, "bf16_master_weights_and_grads")
    states: _Path = (section, "bf16_optimizer_states")
    on = [path for path in (FP16_MASTERS, masters, states) if checker.on(*path)]
    for path in on:
        if checker.stage == 0:
            checker.report("stage", "error", path, "needs ZeRO stage 1, 2 or 3", "set the stage")
    if states in on and masters not in on:
        checker.report("needs", "error", states, f"needs {masters[-1]} as well", "turn both on")
    if checker.stage and {FP16_MASTERS, masters} <= set(on):
        checker.report("contradiction", "error", masters, "and its like in fp16 are both on", "keep one")
    elif masters in on and checker.precision not in (None, "bf16"):
        message = "acts although bf16 is off: masters are bf16 under weights of another type"
        checker.report_to_remove("contradiction", "warning", masters, message, "remove it, or turn bf16 on")
    elif checker.stage and on:
        _check_optimizer(checker, on[0], moments=states in on)
    _check_eps(checker)
    _check_immediate(checker, (section, "immediate_grad_update"))
    if checker.has_own_accumulator and (idle := [path for path in on if path[0] == section]):
        checker.report_to_remove(
            "ignored",
            "warning",
            idle[0],
            "is not read by the optimizer that stage 1 takes for data_types.grad_accum_dtype fp32",
            "remove it, or take stage 2",
        )


def _check_optimizer(checker: Checker, path: _Path, *, moments: bool) -> None:
    """Only where the moments are bf16, too, and stay on the GPU, may it be another than the CPU Adam."""
    offload = checker.offload("offload_optimizer")
    if moments and offload == "none":
        return
    kind = str(checker.get("optimizer", "type") or "adamw").lower()
    if offload == "none":
        wants = "zero_optimization.offload_optimizer to the CPU"
        hint = 'add "offload_optimizer": {"device": "cpu"}'
        if path != FP16_MASTERS:
            hint += ", or turn bf16_optimizer_states on as well"
    elif kind not in ("adam", "adamw") or checker.on("optimizer", "params", "torch_adam"):
        wants, hint = "DeepSpeed's own CPU Adam", "use AdamW without torch_adam"
    else:
        return
    checker.report("needs", "error", path, f"needs {wants}: DeepSpeed stops at start", hint)


def _check_eps(checker: Checker) -> None:
    eps = checker.get("optimizer", "params", "eps")
    small = isinstance(eps, (int, float)) and eps < 6e-8
    if checker.on(*FP16_MASTERS) and (eps is None or small):
        checker.report(
            "risky",
            "warning",
            FP16_MASTERS,
            "optimizer.params.eps below 6e-8 is 0 in fp16, so Adam divides by 0 where a gradient is 0",
            "set optimizer.params.eps to 1e-6",
        )


def _check_immediate(checker: Checker, path: _Path) -> None:
    if checker.on(*path) and checker.stage is not None and not checker.has_own_accumulator:
        checker.report_to_remove(
            "ignored",
            "warning",
            path,
            "acts at stage 1 with bf16, data_types.grad_accum_dtype fp32 and no offload_optimizer only",
            "remove it",
        )
