"""What happened, record by record, in constant memory: runs of overflows, losses, norms, steps.

Ranks write the same things: of overflows that carry a rank, those of the first rank that is seen count; of
those that carry none, copies are known by standing together. Nothing here judges: verdicts.py does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dslaunch.observe.diagnose.course import Overflow, Setting
from dslaunch.observe.diagnose.facts import LOSS_WINDOW, Again, LossStory, NormStory, Place, Run, Streak
from dslaunch.observe.diagnose.series import Series
from dslaunch.observe.diagnose.shapes import Record, sign_of_good

_MAX_EVENTS = 4000


class Story:
    """Feed it records with :meth:`add`; then read what it holds."""

    def __init__(self, stated: dict[str, Setting] | None = None) -> None:
        self.settings: dict[str, Setting] = dict(stated or {})
        self.overflows: deque[Overflow] = deque(maxlen=_MAX_EVENTS)
        self.num_overflows = 0
        self.streaks: list[Streak] = []  # the first, the longest and the last few
        self.num_streaks = 0
        self.num_after_growth = 0  # streaks before which the scale had doubled
        self.longest: Streak | None = None
        self.minimum: Place | None = None
        self.ended: tuple[str, Place] | None = None  # dslaunch's own verdict
        self.stuck = Run()
        self.unscaled = Run()  # skipped steps of bf16 or a static scale
        self.loss = LossStory()
        self.norm = NormStory()
        self.loss_series, self.norm_series, self.scale_series = Series(), Series(), Series()
        self.clock = 0  # the step that is known, or a count of what was seen
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.again = Again()
        self.num_skipped: int | None = None  # as progress lines count them
        self.known = 0
        self.scale: float | None = None
        self.file_rank: int | None = None  # the rank whose file counts, where each has its own
        self._lead: int | None = None
        self._metrics_rank: int | None = None
        self._good = 0  # signs of good steps since the last overflow
        self._seen_metrics = 0
        self._last: Record | None = None  # the last overflow
        self._fused: Overflow | None = None
        self._fused_step = -1
        self._growth_logged = False  # since the last overflow
        self._mark: tuple[int, int] | None = None  # the last line of progress: (step, skipped)
        self._every: int | None = None  # steps between two of them

    def add(self, record: Record, file: str) -> None:
        self.known += 1
        if record.bar is not None and record.step is None:
            self._reach(record.bar)
        kind = record.kind
        if kind == "metrics":
            self._metrics(record, file)
        elif kind == "overflow":
            self._overflow(record, file)
        elif kind == "fused":
            self._fused_overflow(record, file)
        elif kind == "mark":
            self._progress(record)
        elif kind == "setting":
            self._setting(record)
        elif kind == "minimum":
            self.minimum = self.minimum or self._place(record, file)
        elif kind == "ended":
            self.ended = (record.name, self._place(record, file))
        elif kind == "static":
            self._static(record, file)
        elif kind == "spared":
            self._spare(record)
        elif record.after is not None and record.after != self.scale:  # growth, set
            # Where no step is named: within a step, before its end.
            step = self.clock + 1 if record.step is None else record.step
            if self.scale is None and record.before is not None and step > 1:
                self._observe_scale(record.before, step - 1)
            self._observe_scale(record.after, step)
            self._good += 2

    @property
    def good_since_overflow(self) -> int:
        """Signs of good steps since the last overflow: 2 is sure."""
        return self._good

    def lead_of(self, kind: str) -> int | None:
        """The rank whose lines of this kind count, where each names its rank."""
        return self._lead if kind == "overflow" else self._metrics_rank

    # -- steps

    def _reach(self, step: int) -> None:
        """The log is at ``step``; where it goes back, a run was started again."""
        self.again.reach(self.last_step or 0, step)
        if self.last_step is not None and step < self.last_step - 1:
            while self.overflows and self.overflows[-1].step >= step:
                self.overflows.pop()
            self._good += 2
        elif self.last_step is not None and step > self.clock + 3:
            self._good += 2
        if self.first_step is None:
            self.first_step = step
        self.last_step = self.clock = step

    def _progress(self, record: Record) -> None:
        assert record.step is not None
        if record.step == 0:
            return  # before the first
        skipped = record.skipped or 0
        steps = record.step - (self._mark[0] if self._mark else 0)
        skips = skipped - (self._mark[1] if self._mark else 0)
        if steps - skips > 0 and steps > 0:
            self._good += steps - skips
        self._reach(record.step)
        self._every = steps if self._mark is not None and steps > 0 else None
        self._mark, self.num_skipped = (record.step, skipped), skipped

    # -- overflows

    def _overflow(self, record: Record, file: str) -> None:
        if record.name == "other scaler":
            return
        if record.name == "fused" and self._fused is not None:
            if self._fused.before is None:
                self._fused.before, self._fused.after = record.before, record.after
                self._fused.known = self.scale
                self._scaled(record)
            if (self._fused.before, self._fused.after) == (record.before, record.after):
                return
        if self._is_copy(record):
            return
        self._fused = None
        if record.before is None:
            self.unscaled.add(self._place(record, file))
        step, slack = self._step_of(record)
        self._note(record, file, step, slack)

    def _step_of(self, record: Record) -> tuple[int, int | None]:
        if record.step is not None:
            self._reach(record.step)
            return record.step, 0
        if record.bar is not None:
            return record.bar, 2
        self.clock += 1
        if self._mark is not None and self._every is not None and self.clock <= self._mark[0] + self._every:
            return self.clock, self._every - 1  # between two lines of progress
        return self.clock, None

    def _fused_overflow(self, record: Record, file: str) -> None:
        assert record.step is not None
        if self._fused_step - 50 < record.step <= self._fused_step:
            return  # another rank
        self._fused_step = record.step
        self._reach(record.step)
        self._note(record, file, record.step, 0)
        self._fused = self.overflows[-1]

    def _static(self, record: Record, file: str) -> None:
        """The scale of the overflow that was just named does not move."""
        if self._fused is not None and self._fused.before is None:
            self.unscaled.add(self._place(record, file))
        self._fused = None

    def _is_copy(self, record: Record) -> bool:
        """Whether another rank has said this already."""
        if record.rank is not None and record.step is None:
            if self._lead is None:
                self._lead = record.rank
            return record.rank != self._lead
        last = self._last
        if last is None or record.step is not None or record.before == record.after or self._good >= 2:
            return False
        if (last.before, last.after) != (record.before, record.after):
            return False
        if last.second is not None and record.second is not None:
            return abs(last.second - record.second) <= 1
        return record.line - last.line <= 2

    def _note(self, record: Record, file: str, step: int, slack: int | None) -> None:
        """One more skipped step."""
        previous = self.overflows[-1] if self.overflows else None
        grew = bool(record.before and self.scale and record.before > self.scale) or self._growth_logged
        exact_gap = (
            step - previous.step if previous is not None and slack == 0 and previous.slack == 0 else None
        )
        over = grew or (self._good >= 2 if exact_gap is None else exact_gap > 1)
        self.num_overflows += 1
        self.overflows.append(
            Overflow(
                step, slack, record.before, record.after, record.line, file, record.hysteresis, self.scale
            )
        )
        place = self._place(record, file, step if slack is not None else None)
        if not self.streaks or over:
            self._open_streak(place, step, grew)
        else:
            streak = self.streaks[-1]
            streak.count, streak.last = streak.count + 1, place
            streak.num_losses += self._seen_metrics
        self._scaled(record)
        streak = self.streaks[-1]
        if self.longest is None or streak.count >= self.longest.count:
            self.longest = streak
        if self.loss.bad.count:
            self.loss.bad_with_skips = True
        self._last, self._good, self._seen_metrics = record, 0, 0
        self._growth_logged = False

    def _open_streak(self, place: Place, step: int, grew: bool) -> None:
        at_start = not self.streaks and self.loss.count < 5 and (place.step is None or step <= 10)
        if self.streaks:
            self.streaks[-1].over = True
        self.num_streaks += 1
        self.num_after_growth += grew
        self.streaks.append(Streak(place, place, step, at_start=at_start))
        if len(self.streaks) > 40:
            del self.streaks[1]

    def _scaled(self, record: Record) -> None:
        """What the overflow says of the scale."""
        if record.before is None or record.after is None:
            return
        streak = self.streaks[-1]
        if streak.scale_from is None:
            streak.scale_from = record.before
        streak.scale_to = self.scale = record.after
        if record.before == record.after and record.hysteresis is None and self._at_floor(record.after):
            self.stuck.add(streak.last)
        else:
            self.stuck = Run()

    def _spare(self, record: Record) -> None:
        if self.overflows and self.overflows[-1].step == record.step and record.before is not None:
            self.overflows[-1].hysteresis = int(record.before)
            self.stuck = Run()

    def _at_floor(self, scale: float) -> bool:
        floor = self.settings.get("min_loss_scale")
        return scale <= (floor.value if floor else 1.0)

    def _observe_scale(self, scale: float, step: int) -> None:
        """The log names the scale that holds after ``step``."""
        if not (math.isfinite(scale) and scale > 0):
            return
        if self.scale is None or scale != self.scale:
            self.scale_series.add(step, scale)
        self._growth_logged |= self.scale is not None and scale > self.scale
        self.scale = scale

    # -- settings

    def _setting(self, record: Record) -> None:
        assert record.before is not None
        name, value = record.name, record.before
        if name == "consecutive_hysteresis":  # "Restoring hysteresis to N" tells both
            self._state("hysteresis", value)
            value = 1.0
        elif name == "consecutive_hysteresis_on":
            name = "consecutive_hysteresis"
        self._state(name, value)

    def _state(self, name: str, value: float) -> None:
        self.settings.setdefault(name, Setting(value, "log", "the log names it"))

    # -- numbers

    def _metrics(self, record: Record, file: str) -> None:
        if record.rank is not None:
            if self._metrics_rank is None:
                self._metrics_rank = record.rank
            if record.rank != self._metrics_rank:
                return
        if record.step is not None:
            if record.step == self.last_step and record.loss is not None and self.loss.last == record.loss:
                return  # the same step again, by another rank or another logger
            self._skips_in_metrics(record, file)
            self._reach(record.step)
        elif record.bar is None and record.loss is not None:
            self.clock += 1
        self._seen_metrics += 1
        self._good += sign_of_good(record)
        if record.loss is not None:
            self._loss(record.loss, record, file)
        if record.norm is not None:
            self.norm_series.add(self.clock, record.norm)
            self.norm.add(record.norm, record.loss, lambda: self._place(record, file))
        if record.scale is not None and not self._is_before_overflow(record):
            self._observe_scale(record.scale, self.clock - (record.name == "scale used"))

    def _is_before_overflow(self, record: Record) -> bool:
        """Whether its scale is that of an overflow that has been read already: no growth back to it."""
        used = record.name == "scale used" and bool(self.overflows)
        return used and self.overflows[-1].step == record.step

    def add_plain(
        self,
        columns: Mapping[str, list[Any]],
        place: Callable[[int], Place],
        marks: Mapping[int, Sequence[Record]],
    ) -> None:
        """Lines of numbers in which nothing happens, with the effect of :meth:`add` for each.

        See ``columns.add_rows`` for which these are. ``place``: where the line of an index stands.
        ``marks``: of steps, by the index before which they stand.
        """
        losses, norms = columns.get("loss"), columns.get("norm")
        count = len(next(iter(columns.values())))
        self.known += count
        steps = self._plain_steps(columns.get("step") or columns.get("bar"), count, marks)
        self._seen_metrics += count
        self._good += 2 if norms is None or norms[-1] > 0 else 0
        if losses is not None:
            self.loss.add_plain(losses, place)
            self.loss_series.add_many(steps, losses)
        if norms is not None:
            self.norm_series.add_many(steps, norms)
            self.norm.add_plain(norms, place)

    def _plain_steps(
        self, told: Sequence[Any] | None, count: int, marks: Mapping[int, Sequence[Record]]
    ) -> Sequence[int]:
        """The step of each line; ``told``: by the lines themselves, None where one tells none."""
        if told is None and not marks:
            self.clock += count
            return range(self.clock - count + 1, self.clock + 1)
        steps: list[int] = []
        rises = told is not None and None not in told
        for begin, end in pairwise(sorted({0, *marks, count})):
            for mark in marks.get(begin, ()):
                self.add(mark, "")  # of which no place is kept
            part: Sequence[Any] = told[begin:end] if told is not None else [None] * (end - begin)
            if rises:
                self._reach(part[0])
                self._reach(part[-1])
                steps += part
                continue
            for step in part:
                if step is None:
                    self.clock += 1
                else:
                    self._reach(step)
                steps.append(self.clock)
        return steps

    def _skips_in_metrics(self, record: Record, file: str) -> None:
        """Megatron counts the skipped steps in the line of its step, where the scale is the next one."""
        assert record.step is not None
        if not record.skipped or record.rank not in (None, self._metrics_rank):
            return
        scale = record.scale if record.scale is not None and math.isfinite(record.scale) else None
        every = record.step - self.last_step if self.last_step is not None else record.skipped
        for index in range(min(record.skipped, 1000)):
            before = self.scale if self.scale is not None else scale
            last = index == record.skipped - 1
            after = scale if last else before
            one = Record("overflow", record.line, record.step, before=before, after=after, text=record.text)
            slack = 0 if every == record.skipped else every
            self._note(one, file, record.step - record.skipped + index + 1, slack)

    def _loss(self, value: float, record: Record, file: str) -> None:
        loss = self.loss
        loss.count += 1
        self.loss_series.add(self.clock, value)
        if loss.first is None:
            loss.first, loss.first_place = value, self._place(record, file)
        loss.last = value
        if not math.isfinite(value):
            if loss.bad.count == 0:
                loss.num_bad_runs += 1
            loss.bad.add(self._place(record, file))
            loss.bad_with_skips |= bool(record.skipped)
            return
        if loss.bad.count:
            loss.bad, loss.bad_with_skips = Run(), False
        loss.window.append(value)
        if len(loss.window) == LOSS_WINDOW:
            loss.recent_mean = mean = sum(loss.window) / LOSS_WINDOW
            loss.window.clear()
            loss.last_place = self._place(record, file)
            if mean < loss.best_mean:
                loss.best_mean, loss.best_place = mean, loss.last_place

    def _place(self, record: Record, file: str, step: int | None = None) -> Place:
        known = step if step is not None else record.step if record.step is not None else record.bar
        text = record.text[-300:] if record.kind == "overflow" else record.text[:300]
        return Place(file, record.line, known, text)
