"""The learning rate as a function of the optimizer steps that were really taken."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import SchedulerPlan
from dslaunch.core.training_length import decay_steps, warmup_steps


def lr_lambda(scheduler: SchedulerPlan, total_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate for applied step 0, 1, ... ``total_steps - 1``.

    Warm-up of w steps: 1/w, 2/w, ... 1, so the first step is never taken at rate 0.
    Then ``constant`` stays at 1, for ever; ``linear`` and ``cosine`` start at 1 in the last
    step of the warm-up (step 0 without one) and would be at ``min_lr_ratio`` in step
    ``total_steps``, one after the last: no step is wasted at rate 0. Past the end they
    stay there. ``wsd`` starts to fall so in the last step before its ``decay_steps``.

    Raises ConfigError where ``total_steps`` < 1, or warm-up and decay are longer than that.
    Source of the shapes: transformers.optimization, with its warm-up moved by one step.
    """
    if total_steps < 1:
        raise ConfigError(f"the training has {total_steps} steps; at least one is needed")
    warmup = warmup_steps(scheduler, total_steps)
    is_wsd = scheduler.type == "wsd"
    falling = decay_steps(scheduler, total_steps) if is_wsd else total_steps - warmup
    peak = max(total_steps - falling - 1, 0)
    fall = _FALLS[scheduler.decay_type if is_wsd else scheduler.type]
    low = scheduler.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if step <= peak:
            return 1.0
        return low + (1.0 - low) * fall(min((step - peak) / (total_steps - peak), 1.0))

    return factor


# From 1 to 0 as the argument goes from 0 to 1.
_FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def build_scheduler_factory(scheduler: SchedulerPlan, total_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """What ``initialize(lr_scheduler=...)`` takes: DeepSpeed calls it with its basic optimizer.

    Each parameter group keeps its own base rate; the factor is the same for all.
    DeepSpeed advances the schedule only after a step that was applied.
    """
    factor = lr_lambda(scheduler, total_steps)

    def build(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, factor)

    return build
