"""A plan's optimizer as torch has it, for the engine without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import OptimizerPlan

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


def build_optimizer_factory(
    plan: OptimizerPlan,
) -> Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]:
    """What ``initialize_torch(optimizer=...)`` takes. Raises ConfigError for a type that torch has not."""
    if plan.type not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer.type {plan.type} does not run with engine torch",
            hint=f"use {', '.join(OPTIMIZERS)}, or engine deepspeed",
        )
    params: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in plan.params.items()
    }

    def build(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[plan.type](parameters, **params)

    return build
