"""When a run ends for numbers that are not finite: keep what the step was given, trace it if asked to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core import atomic
from dslaunch.core.command import quote
from dslaunch.core.errors import Diverged, one_line
from dslaunch.core.plan import WatchPlan
from dslaunch.train.dist import gather_objects
from dslaunch.train.replay import window as windows
from dslaunch.train.replay.recent import RecentSteps
from dslaunch.train.replay.weights import weight_bytes, write_weights

if TYPE_CHECKING:
    from dslaunch.train.engine import TrainingEngine
    from dslaunch.train.loop import Job
    from dslaunch.train.replay.passes import Objective
    from dslaunch.train.replay.trace import Material

REPORT = "report.json"
_NAMED = ("rank", "micro_batch", "phase", "module", "parameter", "samples", "any_sample", "cause")


@dataclass(frozen=True)
class Scene:
    """Where a step went wrong, whoever's loop it was. ``run_dir`` None: nothing is kept."""

    engine: TrainingEngine
    limits: WatchPlan
    run_dir: Path | None
    event: Callable[..., None]
    say: Callable[[str], None]


def keep_and_trace(job: Job, recent: RecentSteps, error: Diverged) -> None:
    """Keep the window of the step that went wrong, and say in ``error``'s hint how to replay it. Collective.

    With ``watch.on_nonfinite: trace`` the window is traced at once. Nothing that fails here hides ``error``.
    """
    run_dir = Path(job.plan.launch.run_dir)
    scene = Scene(job.engine, job.plan.watch, run_dir, job.report.event, job.report.say)
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
        folder = keep(scene, window, error, has_weights=has_weights)
        if folder is None:
            return
        command = f"dslaunch replay {quote(str(run_dir))}"
        add_hint(error, f"{command} names the module, rank and samples", alone=command)
        if job.plan.watch.on_nonfinite == "trace":
            trace_at_once(scene, job.objective, window, folder, error, has_weights=has_weights)
    except Exception as problem:
        job.report.say(f"the step could not be kept for dslaunch replay: {one_line(problem)}")


def add_hint(error: Diverged, text: str, *, alone: str | None = None) -> None:
    """One more thing to do; ``alone``: how it is said where there is no other."""
    error.hint = f"{error.hint}\n{text}" if error.hint else alone or text


def keep(scene: Scene, window: Material, error: Diverged, *, has_weights: bool) -> Path | None:
    """Write the window; None, and said, where some rank could not. Collective."""
    assert scene.run_dir is not None
    folder = windows.window_path(scene.run_dir, window.step)
    engine = scene.engine
    rank = engine.rank
    writes_weights = rank == 0 or engine.zero_stage == 3

    def prepare() -> None:
        if rank == 0:
            assert scene.run_dir is not None
            windows.make_room(scene.run_dir)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    problem = _on_all(prepare)
    needed = weight_bytes(engine.module)
    fits = problem is None and needed >= 0 and _has_room(folder, needed * engine.world_size)
    has_weights = has_weights and all(gather_objects(fits))

    def write() -> None:
        window.write(folder, rank)
        if has_weights and writes_weights:
            write_weights(folder, rank, engine.module)

    def write_index() -> None:
        if rank == 0:
            windows.write_index(folder, _index(engine, window, error, has_weights))

    problem = problem or _on_all(write) or _on_all(write_index)
    if problem is not None:
        scene.say(f"the step could not be kept for a replay: {problem}")
        return None
    scene.event("nonfinite_kept", step=window.step, path=str(folder), weights=has_weights)
    return folder


def _index(engine: TrainingEngine, window: Material, error: Diverged, has_weights: bool) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "step": window.step,
        "verdict": error.verdict,
        "message": error.message,
        "loss_scale": window.loss_scale,
        "num_tokens": window.num_tokens,
        "has_weights": has_weights,
        "world_size": engine.world_size,
        "zero_stage": engine.zero_stage,
        "precision": engine.precision,
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


def trace_at_once(
    scene: Scene,
    objective: Objective,
    window: Material,
    folder: Path | None,
    error: Diverged,
    *,
    has_weights: bool,
) -> None:
    """Trace in this very process, where its weights are those that the step was given. Collective.

    What was found goes to ``error.culprit``, and into ``folder`` where there is one.
    """
    from dslaunch.train.replay.describe import describe, headline
    from dslaunch.train.replay.passes import Passes
    from dslaunch.train.replay.trace import Trace

    if not has_weights:
        scene.say("not traced here: a step since then has changed the weights; replay goes back")
        return
    scene.say("looking for the first module that went inf or nan")
    trace = Trace(Passes(scene.engine, objective), window, rank=scene.engine.rank)
    report = trace.run(detect_anomaly=scene.limits.detect_anomaly)
    path = None if folder is None else str(folder / REPORT)
    if path is not None and scene.engine.rank == 0:
        atomic.write_json(Path(path), report)
    message = headline(report)
    first = report["findings"][0] if report["findings"] else {}
    error.culprit = {"message": message, **{name: first.get(name) for name in _NAMED}, "report": path}
    scene.event("nonfinite_traced", step=window.step, message=message, path=path)
    for line in describe(report):
        scene.say(line)
