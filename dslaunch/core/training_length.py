"""How many optimizer steps a training has, and how many of them warm the learning rate up."""

from __future__ import annotations

import math
from fractions import Fraction

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import SchedulerPlan


def stream_length(
    num_units: int, train_batch_size: int, num_train_epochs: float | None, max_steps: int | None
) -> int:
    """Rows (samples, or packs of them) that are trained on, from exactly one of the last two.

    Raises ConfigError where there are none.
    """
    if num_units < 1:
        raise ConfigError("there is no sample to train on", hint="check data.train")
    if (num_train_epochs is None) == (max_steps is None):
        raise ConfigError("set exactly one of num_train_epochs and max_steps")
    if max_steps is not None:
        if max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}; it must be at least 1")
        return max_steps * train_batch_size
    assert num_train_epochs is not None
    if not (math.isfinite(num_train_epochs) and num_train_epochs > 0):
        raise ConfigError(f"num_train_epochs is {num_train_epochs}; it must be a positive number")
    # Through the decimal text: as floats, 1.1 epochs of 50 units are 55.00000000000001 units, so 56.
    return math.ceil(Fraction(repr(float(num_train_epochs))) * num_units)


def total_steps(
    num_units: int, train_batch_size: int, num_train_epochs: float | None, max_steps: int | None
) -> int:
    """Steps of ``train_batch_size`` rows, at least 1: the last one may be short, none is dropped."""
    return -(-stream_length(num_units, train_batch_size, num_train_epochs, max_steps) // train_batch_size)


def warmup_steps(scheduler: SchedulerPlan, total: int) -> int:
    """The number of warm-up steps, from ``warmup_steps`` or ``warmup_ratio`` (rounded up).

    Raises ConfigError where the warm-up is longer than the training.
    """
    steps = _count(scheduler.warmup_steps, scheduler.warmup_ratio, total)
    if steps > total:
        raise ConfigError(
            f"scheduler.warmup_steps {steps} is more than the {total} steps of the training",
            hint=f"use at most {total}, or set scheduler.warmup_ratio instead",
        )
    return steps


def decay_steps(scheduler: SchedulerPlan, total: int) -> int:
    """The number of steps in which the rate of type wsd falls, from ``decay_steps`` or ``decay_ratio``.

    Raises ConfigError where warm-up and decay together are longer than the training.
    """
    warmup, steps = (
        warmup_steps(scheduler, total),
        _count(scheduler.decay_steps, scheduler.decay_ratio, total),
    )
    if warmup + steps > total:
        raise ConfigError(
            f"scheduler: {warmup} steps of warm-up and {steps} of decay are more than the {total} steps"
            " of the training",
            hint=f"use a shorter warm-up, or at most {total - warmup} decay_steps",
        )
    return steps


def _count(steps: int | None, ratio: float | None, total: int) -> int:
    return steps if steps is not None else math.ceil((ratio or 0.0) * total)
