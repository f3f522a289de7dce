"""RunPlan, or a DeepSpeed config with flags, -> Setup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dslaunch.config.memory.adapter import adapter_tensors
from dslaunch.config.memory.setup import Attention, Method, OptimizerCost, Setup, ZeroOptions, frozen_tensors
from dslaunch.config.memory.tensors import ModelFacts
from dslaunch.core.plan import BatchPlan, Precision, RunPlan

_ATTENTION: dict[str, Attention] = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash"}


@dataclass(frozen=True)
class Training:
    """What a DeepSpeed config does not say of a training script."""

    method: Method = "full"
    lora_r: int = 16
    max_length: int = 1024
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"


def setup_of_run(plan: RunPlan, facts: ModelFacts) -> Setup:
    """The setup of a run by dslaunch's own worker, which runs 16-bit stage 0 as stage 1 (docs/upstream.md).

    Raises ConfigError where the adapter matches no layer.
    """
    adapter, e = plan.adapter, 4 if plan.precision == "fp32" else 2
    trainable = facts.tensors
    if adapter is not None:
        trainable = adapter_tensors(
            facts,
            r=adapter.r,
            target_modules=adapter.target_modules,
            dora=adapter.type == "dora",
            modules_to_save=adapter.modules_to_save,
        )
    stage_0_as_1 = plan.zero_stage == 0 and e == 2
    several = plan.batch.gradient_accumulation_steps > 1
    return Setup(
        model=facts,
        trainable=trainable,
        frozen=() if adapter is None else frozen_tensors(facts, bytes_each=e),
        method="full" if adapter is None else "lora",
        precision=plan.precision,
        zero_stage=1 if stage_0_as_1 else plan.zero_stage,
        zero=zero_options(plan.ds_config),
        world_size=plan.batch.world_size,
        ranks_per_host=max(len(host.slots) for host in plan.launch.topology.hosts),
        micro_batch=plan.batch.train_micro_batch_size_per_gpu,
        accumulation=plan.batch.gradient_accumulation_steps,
        max_length=plan.data.max_length,
        grad_accum_fp32=accumulates_in_fp32(plan.ds_config)
        or (stage_0_as_1 and several and plan.precision == "bf16"),
        gradient_checkpointing=plan.model.gradient_checkpointing,
        attention=_ATTENTION[plan.model.attn_implementation],
        mask=plan.data.packing or plan.batch.train_micro_batch_size_per_gpu > 1,
        lora_r=adapter.r if adapter else 0,
        lora_dropout=adapter.lora_dropout if adapter else 0.0,
        optimizer=optimizer_cost(plan.ds_config, plan.launch.device_type),
        device_type=plan.launch.device_type,
        loss="dslaunch",
        exclude_frozen=adapter is not None,
    )


def setup_of_config(
    config: Mapping[str, Any],
    facts: ModelFacts,
    training: Training,
    *,
    precision: Precision,
    batch: BatchPlan,
    ranks_per_host: int,
    device_type: Literal["cpu", "cuda"],
) -> Setup:
    """The setup of somebody's own script that runs under the DeepSpeed config ``config``."""
    full, e = training.method == "full", 4 if precision == "fp32" else 2
    quantised = training.method == "qlora"
    return Setup(
        model=facts,
        trainable=facts.tensors if full else adapter_tensors(facts, r=training.lora_r),
        frozen=() if full else frozen_tensors(facts, bytes_each=e, quantised=quantised),
        method=training.method,
        precision=precision,
        zero_stage=config["zero_optimization"]["stage"],
        zero=zero_options(config),
        world_size=batch.world_size,
        ranks_per_host=ranks_per_host,
        micro_batch=batch.train_micro_batch_size_per_gpu,
        accumulation=batch.gradient_accumulation_steps,
        max_length=training.max_length,
        grad_accum_fp32=accumulates_in_fp32(config),
        gradient_checkpointing=training.gradient_checkpointing,
        attention=training.attention,
        mask=batch.train_micro_batch_size_per_gpu > 1,
        lora_r=0 if full else training.lora_r,
        optimizer=optimizer_cost(config, device_type),
        device_type=device_type,
        exclude_frozen=not full,
    )


def zero_options(config: Mapping[str, Any]) -> ZeroOptions:
    """The ``zero_optimization`` block of a DeepSpeed config with DeepSpeed's own defaults filled in."""
    block = config.get("zero_optimization") or {}
    sizes = (
        "reduce_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_reuse_distance",
    )
    given: dict[str, Any] = {key: int(block[key]) for key in sizes if block.get(key) is not None}
    for part in ("offload_optimizer", "offload_param"):
        device = (block.get(part) or {}).get("device", "none")
        given[part] = None if device == "none" else device
    return ZeroOptions(overlap_comm=bool(block.get("overlap_comm")), **given)


def accumulates_in_fp32(config: Mapping[str, Any]) -> bool:
    """Whether data_types.grad_accum_dtype asks for fp32."""
    return (config.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32")


def optimizer_cost(config: Mapping[str, Any], device_type: str) -> OptimizerCost:
    """What the optimizer of a DeepSpeed config keeps and needs in passing, for each trained element."""
    block = config.get("optimizer") or {}
    params = block.get("params") or {}
    if block.get("type") == "SGD":
        return OptimizerCost(state=4 if params.get("momentum") else 0, temporary=4)
    if block.get("type") == "Lion":
        return OptimizerCost(state=4, temporary=0, fused=True)
    if params.get("torch_adam"):
        # One flat tensor on a CPU: two temporaries of its size; on a GPU the foreach kernels need one.
        return OptimizerCost(state=8, temporary=8 if device_type == "cpu" else 4)
    return OptimizerCost(state=8, temporary=0, fused=True)
