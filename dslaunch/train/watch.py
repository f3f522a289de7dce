"""Watches the course of a run: what its skipped steps, its loss and its loss scale mean, and when to stop.

Skips and the scale are known on the host when a step returns. Loss and norm of a step are read when
the next one is seen, so that nothing waits for the device: a verdict on them comes one step late.
All of it is the same on every rank, so all ranks stop at the same step.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core import atomic
from dslaunch.core.errors import ConfigError, Diverged
from dslaunch.core.events import to_jsonable
from dslaunch.core.plan import WatchPlan

if TYPE_CHECKING:
    from dslaunch.train.engine import StepResult

_KEPT = 200  # steps in the diagnosis

OVERLAP_RACE = (
    "where zero_optimization.overlap_comm is on, a known race of DeepSpeed does this: turn it off; "
    "else see that the data has answers and that something is trained"
)


@dataclass
class SeenStep:
    """What is kept of a step. ``step`` counts from 1; loss and norm are None until they are read."""

    step: int
    loss_scale: float
    next_loss_scale: float
    hysteresis: int | None
    skip_reason: str | None
    lr: float
    ranks: tuple[int, ...] = ()
    loss: float | None = None
    grad_norm: float | None = None


class Watch:
    """Sees every step of a run. ``event(kind, **fields)`` and ``say(text)`` tell the user.

    ``diagnosis``: where a run that diverges leaves its last steps; None: nowhere (all ranks but one).
    """

    def __init__(
        self,
        *,
        precision: str,
        limits: WatchPlan,
        event: Callable[..., None],
        say: Callable[[str], None],
        diagnosis: Path | None = None,
    ) -> None:
        self._precision, self._limits, self._diagnosis = precision, limits, diagnosis
        self._event, self._say = event, say
        self._steps: deque[SeenStep] = deque(maxlen=_KEPT)
        self._unread: tuple[SeenStep, StepResult] | None = None
        self._skipped_in_a_row = self._nonfinite_losses_in_a_row = 0
        self._zero_losses = self._equal_norms = 0
        self._last_norm: float | None = None
        self._descending = True  # nothing but skipped steps since step 1
        self._start_scale: float | None = None  # of a descent
        self._grew = False
        self._falls = self._applied = self._skipped_later = 0

    def see(self, result: StepResult) -> None:
        """A step that ended. Raises Diverged, on every rank, where the training gets nowhere."""
        self.read_last()
        seen = SeenStep(
            step=result.step,
            loss_scale=result.loss_scale,
            next_loss_scale=result.next_loss_scale,
            hysteresis=result.next_hysteresis,
            skip_reason=result.skip_reason,
            lr=result.lr,
        )
        self._steps.append(seen)
        self._unread = (seen, result)
        if result.skipped:
            self._see_skip(seen, result)
            return
        self._see_applied(seen, result)

    def read_last(self) -> None:
        """Look at loss and norm of the step seen last, if that has not been done."""
        if self._unread is None:
            return
        (seen, result), self._unread = self._unread, None
        seen.loss, seen.grad_norm = result.loss, result.grad_norm
        seen.ranks = result.nonfinite_ranks or result.nonfinite_loss_ranks
        if result.unlike_ranks:
            raise _unlike(seen.step, result.unlike_ranks)
        self._see_loss(seen, result)
        if not result.skipped:
            self._see_silence(seen)

    def _see_skip(self, seen: SeenStep, result: StepResult) -> None:
        """DeepSpeed has waited for the ranks to say so; what each said of itself is here as well."""
        self._skipped_in_a_row += 1
        moves = seen.next_loss_scale < seen.loss_scale or result.hysteresis != result.next_hysteresis
        self._descending = self._descending and seen.step == self._skipped_in_a_row and moves
        if self._descending and self._start_scale is None:
            self._start_scale = seen.loss_scale
        self._skipped_later += not self._descending
        ranks = result.nonfinite_ranks or result.nonfinite_loss_ranks
        self._event(
            "step_skipped",
            step=seen.step,
            reason=seen.skip_reason,
            ranks=ranks,
            loss_scale=seen.loss_scale,
            next_loss_scale=seen.next_loss_scale,
        )
        self._see_hysteresis(seen, result, ranks)
        if seen.next_loss_scale < seen.loss_scale:
            self._falls += self._grew
        if not self._descending:  # that is one line, when it ends
            self._say(f"step {seen.step} skipped: {seen.skip_reason}{_of(ranks)}; the weights are as before")
        self.read_last()
        if self._skipped_in_a_row >= self._limits.max_skipped_in_a_row:
            raise self._persistent(seen)

    def _see_applied(self, seen: SeenStep, result: StepResult) -> None:
        self._applied += 1
        if self._skipped_in_a_row and self._descending:
            self._verdict(
                seen.step,
                "warm-up descent",
                f"the first {_steps(self._skipped_in_a_row)} skipped, and the loss scale went from "
                f"{self._start_scale:g} to {seen.loss_scale:g}: normal at the start of fp16",
            )
        elif (
            self._skipped_in_a_row and self._falls == self._limits.saw_tooth_falls and self._skips_are_rare()
        ):
            self._falls += 1  # said once
            self._verdict(
                seen.step,
                "sporadic saw-tooth",
                f"the loss scale grows and falls back, now to {seen.loss_scale:g}, and each time a step is "
                "skipped: a normal course of a dynamic loss scale",
            )
        self._descending = False
        self._skipped_in_a_row = 0
        if seen.next_loss_scale > seen.loss_scale:
            self._grew = True
            self._event(
                "loss_scale_grew",
                step=seen.step,
                ranks="all",
                loss_scale=seen.next_loss_scale,
                previous_loss_scale=seen.loss_scale,
            )
        self._see_hysteresis(seen, result, "all")

    def _see_hysteresis(self, seen: SeenStep, result: StepResult, ranks: tuple[int, ...] | str) -> None:
        if result.hysteresis != result.next_hysteresis:
            self._event(
                "hysteresis_changed",
                step=seen.step,
                ranks=ranks,
                loss_scale=seen.next_loss_scale,
                previous_hysteresis=result.hysteresis,
                hysteresis=result.next_hysteresis,
            )

    def _skips_are_rare(self) -> bool:
        share = self._limits.saw_tooth_max_skipped_fraction
        return self._skipped_later <= share * (self._skipped_later + self._applied)

    def _see_loss(self, seen: SeenStep, result: StepResult) -> None:
        if math.isfinite(result.loss):
            self._nonfinite_losses_in_a_row = 0
            return
        self._nonfinite_losses_in_a_row += 1
        limit = self._limits.max_nonfinite_losses_in_a_row
        if self._nonfinite_losses_in_a_row < limit:
            return
        hint = "see what `dslaunch generate` makes of this model: nan in its weights breaks every loss"
        if seen.step > 1:
            hint = "see which samples this step had, or resume from a checkpoint before it with a lower lr"
        if self._precision == "fp16":
            hint = "its activations may overflow fp16: use precision bf16 or fp32"
        raise Diverged(
            f"step {seen.step} has loss {result.loss:g}{_of(result.nonfinite_loss_ranks)}: forward itself "
            f"gives it, which no loss scale can mend; watch.max_nonfinite_losses_in_a_row is {limit}",
            hint=hint,
            verdict="forward non-finite",
            step=seen.step,
        )

    def _see_silence(self, seen: SeenStep) -> None:
        """Loss exactly 0, or a norm equal to the last bit: training does not do that by itself."""
        limit = self._limits.max_unchanged_in_a_row
        self._zero_losses = self._zero_losses + 1 if seen.loss == 0.0 else 0
        if self._zero_losses == limit:
            self._verdict(
                seen.step, "loss 0", f"the loss has been exactly 0 for {limit} steps; {OVERLAP_RACE}"
            )
        self._equal_norms = self._equal_norms + 1 if seen.grad_norm == self._last_norm else 1
        self._last_norm = seen.grad_norm
        if self._equal_norms == limit:
            text = (
                f"the gradient's norm has been exactly {seen.grad_norm:g} for {limit} steps; {OVERLAP_RACE}"
            )
            self._verdict(seen.step, "norm constant", text)

    def _persistent(self, seen: SeenStep) -> Diverged:
        hint, fall = (
            "see which samples these steps had, lower optimizer.lr, resume from a checkpoint before them",
            "",
        )
        if self._precision == "fp16":
            first = self._steps[-min(self._skipped_in_a_row, _KEPT)].loss_scale
            hint = "use precision bf16 (or fp32) or a lower optimizer.lr"
            if seen.next_loss_scale < first:
                fall = f", while the loss scale went from {first:g} to {seen.next_loss_scale:g}"
                hint = f"a smaller loss scale did not help: {hint}, and see which samples these steps had"
            else:
                hint += "; a static loss_scale may be too high"
        return Diverged(
            f"step {seen.step}: {self._skipped_in_a_row} steps in a row were skipped ({seen.skip_reason}"
            f"{_of(seen.ranks)}){fall}; watch.max_skipped_in_a_row is {self._limits.max_skipped_in_a_row}",
            hint=hint,
            verdict="persistent skipping",
            step=seen.step,
        )

    @contextmanager
    def concluding(self) -> Iterator[None]:
        """What diverges inside becomes an event and, on the rank that has a place for it, a diagnosis."""
        try:
            yield
        except Diverged as error:
            self._event("verdict", step=error.step, verdict=error.verdict, message=error.message)
            if self._diagnosis is not None:
                self._write_diagnosis(self._diagnosis, error)
            raise

    def diagnosis(self, error: Diverged) -> dict[str, Any]:
        """What is written beside a run that diverged: the verdict, the advice, the last steps."""
        report: dict[str, Any] = to_jsonable(
            {
                "schema_version": 1,
                "kind": error.verdict,
                "verdict": error.message,
                "advice": error.hint,
                **({} if error.culprit is None else {"culprit": error.culprit}),
                "precision": self._precision,
                "skipped_in_a_row": self._skipped_in_a_row,
                "steps": [asdict(step) for step in self._steps],
            }
        )
        return report

    def _write_diagnosis(self, path: Path, error: Diverged) -> None:
        """Write it as JSON; a disk that is full must not hide the error itself."""
        try:
            atomic.write_text(path, json.dumps(self.diagnosis(error), indent=2, allow_nan=False) + "\n")
        except OSError:
            self._say(f"cannot write {path}")

    def _verdict(self, step: int, name: str, message: str) -> None:
        self._event("verdict", step=step, verdict=name, message=message)
        self._say(f"{name}: {message}")


def _unlike(step: int, ranks: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        f"step {step}: the gradients{_of(ranks)} were of other parameters than on rank 0, or came in another "
        "order; ZeRO stages 1 and 2 add them up by their place, so the weights are wrong since then",
        hint="have every rank use the same parameters in the same order in each micro-batch, or use fp32 at "
        "zero_optimization.stage 0, or bf16 with data_types.grad_accum_dtype fp32 at stage 1; go on from a "
        "checkpoint before this step",
    )


def _steps(count: int) -> str:
    return "step was" if count == 1 else f"{count} steps were"


def _of(ranks: tuple[int, ...]) -> str:
    """Whose it was, in words; of many ranks the first few."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f" on rank {shown}" if len(ranks) == 1 else f" on ranks {shown}"
