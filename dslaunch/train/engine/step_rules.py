"""What both engines hold a step to, and what they call it."""

from __future__ import annotations

from dslaunch.core.errors import ConfigError, Diverged
from dslaunch.train.engine.result import SkipReason


def check_num_tokens(step: int, num_tokens: int) -> None:
    """Raises ConfigError for a window without supervised tokens: it has no mean."""
    if num_tokens < 1:
        raise ConfigError(
            f"step {step}: {num_tokens} supervised tokens in the whole batch",
            hint="see that the data has answers to train on and that they are not cut off by max_length",
        )


def skip_reason(precision: str) -> SkipReason:
    """What gradients that are not finite are called."""
    return "overflow" if precision == "fp16" else "non-finite gradient"


def at_minimum_scale(step: int, loss_scale: float) -> Diverged:
    """The error of gradients that no loss scale can save."""
    return Diverged(
        f"step {step}: the gradients overflow fp16 even at the minimum loss scale {loss_scale:g}",
        hint="use bf16 (or fp32) where the device has it, or a lower learning rate",
        verdict="at minimum",
        step=step,
    )
