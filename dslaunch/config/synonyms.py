"""What users know from other tools -> the key or value here, where the nearest spelling would not find it."""

from __future__ import annotations

from collections.abc import Mapping

# Whole key paths first; a name alone stands for it in any section.
_KEYS = {
    "adapter.alpha": "adapter.lora_alpha",
    "adapter.dropout": "adapter.lora_dropout",
    "adapter.rank": "adapter.r",
    "cluster.gpus": "cluster.num_gpus_per_node",
    "cluster.nodes": "cluster.num_nodes",
    "data.path": "data.train",
    "data.test": "data.eval",
    "data.val": "data.eval",
    "fp16.enabled": "precision",
    "optimizer.name": "optimizer.type",
    "scheduler.name": "scheduler.type",
}
_NAMES = {
    "add_special_tokens": "model.new_tokens",
    "add_tokens": "model.new_tokens",
    "attn_impl": "model.attn_implementation",
    "batch_size": "train_batch_size",
    "betas": "optimizer.params.betas",
    "bf16": "precision",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "double_quantization": "model.quantization_config.bnb_4bit_use_double_quant",
    "ddp_timeout": "launch.ddp_timeout_s",
    "dataset_path": "data.train",
    "dtype": "precision",
    "epoch": "num_train_epochs",
    "epochs": "num_train_epochs",
    "eps": "optimizer.params.eps",
    "eval_dataset": "data.eval",
    "eval_file": "data.eval",
    "grad_clip": "gradient_clipping",
    "learning_rate": "optimizer.lr",
    "load_in_4bit": "model.quantization_config.load_in_4bit",
    "load_in_8bit": "model.quantization_config.load_in_8bit",
    "lora": "adapter",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_target": "adapter.target_modules",
    "loraplus_lr_ratio": "optimizer.loraplus_lr_ratio",
    "lora_target_modules": "adapter.target_modules",
    "lr": "optimizer.lr",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler.type",
    "max_grad_norm": "gradient_clipping",
    "max_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "mixed_precision": "precision",
    "model_max_length": "data.max_length",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "nproc_per_node": "cluster.num_gpus_per_node",
    "new_special_tokens": "model.new_tokens",
    "num_epochs": "num_train_epochs",
    "num_gpus": "cluster.num_gpus_per_node",
    "num_processes": "cluster.num_gpus_per_node",
    "neftune_alpha": "neftune_noise_alpha",
    "noise_alpha": "neftune_noise_alpha",
    "num_decay_steps": "scheduler.decay_steps",
    "num_warmup_steps": "scheduler.warmup_steps",
    "optim": "optimizer.type",
    "output_dir": "output.run_dir",
    "packing": "data.packing",
    "peft_config": "adapter",
    "peft_type": "adapter.type",
    "quantization": "model.quantization_config",
    "quantization_bit": "model.quantization_config.load_in_4bit",
    "quantization_config": "model.quantization_config",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "run_name": "name",
    "seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "torch_dtype": "precision",
    "total_steps": "max_steps",
    "train_dataset": "data.train",
    "train_file": "data.train",
    "train_steps": "max_steps",
    "validation_file": "data.eval",
    "warmup_ratio": "scheduler.warmup_ratio",
    "warmup_steps": "scheduler.warmup_steps",
    "weight_decay": "optimizer.params.weight_decay",
    "zero_stage": "zero_optimization.stage",
}

_FP16, _BF16, _FP32 = "fp16", "bf16", "fp32"
_VALUES: Mapping[str, Mapping[str, str]] = {
    "precision": {
        **dict.fromkeys(("float16", "half", "16", "16-mixed", "f16"), _FP16),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bfloat"), _BF16),
        **dict.fromkeys(("float32", "float", "full", "32", "32-true", "no", "f32"), _FP32),
    },
    "optimizer.type": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "FusedAdam"), "AdamW"),
        **dict.fromkeys(("DeepSpeedCPUAdam", "adamw_apex_fused"), "AdamW"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "Adam8bit"), "AdamW8bit"),
        **dict.fromkeys(("paged_adamw_8bit", "PagedAdam8bit"), "PagedAdamW8bit"),
        **dict.fromkeys(("lion_32bit", "FusedLion", "DeepSpeedCPULion"), "Lion"),
    },
    "scheduler.type": {
        "WarmupDecayLR": "linear",
        "WarmupCosineLR": "cosine",
        "cosine_with_restarts": "cosine",
        "WarmupLR": "constant",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    "model.attn_implementation": dict.fromkeys(
        ("flash", "flash_attn", "fa2", "flash_attention", "flash2"), "flash_attention_2"
    ),
    "data.format": {
        **dict.fromkeys(("chat", "chatml", "openai"), "messages"),
        "sharegpt": "conversations",
        "alpaca": "instruction",
        **dict.fromkeys(("completion", "prompt", "prompt-completion"), "prompt_completion"),
    },
}


# What has no key here, and why.
_REASONS = {
    "bnb_4bit_compute_dtype": "leave it out: quantised weights are computed with in the run's precision",
    "device_map": "leave it out: DeepSpeed places the weights",
    "low_cpu_mem_usage": "leave it out: at zero_optimization.stage 3 weights are loaded in shards anyway",
    "local_rank": "leave it out: each rank finds its own in LOCAL_RANK",
    "use_cpu": "leave it out, and set cluster.gpu to cpu",
    "no_cuda": "leave it out, and set cluster.gpu to cpu",
}


def why_not(path: str) -> str | None:
    """What to do with a name of other tools that has no key here."""
    return _REASONS.get(path.rpartition(".")[2])


def known_key(path: str) -> str | None:
    """The key of the run file that ``path``, unknown here, is elsewhere a name of."""
    return _KEYS.get(path) or _NAMES.get(path.rpartition(".")[2])


def known_value(key: str, value: str) -> str | None:
    """The value of ``key`` (``data.train[0].format`` counts as ``data.format``) that ``value`` means."""
    if key.startswith("data.") and key.endswith(".format"):
        key = "data.format"
    return {name.lower(): meant for name, meant in _VALUES.get(key, {}).items()}.get(value.lower())
