"""Optimizers and schedules that a DeepSpeed config can name, with the arguments of each.

They are the constructors' own parameters (an unknown one is a TypeError at start), held
against the installed DeepSpeed and torch by tests/config/test_key_table.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Optimizer:
    """``tested``: ZeRO takes it without zero_allow_untested_optimizer. ``elementwise``: ZeRO's flat
    shards do not change its meaning."""

    name: str
    params: frozenset[str]
    tested: bool = False
    elementwise: bool = True
    from_torch: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _of(name: str, params: str, **facts: bool) -> Optimizer:
    return Optimizer(name, _words(params), **facts)


_ADAM = (
    "lr bias_correction betas eps weight_decay amsgrad adam_w_mode torch_adam fp32_optimizer_states"
    " set_grad_none foreach maximize capturable differentiable fused"
)
_POPPED = "torch_adam adam_w_mode fp32_optimizer_states"
_TORCH = "lr weight_decay foreach maximize differentiable capturable"
_OWN = (
    _of("Adam", _ADAM, tested=True),
    _of("AdamW", _ADAM, tested=True),
    _of(
        "Adagrad",
        "lr lr_decay eps weight_decay amsgrad fp32_optimizer_states initial_accumulator_value foreach"
        " maximize differentiable fused",
        tested=True,
    ),
    _of(
        "Lamb",
        "lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff amsgrad",
        elementwise=False,
    ),
    _of("Lion", "lr betas weight_decay set_grad_none fp32_optimizer_states", tested=True),
    _of(
        "Muon",
        "lr betas eps weight_decay momentum ns_method muon_lr adam_lr adam_w_mode torch_adam"
        " fp32_optimizer_states foreach",
        tested=True,
        elementwise=False,
    ),
    _of("MuAdam", "lr betas eps weight_decay amsgrad"),
    _of("MuAdamW", "lr betas eps weight_decay amsgrad"),
    _of("MuSGD", "lr momentum dampening weight_decay nesterov"),
)
_FROM_TORCH = (
    _of(
        "SGD",
        "lr weight_decay foreach maximize differentiable momentum dampening nesterov fused",
        from_torch=True,
    ),
    _of("NAdam", f"{_TORCH} betas eps momentum_decay decoupled_weight_decay", from_torch=True),
    _of("RAdam", f"{_TORCH} betas eps decoupled_weight_decay", from_torch=True),
    _of("Adamax", f"{_TORCH} betas eps", from_torch=True),
    _of("Adadelta", f"{_TORCH} rho eps", from_torch=True),
    _of("RMSprop", f"{_TORCH} alpha eps momentum centered", from_torch=True),
    _of("Rprop", "lr etas step_sizes foreach maximize differentiable capturable", from_torch=True),
    _of("ASGD", f"{_TORCH} lambd alpha t0", from_torch=True),
    _of(
        "Adafactor",
        "lr beta2_decay eps d weight_decay foreach maximize",
        elementwise=False,
        from_torch=True,
    ),
)
# DeepSpeed's own are found in any spelling of case, torch's only in the exact one.
OPTIMIZERS: Mapping[str, Optimizer] = {
    **{optimizer.name.lower(): optimizer for optimizer in _OWN},
    **{optimizer.name: optimizer for optimizer in _FROM_TORCH},
}
# What DeepSpeed makes of a name: by `torch_adam`, by offload_optimizer (cpu), else its own kernels (fused).
Variant = Literal["fused", "cpu", "torch"]
_ADAM_VARIANTS: Mapping[Variant, frozenset[str]] = {  # with what DeepSpeed takes out before it calls them
    "torch": _words(
        f"{_POPPED} lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused"
    ),
    "cpu": _words(f"{_POPPED} lr bias_correction betas eps weight_decay amsgrad"),
    "fused": _words(f"{_POPPED} lr bias_correction betas eps weight_decay amsgrad set_grad_none"),
}
VARIANTS: Mapping[str, Mapping[Variant, frozenset[str]]] = {
    "Adam": _ADAM_VARIANTS,
    "AdamW": _ADAM_VARIANTS,
    "Adagrad": {
        "torch": _words(
            "lr lr_decay weight_decay initial_accumulator_value eps foreach maximize differentiable fused"
        ),
        "cpu": _words("lr eps weight_decay amsgrad fp32_optimizer_states"),
    },
    "Lion": {
        "fused": _words("lr betas weight_decay set_grad_none"),
        "cpu": _words("lr betas weight_decay fp32_optimizer_states"),
    },
}
GONE_OPTIMIZERS = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})

SCHEDULES: Mapping[str, frozenset[str]] = {
    "WarmupLR": frozenset(
        ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"]
    ),
    "WarmupDecayLR": frozenset(
        [
            "total_num_steps",
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "warmup_type",
            "last_batch_iteration",
        ]
    ),
    "WarmupCosineLR": frozenset(
        [
            "total_num_steps",
            "warmup_min_ratio",
            "warmup_num_steps",
            "cos_min_ratio",
            "warmup_type",
            "last_batch_iteration",
        ]
    ),
    "LRRangeTest": frozenset(
        [
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
            "last_batch_iteration",
        ]
    ),
    "OneCycle": frozenset(
        [
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
            "last_batch_iteration",
        ]
    ),
}
# torch's, by the exact name. Those that want a function or other schedules have arguments that no JSON holds.
_CYCLE = "cycle_momentum base_momentum max_momentum last_epoch"
TORCH_SCHEDULES: Mapping[str, frozenset[str]] = {
    "ChainedScheduler": _words("schedulers"),
    "ConstantLR": _words("factor total_iters last_epoch"),
    "CosineAnnealingLR": _words("T_max eta_min last_epoch"),
    "CosineAnnealingWarmRestarts": _words("T_0 T_mult eta_min last_epoch"),
    "CyclicLR": _words(f"base_lr max_lr step_size_up step_size_down mode gamma scale_fn scale_mode {_CYCLE}"),
    "ExponentialLR": _words("gamma last_epoch"),
    "LambdaLR": _words("lr_lambda last_epoch"),
    "LinearLR": _words("start_factor end_factor total_iters last_epoch"),
    "MultiStepLR": _words("milestones gamma last_epoch"),
    "MultiplicativeLR": _words("lr_lambda last_epoch"),
    "OneCycleLR": _words(
        "max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy div_factor final_div_factor"
        f" three_phase {_CYCLE}"
    ),
    "PolynomialLR": _words("total_iters power last_epoch"),
    "ReduceLROnPlateau": _words("mode factor patience threshold threshold_mode cooldown min_lr eps"),
    "SequentialLR": _words("schedulers milestones last_epoch"),
    "StepLR": _words("step_size gamma last_epoch"),
}
NO_JSON = ("lr_lambda", "schedulers", "scale_fn")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "ChainedScheduler": ("schedulers",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "CyclicLR": ("base_lr", "max_lr"),
    "ExponentialLR": ("gamma",),
    "LambdaLR": ("lr_lambda",),
    "MultiStepLR": ("milestones",),
    "MultiplicativeLR": ("lr_lambda",),
    "OneCycleLR": ("max_lr",),
    "SequentialLR": ("schedulers", "milestones"),
    "StepLR": ("step_size",),
}


def find_optimizer(name: str) -> Optimizer | None:
    """The optimizer of a config's ``optimizer.type``; None where there is none of that name."""
    return OPTIMIZERS.get(name.lower()) or OPTIMIZERS.get(name)
