"""How far our own worker is: the last lines of metrics.jsonl, and the total from events.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dslaunch.core.events import parse_line, parse_number
from dslaunch.core.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last step that was logged since this start. ``total`` is 0 where it is not known."""

    step: int
    total: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None

    @property
    def place(self) -> str:
        """``step 12 of 100``."""
        return f"step {self.step}" + (f" of {self.total}" if self.total else "")


class ProgressReader:
    """Reads what this start of a run adds to its files; ``progress`` is None before the first step."""

    def __init__(self, run_dir: RunDir) -> None:
        self.progress: Progress | None = None
        self._total = 0
        self._metrics, self._events = _Tail(run_dir.metrics), _Tail(run_dir.events)

    def read(self) -> None:
        """Take in what was added since the last call."""
        for row in self._events.read():
            if row.get("kind") == "train_start":
                self._total = row.get("total_steps") or 0
        for row in self._metrics.read():
            if row.get("kind") == "train" and isinstance(row.get("step"), int):
                self.progress = Progress(
                    step=row["step"],
                    loss=parse_number(row.get("loss")),
                    tokens_per_s=parse_number(row.get("tokens_per_s")),
                )
        if self.progress is not None:
            self.progress = replace(self.progress, total=self._total)


class _Tail:
    """The objects that are added to a JSON-lines file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._place)
                data = stream.read()
        except OSError:  # not there yet, or the file system is not: then there is no news
            return
        self._place += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if (row := parse_line(line)) is not None:
                yield row
