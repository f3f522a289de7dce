"""The loss scale over the steps: what was logged, and the growths that ZeRO never logs.

An overflow names the scale it ran with. Where that is above what the overflow before left, the scale has
doubled in between; the rule of core/loss_scale.py says on which steps, once the window is
known: as the log or the user states it, else as it follows from overflows whose steps are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from dslaunch.core.loss_scale import LossScaleRule, growths_within

USUAL_WINDOWS = (1000, 2000, 500, 100, 200, 128, 256, 50, 400)
FINE_STEP = 2  # by so much a progress bar may be behind


@dataclass(slots=True)
class Overflow:
    """One skipped step. ``step`` is right to ``slack`` steps; where that is None, it counts what was seen.

    ``known``: the scale that the log had told last.
    """

    step: int
    slack: int | None
    before: float | None
    after: float | None
    line: int
    file: str
    hysteresis: int | None = None
    known: float | None = None


@dataclass(frozen=True)
class Setting:
    """A value of the rule and where it is from: ``flag``, ``log``, ``inferred``, ``default``."""

    value: float
    source: str
    why: str


@dataclass(frozen=True)
class Growth:
    """The scale doubled ``times`` times between two steps, and no line tells of it.

    ``step``: that of the first doubling; None where the window is not known. ``exact``: not about.
    """

    after_step: int
    before_step: int | None
    scale: float
    next_scale: float
    times: int
    step: int | None
    exact: bool


@dataclass(frozen=True)
class Course:
    """``points``: (step, scale) wherever it changes. ``last_scale_is``: how it is known."""

    points: tuple[tuple[int, float], ...]
    growths: tuple[Growth, ...]
    settings: Mapping[str, Setting]
    last_scale: float | None
    last_scale_is: Literal["logged", "inferred", "last overflow"]
    overflow_steps: tuple[int, ...]


@dataclass
class _Window:
    """Bounds of the window, both included."""

    low: int = 1
    high: float = math.inf
    pairs: int = 0
    contradictory: bool = field(default=False)

    def narrow(self, gap: int, slack: int, times: int) -> None:
        """``gap`` good steps between two overflows in which the scale doubled ``times`` times."""
        low = (max(0, gap - slack) - 1) // (times + 1) + 1
        high = (gap + slack - 1) // times if times else math.inf
        if max(self.low, low) > min(self.high, high):
            self.contradictory = True
            return
        self.low, self.high = max(self.low, low), min(self.high, high)
        self.pairs += times > 0

    def setting(self) -> Setting | None:
        """The usual value between the bounds; the bounds alone decide where they are one number."""
        if not self.pairs or self.contradictory:
            return None
        bounds = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high:g}"
        usual = next((value for value in USUAL_WINDOWS if self.low <= value <= self.high), None)
        value = self.low if self.low == self.high else usual
        if value is None:
            value = self.low if self.high - self.low <= FINE_STEP else None
        if value is None:
            return None
        return Setting(value, "inferred", f"the overflows allow {bounds}")


def scale_course(
    overflows: Sequence[Overflow],
    *,
    observed: Sequence[tuple[int, float]],
    last_step: int | None,
    stated: Mapping[str, Setting],
) -> Course:
    """The course from the overflows, in their order, and from scales that the log names (step, scale).

    ``last_step``: where the log ends, if its steps are known.
    """
    scaled = [event for event in overflows if event.before is not None and event.after is not None]
    settings = dict(stated)
    settings |= {name: found for name, found in _inferred(scaled).items() if name not in settings}
    scaled = _placed(scaled, settings.get("loss_scale_window"))
    points: list[tuple[int, float]] = []
    growths = []
    for event, growth in _walk(scaled, settings.get("loss_scale_window")):
        if growth is not None:
            growths.append(growth)
            points += _growth_points(growth, settings.get("loss_scale_window"))
        assert event.before is not None and event.after is not None
        points += [(event.step, event.before), (event.step, event.after)]
    points += observed
    points = [point for point in points if 0 < point[1] < math.inf]  # int(0.5) is logged as 0
    points.sort(key=lambda point: point[0])
    last = points[-1][1] if points else None
    known: Literal["logged", "inferred", "last overflow"] = "logged" if observed else "last overflow"
    window = settings.get("loss_scale_window")
    tail = None if observed else _tail(scaled, window, last_step)
    if (
        known == "last overflow"
        and window
        and last_step is not None
        and scaled
        and scaled[-1].slack is not None
    ):
        known = "inferred"
    if tail is not None:
        growths.append(tail)
        points += _growth_points(tail, settings.get("loss_scale_window"))
        last = tail.next_scale
    steps = tuple(event.step for event in (scaled or overflows))
    return Course(tuple(points), tuple(growths), settings, last, known, steps)


def _placed(events: Sequence[Overflow], window: Setting | None) -> list[Overflow]:
    """Where steps are counted only, an overflow after growths is not before the rule allows them."""
    placed: list[Overflow] = []
    for event in events:
        if window is not None and placed and event.slack != 0:
            left = placed[-1]
            assert left.after is not None and event.before is not None
            times = _doublings(left.after, event.before)
            least = left.step + times * int(window.value) + 2 if times else left.step + 1
            event = replace(event, step=max(event.step, least))
        placed.append(event)
    return placed


def _walk(events: Sequence[Overflow], window: Setting | None) -> Iterator[tuple[Overflow, Growth | None]]:
    previous: Overflow | None = None
    for event in events:
        yield event, None if previous is None else _growth_between(previous, event, window)
        previous = event


def _growth_between(left: Overflow, right: Overflow, window: Setting | None) -> Growth | None:
    assert left.after is not None and right.before is not None
    if right.known == right.before:
        return None
    times = _doublings(left.after, right.before)
    if times <= 0:
        return None
    step = None if window is None else left.step + int(window.value) + 1
    if step is not None and step >= right.step:
        step = None  # another rule than the one we know
    return Growth(left.step, right.step, left.after, right.before, times, step, exact=left.slack == 0)


def _doublings(before: float, after: float) -> int:
    """How often ``before`` was doubled to give ``after``; 0 where it was not."""
    if not (0 < before < after < math.inf):
        return 0
    return round(math.log2(after) - math.log2(before))


def _tail(events: Sequence[Overflow], window: Setting | None, last_step: int | None) -> Growth | None:
    """The growths after the last overflow, up to where the log ends."""
    if not events or window is None or last_step is None:
        return None
    last = events[-1]
    if last.slack is None or last.after is None:
        return None
    times = growths_within(LossScaleRule(loss_scale_window=int(window.value)), last_step - last.step)
    if not times:
        return None
    scale = last.after * 2.0**times
    return Growth(
        last.step, None, last.after, scale, times, last.step + int(window.value) + 1, last.slack == 0
    )


def _growth_points(growth: Growth, window: Setting | None) -> list[tuple[int, float]]:
    """Where the doublings are drawn: on their steps, or evenly between what is known."""
    points, scale = [], growth.scale
    if growth.step is not None and window is not None:
        steps = [growth.step + index * int(window.value) for index in range(growth.times)]
    else:
        end = growth.before_step if growth.before_step is not None else growth.after_step
        gap = (end - growth.after_step) / (growth.times + 1)
        steps = [round(growth.after_step + gap * (index + 1)) for index in range(growth.times)]
    for step in steps:
        points += [(step, scale), (step, scale * 2)]
        scale *= 2
    return points


def _inferred(events: Sequence[Overflow]) -> dict[str, Setting]:
    found = {}
    window = _Window()
    for left, right in pairwise(events):
        if left.slack is None or right.slack is None or left.after is None or right.before is None:
            continue
        gap = right.step - left.step - 1
        if gap >= 0 and right.before >= left.after:
            window.narrow(gap, left.slack + right.slack, _doublings(left.after, right.before))
    setting = window.setting()
    if setting is not None:
        found["loss_scale_window"] = setting
    counts = [event.hysteresis for event in events if event.hysteresis is not None]
    if counts:
        found["hysteresis"] = Setting(max(counts), "log", "an overflow names it")
        return found
    for spared, event in enumerate(events):
        if event.before != event.after:
            why = f"overflows before the first halving: {spared}"
            found["hysteresis"] = Setting(spared + 1, "inferred", why)
            break
    return found
