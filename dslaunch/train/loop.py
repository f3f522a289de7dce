"""The training loop: windows of micro-batches, their numbers, evaluations, checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dslaunch.core.errors import EXIT_OK, EXIT_STOPPED_AT_CHECKPOINT, Diverged
from dslaunch.core.plan import RunPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.train.adapters import GradientWitness
from dslaunch.train.checkpoint import save_checkpoint
from dslaunch.train.corpus import Corpus
from dslaunch.train.data.sampler import BatchSchedule
from dslaunch.train.dist import World, all_reduce_sum, peak_device_memory
from dslaunch.train.engine import StepResult, TrainingEngine
from dslaunch.train.evaluate import EvalResult, eval_batches, run_evaluation
from dslaunch.train.objectives.sft import SftObjective
from dslaunch.train.replay.recent import RecentSteps
from dslaunch.train.report import Report
from dslaunch.train.stopping import StopRequest
from dslaunch.train.watch import Watch
from dslaunch.train.whereabouts import note_steps


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the loop works with.

    ``extra`` goes into each checkpoint; ``keep_alive`` is only held (see ``LoadedModel``).
    """

    plan: RunPlan
    world: World
    engine: TrainingEngine
    objective: SftObjective
    train: Corpus
    evaluation: Corpus | None
    schedule: BatchSchedule
    report: Report
    stop: StopRequest
    watch: Watch
    extra: dict[str, Any]
    keep_alive: tuple[Any, ...] = ()


@dataclass
class _Interval:
    """The steps since the last line of metrics.jsonl. Results stay unread until it is written."""

    results: list[StepResult] = field(default_factory=list)
    num_tokens: int = 0
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def num_supervised(self) -> int:
        """Trained tokens of all steps of the interval."""
        return sum(r.num_tokens or 0 for r in self.results)

    @property
    def loss(self) -> float:
        """The mean per supervised token over all steps of the interval."""
        return sum(r.loss * (r.num_tokens or 0) for r in self.results) / self.num_supervised

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside, an evaluation or a checkpoint, is not in the interval's time."""
        if self.results:
            _ = self.results[-1].loss  # what the device still has to do for the steps is
        paused = time.monotonic()
        yield
        self.started += time.monotonic() - paused


def run_training(job: Job, first_step: int) -> int:
    """Train from ``first_step`` to the end or to a request to stop; the exit code of this rank. Collective.

    Each step's data and denominator come from the schedule alone, so a resumed
    run continues as if it had never stopped. A stop request of any rank stops
    all of them after the same step, at a checkpoint: the step after the one in
    which it was raised, so that no step has to wait for the others' word.
    """
    total = job.schedule.total_steps
    job.report.event("train_start", step=first_step, total_steps=total, num_units=len(job.train))
    if first_step == 0:
        _evaluate(job, 0)
    witness = GradientWitness(job.engine.module) if job.plan.adapter is not None else None
    interval = _Interval()
    previous: StepResult | None = None
    recent = RecentSteps()
    for step in range(first_step, total):
        note_steps(step)
        with job.watch.concluding(), _keeping(job, recent):
            recent.begin(step, job.engine.loss_scale)
            result = train_step(job, step)
            recent.end(result)
            job.watch.see(result)
        if witness is not None:
            _check_gradients(job, witness)
            witness = None
        done = step + 1
        stopping = previous is not None and previous.flag and done < total
        previous = result
        interval = _report_step(job, interval, step, result, force=stopping or done == total)
        _evaluate_and_save(job, interval, done, stopping=stopping)
        if stopping:
            return _stopped(job, done, total)
    job.report.event("train_end", step=total)
    job.report.say(f"done: {total} steps, checkpoint step-{total}")
    return EXIT_OK


def _evaluate_and_save(job: Job, interval: _Interval, done: int, *, stopping: bool) -> None:
    """What is due after ``done`` steps."""
    last = done == job.schedule.total_steps
    evaluates = _is_due(job.plan.output.eval_steps, done) or last
    saves = _is_due(job.plan.output.save_steps, done) or last or stopping
    if not (evaluates or saves):
        return
    with interval.pause():
        if evaluates:
            _evaluate(job, done)
        if saves:
            _save(job, done, say=not (last or stopping))  # those are said at the end


@contextmanager
def _keeping(job: Job, recent: RecentSteps) -> Iterator[None]:
    """Of a run that diverges, keep what its last step was given, for ``dslaunch replay``."""
    try:
        yield
    except Diverged as error:
        from dslaunch.train.replay.on_failure import keep_and_trace

        keep_and_trace(job, recent, error)
        raise


def _check_gradients(job: Job, witness: GradientWitness) -> None:
    warning = witness.check(lambda values: all_reduce_sum(values, job.world.device))
    if warning is not None:
        job.report.event("warning", message=warning)
        job.report.say(f"warning: {warning}")


def train_step(job: Job, step: int) -> StepResult:
    """One accumulation window. The number of micro-batches is the same on all ranks."""
    num_tokens = job.train.count_supervised(job.schedule.window_units(step))
    result: StepResult | None = None
    for units in job.schedule.micro_batches(step, job.world.rank):
        loss = job.objective.token_loss(job.train.batch(units))
        job.engine.backward_token_sum(loss.sum, num_tokens=num_tokens)
        result = job.engine.step(flag=job.stop.requested)
    assert result is not None, "a schedule's window is DeepSpeed's accumulation window"
    return result


def _report_step(job: Job, interval: _Interval, step: int, result: StepResult, *, force: bool) -> _Interval:
    """Write the interval's line where one is due; returns the interval to go on with."""
    units = job.schedule.window_units(step)
    interval.results.append(result)
    interval.num_tokens += job.train.count_tokens(units)
    if not (_is_due(job.plan.output.logging_steps, step + 1) or force):
        return interval
    _report_interval(job, interval, step + 1, data_digest(units))
    return _Interval()


def _report_interval(job: Job, interval: _Interval, done: int, digest: str) -> None:
    """One line of numbers and one on stdout; losses are the interval's, the rest the last step's."""
    result = interval.results[-1]
    loss, norm = interval.loss, result.grad_norm  # waits for the device
    seconds = time.monotonic() - interval.started
    speed = interval.num_tokens / max(seconds, 1e-9)
    job.report.metrics(
        "train",
        done,
        epoch=round(job.schedule.epoch(done), 4),
        loss=loss,
        grad_norm=norm,
        grad_norm_clipped=result.grad_norm_clipped,
        lr=result.lr,
        loss_scale=result.loss_scale,
        skipped=result.skipped,
        num_supervised_tokens=interval.num_supervised,
        num_tokens=interval.num_tokens,
        tokens_per_s=round(speed, 1),
        seconds=round(seconds, 3),
        peak_memory_bytes=peak_device_memory(job.world.device),
        data_digest=digest,
    )
    job.report.say(
        f"step {done}/{job.schedule.total_steps}  loss {loss:.4f}  grad_norm {norm:.4g}  "
        f"lr {result.lr:.3g}  {speed:.0f} tokens/s"
    )


def data_digest(units: np.ndarray[Any, Any]) -> str:
    """A short name for which units a step used, in which order: equal digests, equal data."""
    return hashlib.sha256(np.ascontiguousarray(units, dtype="<i8").tobytes()).hexdigest()[:12]


def _evaluate(job: Job, step: int) -> EvalResult | None:
    corpus = job.evaluation
    if corpus is None:
        return None
    started = time.monotonic()
    batches = eval_batches(
        corpus.packs,
        corpus.lengths,
        micro_batch_size=job.plan.batch.train_micro_batch_size_per_gpu,
        rank=job.world.rank,
        world_size=job.world.world_size,
        collate_units=corpus.batch,
    )
    result = run_evaluation(job.engine, job.objective, batches, job.world.device)
    job.report.metrics(
        "eval",
        step,
        loss=result.loss,
        perplexity=result.perplexity,
        num_supervised_tokens=result.num_tokens,
        seconds=round(time.monotonic() - started, 3),
    )
    job.report.say(
        f"eval at step {step}: held-out loss {result.loss:.4f} over {result.num_tokens} answer tokens"
    )
    return result


def _save(job: Job, step: int, *, say: bool) -> None:
    root = RunDir(Path(job.plan.launch.run_dir)).checkpoints
    started = time.monotonic()
    path = save_checkpoint(job.engine, root, step, extra=job.extra, keep=job.plan.output.save_total_limit)
    seconds = time.monotonic() - started
    job.report.event("checkpoint_saved", step=step, path=str(path), seconds=round(seconds, 3))
    if say:
        job.report.say(f"checkpoint {path.name} ({seconds:.1f} s)")


def _stopped(job: Job, done: int, total: int) -> int:
    job.report.event("train_stopped", step=done, total_steps=total)
    job.report.say(f"stopped at step {done} of {total}, at a checkpoint: --resume goes on from there")
    return EXIT_STOPPED_AT_CHECKPOINT


def _is_due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0
