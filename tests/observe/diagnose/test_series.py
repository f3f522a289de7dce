"""Curves of bounded size: what a step that comes again and merged points are."""

from __future__ import annotations

import math

import pytest

from dslaunch.observe.diagnose.series import Series


def test_a_step_that_comes_again_takes_the_place_of_the_old() -> None:
    series = Series()
    for step, value in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 8.0), (2, 9.0), (3, 2.0)):
        series.add(step, value)
    assert series.to_json() == [[1, 5.0], [2, 9.0], [3, 2.0]]


def test_what_is_not_finite_is_counted_and_in_no_mean() -> None:
    series = Series()
    for step, value in ((1, math.nan), (2, 4.0), (3, math.inf)):
        series.add(step, value)
    assert series.to_json() == [[1, None], [2, 4.0], [3, None]]
    assert [(point.count, point.num_bad) for point in series.points] == [(0, 1), (1, 0), (0, 1)]


@pytest.mark.parametrize("count", [2048, 2049, 5000, 100_000])
def test_many_points_are_merged_and_nothing_of_them_is_lost(count: int) -> None:
    values = [math.sin(step) for step in range(count)]
    one_by_one, at_once = Series(), Series()
    for step, value in enumerate(values):
        one_by_one.add(step, value)
    for begin in range(0, count, 700):
        part = values[begin : begin + 700]
        at_once.add_many(range(begin, begin + len(part)), part)
    for series in (one_by_one, at_once):
        assert 1024 <= len(series.points) <= 2048
        assert sum(point.count for point in series.points) == count
        assert math.fsum(point.total for point in series.points) == pytest.approx(math.fsum(values), abs=1e-9)
        assert min(point.low for point in series.points) == min(values)
        assert max(point.high for point in series.points) == max(values)
        assert (series.points[0].first, series.points[-1].last) == (0, count - 1)
    assert [(p.first, p.last, p.count) for p in at_once.points] == [
        (p.first, p.last, p.count) for p in one_by_one.points
    ]
