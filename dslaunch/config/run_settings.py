"""What a run file says beside its engine, resolved. Neither its model nor its data need be here."""

from __future__ import annotations

from typing import NamedTuple

from dslaunch.config.attention import resolve_attention
from dslaunch.config.engine_plan import EnginePlan
from dslaunch.config.facts import Facts
from dslaunch.config.fp32_modules import check_fp32_modules
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.length import resolve_length
from dslaunch.config.quantization import settle_quantization
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec, SchedulerSpec
from dslaunch.core.plan import Attention, Fp16Plan, OutputPlan, QuantizationPlan, SchedulerPlan
from dslaunch.core.training_length import decay_steps, warmup_steps

_DEFAULT_WARMUP_RATIO = 0.03
_DEFAULT_DECAY_RATIO = 0.1


class RunSettings(NamedTuple):
    """What a run has beside its engine, model and data."""

    attention: Attention
    quantization: QuantizationPlan | None
    num_train_epochs: float | None
    max_steps: int | None
    scheduler: SchedulerPlan
    output: OutputPlan


def resolve_settings(
    report: Report, facts: Facts, engine: tuple[EnginePlan, ResolvedHosts] | None
) -> RunSettings:
    """The settings of a run file; what of them cannot be goes to ``report``. gen-config asks them, too."""
    spec: RunSpec = report.loaded.spec
    attention: Attention = "sdpa"
    quantization = None
    if engine is not None:
        attention = resolve_attention(spec, engine[0].precision, engine[1], facts, report)
        quantization = settle_quantization(report, facts, *engine)
        check_fp32_modules(spec, engine[0].precision, report)
        _check_watch(spec, engine[0].fp16, report)
    epochs, steps = resolve_length(spec, report)
    scheduler = _scheduler(spec, report)
    if steps is not None:
        with report.catching("scheduler.warmup_steps"):
            warmup_steps(scheduler, steps)
            with report.catching("scheduler.decay_steps"):
                decay_steps(scheduler, steps)
    return RunSettings(attention, quantization, epochs, steps, scheduler, _output(spec, report))


def _scheduler(spec: RunSpec, report: Report) -> SchedulerPlan:
    part = spec.scheduler
    if part.warmup_steps is not None and part.warmup_ratio is not None:
        message = "scheduler.warmup_steps and scheduler.warmup_ratio are both given"
        report.fail("scheduler.warmup_ratio", message, "keep one of the two")
    ratio = part.warmup_ratio
    if part.warmup_steps is None and ratio is None:
        ratio = 0.0 if part.type == "constant" else _DEFAULT_WARMUP_RATIO
        report.reason("scheduler.warmup_ratio", f"usual for {part.type}", "default")
    if part.type == "constant" and report.given("scheduler.min_lr_ratio"):
        message = "scheduler.min_lr_ratio has no effect: a constant rate does not fall"
        report.fail("scheduler.min_lr_ratio", message, "remove it, or use type linear, cosine or wsd")
    return SchedulerPlan(
        type=part.type,
        warmup_steps=part.warmup_steps,
        warmup_ratio=ratio,
        min_lr_ratio=float(part.min_lr_ratio),
        decay_steps=part.decay_steps,
        decay_ratio=_decay_ratio(part, report),
        decay_type=part.decay_type or "linear",
    )


def _decay_ratio(part: SchedulerSpec, report: Report) -> float | None:
    """The share of steps in which the rate of wsd falls; None where decay_steps says it, or nothing does."""
    if part.type != "wsd":
        for name in ("decay_steps", "decay_ratio", "decay_type"):
            if getattr(part, name) is not None:
                key = f"scheduler.{name}"
                report.fail(key, f"{key} is for type wsd; the type is {part.type}", "remove it, or use wsd")
        return None
    if part.decay_steps is not None and part.decay_ratio is not None:
        message = "scheduler.decay_steps and scheduler.decay_ratio are both given"
        report.fail("scheduler.decay_ratio", message, "keep one of the two")
    if part.decay_steps is None and part.decay_ratio is None:
        report.reason("scheduler.decay_ratio", "usual for wsd", "default")
        return _DEFAULT_DECAY_RATIO
    return _optional_float(part.decay_ratio)


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _check_watch(spec: RunSpec, fp16: Fp16Plan | None, report: Report) -> None:
    """A limit that the scale's own descent would reach stops every fp16 run at its start."""
    if spec.watch.detect_anomaly and spec.watch.on_nonfinite != "trace":
        message = "watch.detect_anomaly is for tracing, and watch.on_nonfinite is stop"
        report.fail("watch.detect_anomaly", message, "set on_nonfinite: trace, or remove detect_anomaly")
    limit = spec.watch.max_skipped_in_a_row
    if fp16 is None or fp16.loss_scale != "dynamic":
        return
    descent = fp16.initial_scale_power + fp16.hysteresis
    if limit <= descent:
        report.fail(
            "watch.max_skipped_in_a_row",
            f"watch.max_skipped_in_a_row {limit}: the descent of the loss scale from "
            f"2^{fp16.initial_scale_power} alone may skip {descent} steps",
            f"set it above {descent}, or lower fp16.initial_scale_power",
        )


def _output(spec: RunSpec, report: Report) -> OutputPlan:
    part = spec.output
    if part.eval_steps is not None and not spec.data.eval:
        message = "output.eval_steps: there is no data.eval to evaluate on"
        report.fail("output.eval_steps", message, "set data.eval, or remove eval_steps")
    return OutputPlan(
        save_steps=part.save_steps,
        eval_steps=part.eval_steps,
        logging_steps=part.logging_steps,
        save_total_limit=part.save_total_limit,
        report_to=part.report_to,
    )
