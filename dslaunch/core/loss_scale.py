"""How the fp16 loss scale moves: the rule alone, without tensors.

Source: DeepSpeed 0.19.8 ``runtime/fp16/loss_scaler.py``, ``DynamicLossScaler.update_scale``
(ZeRO stages 1-3). Stage 0 has a rule of its own: no hysteresis, and no error at the floor
(``raises_at_floor=False`` with hysteresis 1).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScaleRule:
    """The settings, named as in the ``fp16`` section of a DeepSpeed config.

    ``loss_scale`` 0 means dynamic; another number is static and never moves.
    """

    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1
    raises_at_floor: bool = True

    @property
    def dynamic(self) -> bool:
        return self.loss_scale == 0

    def start(self) -> LossScaleState:
        """The state before the first step."""
        scale = 2.0**self.initial_scale_power if self.dynamic else float(self.loss_scale)
        return LossScaleState(scale, hysteresis_left=self.hysteresis)


def settings_in_words(rule: LossScaleRule) -> dict[str, str]:
    """What each setting of the ``fp16`` section does; of a static scale there is only ``loss_scale``."""
    if not rule.dynamic:
        text = (
            f"static scale {rule.loss_scale:g}: each loss is multiplied by it; overflows only skip their step"
        )
        return {"loss_scale": text}
    window, power = rule.loss_scale_window, rule.initial_scale_power
    quiet = "every step" if window == 1 else f"{window} steps"
    refill = "at every good step" if rule.consecutive_hysteresis else "only when the scale doubles"
    return {
        "loss_scale": "dynamic: halved on overflow, doubled after a quiet window",
        "initial_scale_power": f"starts at 2^{power} = {2.0**power:.15g}",
        "loss_scale_window": f"doubles after {quiet} without overflow (the first time after {window + 1})",
        "hysteresis": _hysteresis_in_words(rule.hysteresis),
        "consecutive_hysteresis": f"the hysteresis is refilled {refill}",
        "min_loss_scale": f"an overflow at scale {rule.min_loss_scale:g} stops the run at ZeRO stages 1-3",
    }


def _hysteresis_in_words(hysteresis: int) -> str:
    if hysteresis == 1:
        return "every overflow skips its step and halves the scale"
    spared = hysteresis - 1
    overflows = "overflow only skips its" if spared == 1 else f"{spared} overflows only skip their"
    return f"the first {overflows} step, later ones halve the scale too"


@dataclass(frozen=True)
class LossScaleState:
    """``scale``: what the next loss is multiplied by. ``step`` counts from 0."""

    scale: float
    hysteresis_left: int
    step: int = 0
    last_overflow: int = -1


@dataclass(frozen=True)
class LossScaleStep:
    """One step: the scale it ran with, whether it overflowed (and was skipped), and what came of it.

    ``event``: "" (nothing), "halved", "hysteresis", "doubled", "floor" (it stays there), "skipped" (the
    scale is static), "stopped" (DeepSpeed raises at the floor).
    """

    step: int
    scale: float
    overflow: bool
    event: str
    next_scale: float
    hysteresis_left: int


def next_state(rule: LossScaleRule, state: LossScaleState, overflow: bool) -> tuple[LossScaleState, str]:
    """The state after one step and what happened. "stopped" leaves the state: DeepSpeed raises there."""
    if not rule.dynamic:
        return replace(state, step=state.step + 1), "skipped" if overflow else ""
    if overflow:
        return _after_overflow(rule, state)
    left = rule.hysteresis if rule.consecutive_hysteresis else state.hysteresis_left
    quiet = state.step - state.last_overflow - 1
    grows = quiet > 0 and quiet % rule.loss_scale_window == 0
    if grows and not rule.consecutive_hysteresis:
        left = rule.hysteresis
    scale = state.scale * 2 if grows else state.scale
    return replace(state, scale=scale, hysteresis_left=left, step=state.step + 1), "doubled" if grows else ""


def growths_within(rule: LossScaleRule, good_steps: int) -> int:
    """How often the scale doubles in ``good_steps`` steps without overflow, from the start or an overflow."""
    return max(0, good_steps - 1) // rule.loss_scale_window if rule.dynamic else 0


def simulate_loss_scale(
    rule: LossScaleRule, *, steps: int, overflow_at: Collection[int]
) -> list[LossScaleStep]:
    """The course over ``steps`` steps (counted from 1) with overflows at the given ones.

    Ends early at the step in which DeepSpeed would stop: an overflow at the floor.
    """
    state, course = rule.start(), []
    for number in range(1, steps + 1):
        overflow = number in overflow_at
        after, event = next_state(rule, state, overflow)
        course.append(LossScaleStep(number, state.scale, overflow, event, after.scale, after.hysteresis_left))
        if event == "stopped":
            break
        state = after
    return course


def _after_overflow(rule: LossScaleRule, state: LossScaleState) -> tuple[LossScaleState, str]:
    if rule.hysteresis == 1 or state.hysteresis_left == 1:
        if state.scale == rule.min_loss_scale and rule.raises_at_floor:
            return state, "stopped"
        scale, left = max(state.scale / 2, float(rule.min_loss_scale)), state.hysteresis_left
        event = "halved" if scale < state.scale else "floor"
    else:
        scale, left, event = state.scale, state.hysteresis_left - 1, "hysteresis"
    after = replace(state, scale=scale, hysteresis_left=left, last_overflow=state.step, step=state.step + 1)
    return after, event
