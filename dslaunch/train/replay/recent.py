"""The last steps of a run as they began: all that it takes to make their windows again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dslaunch.train.engine import StepResult
from dslaunch.train.replay.window import Rng, take_rng

_KEPT = 2  # a verdict may come one step late


@dataclass
class BegunStep:
    """``step`` counts from 0; ``result`` is None until it has ended, and where it ended in an error."""

    step: int
    loss_scale: float
    rng: Rng
    result: StepResult | None = None
    calls: list[Any] = field(default_factory=list)  # of the engine in a loop of one's own, see ``own_loop``
    num_tokens: int | None = None

    @property
    def changed_weights(self) -> bool:
        return self.result is not None and not self.result.skipped

    @property
    def is_suspect(self) -> bool:
        """It raised, was skipped, or has a loss that is not finite. Waits for the loss."""
        return not self.changed_weights or not math.isfinite(self.result.loss)  # type: ignore[union-attr]


class RecentSteps:
    """Told of each step as it begins and ends. It keeps two of them."""

    def __init__(self) -> None:
        self._steps: deque[BegunStep] = deque(maxlen=_KEPT)

    def begin(self, step: int, loss_scale: float) -> BegunStep:
        """Before the first forward of a step."""
        self._steps.append(BegunStep(step, loss_scale, take_rng()))
        return self._steps[-1]

    def end(self, result: StepResult) -> None:
        """After its optimizer step."""
        self._steps[-1].result = result

    def suspect(self, step: int | None) -> tuple[BegunStep, bool] | None:
        """The step that went wrong, and whether the weights are still those that it was given.

        ``step``, counted from 1, is the one that a verdict names; else the newest that went wrong.
        None where none of them did: the run ends for something else. Every rank answers the same.
        """
        steps = list(self._steps)
        for index in range(len(steps) - 1, -1, -1):
            if steps[index].step + 1 == step or (step is None and steps[index].is_suspect):
                later = steps[index:]
                return steps[index], not any(each.changed_weights for each in later)
        return None
