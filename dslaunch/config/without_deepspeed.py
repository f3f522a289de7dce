"""``engine: torch``: what of a run file acts without DeepSpeed, and what of its loss scale torch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dslaunch.config.load import LoadedSpec
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import EngineSpec, Fp16Spec, ZeroSpec
from dslaunch.core.plan import OptimizerPlan

_OF_DEEPSPEED = ("torch_adam", "adam_w_mode")


def uses_torch(spec: EngineSpec) -> bool:
    """Whether a run file asks for the engine without DeepSpeed."""
    return isinstance(spec, RunSpec) and spec.engine == "torch"


def check_keys(report: Report) -> None:
    """Each key that is given and acts with DeepSpeed only is a problem in ``report``."""
    for key, message, hint in _of_deepspeed(report.loaded):
        report.fail(key, message, hint)


def keys_of_deepspeed(loaded: LoadedSpec[RunSpec]) -> tuple[str, ...]:
    """The keys that a run file (or --set) gives and engine torch refuses, to be left out for it."""
    part, autocast = loaded.spec.fp16, loaded.spec.torch_autocast
    keys = [key for key, _, _ in (*_of_deepspeed(loaded), *_hysteresis(part, loaded))]
    return (*keys, *(["torch_autocast"] if autocast.enabled else []))


def plain_optimizer(plan: OptimizerPlan, report: Report) -> OptimizerPlan:
    """Without the keys by which DeepSpeed chooses between its Adam and torch's: the type alone says it."""
    for key in _OF_DEEPSPEED:
        report.reasons.pop(f"optimizer.params.{key}", None)
    params = {key: value for key, value in plan.params.items() if key not in _OF_DEEPSPEED}
    report.reason("optimizer.made_by", "engine is torch")
    return replace(plan, params=params, made_by="dslaunch")


def gradscaler_settings(part: Fp16Spec, report: Report) -> Fp16Spec:
    """The ``fp16`` section as torch.amp.GradScaler can follow it: without hysteresis.

    What was written of hysteresis is a problem in ``report``.
    """
    for key, message, hint in _hysteresis(part, report.loaded):
        report.fail(key, message, hint)
    return part.model_copy(update={"hysteresis": 1, "consecutive_hysteresis": False})


def gradscaler_in_words(part: Fp16Spec) -> dict[str, str]:
    """What each setting of the section does with GradScaler; of a static scale there is only one."""
    if part.loss_scale != "dynamic":
        return {"loss_scale": f"static scale {part.loss_scale:g}: overflows only skip their step"}
    power, window = part.initial_scale_power, part.loss_scale_window
    return {
        "loss_scale": "dynamic: torch.amp.GradScaler",
        "initial_scale_power": f"init_scale 2^{power} = {2**power}",
        "loss_scale_window": f"growth_interval: doubles after {window} steps in a row without overflow",
        "hysteresis": "GradScaler has none: every overflow skips its step and halves the scale",
        "consecutive_hysteresis": "GradScaler has no hysteresis",
        "min_loss_scale": f"an overflow at scale {part.min_loss_scale:g} stops the run",
    }


_Problem = tuple[str, str, str]  # key, what is wrong, what to do


def _of_deepspeed(loaded: LoadedSpec[RunSpec]) -> Iterator[_Problem]:
    spec = loaded.spec
    yield from _zero(spec.zero_optimization, loaded)
    for key in ("deepspeed", "deepspeed_template"):
        if loaded.given(key) or getattr(spec, key):
            yield key, f"{key} is for the DeepSpeed JSON, and engine is torch", f"remove {key}"
    if spec.optimizer.params.torch_adam is False:
        key = "optimizer.params.torch_adam"
        yield key, f"{key} false asks for DeepSpeed's Adam, and engine is torch", "remove torch_adam"


def _zero(zero: ZeroSpec, loaded: LoadedSpec[RunSpec]) -> Iterator[_Problem]:
    for name in type(zero).model_fields:
        value: Any = getattr(zero, name)
        key = f"zero_optimization.{name}"
        if value is None or not loaded.given(key) or (name, value) == ("stage", 0):
            continue
        if name == "stage":
            yield (
                key,
                f"{key} {value}: engine torch shards nothing, each rank holds the whole model and its states",
                "set it to 0 (--set zero_optimization.stage=0), or use engine: deepspeed",
            )
        else:
            yield key, f"{key} acts with DeepSpeed only, and engine is torch", f"remove {name}"


def _hysteresis(part: Fp16Spec, loaded: LoadedSpec[Any]) -> Iterator[_Problem]:
    why = "GradScaler halves the scale at every overflow"
    if loaded.given("fp16.hysteresis") and part.hysteresis != 1:
        message = f"fp16.hysteresis {part.hysteresis} does not act with engine torch: {why}"
        yield "fp16.hysteresis", message, "set it to 1, or use engine: deepspeed"
    if part.consecutive_hysteresis:
        key = "fp16.consecutive_hysteresis"
        yield key, f"{key} does not act with engine torch: {why}", "remove it"
