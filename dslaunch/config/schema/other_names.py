"""Names that trainers and older tools have -> the DeepSpeed key or argument, for ``check`` and ``explain``.

What a run file of ours calls it is another table: :mod:`dslaunch.config.synonyms`.
"""

from __future__ import annotations

_MICRO = "train_micro_batch_size_per_gpu"

# Of the Hugging Face Trainer, accelerate, axolotl, LLaMA-Factory, Lightning and torch's GradScaler.
OTHER_NAMES: dict[str, str] = {
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "batch_size": "train_batch_size",
    "clip_grad": "gradient_clipping",
    "comms_config": "comms_logger",
    "deepspeed_stage": "zero_optimization.stage",
    "global_batch_size": "train_batch_size",
    "grad_clip": "gradient_clipping",
    "gradient_clip_val": "gradient_clipping",
    "growth_interval": "fp16.loss_scale_window",
    "init_scale": "fp16.initial_scale_power",
    "learning_rate": "optimizer.params.lr",
    "log": "log_level",
    "logging_steps": "steps_per_print",
    "lr": "optimizer.params.lr",
    "lr_scheduler_type": "scheduler.type",
    "max_grad_norm": "gradient_clipping",
    "micro_batch_size": _MICRO,
    "monitor_config": "tensorboard",
    "num_warmup_steps": "scheduler.params.warmup_num_steps",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "optim": "optimizer.type",
    "optimizer_type": "optimizer.type",
    "per_device_train_batch_size": _MICRO,
    "per_gpu_train_batch_size": _MICRO,
    "tensor_parallel_size": "tensor_parallel.autotp_size",
    "tp_size": "tensor_parallel.autotp_size",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "weight_decay": "optimizer.params.weight_decay",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_stage": "zero_optimization.stage",
}
