"""model.quantization_config: resolved, and what of it cannot work with adapter, stage, precision and device.

Each refusal was measured with DeepSpeed 0.19.8, peft 0.21.2 and bitsandbytes 0.50.2 on two ranks
(docs/adapters.md); tests/train/test_quantization.py runs the same cells and fails when one is mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from dslaunch.config.engine_plan import EnginePlan
from dslaunch.config.facts import Facts
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import QuantizationSpec
from dslaunch.core.plan import Precision, QuantizationPlan
from dslaunch.core.quantised_model import plan_on_disk, undeclared

KEY = "model.quantization_config"
STAGE = "zero_optimization.stage"
_TORCH_NAMES: dict[Precision, Literal["bfloat16", "float16", "float32"]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}
_ONLY_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")
_ONLY_8BIT = ("llm_int8_threshold",)


class Refusal(NamedTuple):
    """What cannot be, by run-file key, why, and what to do."""

    key: str
    why: str
    hint: str


def resolve_quantization(
    spec: QuantizationSpec | None,
    on_disk: Mapping[str, Any] | None,
    *,
    zero_stage: int,
    precision: Precision,
    report: Report,
) -> QuantizationPlan | None:
    """The plan of the section; None without it, or where a problem that went to ``report`` forbids it.

    ``on_disk``: the block of the model's own config.json, where its weights are quantised already.
    """
    if spec is None:
        if on_disk is not None:
            with report.catching("model.path"):
                raise undeclared(plan_on_disk(on_disk), "model.path")
        return None
    if spec.load_in_4bit == spec.load_in_8bit:
        said = "both are" if spec.load_in_4bit else "neither is"
        message = f"{KEY}: of load_in_4bit and load_in_8bit {said} true"
        report.fail(KEY, message, "write one: load_in_4bit: true, or load_in_8bit: true")
        return None
    for name in _ONLY_8BIT if spec.load_in_4bit else _ONLY_4BIT:
        if getattr(spec, name) is not None:
            message = f"{KEY}.{name} has no effect on {4 if spec.load_in_4bit else 8}-bit weights"
            report.fail(f"{KEY}.{name}", message, f"remove {name}")
    values: dict[str, Any] = {k: v for k, v in dict(spec).items() if v is not None}
    if on_disk is not None:
        return _as_on_disk(values, on_disk, report)
    if spec.load_in_4bit and spec.bnb_4bit_quant_storage is None:
        storage = _TORCH_NAMES[precision] if zero_stage == 3 else "uint8"
        values["bnb_4bit_quant_storage"] = storage
        why = f"partitioned with the other {precision} weights" if zero_stage == 3 else "as they are packed"
        report.reason(f"{KEY}.bnb_4bit_quant_storage", why)
    return QuantizationPlan(**values)


def refusals(
    quantization: QuantizationPlan,
    adapter: Literal["lora", "dora"] | None,
    *,
    zero_stage: int,
    precision: Precision,
    device_type: str,
) -> Iterator[Refusal]:
    """Everything that keeps these from working together; ``adapter`` None trains the whole model."""
    bits = 4 if quantization.load_in_4bit else 8
    if adapter is None:
        why = f"{KEY}: {bits}-bit weights cannot be trained themselves, and there is no adapter section"
        yield Refusal(
            KEY, why, "add `adapter: {type: lora}` to train an adapter on them, or remove the section"
        )
        return
    if zero_stage == 3 and bits == 8:
        yield Refusal(
            STAGE,
            f"{STAGE} 3 with 8-bit weights: bitsandbytes keeps a whole copy of each on every rank beside"
            " the share that ZeRO makes of it, so it takes more memory than stage 2",
            "use stage 2 (the same training), or load_in_4bit",
        )
    elif zero_stage == 3 and adapter == "dora":
        yield Refusal(
            STAGE,
            f"{STAGE} 3 with adapter.type dora on 4-bit weights: peft reads the weight outside of the layer"
            " that ZeRO gathers it for, and DeepSpeed stops (no attribute 'ds_status')",
            "use stage 2, or adapter.type lora",
        )
    if adapter == "dora" and bits == 8 and device_type == "cpu":
        yield Refusal(
            "adapter.type",
            "adapter.type dora on 8-bit weights on a CPU: peft loses the weights' scales in the first step",
            "use adapter.type lora, or load_in_4bit",
        )
    yield from _storage(quantization, precision)


def _storage(quantization: QuantizationPlan, precision: Precision) -> Iterator[Refusal]:
    """DeepSpeed casts every floating tensor to bf16 or fp16; in fp32 it casts nothing."""
    storage = quantization.bnb_4bit_quant_storage
    if precision == "fp32" or not quantization.load_in_4bit or storage in ("uint8", _TORCH_NAMES[precision]):
        return
    yield Refusal(
        f"{KEY}.bnb_4bit_quant_storage",
        f"{KEY}.bnb_4bit_quant_storage {storage} with precision {precision}: DeepSpeed would cast the packed"
        f" bits as if they were numbers, and the weights be noise",
        f"leave it out, or use {_TORCH_NAMES[precision]} or uint8",
    )


def settle_quantization(
    report: Report, facts: Facts, engine: EnginePlan, hosts: ResolvedHosts
) -> QuantizationPlan | None:
    """The plan of a run file's section; every refusal goes to ``report`` at the line of its key."""
    spec: RunSpec = report.loaded.spec
    plan = resolve_quantization(
        spec.model.quantization_config,
        facts.model_quantization,
        zero_stage=engine.zero_stage,
        precision=engine.precision,
        report=report,
    )
    for refusal in (
        ()
        if plan is None
        else refusals(
            plan,
            spec.adapter.type if spec.adapter else None,
            zero_stage=engine.zero_stage,
            precision=engine.precision,
            device_type=hosts.device_type,
        )
    ):
        report.fail(refusal.key, refusal.why, refusal.hint)
    return plan


def assumed_quantization(spec: QuantizationSpec | None) -> QuantizationPlan | None:
    """What a section that need not be right comes to, for the memory plan; None where it says too little."""
    if spec is None or spec.load_in_4bit == spec.load_in_8bit:
        return None
    return QuantizationPlan(**{key: value for key, value in dict(spec).items() if value is not None})


def fits_stage(spec: QuantizationSpec | None, adapter: Literal["lora", "dora"] | None, stage: int) -> bool:
    """Whether ``zero_optimization.stage: auto`` may try this stage."""
    plan = assumed_quantization(spec)
    if plan is None or adapter is None:
        return True  # what else is wrong is said when the plan is resolved
    found = refusals(plan, adapter, zero_stage=stage, precision="fp32", device_type="cuda")
    return not any(refusal.key == STAGE for refusal in found)


def _as_on_disk(
    values: dict[str, Any], on_disk: Mapping[str, Any], report: Report
) -> QuantizationPlan | None:
    """The quantisation that the weights on disk have; what was written must not differ from it."""
    with report.catching(KEY):
        there = plan_on_disk(on_disk)
        for name, value in values.items():
            found = getattr(there, name)
            if value != found and report.given(f"{KEY}.{name}"):
                message = f"{KEY}.{name} {value}: the model's weights are quantised already, with {found}"
                report.fail(
                    f"{KEY}.{name}", message, f"remove {name}, or take the model that is not quantised"
                )
        report.reason(KEY, "as the model's weights are on disk")
        return there
    return None
