"""RunPlan, or a DeepSpeed config with flags, -> Setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dslaunch.config.engine_plan import EnginePlan
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.memory.rows import trained_with
from dslaunch.config.memory.setup import (
    Attention,
    Method,
    OptimizerCost,
    Setup,
    Task,
    ZeroOptions,
    adapted,
    frozen_tensors,
    with_value_head,
)
from dslaunch.config.memory.tensors import ModelFacts
from dslaunch.config.memory.wide import with_fp32_modules
from dslaunch.config.nested import leaves
from dslaunch.config.quantization import assumed_quantization, refusals
from dslaunch.config.spec import AdapterSpec, RunSpec
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import (
    AdapterPlan,
    BatchPlan,
    EngineKind,
    OptimizerPlan,
    Precision,
    QuantizationPlan,
    RunPlan,
)
from dslaunch.core.plan import Attention as PlannedAttention
from dslaunch.core.quantised_model import undeclared
from dslaunch.core.topology import Host

# Neither flash nor flex attention keeps scores or a mask of all pairs of tokens.
ATTENTION: dict[PlannedAttention, Attention] = {
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attention_2": "flash",
    "flex_attention": "flash",
}


_QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
# Keys of the config that make less of what is planned, and the value that does.
_SAVING = {
    ("bf16", "bf16_master_weights_and_grads"): True,
    ("bf16", "bf16_optimizer_states"): True,
    ("bf16", "immediate_grad_update"): True,
    ("fp16", "fp16_master_weights_and_grads"): True,
    ("optimizer", "params", "fp32_optimizer_states"): False,
}
_NVME_SIZES = {"buffer_size": "param_buffer_size", "max_in_cpu": "max_in_cpu"}


@dataclass(frozen=True)
class Training:
    """What a DeepSpeed config does not say of a training script."""

    task: Task = "sft"
    precompute_ref_log_probs: bool = False
    method: Method = "full"
    lora_r: int = 16
    max_length: int = 1024
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"


def setup_of_run(plan: RunPlan, facts: ModelFacts) -> Setup:
    """The setup of a run by dslaunch's own worker. Raises ConfigError where the adapter matches no
    layer, or a pattern of fp32_modules no module."""
    return _worker_setup(
        facts,
        plan.ds_config,
        plan.adapter,
        engine=plan.engine,
        optimizer=plan.optimizer,
        zero_stage=plan.zero_stage,
        precision=plan.precision,
        batch=plan.batch,
        hosts=plan.launch.topology.hosts,
        device_type=plan.launch.device_type,
        max_length=plan.data.max_length,
        packing=plan.data.packing,
        gradient_checkpointing=plan.model.gradient_checkpointing,
        attention=ATTENTION[plan.model.attn_implementation],
        fp32_modules=plan.fp32_modules,
        quantization=plan.model.quantization_config,
        new_tokens=len(plan.model.new_tokens),
    )


def setup_of_spec(
    spec: RunSpec,
    engine: EnginePlan,
    hosts: ResolvedHosts,
    config: Mapping[str, Any],
    facts: ModelFacts,
    attention: PlannedAttention,
) -> Setup:
    """The same for a run file of which only the engine and the hosts are resolved."""
    return _worker_setup(
        facts,
        config,
        spec.adapter,
        engine=spec.engine,
        optimizer=engine.optimizer,
        zero_stage=engine.zero_stage,
        precision=engine.precision,
        batch=engine.batch,
        hosts=hosts.topology.hosts,
        device_type=hosts.device_type,
        max_length=spec.data.max_length,
        packing=spec.data.packing,
        gradient_checkpointing=spec.model.gradient_checkpointing is True,
        attention=ATTENTION[attention],
        fp32_modules=spec.fp32_modules,
        quantization=assumed_quantization(spec.model.quantization_config),
        new_tokens=len(spec.model.new_tokens),
    )


def _worker_setup(
    facts: ModelFacts,
    config: Mapping[str, Any],
    adapter: AdapterPlan | AdapterSpec | None,
    *,
    engine: EngineKind,
    optimizer: OptimizerPlan,
    zero_stage: int,
    precision: Precision,
    batch: BatchPlan,
    hosts: Sequence[Host],
    device_type: Literal["cpu", "cuda"],
    max_length: int,
    packing: bool,
    gradient_checkpointing: bool,
    attention: Attention,
    fp32_modules: Sequence[str],
    quantization: QuantizationPlan | None,
    new_tokens: int,
) -> Setup:
    """Our worker runs 16-bit stage 0 as stage 1 (docs/upstream.md).

    With engine torch what is trained is fp32; what an adapter leaves frozen is not.
    """
    if facts.on_disk is not None and quantization is None:  # of a hub id only its cache tells
        raise undeclared(facts.on_disk, "model.path")
    alone = engine == "torch"
    autocast = precision != "fp32" and (alone or uses_autocast(config))
    if alone:
        config = {}
    e = 4 if precision == "fp32" or (autocast and not alone) else 2  # of what is frozen
    trainable = facts.tensors
    if adapter is not None:
        trainable = trained_with(facts, adapter, new_tokens)
    stage_0_as_1 = zero_stage == 0 and e == 2 and not alone
    several = batch.gradient_accumulation_steps > 1
    setup = Setup(
        model=facts,
        trainable=trainable,
        frozen=() if adapter is None else frozen_tensors(facts, bytes_each=e, quantization=quantization),
        method="full" if adapter is None else "qlora" if quantization else "lora",
        engine=engine,
        autocast=autocast,
        precision="fp32" if alone or autocast else precision,
        zero_stage=1 if stage_0_as_1 else zero_stage,
        zero=zero_options(config),
        world_size=batch.world_size,
        ranks_per_host=max(len(host.slots) for host in hosts),
        micro_batch=batch.train_micro_batch_size_per_gpu,
        accumulation=batch.gradient_accumulation_steps,
        max_length=max_length,
        grad_accum_fp32=accumulates_in_fp32(config) or (stage_0_as_1 and several and precision == "bf16"),
        gradient_checkpointing=gradient_checkpointing,
        attention=attention,
        mask=packing or batch.train_micro_batch_size_per_gpu > 1,
        mask_alone=packing,
        lora_r=adapter.r if adapter else 0,
        lora_dropout=adapter.lora_dropout if adapter else 0.0,
        optimizer=cost_of(
            optimizer.type,
            {**optimizer.params, **((config.get("optimizer") or {}).get("params") or {})},
            device_type,
            ours=optimizer.made_by == "dslaunch",
        ),
        device_type=device_type,
        loss="dslaunch",
        exclude_frozen=adapter is not None,
    )
    return with_fp32_modules(setup, fp32_modules)


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
    """The setup of somebody's own script that runs under the DeepSpeed config ``config``.

    Raises ConfigError where weights that are quantised on disk cannot be trained so.
    """
    autocast = uses_autocast(config)
    precision = "fp32" if autocast else precision
    if facts.on_disk is not None:
        stage = config["zero_optimization"]["stage"]
        _check_on_disk(facts.on_disk, training.method, stage, precision, device_type)
    full, e = training.method == "full", 4 if precision == "fp32" else 2
    reward, pairs = training.task == "reward", training.task in ("dpo", "reward")
    model = with_value_head(facts) if reward else facts
    trained, frozen = adapted(model, training.method, r=training.lora_r, bytes_each=e, value_head=reward)
    return Setup(
        model=model,
        trainable=trained,
        frozen=frozen,
        task=training.task,
        value_head=reward,
        precomputed_reference=training.precompute_ref_log_probs,
        method=training.method,
        precision=precision,
        autocast=autocast,
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
        mask=batch.train_micro_batch_size_per_gpu > 1 or pairs,
        mask_alone=pairs,
        lora_r=0 if full else training.lora_r,
        optimizer=optimizer_cost(config, device_type),
        device_type=device_type,
        exclude_frozen=not full,
    )


def _check_on_disk(
    there: QuantizationPlan, method: Method, stage: int, precision: Precision, device_type: str
) -> None:
    """Raises ConfigError for what the worker would refuse as well."""
    if method != "qlora":
        raise ConfigError(
            f"--method {method}: the model's weights are quantised already ({there})",
            hint="--method qlora trains an adapter on them; or take the model that is not quantised",
        )
    for refusal in refusals(there, "lora", zero_stage=stage, precision=precision, device_type=device_type):
        raise ConfigError(refusal.why, hint=refusal.hint)


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
    for part in ("optimizer", "param"):
        offload = block.get(f"offload_{part}") or {}
        device = offload.get("device", "none")
        given[f"offload_{part}"] = None if device == "none" else device
        if device != "none":
            given["pin_memory"] = bool(offload.get("pin_memory", True)) or given.get("pin_memory", False)
        if (count := offload.get("buffer_count")) is not None:
            given[f"{part}_buffer_count"] = int(count)
    if (ratio := (block.get("offload_optimizer") or {}).get("ratio")) is not None:
        given["optimizer_ratio"] = float(ratio)
    written = dict(leaves(config))
    given["overcounted"] = tuple(
        ".".join(path) for path, value in _SAVING.items() if path in written and bool(written[path]) is value
    )
    given |= {key: block.get(key) is True for key in _QUANTISED}
    if (ranks := block.get("zero_hpz_partition_size")) is not None:
        given["hpz_partition_size"] = int(ranks)
    param = block.get("offload_param") or {}
    given |= {ours: int(param[key]) for key, ours in _NVME_SIZES.items() if param.get(key) is not None}
    return ZeroOptions(overlap_comm=bool(block.get("overlap_comm")), **given)


def uses_autocast(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed keeps fp32 weights and computes by autocast."""
    return bool((config.get("torch_autocast") or {}).get("enabled"))


def accumulates_in_fp32(config: Mapping[str, Any]) -> bool:
    """Whether data_types.grad_accum_dtype asks for fp32."""
    return (config.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32")


def optimizer_cost(config: Mapping[str, Any], device_type: str) -> OptimizerCost:
    """What the optimizer of a DeepSpeed config keeps and needs in passing, for each trained element."""
    block = config.get("optimizer") or {}
    return cost_of(str(block.get("type") or "AdamW"), block.get("params") or {}, device_type)


def cost_of(kind: str, params: Mapping[str, Any], device_type: str, *, ours: bool = False) -> OptimizerCost:
    """The same of one optimizer. ``ours``: made by dslaunch's worker, not by DeepSpeed."""
    on_cpu = device_type == "cpu"
    if kind == "SGD":
        changed = params.get("nesterov") or params.get("weight_decay")  # then by a copy of the gradient
        return OptimizerCost(state=4 if params.get("momentum") else 0, temporary=4 if changed else 0)
    if kind == "Lion":
        return (
            OptimizerCost(state=4, temporary=4) if ours else OptimizerCost(state=4, temporary=0, fused=True)
        )
    if kind == "AdEMAMix":
        return OptimizerCost(state=12, temporary=8)
    if kind == "Muon":  # Adam for what is no matrix; a matrix has a momentum, its direction and its update
        return OptimizerCost(
            state=8, temporary=4, matrices=OptimizerCost(state=4, temporary=8, orthogonal=True)
        )
    if kind == "Adafactor":
        return OptimizerCost(state=4, temporary=4, factored=True)
    if kind.endswith("8bit"):
        return OptimizerCost(temporary=20 if on_cpu else 0, eight_bit=True)
    if params.get("torch_adam") or ours:
        # One flat tensor on a CPU: two temporaries of its size; on a GPU the foreach kernels need one.
        state = 12 if params.get("amsgrad") else 8
        return OptimizerCost(state=state, temporary=8 if on_cpu else 4)
    return OptimizerCost(state=8, temporary=0, fused=True)
