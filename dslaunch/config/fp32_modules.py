"""fp32_modules: what cannot be."""

from __future__ import annotations

from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.without_deepspeed import uses_torch
from dslaunch.config.zero import offload_device
from dslaunch.core.plan import Precision

KEY = "fp32_modules"


def check_fp32_modules(spec: RunSpec, precision: Precision, report: Report) -> None:
    """Refuse what DeepSpeed 0.19.8 cannot do with two dtypes; say where they have no effect."""
    if not spec.fp32_modules:
        return
    if precision == "fp32":
        report.note(f"{KEY} {', '.join(spec.fp32_modules)}: the whole model is in fp32 already")
        return
    if uses_torch(spec):
        why = (
            "autocast there computes in fp32 what it holds to be sensitive, and all trained weights are fp32"
        )
        report.fail(KEY, f"{KEY} does not act with engine torch: {why}", f"remove {KEY}")
        return
    zero = spec.zero_optimization
    if offload_device(zero, "offload_param") is not None:
        report.fail(
            KEY,
            f"{KEY} with zero_optimization.offload_param: DeepSpeed keeps offloaded parameters in one"
            f" {precision} buffer, which would round them",
            "leave offload_param out (offload_optimizer: cpu works), or fp32_modules",
        )
    elif offload_device(zero, "offload_optimizer") == "nvme":
        report.fail(
            KEY,
            f"{KEY} with zero_optimization.offload_optimizer nvme: not known to work",
            "use offload_optimizer: cpu",
        )
