"""When a run ends for numbers that are not finite: keep what the step was given, trace it if asked to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core import atomic
from dslaunch.core.command import quote
from dslaunch.core.errors import Diverged, one_line
from dslaunch.train.dist import gather_objects
from dslaunch.train.replay import window as windows
from dslaunch.train.replay.recent import RecentSteps
from dslaunch.train.replay.weights import weight_bytes, write_weights
from dslaunch.train.replay.window import Window

if TYPE_CHECKING:
    from dslaunch.train.loop import Job

REPORT = "report.json"


def keep_and_trace(job: Job, recent: RecentSteps, error: Diverged) -> None:
    """Keep the window of the step that went wrong, and say in ``error``'s hint how to replay it. Collective.

    With ``watch.on_nonfinite: trace`` the window is traced at once. Nothing that fails here hides ``error``.
    """
    try:
        found = recent.suspect(error.step)
        if found is None:
            return
        step, has_weights = found
        units = job.schedule.window_units(step.step)
        window = windows.build_window(
            step.step + 1,
            corpus=job.train,
            micro_batches=job.schedule.micro_batches(step.step, job.world.rank),
            num_tokens=job.train.count_supervised(units),
            loss_scale=step.loss_scale,
            rng=step.rng,
        )
        folder = _keep(job, window, error, has_weights=has_weights)
        if folder is not None:
            error.hint = _with_replay(error.hint, job)
            if job.plan.watch.on_nonfinite != "trace":
                return
            if not has_weights:
                job.report.say("not traced here: a step since then has changed the weights; replay goes back")
                return
            _trace(job, window, folder)
    except Exception as problem:
        job.report.say(f"the step could not be kept for dslaunch replay: {one_line(problem)}")


def _with_replay(hint: str | None, job: Job) -> str:
    command = f"dslaunch replay {quote(job.plan.launch.run_dir)}"
    return f"{hint}\n{command} names the module, rank and samples" if hint else command


def _keep(job: Job, window: Window, error: Diverged, *, has_weights: bool) -> Path | None:
    """Write the window; None, and said, where some rank could not."""
    run_dir = Path(job.plan.launch.run_dir)
    folder = windows.window_path(run_dir, window.step)
    rank, engine = job.world.rank, job.engine
    writes_weights = rank == 0 or engine.zero_stage == 3

    def prepare() -> None:
        if rank == 0:
            windows.make_room(run_dir)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    problem = _on_all(prepare)
    needed = weight_bytes(engine.module)
    fits = problem is None and needed >= 0 and _has_room(folder, needed * engine.world_size)
    has_weights = has_weights and all(gather_objects(fits))

    def write() -> None:
        windows.write_rank(folder, rank, window)
        if has_weights and writes_weights:
            write_weights(folder, rank, engine.module)

    def write_index() -> None:
        if rank == 0:
            windows.write_index(folder, _index(job, window, error, has_weights))

    problem = problem or _on_all(write) or _on_all(write_index)
    if problem is not None:
        job.report.say(f"the step could not be kept for dslaunch replay: {problem}")
        return None
    job.report.event("nonfinite_kept", step=window.step, path=str(folder), weights=has_weights)
    return folder


def _index(job: Job, window: Window, error: Diverged, has_weights: bool) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "step": window.step,
        "verdict": error.verdict,
        "message": error.message,
        "loss_scale": window.loss_scale,
        "num_tokens": window.num_tokens,
        "has_weights": has_weights,
        "world_size": job.engine.world_size,
        "zero_stage": job.engine.zero_stage,
        "precision": job.engine.precision,
    }


def _on_all(act: Callable[[], None]) -> str | None:
    """Run ``act`` on every rank; the first problem that any of them had. Collective."""
    problem = None
    try:
        act()
    except Exception as error:  # a full disk, above all; and no rank may leave the others waiting
        problem = one_line(error)
    return next((text for text in gather_objects(problem) if text is not None), None)


def _has_room(folder: Path, needed: int) -> bool:
    return shutil.disk_usage(folder).free > 2 * needed


def _trace(job: Job, window: Window, folder: Path) -> None:
    """Trace in this very process: its weights are those that the step was given."""
    from dslaunch.train.replay.describe import describe, headline
    from dslaunch.train.replay.passes import Passes
    from dslaunch.train.replay.trace import Trace

    job.report.say("looking for the first module that went inf or nan")
    passes = Passes(job.engine, job.objective)
    trace = Trace(passes, window, rank=job.world.rank, pad_token_id=job.train.pad_token_id)
    report = trace.run(detect_anomaly=job.plan.watch.detect_anomaly)
    if job.world.rank == 0:
        atomic.write_json(folder / REPORT, report)
    job.report.event(
        "nonfinite_traced", step=window.step, message=headline(report), path=str(folder / REPORT)
    )
    for line in describe(report):
        job.report.say(line)
