"""The course of a loss scale in text: what happened when, and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslaunch.core.loss_scale import LossScaleRule, LossScaleStep

_EVENTS = {
    "hysteresis": "overflow, step skipped; hysteresis goes down to {left}, the scale stays",
    "halved": "overflow, step skipped; the scale is halved to {scale}",
    "floor": "overflow, step skipped; the scale is at its floor",
    "skipped": "overflow, step skipped; a static scale does not move",
    "stopped": "overflow at min_loss_scale: DeepSpeed stops the run here",
    "doubled": "no overflow for a whole window: the scale is doubled to {scale}",
}
WIDTH = 76
_TOO_LARGE = 1024  # 2 to this power is no float any more


def rule_lines(rule: LossScaleRule) -> list[str]:
    """The settings in words."""
    from dslaunch.core.loss_scale import settings_in_words

    words = settings_in_words(rule)
    if not rule.dynamic:
        return [words["loss_scale"]]
    lines = [words["initial_scale_power"], words["loss_scale_window"]]
    if rule.hysteresis == 1:
        lines.append(words["hysteresis"])
    else:
        lines.append(
            f"hysteresis {rule.hysteresis}: {words['hysteresis']}; {words['consecutive_hysteresis']}"
        )
    return [*lines, f"{words['min_loss_scale']} (min_loss_scale)"]


def event_lines(course: Sequence[LossScaleStep]) -> list[str]:
    """One line for each step in which something happened."""
    lines = []
    for step in course:
        if step.event:
            text = _EVENTS[step.event].format(scale=_shown(step.next_scale), left=step.hysteresis_left)
            lines.append(f"step {step.step:>5}  scale {_shown(step.scale):<10}  {text}")
    return lines


def _shown(scale: float) -> str:
    return f"{scale:.0f}" if 1 <= scale < 1e10 and scale == int(scale) else f"{scale:g}"


def plot_lines(course: Sequence[LossScaleStep]) -> list[str]:
    """The scale over the steps, one line a power of two, ``x`` where a step was skipped."""
    if not course:
        return []
    columns = _columns(course)
    lines = power_rows(
        [[step.scale for step in column] for column in columns],
        [any(step.overflow for step in column) for column in columns],
    )
    per = len(columns[0])
    first, last = course[0].step, course[-1].step
    lines.append(
        f"{'':>12}step {first}"
        + (f" to {last}" if last > first else "")
        + (f", {per} steps a column" if per > 1 else "")
    )
    return lines


def power_rows(columns: Sequence[Sequence[float]], skipped: Sequence[bool]) -> list[str]:
    """A row for each power of two, ``#`` where a column holds such a scale; skipped steps; the axis."""
    powers = [{_power_of(scale) for scale in column} for column in columns]
    all_powers = set().union(*powers)
    lines = []
    for power in range(max(all_powers), min(all_powers) - 1, -1):
        marks = "".join("#" if power in column else " " for column in powers)
        lines.append(f"{_power(power):>10} |{marks}".rstrip())
    marks = "".join("x" if skip else " " for skip in skipped)
    lines.append(f"{'skipped':>10} |{marks}".rstrip())
    return [*lines, f"{'':>11}+{'-' * len(columns)}"]


def _power_of(scale: float) -> int:
    return _TOO_LARGE if math.isinf(scale) else math.floor(math.log2(scale))


def _power(power: int) -> str:
    if power == _TOO_LARGE:
        return "inf"
    return str(2**power) if 0 <= power < 30 else f"2^{power}"


def _columns(course: Sequence[LossScaleStep]) -> list[Sequence[LossScaleStep]]:
    per = -(-len(course) // WIDTH)
    return [course[i : i + per] for i in range(0, len(course), per)]
