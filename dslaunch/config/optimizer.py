"""optimizer: section -> the ``params`` that DeepSpeed's JSON takes.

Elementwise optimizers only: ZeRO flattens the parameters, so one that looks at
a tensor as a whole (LAMB, Adafactor) would silently become another optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslaunch.config.report import Report
from dslaunch.config.spec_engine import OptimizerSpec
from dslaunch.core.plan import OptimizerPlan

_ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}
# DeepSpeed asks for zero_allow_untested_optimizer with these (runtime/zero/utils.py); they are elementwise.
_UNTESTED = ("SGD",)
LR_WITH_ADAPTER, LR_WITHOUT = 2e-4, 2e-5


@dataclass(frozen=True)
class ChosenOptimizer:
    """The optimizer, and whether ZeRO must be told to accept it."""

    plan: OptimizerPlan
    allow_untested: bool


def resolve_optimizer(
    spec: OptimizerSpec, *, device_type: str, zero_stage: int, adapter: bool, report: Report
) -> ChosenOptimizer:
    """Fill in what was not given; problems (a parameter that the type does not take) go to ``report``."""
    lr = spec.lr if spec.lr is not None else LR_WITH_ADAPTER if adapter else LR_WITHOUT
    if spec.lr is None:
        report.reason("optimizer.lr", f"usual for {'an adapter' if adapter else 'a whole model'}", "default")
    params: dict[str, Any] = {"lr": lr}
    for key, default in _DEFAULTS[spec.type].items():
        value = getattr(spec.params, key)
        params[key] = default if value is None else value
    if spec.type in ("AdamW", "Adam"):
        _add_adam_keys(params, spec, device_type, report)
    _check(spec, params, device_type, report)
    plan = OptimizerPlan(type=spec.type, lr=lr, params={k: _plain(v) for k, v in params.items()})
    return ChosenOptimizer(plan, allow_untested=spec.type in _UNTESTED and zero_stage > 0)


def _add_adam_keys(params: dict[str, Any], spec: OptimizerSpec, device_type: str, report: Report) -> None:
    if spec.type == "Adam":
        params["adam_w_mode"] = False
        report.reason("optimizer.params.adam_w_mode", "without it DeepSpeed runs Adam as AdamW")
    if spec.params.torch_adam is not None:
        params["torch_adam"] = spec.params.torch_adam
    elif device_type == "cpu":
        params["torch_adam"] = True
        report.reason(
            "optimizer.params.torch_adam",
            "on a CPU DeepSpeed would compile its own Adam for a minute or more",
        )


def _check(spec: OptimizerSpec, params: dict[str, Any], device_type: str, report: Report) -> None:
    takes = {*_DEFAULTS[spec.type], *(("torch_adam",) if spec.type in ("AdamW", "Adam") else ())}
    for key in type(spec.params).model_fields:
        if getattr(spec.params, key) is not None and key not in takes:
            report.fail(
                f"optimizer.params.{key}",
                f"optimizer.params.{key}: {spec.type} does not take it",
                f"{spec.type} takes {', '.join(sorted(takes))}",
            )
    if params.get("nesterov") and (params["momentum"] == 0 or params["dampening"] != 0):
        report.fail(
            "optimizer.params.nesterov",
            "optimizer.params.nesterov needs momentum > 0 and dampening 0",
            "set optimizer.params.momentum, such as 0.9",
        )
    if spec.type == "Lion" and device_type == "cpu":
        report.fail(
            "optimizer.type", "optimizer.type Lion: DeepSpeed has it for GPUs only", "use AdamW or SGD"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
