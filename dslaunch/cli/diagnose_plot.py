"""A diagnosis drawn in the terminal: the scale in powers of two, loss and norm as curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dslaunch.cli.loss_scale_plot import WIDTH, power_rows

if TYPE_CHECKING:
    from dslaunch.observe.diagnose.course import Course
    from dslaunch.observe.diagnose.series import Series

_ROWS = 8
_LOG_FROM = 1000.0  # a curve whose greatest value is so many times its least is drawn by powers of ten


def scale_plot(course: Course, overflow_steps: Sequence[int], last_step: int | None) -> list[str]:
    """The loss scale; empty where the log names none."""
    points = course.points
    if not points:
        return []
    first, last = points[0][0], max(points[-1][0], last_step or 0)
    width = min(WIDTH, last - first + 1)
    columns: list[list[float]] = []
    skipped = [False] * width
    place, scale = 0, points[0][1]
    for column in range(width):
        end = first + (last - first + 1) * (column + 1) / width
        held = [] if place < len(points) and points[place][0] < end - 1 else [scale]
        while place < len(points) and points[place][0] < end:
            scale = points[place][1]
            held.append(scale)
            place += 1
        columns.append(held or [scale])
    for step in overflow_steps:
        if first <= step <= last:
            skipped[min(width - 1, (step - first) * width // (last - first + 1))] = True
    return ["loss scale", *power_rows(columns, skipped), f"{'':>12}step {first} to {last}"]


def curve_plot(title: str, series: Series) -> list[str]:
    """A curve of the means, ``!`` where a value was nan or inf; empty without points."""
    if len(series.points) < 2:
        return []
    first, last = series.points[0].first, series.points[-1].last
    width = min(WIDTH, len(series.points))
    totals, counts, bad = [0.0] * width, [0] * width, [False] * width
    for point in series.points:
        column = min(width - 1, int((point.last - first) * width / max(1, last - first + 1)))
        totals[column] += point.total
        counts[column] += point.count
        bad[column] |= point.num_bad > 0
    means = [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]
    lines = _rows(means, bad)
    return [title, *lines, f"{'':>11}+{'-' * width}", f"{'':>12}step {first:g} to {last:g}"]


def _rows(means: Sequence[float], bad: Sequence[bool]) -> list[str]:
    finite = [mean for mean in means if math.isfinite(mean)]
    lines = []
    if finite:
        low, high = min(finite), max(finite)
        by_power = low > 0 and high / low >= _LOG_FROM
        heights = [_height(mean, low, high, by_power) for mean in means]
        for row in range(_ROWS - 1, -1, -1):
            share = row / (_ROWS - 1)
            value = low * (high / low) ** share if by_power else low + (high - low) * share
            marks = "".join("*" if height == row else " " for height in heights)
            if row == 0 or high > low:
                lines.append(f"{value:>10.4g} |{marks}".rstrip())
    if any(bad):
        marks = "".join("!" if mark else " " for mark in bad)
        lines.append(f"{'nan or inf':>10} |{marks}".rstrip())
    return lines


def _height(mean: float, low: float, high: float, by_power: bool) -> int | None:
    if not math.isfinite(mean):
        return None
    if high <= low:
        return 0
    share = math.log(mean / low) / math.log(high / low) if by_power else (mean - low) / (high - low)
    return round(share * (_ROWS - 1))
