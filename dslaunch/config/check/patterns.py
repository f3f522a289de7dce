"""Patterns of an optimizer's parameter groups that match nothing in a model of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dslaunch.config.report import Problem, Report
from dslaunch.config.spec import RunSpec
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import AdapterPlan, OptimizerPlan, ParamGroupPlan

if TYPE_CHECKING:
    from dslaunch.config.load import LoadedSpec
    from dslaunch.config.memory.tensors import ModelFacts


def has_patterns(spec: RunSpec) -> bool:
    """Whether there is a pattern to match with the model's parameters."""
    optimizer = spec.optimizer
    return bool(optimizer.groups or optimizer.no_decay or optimizer.loraplus_lr_ratio is not None)


def pattern_problems(loaded: LoadedSpec[RunSpec], model: ModelFacts) -> list[Problem]:
    """The first pattern that means nothing, at its key. None where the adapter itself matches nothing."""
    from dslaunch.config.memory.adapter import adapter_tensors
    from dslaunch.config.memory.matches import matches_of_run

    adapter, new_tokens = _adapter(loaded.spec), loaded.spec.model.new_tokens
    trainable = model.tensors
    if adapter is not None:
        try:
            trainable = adapter_tensors(
                model,
                r=adapter.r,
                target_modules=adapter.target_modules,
                dora=adapter.type == "dora",
                modules_to_save=adapter.modules_to_save,
                trained_rows=len(adapter.trainable_token_indices) + len(new_tokens),
            )
        except ConfigError:
            return []
    report = Report(loaded)
    try:
        matches_of_run(model, trainable, adapter, _optimizer(loaded.spec))
    except ConfigError as error:
        report.fail(error.message.split(":")[0].split(" ")[0], error.message, error.hint)
    return report.problems


def _adapter(spec: RunSpec) -> AdapterPlan | None:
    if spec.adapter is None:
        return None
    return AdapterPlan(
        type=spec.adapter.type,
        r=spec.adapter.r,
        lora_alpha=1.0,
        lora_dropout=0.0,
        target_modules=spec.adapter.target_modules,
        modules_to_save=spec.adapter.modules_to_save,
        trainable_token_indices=spec.adapter.trainable_token_indices,
    )


def _optimizer(spec: RunSpec) -> OptimizerPlan:
    """Its patterns; the rates do not matter here."""
    optimizer = spec.optimizer
    groups = tuple(
        ParamGroupPlan(match=g.match, lr=g.lr, weight_decay=g.weight_decay) for g in optimizer.groups
    )
    return OptimizerPlan(
        type=optimizer.type,
        lr=1.0,
        params={},
        no_decay=optimizer.no_decay,
        loraplus_lr_ratio=optimizer.loraplus_lr_ratio,
        groups=groups,
    )
