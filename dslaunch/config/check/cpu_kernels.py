"""What DeepSpeed has for GPUs alone: with ``--gpu cpu`` it stops at start."""

from __future__ import annotations

from dslaunch.config.check.context import PARENT, Checker

_WITHOUT = "has no kernel on a CPU: DeepSpeed stops at start"


def check_cpu_kernels(checker: Checker) -> None:
    """Operators without a version for CPUs (ops/op_builder/cpu) and code that asks for CUDA."""
    if not checker.on_cpu:
        return
    kind = str(checker.get("optimizer", "type") or "").lower()
    offload = checker.offload("offload_optimizer") != "none" and checker.stage
    if kind == "lamb" or (kind == "lion" and not offload):
        name = checker.get("optimizer", "type")
        checker.report("device", "error", ("optimizer", "type"), f"{name} {_WITHOUT}", "use AdamW")
    if checker.stage == 3:
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
            if checker.on(PARENT, key):
                checker.report("device", "error", (PARENT, key), _WITHOUT, "leave it out")
        super_offload = (PARENT, "offload_optimizer", "super_offload")
        if checker.on(*super_offload):
            checker.report(
                "device", "error", super_offload, "needs CUDA: DeepSpeed stops at start", "leave it out"
            )
    if checker.on("aio", "use_gds"):
        checker.report(
            "device", "error", ("aio", "use_gds"), "GPU direct storage needs a CUDA device", "use false"
        )
