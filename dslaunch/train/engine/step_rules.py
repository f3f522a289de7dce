"""What both engines hold a step to, and what they call it."""

from __future__ import annotations

from dslaunch.core.errors import ConfigError, Diverged
from dslaunch.train.engine.result import SkipReason


class Turns:
    """F24: under ZeRO there is one backward for each step; anything else is refused, since it is wrong.

    DeepSpeed drops or overwrites what an earlier backward of the same micro-batch gave. A step that none
    came before ends there as a TypeError or a KeyError, and with ``offload_optimizer`` in silence: with the
    gradients of the step before.
    """

    def __init__(self) -> None:
        self._went_backward = False

    def backward(self) -> None:
        """A backward begins. Raises ConfigError for the second one of a micro-batch."""
        if self._went_backward:
            raise ConfigError(
                "backward was called twice without a step between: DeepSpeed loses gradients of the first",
                hint="add the losses up and call backward once; or call step after each backward, and count "
                "them in gradient_accumulation_steps",
            )
        self._went_backward = True

    def step(self) -> None:
        """A step begins. Raises ConfigError where no backward came before it."""
        if not self._went_backward:
            raise ConfigError(
                "step was called without a backward before it",
                hint="call backward once in each micro-batch; where there is nothing to learn from, of "
                "(output * 0).sum(): it makes every gradient a zero (output.sum() * 0 may be nan in fp16)",
            )
        self._went_backward = False


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
