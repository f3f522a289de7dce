"""Patterns of an optimizer's parameter groups that match nothing in a model of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dslaunch.config.quantization import assumed_quantization
from dslaunch.config.report import Problem, Report
from dslaunch.config.spec import RunSpec
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import AdapterPlan, OptimizerPlan, ParamGroupPlan

if TYPE_CHECKING:
    from dslaunch.config.load import LoadedSpec
    from dslaunch.config.memory.tensors import ModelFacts


def has_patterns(spec: RunSpec) -> bool:
    """Whether there is a pattern or a name to hold against the model's parameters."""
    optimizer, adapter = spec.optimizer, spec.adapter
    if spec.model.quantization_config is not None and spec.fp32_modules:
        return True
    if adapter is not None and (
        adapter.modules_to_save or adapter.trainable_token_indices or spec.model.new_tokens
    ):
        return True
    return bool(optimizer.groups or optimizer.no_decay or optimizer.loraplus_lr_ratio is not None)


def pattern_problems(loaded: LoadedSpec[RunSpec], model: ModelFacts) -> list[Problem]:
    """What names ask of modules that cannot do it, and the first pattern of the optimizer that means nothing.

    Nothing where the adapter itself matches no layer.
    """
    from dslaunch.config.memory.matches import matches_of_run
    from dslaunch.config.memory.rows import trained_with

    adapter, new_tokens = _adapter(loaded.spec), loaded.spec.model.new_tokens
    trainable = model.tensors
    if adapter is not None:
        try:
            trainable = trained_with(model, adapter, len(new_tokens))
        except ConfigError:
            return []
    report = Report(loaded)
    for key, error in _conflicts(loaded.spec, adapter, model):
        report.fail(key, error.message, error.hint)
    try:
        matches_of_run(model, trainable, adapter, _optimizer(loaded.spec))
    except ConfigError as error:
        report.fail(error.message.split(":")[0].split(" ")[0], error.message, error.hint)
    return report.problems


def _conflicts(
    spec: RunSpec, adapter: AdapterPlan | None, model: ModelFacts
) -> list[tuple[str, ConfigError]]:
    from dslaunch.config.memory.conflicts import find_conflicts

    patterns = spec.fp32_modules if spec.precision in ("bf16", "fp16") else ()
    try:
        return find_conflicts(
            model,
            adapter,
            assumed_quantization(spec.model.quantization_config),
            fp32_modules=patterns,
            num_new_tokens=len(spec.model.new_tokens),
        )
    except ConfigError:  # a pattern of fp32_modules that matches nothing, which is said
        return []


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
