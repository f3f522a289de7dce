"""The parts of a story: places in logs, overflows in a row, lines in a row, the losses and the norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LOSS_WINDOW = 8  # losses in the mean that is watched for divergence


@dataclass(slots=True)
class Place:
    """Where something was seen. ``step`` is None where the log does not say."""

    file: str
    line: int
    step: int | None
    raw: bytes

    @property
    def text(self) -> str:
        return " ".join(self.raw.decode("utf-8", "replace").split())


@dataclass(slots=True)
class Streak:
    """Overflows in a row. ``losses`` and ``bad_losses``: how many lines with a loss stood among them."""

    first: Place
    last: Place
    first_step: int
    count: int = 1
    scale_from: float | None = None
    scale_to: float | None = None
    at_start: bool = False
    num_losses: int = 0
    over: bool = False


@dataclass(slots=True)
class Run:
    """Lines in a row for which something holds."""

    count: int = 0
    first: Place | None = None
    last: Place | None = None

    def add(self, place: Place) -> None:
        self.first = self.first or place
        self.last = place
        self.count += 1


@dataclass(slots=True)
class Again:
    """Steps that were taken once more, where a run was started again. ``count``: of all restarts."""

    count: int = 0
    _last: int = 0  # the step that had been reached when the log went back, 0: it has gone on since
    _back: int = 0

    def reach(self, last: int, step: int) -> None:
        """The log has come from step ``last`` to ``step``. A line between the others is no restart."""
        if step < last - 1:
            self._last, self._back = last, step
        elif self._last:
            if step <= self._last:
                self.count += self._last - self._back + 1
            self._last = 0


@dataclass
class LossStory:
    """Losses in the order of the log; only those of training."""

    count: int = 0
    first: float | None = None
    first_place: Place | None = None
    last: float | None = None
    last_place: Place | None = None
    bad: Run = field(default_factory=Run)  # not finite, up to now
    num_bad_runs: int = 0
    best_mean: float = math.inf
    best_place: Place | None = None
    window: list[float] = field(default_factory=list)  # the last losses, fewer than LOSS_WINDOW
    recent_mean: float | None = None  # of the last whole window
    bad_with_skips: bool = False

    def add_plain(self, values: Sequence[float], place: Callable[[int], Place]) -> None:
        """Finite losses after a finite one. ``place``: where the loss of an index stands."""
        self.count += len(values)
        self.last = values[-1]
        since = len(self.window)
        together = [*self.window, *values]
        whole = len(together) // LOSS_WINDOW * LOSS_WINDOW
        self.window = together[whole:]
        means = [sum(together[i : i + LOSS_WINDOW]) / LOSS_WINDOW for i in range(0, whole, LOSS_WINDOW)]
        if not means:
            return
        self.recent_mean, best = means[-1], min(means)
        if best < self.best_mean:
            ends = (means.index(best) + 1) * LOSS_WINDOW - 1 - since
            self.best_mean, self.best_place = best, place(ends)


@dataclass
class NormStory:
    """Norms in the order of the log: those that stay the same, and those of losses that are 0."""

    last: float | None = None
    race: Run = field(default_factory=Run)  # loss 0, and nan or the same norm, up to now
    longest_race: Run = field(default_factory=Run)
    same: Run = field(default_factory=Run)
    longest_same: Run = field(default_factory=Run)

    def add(self, norm: float, loss: float | None, place: Callable[[], Place]) -> None:
        """``place``: where it stands."""
        same = norm == self.last or (norm != norm and self.last is not None and self.last != self.last)
        finite = math.isfinite(norm)
        if loss == 0 and (same or not finite):
            self.race.add(place())
        elif self.race.count:
            self.race = Run()
        if same and finite:
            self.same.add(place())
        elif self.same.count:
            self.same = Run()
        if self.race.count > self.longest_race.count:
            self.longest_race = self.race
        if self.same.count > self.longest_same.count:
            self.longest_same = self.same
        self.last = norm

    def add_plain(self, norms: Sequence[float], place: Callable[[int], Place]) -> None:
        """They are all the same, or no run of them is long."""
        if norms[0] != self.last or norms[-1] != norms[0] or norms.count(norms[0]) < len(norms):
            self.same = Run()
        else:
            self.same.count += len(norms)
            self.same.last = place(len(norms) - 1)
            if self.same.count > self.longest_same.count:
                self.longest_same = self.same
        self.last = norms[-1]
