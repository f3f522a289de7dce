"""EnginePlan: what the DeepSpeed JSON says, resolved. Part of the way to a RunPlan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dslaunch.config.facts import Facts
from dslaunch.config.host_devices import check_gpu
from dslaunch.config.hosts import ResolvedHosts, resolve_hosts
from dslaunch.config.nested import merge
from dslaunch.config.optimizer import (
    ChosenOptimizer,
    check_fit,
    check_json_says_it_all,
    resolve_optimizer,
)
from dslaunch.config.precision import communication_data_type, resolve_precision
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import EngineSpec, Fp16Spec
from dslaunch.config.torch_autocast import autocast_block, resolve_torch_autocast
from dslaunch.config.without_deepspeed import (
    check_keys,
    gradscaler_in_words,
    gradscaler_settings,
    plain_optimizer,
    uses_torch,
)
from dslaunch.config.zero import resolve_zero
from dslaunch.core.batch_size import ACCUMULATION, MICRO, TRAIN, solve_batch_sizes
from dslaunch.core.devices import Device
from dslaunch.core.loss_scale import LossScaleRule, settings_in_words
from dslaunch.core.plan import BatchPlan, Fp16Plan, OptimizerPlan, Precision


@dataclass(frozen=True)
class EnginePlan:
    """Everything that goes into the DeepSpeed JSON. ``zero_options`` is the block without ``stage``."""

    precision: Precision
    fp16: Fp16Plan | None
    grad_accum_dtype: str | None
    communication_data_type: str | None
    zero_stage: Literal[0, 1, 2, 3]
    zero_options: Mapping[str, Any]
    gradient_clipping: float
    optimizer: OptimizerPlan
    zero_allow_untested_optimizer: bool
    batch: BatchPlan
    torch_autocast: tuple[str, ...] | None = None
    scheduler: Mapping[str, Any] | None = None  # for scripts of one's own; our worker brings its own

    @property
    def weights(self) -> Precision:
        """The type of the weights that DeepSpeed holds."""
        return self.precision if self.torch_autocast is None else "fp32"

    def context(self) -> dict[str, Any]:
        """The names that a template may use."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "torch_autocast": autocast_block(self.torch_autocast)}


def resolve_engine(
    report: Report, facts: Facts, hosts: ResolvedHosts | None = None
) -> tuple[EnginePlan, ResolvedHosts] | None:
    """The engine plan of ``report.loaded`` and the hosts it is for: ``hosts``, else those of its cluster.

    Returns None where a problem that went to ``report`` makes it impossible.
    """
    spec: EngineSpec = report.loaded.spec
    hosts = hosts or _resolve_hosts(spec, facts, report)
    stage, zero_options = _resolve_zero(spec, facts, report)
    adapter = isinstance(spec, RunSpec) and spec.adapter is not None
    chosen = resolve_optimizer(
        spec.optimizer,
        device_type=hosts.device_type if hosts else "cuda",
        zero_stage=stage,
        adapter=adapter,
        report=report,
    )
    if uses_torch(spec):
        chosen = dataclasses.replace(chosen, plan=plain_optimizer(chosen.plan, report))
    if hosts is None:
        _check_raw_keys(report, facts, zero_options, chosen, None, None)
        return None
    report.reason("launch.topology", hosts.topology_reason)
    written = report.loaded.positions.get("cluster.gpu", "derived")
    report.reason("launch.device_type", hosts.device_reason, source=written)
    batch = _resolve_batch(spec, hosts, report)
    precision = _resolve_precision(spec, hosts, facts, report)
    fp16 = _fp16(spec, precision, report) if precision is not None else None
    if batch is None or precision is None:
        _check_raw_keys(report, facts, zero_options, chosen, batch, precision)
        return None
    check_fit(
        chosen.plan,
        zero_stage=stage,
        precision=precision,
        offload=_offload_device(zero_options, spec.deepspeed),
        report=report,
        shards=not uses_torch(spec) and (stage > 0 or precision != "fp32"),
    )
    autocast = resolve_torch_autocast(precision, stage, report)
    plan = _engine_plan(spec, zero_options, chosen, batch, precision, fp16, hosts.devices, autocast)
    if stage == 0 and not uses_torch(spec):
        _note_stage_0(plan.weights, isinstance(spec, RunSpec), report)
    return plan, hosts


def _offload_device(zero_options: Mapping[str, Any], raw: Mapping[str, Any]) -> str | None:
    """Where the optimizer's states will lie, raw keys merged in; None: on the device."""
    block = merge({"zero_optimization": zero_options}, raw)["zero_optimization"]
    part = block.get("offload_optimizer") if isinstance(block, Mapping) else None
    device = part.get("device") if isinstance(part, Mapping) else None
    return None if device in (None, "none") else str(device)


def _engine_plan(
    spec: EngineSpec,
    zero_options: Mapping[str, Any],
    optimizer: ChosenOptimizer,
    batch: BatchPlan,
    precision: Precision,
    fp16: Fp16Plan | None,
    devices: Sequence[Device] | None,
    autocast: tuple[str, ...] | None = None,
) -> EnginePlan:
    stage = _stage(spec)
    weights: Precision = "fp32" if autocast is not None else precision
    return EnginePlan(
        precision=precision,
        fp16=fp16,
        torch_autocast=autocast,
        grad_accum_dtype=_grad_accum_dtype(stage, weights, batch),
        communication_data_type=None if uses_torch(spec) else communication_data_type(weights, devices),
        zero_stage=stage,
        zero_options=zero_options,
        gradient_clipping=spec.gradient_clipping,
        optimizer=optimizer.plan,
        zero_allow_untested_optimizer=optimizer.allow_untested,
        batch=batch,
    )


def _check_raw_keys(
    report: Report,
    facts: Facts,
    zero_options: Mapping[str, Any],
    optimizer: ChosenOptimizer,
    batch: BatchPlan | None,
    precision: Precision | None,
) -> None:
    """Report the raw keys that are wrong whatever the part of the plan that is None turns out to be.

    So that they are told in the same run as the reason why there is no plan. Stand-ins take the
    place of what is None; what is found of keys that hang on them is left out.
    """
    spec: EngineSpec = report.loaded.spec
    if not spec.deepspeed or uses_torch(spec):
        return
    from dslaunch.config.render import render_ds_config  # it imports this module

    unsure = set() if batch is not None else {TRAIN, MICRO, ACCUMULATION}
    unsure |= set() if precision is not None else {"fp16", "bf16", "data_types", "communication_data_type"}
    batch = batch or BatchPlan(
        train_batch_size=1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1, world_size=1
    )
    precision = precision or ("fp32" if spec.precision == "auto" else spec.precision)
    fp16 = Fp16Plan() if precision == "fp16" else None
    engine = _engine_plan(spec, zero_options, optimizer, batch, precision, fp16, None)
    trial = Report(report.loaded)
    render_ds_config(engine, trial, dataclasses.replace(facts, template=None, template_problem=None), None)
    report.problems += [
        problem
        for problem in trial.problems
        if problem.key.startswith("deepspeed.") and problem.key.split(".")[1] not in unsure
    ]


def _resolve_zero(
    spec: EngineSpec, facts: Facts, report: Report
) -> tuple[Literal[0, 1, 2, 3], dict[str, Any]]:
    """The stage, and the rest of the block; nothing is sharded without DeepSpeed."""
    if uses_torch(spec):
        check_keys(report)
        report.reason("zero_stage", "engine torch shards nothing")
        return 0, {}
    return _stage(spec), resolve_zero(spec.zero_optimization, facts, report)


def _stage(spec: EngineSpec) -> Literal[0, 1, 2, 3]:
    if uses_torch(spec):
        return 0
    stage = spec.zero_optimization.stage
    assert stage != "auto", "settle_zero comes first"
    return stage


def _resolve_hosts(spec: EngineSpec, facts: Facts, report: Report) -> ResolvedHosts | None:
    known = False
    with report.catching("cluster.gpu"):  # at the place of the name, which may be a flag
        check_gpu(spec.cluster.gpu)
        known = True
    if facts.inventory_problem is not None:
        report.add("cluster.inventory", facts.inventory_problem)
    if facts.hostfile_problem is not None:
        report.add("cluster.hostfile", facts.hostfile_problem)
    elif facts.allocation_problem is not None:
        report.add("cluster", facts.allocation_problem)
    elif known and facts.inventory_problem is None:
        with report.catching("cluster"):
            hosts = resolve_hosts(spec.cluster, facts, runs_here=isinstance(spec, RunSpec))
            if facts.allocation is not None:  # nobody wrote these hosts down
                report.note(f"hosts: {hosts.topology_reason}")
            return hosts
    return None


def _resolve_batch(spec: EngineSpec, hosts: ResolvedHosts, report: Report) -> BatchPlan | None:
    key = next((key for key in (TRAIN, MICRO, ACCUMULATION) if report.given(key)), "")
    with report.catching(key):
        solution = solve_batch_sizes(
            train_batch_size=spec.train_batch_size,
            train_micro_batch_size_per_gpu=spec.train_micro_batch_size_per_gpu,
            gradient_accumulation_steps=spec.gradient_accumulation_steps,
            world_size=hosts.topology.world_size,
        )
        for name, reason in solution.reasons.items():
            report.reason(f"batch.{name}", reason)
        report.reason("batch.world_size", hosts.topology_reason)
        if MICRO in solution.reasons and ACCUMULATION in solution.reasons:
            micro, steps = (
                solution.batch.train_micro_batch_size_per_gpu,
                solution.batch.gradient_accumulation_steps,
            )
            report.note(f"{MICRO} {micro} ({solution.reasons[MICRO]}), {ACCUMULATION} {steps}")
        return solution.batch
    return None


def _resolve_precision(
    spec: EngineSpec, hosts: ResolvedHosts, facts: Facts, report: Report
) -> Precision | None:
    with report.catching("precision"):
        emulated = isinstance(spec, RunSpec) and spec.allow_emulated_fp16
        chosen = resolve_precision(spec.precision, hosts.groups, allow_emulated_fp16=emulated)
        if chosen.reason.startswith("emulated"):
            report.reason("precision", chosen.reason, report.loaded.positions["precision"])
        if spec.precision == "auto":
            report.reason("precision", chosen.reason)
            report.note(f"precision {chosen.value}: {chosen.reason}")
        for note in chosen.notes:
            report.warn("precision", note)
        if chosen.value == "fp16" and facts.model_dtype == "bfloat16":
            report.warn(
                "precision",
                "the model's weights are bfloat16: in fp16 what is above 65504 becomes inf;"
                " watch the loss scale, or train on devices that compute in bf16",
            )
        return chosen.value
    return None


def _fp16(spec: EngineSpec, precision: Precision, report: Report) -> Fp16Plan | None:
    if precision != "fp16":
        report.reason("fp16", f"not used with precision {precision}")
        if report.given("fp16"):
            report.warn("fp16", f"{report.loaded.where('fp16')}fp16 is not used: precision is {precision}")
        return None
    part = gradscaler_settings(spec.fp16, report) if uses_torch(spec) else spec.fp16
    _explain_fp16(part, report, gradscaler=uses_torch(spec))
    if part.loss_scale != "dynamic":
        _fail_dynamic_keys(part.loss_scale, report)
    elif part.min_loss_scale > 2**part.initial_scale_power:
        key, start = "fp16.min_loss_scale", 2**part.initial_scale_power
        report.fail(
            key if report.given(key) else "fp16.initial_scale_power",
            f"{key} {part.min_loss_scale} is above the first scale, 2^{part.initial_scale_power} = {start}",
            f"set {key} to at most {start}, or raise fp16.initial_scale_power",
        )
    return Fp16Plan(**dict(part))


def _fail_dynamic_keys(scale: float, report: Report) -> None:
    """A static scale never moves, so what was written of its course means something else than it does."""
    for key in Fp16Spec.model_fields:
        name = f"fp16.{key}"
        if key != "loss_scale" and report.given(name):
            message = f"{name} is for a dynamic scale, and fp16.loss_scale is {scale:g}, which never moves"
            report.fail(name, message, f"remove {key}, or write loss_scale: dynamic")


def _explain_fp16(part: Fp16Spec, report: Report, *, gradscaler: bool) -> None:
    values = dict(part)
    if values["loss_scale"] == "dynamic":
        values["loss_scale"] = 0
    found = gradscaler_in_words(part) if gradscaler else settings_in_words(LossScaleRule(**values))
    for key, words in found.items():
        name = f"fp16.{key}"
        source = report.loaded.positions[name] if report.given(name) else "default"
        report.reason(name, words, source)


def check_for_own_script(engine: EnginePlan, report: Report) -> None:
    """Record what DeepSpeed itself gets wrong and our worker does not: for JSON that is printed."""
    if engine.precision == "fp16" and engine.zero_stage == 0:
        report.fail(
            "zero_optimization.stage",
            "fp16 at zero_optimization.stage 0: DeepSpeed 0.19.8 divides the gradients by a scale that"
            " it never multiplied the loss by",
            "use stage: 1 (--zero-stage 1), which computes the same; `dslaunch launch` may keep stage 0,"
            " which its worker runs as stage 1",
        )
    check_json_says_it_all(
        engine.optimizer,
        zero_stage=engine.zero_stage,
        precision=engine.precision,
        clipping=engine.gradient_clipping,
        report=report,
    )


def _note_stage_0(precision: Precision, own_worker: bool, report: Report) -> None:
    """Our worker cures these; a script that gets the JSON from gen-config does not."""
    if precision == "fp32":
        return
    does = {
        "fp16": "does not scale the loss there and takes a step on zero gradients at the start",
        "bf16": "takes an optimizer step on zero gradients there at the start",
    }[precision]
    say = partial(report.warn, "zero_optimization.stage") if precision == "fp16" else report.note
    say(
        f"{precision} at ZeRO stage 0: DeepSpeed 0.19.8 itself {does};"
        + (" dslaunch's worker runs it as stage 1;" if own_worker else "")
        + " in a training script of your own use stage 1, which computes the same"
    )


def _grad_accum_dtype(stage: int, precision: Precision, batch: BatchPlan) -> str | None:
    """bf16 has 8 bits of mantissa: sums of several micro-batches are kept in fp32.

    DeepSpeed raises NotImplementedError for it at stage 0.
    """
    several = batch.gradient_accumulation_steps > 1
    return "fp32" if precision == "bf16" and several and stage > 0 else None
