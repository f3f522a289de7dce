"""The watch of an engine that someone's own loop drives, without a run file, and what it keeps of a step."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core.errors import ConfigError, Diverged
from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import WatchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.train.watch import Watch

if TYPE_CHECKING:
    from dslaunch.train.engine.protocol import TrainingEngine
    from dslaunch.train.engine.result import StepResult
    from dslaunch.train.replay.own_loop import Recorder, TraceLoss

OnEvent = Callable[..., None]
USUAL_WATCH = WatchPlan()


class OwnLoop:
    """What watches an engine's steps; with ``on_nonfinite: trace`` it holds what each was given, too.

    ``run_dir``: where a step that went wrong is kept; None: nowhere.
    """

    def __init__(
        self,
        watch: Watch,
        limits: WatchPlan,
        *,
        run_dir: Path | None,
        event: Callable[..., None],
        say: Callable[[str], None],
        trace_loss: TraceLoss | None,
    ) -> None:
        self.watch = watch
        self._limits, self._run_dir, self._event, self._say = limits, run_dir, event, say
        self._trace_loss = trace_loss
        self.recorder: Recorder | None = None
        if limits.on_nonfinite == "trace":
            from dslaunch.train.replay.own_loop import Recorder

            self.recorder = Recorder()

    @contextmanager
    def ending(self, engine: TrainingEngine) -> Iterator[None]:
        """What diverges inside, at the end of a window, is traced, told and written."""
        with self.watch.concluding():
            try:
                yield
            except Diverged as error:
                if self.recorder is not None:
                    self._trace(engine, self.recorder, error)
                raise

    def see(self, result: StepResult) -> None:
        """A step that ended. Raises Diverged, on every rank, where the training gets nowhere."""
        if self.recorder is not None:
            self.recorder.see_step(result)
        self.watch.see(result)

    def _trace(self, engine: TrainingEngine, recorder: Recorder, error: Diverged) -> None:
        from dslaunch.train.replay.on_failure import Scene
        from dslaunch.train.replay.own_loop import conclude

        self.recorder = None  # neither the passes of the trace nor what a script goes on with is to be kept
        engine.record_no_more()
        scene = Scene(engine, self._limits, self._run_dir, self._event, self._say)
        conclude(recorder, scene, engine, self._trace_loss, error)


def build_own_loop(
    limits: WatchPlan | Mapping[str, Any],
    *,
    precision: str,
    rank: int,
    run_dir: str | Path | None,
    on_event: OnEvent | None,
    trace_loss: TraceLoss | None = None,
    notes: Sequence[str] = (),
) -> OwnLoop:
    """A watch that tells rank 0's stderr, ``on_event`` of each rank, and with ``run_dir`` its files.

    ``notes`` on the engine become its first events.
    Raises ConfigError for limits that are none, or a ``run_dir`` that cannot be made.
    """
    plan = limits if isinstance(limits, WatchPlan) else _read_limits(limits)
    files = None if run_dir is None else RunDir(Path(run_dir).absolute())
    writer, diagnosis = None, None
    if files is not None and rank == 0:
        try:
            files.path.mkdir(parents=True, exist_ok=True)
            writer, diagnosis = JsonlWriter(files.events), files.diagnosis
        except OSError as error:
            raise ConfigError(f"run_dir {run_dir} cannot be written: {error.strerror}") from None

    def tell(kind: str, **fields: Any) -> None:
        if writer is not None:
            writer.write(kind, **fields)
        if on_event is not None:
            on_event(kind, **fields)

    for note in notes:
        tell("note", message=note)

    def say(text: str) -> None:
        if rank == 0:
            print(text, file=sys.stderr, flush=True)

    watch = Watch(precision=precision, limits=plan, event=tell, say=say, diagnosis=diagnosis)
    where = None if files is None else files.path
    return OwnLoop(watch, plan, run_dir=where, event=tell, say=say, trace_loss=trace_loss)


def _read_limits(limits: Mapping[str, Any]) -> WatchPlan:
    kinds = {field.name: field.type for field in dataclasses.fields(WatchPlan)}
    for name, value in limits.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(kinds)}"
            raise ConfigError(f"watch.{name}: there is no such limit", hint=hint)
        if name == "on_nonfinite":
            if value not in ("stop", "trace"):
                raise ConfigError(f"watch.{name} is {value!r}; it must be 'stop' or 'trace'")
        elif name == "detect_anomaly":
            if not isinstance(value, bool):
                raise ConfigError(f"watch.{name} is {value!r}; it must be True or False")
        elif kinds[name] == "float":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"watch.{name} is {value!r}; it must be a number from 0 to 1")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"watch.{name} is {value!r}; it must be a whole number of at least 1")
    return WatchPlan(**limits)
