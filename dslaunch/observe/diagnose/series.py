"""A curve of bounded size: neighbouring points are merged when there are too many."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_POINTS = 2048


@dataclass(slots=True)
class Point:
    """The values from step ``first`` to ``last``: the finite ones' sum, least and greatest, and their count.

    ``num_bad`` of them are nan or inf.
    """

    first: float
    last: float
    low: float
    high: float
    total: float
    count: int
    num_bad: int

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def add(self, other: Point) -> None:
        self.last = other.last
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total, self.count = self.total + other.total, self.count + other.count
        self.num_bad += other.num_bad


class Series:
    """Values over steps, in the order in which they come. A step that comes again takes the place of the old.

    Neighbours are merged once there are more than 2048 points.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._per_point = 1
        self._in_last = 0

    def add(self, step: float, value: float) -> None:
        points = self.points
        if points and self._in_last < self._per_point:
            point = points[-1]
            if step > point.last and value - value == 0:  # the usual case, done with little
                point.last = step
                point.total += value
                point.count += 1
                if value < point.low:
                    point.low = value
                if value > point.high:
                    point.high = value
                self._in_last += 1
                return
        while points and points[-1].first >= step:
            points.pop()  # a resumed run does these steps again
            self._in_last = self._per_point
        if math.isfinite(value):
            point = Point(step, step, value, value, value, 1, 0)
        else:
            point = Point(step, step, math.inf, -math.inf, 0.0, 0, 1)
        if points and self._in_last < self._per_point:
            points[-1].add(point)
            self._in_last += 1
            return
        points.append(point)
        self._in_last = 1
        if len(points) > _MAX_POINTS:
            self._halve()

    def add_many(self, steps: Sequence[float], values: Sequence[float]) -> None:
        """The same as :meth:`add` for each; values are finite."""
        if not isinstance(steps, range) and any(map(operator.gt, steps, steps[1:])):
            for step, value in zip(steps, values, strict=True):
                self.add(step, value)
            return
        steps, values = _last_of_each(steps, values)
        index, count = 0, len(values)
        while index < count:
            point = self.points[-1] if self.points else None
            room = min(self._per_point - self._in_last, count - index)
            if point is None or room <= 0 or steps[index] <= point.last:
                self.add(steps[index], values[index])
                index += 1
                continue
            part = values[index : index + room]
            index += room
            point.last = steps[index - 1]
            point.low, point.high = min(point.low, min(part)), max(point.high, max(part))
            point.total, point.count = point.total + sum(part), point.count + room
            self._in_last += room

    def _halve(self) -> None:
        kept = self.points[::2]
        for left, right in zip(kept, self.points[1::2], strict=False):
            left.add(right)
        self._in_last = self._per_point + (self._in_last if len(self.points) % 2 == 0 else 0)
        if len(self.points) % 2:
            self._in_last = self._per_point
        self.points = kept
        self._per_point *= 2

    def to_json(self) -> list[list[float | None]]:
        """``[step, mean]`` of each point; null where no value is finite."""
        return [[point.last, point.mean if point.count else None] for point in self.points]


def _last_of_each(steps: Sequence[float], values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Of neighbours with one step, which only a bar has, the last one counts."""
    if isinstance(steps, range) or not any(map(operator.eq, steps, steps[1:])):
        return steps, values
    kept = [
        index for index in range(len(steps)) if index + 1 == len(steps) or steps[index] != steps[index + 1]
    ]
    return [steps[index] for index in kept], [values[index] for index in kept]
