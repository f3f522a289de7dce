"""torch_autocast: DeepSpeed's own autocast, with fp32 weights; resolved, and what of it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import EngineSpec
from dslaunch.config.without_deepspeed import uses_torch
from dslaunch.core.plan import Precision

KEY = "torch_autocast"


def resolve_torch_autocast(precision: Precision, stage: int, report: Report) -> tuple[str, ...] | None:
    """Its lower_precision_safe_modules, None where it is off; what cannot be goes to ``report``."""
    spec: EngineSpec = report.loaded.spec
    part = spec.torch_autocast
    if not part.enabled:
        key = f"{KEY}.lower_precision_safe_modules"
        if part.lower_precision_safe_modules:
            report.fail(key, f"{key} has no effect without {KEY}.enabled", f"set {KEY}.enabled: true")
        return None
    for message, hint in _refusals(spec, precision, stage):
        report.fail(f"{KEY}.enabled", f"{KEY}.enabled {message}", hint)
    return part.lower_precision_safe_modules


def autocast_block(modules: tuple[str, ...] | None) -> dict[str, Any] | None:
    """The block of the DeepSpeed JSON."""
    if modules is None:
        return None
    block: dict[str, Any] = {"enabled": True, "dtype": "bfloat16"}
    return {**block, "lower_precision_safe_modules": list(modules)} if modules else block


def _refusals(spec: EngineSpec, precision: Precision, stage: int) -> Iterator[tuple[str, str]]:
    if uses_torch(spec):
        yield "is for DeepSpeed, and engine torch computes by autocast anyway", "remove torch_autocast"
    elif precision == "fp32":
        yield "with precision fp32 casts nothing", "set precision: bf16, or remove torch_autocast"
    elif precision == "fp16":
        yield (
            f"with precision fp16 at zero_optimization.stage {stage}: "
            + (
                "DeepSpeed skips every step after the first overflow"
                if stage > 0
                else "DeepSpeed scales the loss in a way of its own there and leaves the fp16 section unread"
            ),
            "use precision bf16, or engine: torch, which is fp16 autocast with GradScaler",
        )
    if isinstance(spec, RunSpec) and spec.model.quantization_config is not None:
        yield "with model.quantization_config: not known to work", "remove one of the two"
    if isinstance(spec, RunSpec) and spec.fp32_modules and precision == "bf16":
        yield (
            "with fp32_modules: all weights are fp32 there, and autocast chooses what it computes in fp32",
            "remove fp32_modules, or torch_autocast",
        )
