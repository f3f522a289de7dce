"""How long a run is, as far as that is known before its data is tokenised."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.core.data_files import JSON_LINES
from dslaunch.core.plan import DataSource, RunPlan
from dslaunch.core.training_length import decay_steps, total_steps, warmup_steps

_LARGEST_COUNTED = 2**31  # bytes: some seconds of reading


@dataclass(frozen=True)
class RunLength:
    """``total_steps`` and ``warmup_steps``: None where they are not known; what each rests on.

    ``exact``: False where tokenising may drop samples, or packs several into a row: at most so many then.
    """

    total_steps: int | None
    warmup_steps: int | None
    exact: bool
    reason: str
    warmup_reason: str


def resolve_length(spec: RunSpec, report: Report) -> tuple[float | None, int | None]:
    """(num_train_epochs, max_steps): exactly one is set. Both given is a problem for ``report``."""
    if spec.num_train_epochs is not None and spec.max_steps is not None:
        report.fail("max_steps", "max_steps and num_train_epochs are both given", "keep one of the two")
    if spec.max_steps is not None:
        report.reason("num_train_epochs", "max_steps is given")
        return None, spec.max_steps
    report.reason("max_steps", "from the data and num_train_epochs")
    if spec.num_train_epochs is None:
        report.reason("num_train_epochs", "neither num_train_epochs nor max_steps is given", "default")
        return 1.0, None
    return float(spec.num_train_epochs), None


def length_of_run(plan: RunPlan) -> RunLength:
    """Steps of a run, counted in its data where that is JSON lines on this machine.

    Raises ConfigError where there is no sample, and where warm-up and decay are longer than the training.
    """
    size, epochs, most = plan.batch.train_batch_size, plan.num_train_epochs, plan.max_steps
    if most is not None:
        decay_steps(plan.scheduler, most)
        return RunLength(
            most, warmup_steps(plan.scheduler, most), True, "max_steps", _warmup_reason(plan, most)
        )
    samples = count_samples(plan.data.train)
    if samples is None:
        reason = "known once the data is tokenised; only JSON lines of this machine are counted before"
        return RunLength(None, plan.scheduler.warmup_steps, False, reason, _warmup_reason(plan, None))
    total = total_steps(samples, size, epochs, None)
    decay_steps(plan.scheduler, total)
    reason = f"{samples} samples x {epochs:g} epochs / train_batch_size {size}, rounded up"
    if plan.data.packing:
        reason += "; at most: packing puts several samples in a row"
    else:
        reason += "; fewer if samples are dropped for their length"
    return RunLength(total, warmup_steps(plan.scheduler, total), False, reason, _warmup_reason(plan, total))


def _warmup_reason(plan: RunPlan, total: int | None) -> str:
    if plan.scheduler.warmup_steps is not None:
        return "scheduler.warmup_steps"
    share = f"scheduler.warmup_ratio {plan.scheduler.warmup_ratio or 0:g}"
    return f"{share} of the steps" if total is None else f"{share} x {total} steps, rounded up"


def count_samples(sources: Sequence[DataSource]) -> int | None:
    """Lines of all sources that are not blank; None where one is no file of JSON lines, or is very large."""
    total = 0
    for source in sources:
        path = Path(source.path)
        if source.kind != "file" or not path.name.lower().endswith(JSON_LINES):
            return None
        try:
            if path.stat().st_size > _LARGEST_COUNTED:
                return None
            read = gzip.open if path.name.lower().endswith(".gz") else open
            with read(path, "rb") as stream:
                total += sum(1 for line in stream if line.strip())
        except (OSError, EOFError):
            return None  # the worker says what is wrong with it
    return total
