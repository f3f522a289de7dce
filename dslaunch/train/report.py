"""Where a run's numbers go: metrics.jsonl, events.jsonl, stdout, and trackers. Rank 0 only.

One object, so that the loop says once what happened. On other ranks every call does nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dslaunch.core.errors import EnvironmentNotReady, one_line
from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import RunPlan, to_json
from dslaunch.core.run_dir import RunDir

_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_MLFLOW_TAG = "dslaunch_run_id"


class Tracker(Protocol):
    """Something that draws curves."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Report:
    """Writes the run's numbers and events. Build it with :func:`open_report`."""

    def __init__(self, run_dir: RunDir | None, trackers: Mapping[str, Tracker]) -> None:
        self._metrics = JsonlWriter(run_dir.metrics) if run_dir else None
        self._events = JsonlWriter(run_dir.events) if run_dir else None
        self._trackers = dict(trackers)

    def say(self, text: str) -> None:
        """One line on stdout."""
        if self._metrics:
            print(text, flush=True)

    def metrics(self, kind: str, step: int, **values: Any) -> None:
        """One line of metrics.jsonl, and every finite number of it to the trackers as ``kind/name``."""
        if self._metrics is None:
            return
        self._metrics.write(kind, step=step, **values)
        numbers = {f"{kind}/{name}": float(value) for name, value in values.items() if _is_number(value)}
        for name in tuple(self._trackers):
            self._try(name, lambda tracker: tracker.log(step, numbers))

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        if self._events:
            self._events.write(kind, **fields)

    def close(self) -> None:
        for name in tuple(self._trackers):
            self._try(name, lambda tracker: tracker.close())
        for writer in (self._metrics, self._events):
            if writer:
                writer.close()
        self._metrics = self._events = None
        self._trackers = {}

    def _try(self, name: str, act: Callable[[Tracker], None]) -> None:
        """A service that goes away in the middle costs its curves, said once, and never the training."""
        try:
            act(self._trackers[name])
        except Exception as error:
            del self._trackers[name]
            text = f"{name} gets no more numbers, metrics.jsonl has them all: {one_line(error)}"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            self.event("warning", message=text)


def _is_number(value: Any) -> bool:
    # Trackers draw nan and inf as they please, some refuse the whole line; metrics.jsonl has them.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises EnvironmentNotReady where a tracker that was asked for is not installed. Every rank may ask."""
    for name in names:
        if importlib.util.find_spec(_MODULES[name]) is None:
            raise EnvironmentNotReady(
                f"output.report_to asks for {name}, which is not installed; nothing was trained",
                hint=f"pip install {name}, or take it out of output.report_to",
            )


def open_report(plan: RunPlan, *, is_main: bool, first_step: int) -> Report:
    """The report of this rank: a real one on the main rank, an idle one on the others.

    TensorBoard files are written whenever tensorboard is installed; wandb and
    mlflow only when asked for. ``first_step``: how many steps were done before;
    later ones replace what an interrupted start wrote past its last checkpoint.
    """
    if not is_main:
        return Report(None, {})
    run_dir = RunDir(path=Path(plan.launch.run_dir))
    trackers: dict[str, Tracker] = {}
    if importlib.util.find_spec("tensorboard") is not None:
        trackers["tensorboard"] = _TensorBoard(run_dir, first_step)
    resumed = first_step > 0
    if "wandb" in plan.output.report_to:
        trackers["wandb"] = _open_tracker("wandb", lambda: _Wandb(plan, resumed=resumed))
    if "mlflow" in plan.output.report_to:
        trackers["mlflow"] = _open_tracker("mlflow", lambda: _Mlflow(plan, resumed=resumed))
    return Report(run_dir, trackers)


def _open_tracker(name: str, build: Callable[[], Tracker]) -> Tracker:
    """Raises EnvironmentNotReady, in the tracker's own words, where it cannot be logged in to or reached."""
    try:
        return build()
    except Exception as error:
        raise EnvironmentNotReady(
            f"{name} cannot be used: {one_line(error)}",
            hint=f"mend what {name} says, or take it out of output.report_to",
        ) from error


class _TensorBoard:
    def __init__(self, run_dir: RunDir, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard forgets what an interrupted start wrote past the checkpoint.
        purge_step = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(str(run_dir.tensorboard), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, plan: RunPlan, *, resumed: bool) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dslaunch"),
            name=plan.name,
            id=_run_id(plan),
            resume="allow" if resumed else None,
            dir=plan.launch.run_dir,
            config=_public(plan),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, plan: RunPlan, *, resumed: bool) -> None:
        import mlflow  # type: ignore[import-not-found, unused-ignore]

        self._mlflow = mlflow
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "dslaunch"))
        # MLflow makes the ids itself, so ours is a tag.
        found = mlflow.MlflowClient().search_runs(
            [experiment.experiment_id], f"tags.{_MLFLOW_TAG} = '{_run_id(plan)}'", max_results=1
        )
        mlflow.start_run(
            run_id=found[0].info.run_id if resumed and found else None,
            run_name=os.path.basename(plan.launch.run_dir),
            tags={_MLFLOW_TAG: _run_id(plan)},
        )
        mlflow.log_dict(_public(plan), "plan.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("/", "."): v for name, v in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _run_id(plan: RunPlan) -> str:
    """The same run directory is the same run, so that a resumed one goes on in its own curves."""
    return hashlib.sha256(plan.launch.run_dir.encode()).hexdigest()[:16]


def _public(plan: RunPlan) -> dict[str, Any]:
    """The plan without the environment of the ranks: it leaves this machine."""
    value = to_json(plan)
    value["launch"].pop("env", None)
    value["launch"].pop("secret_env", None)
    return value
