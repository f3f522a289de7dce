"""Watches the course of a run: what its skipped steps and its loss scale mean, and when to stop.

Everything here follows from each step's result, which is known without waiting for the device,
and is the same on every rank.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dslaunch.core import atomic
from dslaunch.core.errors import Diverged
from dslaunch.core.events import to_jsonable
from dslaunch.train.engine import StepResult

_KEPT = 200  # steps in the diagnosis
_SILENT = 5  # reported intervals with loss 0 in a row before that is said


@dataclass(frozen=True)
class SeenStep:
    """What is kept of a step. ``step`` counts from 1."""

    step: int
    loss_scale: float
    next_loss_scale: float
    skip_reason: str | None
    lr: float


class Watch:
    """Sees every step of a run. ``event(kind, **fields)`` and ``say(text)`` tell the user."""

    def __init__(
        self,
        *,
        precision: str,
        max_skipped_in_a_row: int,
        event: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._precision = precision
        self._limit = max_skipped_in_a_row
        self._event, self._say = event, say
        self._steps: deque[SeenStep] = deque(maxlen=_KEPT)
        self._in_a_row = 0
        self._applied = 0
        self._zero_losses = 0

    def see(self, step: int, result: StepResult, next_loss_scale: float) -> None:
        """A step that ended, and the loss scale of the next one.

        Raises Diverged where so many steps in a row were skipped that this is no descent of
        the scale any more. DeepSpeed goes on for ever in bf16 and with a static scale.
        """
        seen = SeenStep(step, result.loss_scale, next_loss_scale, result.skip_reason, result.lr)
        self._steps.append(seen)
        if seen.next_loss_scale > seen.loss_scale:
            self._event("loss_scale_grew", step=step, loss_scale=next_loss_scale)
        if result.skipped:
            self._see_skip(seen)
            return
        if self._in_a_row and not self._applied and self._precision == "fp16":
            self._verdict(
                step,
                "warm-up descent",
                f"the loss scale has come down to {seen.loss_scale:g} after {self._in_a_row} skipped steps:"
                " normal at the start of fp16",
            )
        self._applied += 1
        self._in_a_row = 0

    def see_loss(self, step: int, loss: float) -> None:
        """The loss of a reported interval."""
        self._zero_losses = self._zero_losses + 1 if loss == 0.0 else 0
        if self._zero_losses == _SILENT:
            self._verdict(
                step,
                "loss 0",
                f"the loss has been exactly 0 for {_SILENT} lines: a known race of DeepSpeed with"
                " zero_optimization.overlap_comm; turn that off, and see that the data has answers",
            )

    def diagnosis(self, error: Diverged) -> dict[str, Any]:
        """What is written beside a run that diverged: the verdict, the advice, the last steps."""
        report: dict[str, Any] = to_jsonable(
            {
                "schema_version": 1,
                "verdict": error.message,
                "advice": error.hint,
                "precision": self._precision,
                "skipped_in_a_row": self._in_a_row,
                "steps": [asdict(step) for step in self._steps],
            }
        )
        return report

    def write_diagnosis(self, path: Path, error: Diverged) -> None:
        """Write it as JSON; a disk that is full must not hide the error itself."""
        try:
            atomic.write_text(path, json.dumps(self.diagnosis(error), indent=2, allow_nan=False) + "\n")
        except OSError:
            self._say(f"cannot write {path}")

    def _see_skip(self, seen: SeenStep) -> None:
        self._in_a_row += 1
        self._event(
            "step_skipped",
            step=seen.step,
            reason=seen.skip_reason,
            loss_scale=seen.loss_scale,
            next_loss_scale=seen.next_loss_scale,
        )
        self._say(f"step {seen.step} skipped: {seen.skip_reason}; the weights are as before")
        if self._in_a_row < self._limit:
            return
        hint = "see which samples these steps had, lower optimizer.lr, resume from a checkpoint before them"
        if self._precision == "fp16":
            hint = "use precision bf16 (or fp32) or a lower optimizer.lr; a static loss_scale may be too high"
        raise Diverged(
            f"step {seen.step}: {self._in_a_row} steps in a row were skipped ({seen.skip_reason}); "
            f"watch.max_skipped_in_a_row is {self._limit}",
            hint=hint,
        )

    def _verdict(self, step: int, name: str, message: str) -> None:
        self._event("verdict", step=step, verdict=name, message=message)
        self._say(f"{name}: {message}")
