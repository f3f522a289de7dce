"""The watch of an engine that someone's own loop drives, without a run file."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import WatchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.train.watch import Watch

OnEvent = Callable[..., None]


def build_watch(
    limits: WatchPlan | Mapping[str, float],
    *,
    precision: str,
    rank: int,
    run_dir: str | Path | None,
    on_event: OnEvent | None,
    notes: Sequence[str] = (),
) -> Watch:
    """A watch that tells rank 0's stderr, ``on_event`` of each rank, and with ``run_dir`` its files.

    ``notes`` on the engine become its first events.
    Raises ConfigError for limits that are none, or a ``run_dir`` that cannot be made.
    """
    plan = limits if isinstance(limits, WatchPlan) else _read_limits(limits)
    writer, diagnosis = None, None
    if run_dir is not None and rank == 0:
        files = RunDir(Path(run_dir))
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

    return Watch(precision=precision, limits=plan, event=tell, say=say, diagnosis=diagnosis)


def _read_limits(limits: Mapping[str, float]) -> WatchPlan:
    kinds = {field.name: field.type for field in dataclasses.fields(WatchPlan)}
    names = [name for name, kind in kinds.items() if kind in ("int", "float")]
    for name, value in limits.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise ConfigError(f"watch.{name}: there is no such limit", hint=hint)
        if kinds[name] == "float":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"watch.{name} is {value!r}; it must be a number from 0 to 1")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"watch.{name} is {value!r}; it must be a whole number of at least 1")
    return WatchPlan(**limits)  # type: ignore[arg-type]
