"""Keys that DeepSpeed 0.19.8 reads, with their types. Most others it ignores without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = """
activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
compile csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel tensorboard
timers torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
vocabulary_size wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer zero_optimization
"""

TOP_LEVEL_KEYS = frozenset(_NAMES.split())


Types = Mapping[str, Any]


def _typed(kind: type, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_OFFLOAD = _typed(str, "device nvme_path") | _typed(int, "buffer_count") | _typed(bool, "pin_memory")

# Key -> its type, `dict` for a section that is not looked into, or the types of a section all of
# whose keys are known. runtime/zero/config.py, runtime/zero/offload_config.py:
ZERO_TYPES: Types = {
    **_typed(
        bool,
        "allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint"
        " enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights"
        " log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply"
        " parameter_alignment pipeline_loading_checkpoint reduce_scatter round_robin_gradients"
        " save_muon_momentum_buffer_in_memory stage3_allgather_sequential"
        " stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params"
        " use_multi_rank_bucket_allreduce zero_quantized_gradients zero_quantized_nontrainable_weights"
        " zero_quantized_weights",
    ),
    **_typed(
        int,
        "allgather_bucket_size reduce_bucket_size stage stage3_max_live_parameters"
        " stage3_max_reuse_distance stage3_model_persistence_threshold"
        " stage3_module_granularity_threshold stage3_param_persistence_threshold"
        " stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size",
    ),
    **_typed(dict, "leaf_module zenflow"),
    "offload_param": {**_OFFLOAD, **_typed(int, "buffer_size max_in_cpu")},
    "offload_optimizer": {
        **_OFFLOAD,
        **_typed(bool, "fast_init pipeline_read pipeline_write super_offload"),
        **_typed(float, "cpuadam_cores_perc ratio"),
    },
}

# Only what is listed is checked; DeepSpeed takes `"false"` in most of these for true.
TOP_LEVEL_TYPES: Types = {
    **_typed(
        bool,
        "dataloader_drop_last disable_allgather disable_python_gc dump_state memory_breakdown"
        " prescale_gradients use_data_before_expert_parallelism wall_clock_breakdown"
        " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
    **_typed(int, "sequence_parallel_size steps_per_print vocabulary_size"),
    "zero_optimization": ZERO_TYPES,
    # profiling/config.py
    "flops_profiler": {
        **_typed(bool, "detailed enabled"),
        **_typed(int, "module_depth profile_step top_modules"),
        **_typed(float, "recompute_fwd_factor"),
        **_typed(str, "output_file"),
    },
    # runtime/activation_checkpointing/config.py
    "activation_checkpointing": {
        **_typed(
            bool,
            "contiguous_memory_optimization cpu_checkpointing partition_activations profile"
            " synchronize_checkpoint_boundary",
        ),
        **_typed(int, "number_checkpoints"),
    },
}

# Old names that DeepSpeed still reads, with a warning -> what they are called now.
OLD_ZERO_KEYS = {
    "cpu_offload": "offload_optimizer: {device: cpu}",
    "cpu_offload_param": "offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "pin_memory of offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
