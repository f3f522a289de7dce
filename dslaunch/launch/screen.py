"""What the user sees of a launch: rank 0's output, error lines of the others, our own words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dslaunch.core.errors import EXIT_DIVERGED
from dslaunch.core.run_dir import RunDir
from dslaunch.launch.folding import NEVER, BarFilter, LineFolder
from dslaunch.launch.terminal import StreamWriter, is_same_terminal, is_terminal
from dslaunch.launch.text import printable, without_controls
from dslaunch.launch.verdict import Outcome, render_end

_REMEMBERED = 100  # lines of a rank's stderr: more than its last words have


class Screen:
    """stdout and stderr of a launch, written in threads that may be held up.

    ``deadline`` is when :meth:`tick` is due (monotonic time).
    """

    def __init__(self, out: BinaryIO, err: BinaryIO, run_dir: str) -> None:
        shared = is_same_terminal(out, err)
        self._err = StreamWriter(err, out if shared else None)
        self._out = self._err if shared else StreamWriter(out)
        self._out_stream = out
        self.is_terminal = is_terminal(err)
        self._run_dir = RunDir(Path(run_dir))
        self._shown: dict[int, deque[str]] = {}  # by rank: lines of stderr that the user has seen
        self._folder = LineFolder(self._err.tell)
        self._bars = None if err.isatty() else BarFilter()

    @property
    def deadline(self) -> float:
        return min(self._folder.deadline, NEVER if self._bars is None else self._bars.deadline)

    def tick(self, now: float = NEVER) -> None:
        """Show what has waited long enough by ``now``."""
        self._folder.flush(now)
        if self._bars is not None and (text := self._bars.tick(now)):
            self._err.write(text)

    def show_status(self, text: str) -> None:
        """A line that stays the last one; only on a terminal."""
        self._err.show_status(printable(text))

    def say(self, text: str) -> None:
        """A line of our own on stderr."""
        self._folder.flush()
        self._err.tell(f"dslaunch: {text}\n".encode("utf-8", "surrogateescape"))

    def show_output(self, event: dict[str, Any], on_written: Callable[[int], None]) -> None:
        """Bytes of rank 0, to the stream that they were written to; ``on_written`` gets their number."""
        data = event["data"].encode("utf-8", "surrogateescape")
        size = len(data)
        if event["stream"] == "stdout":
            self._out.write(data, lambda: on_written(size), self._out_stream)
            return
        if self._bars is not None:
            data = self._bars.feed(data, time.monotonic())
        self._err.write(data, lambda: on_written(size))

    def show_error_line(
        self, host: str, event: dict[str, Any], on_written: Callable[[int], None], *, hidden: bool
    ) -> None:
        """A line of another rank's stderr that looks like an error. ``hidden``: it is only counted."""
        rank, size = event["rank"], event["bytes"]
        if hidden:
            self._err.write(b"", lambda: on_written(size))
            return
        line = without_controls(event["data"])
        self._shown.setdefault(rank, deque(maxlen=_REMEMBERED)).append(line)
        self._folder.add(
            host, rank, line.encode("utf-8", "surrogateescape"), lambda: on_written(size), time.monotonic()
        )

    def show_end(self, outcome: Outcome) -> None:
        """The last block on stderr."""
        self._err.show_status("")
        self.tick()
        first = -1 if outcome.first_failure is None else outcome.first_failure.rank
        # Of rank 0 all was shown as it came, of the others single lines.
        lines = () if self._folder.has_left_out else self._shown.get(first, ())
        shown = None if first == 0 else frozenset(lines)
        can_replay = outcome.exit_code == EXIT_DIVERGED and bool(self._run_dir.kept_steps())
        words = render_end(outcome, self._run_dir, shown=shown, can_replay=can_replay)
        self._err.tell(words.encode("utf-8", "surrogateescape"))

    def close(self, give_up: Callable[[], bool]) -> None:
        """Wait until all is written, or ``give_up()`` turns true."""
        self._err.show_status("")
        self.tick()
        self._out.close(give_up)
        if self._out.problem is not None:
            log = self._run_dir.rank_log(0)
            self.say(f"rank 0's output could not all be written here: {self._out.problem}; see {log}")
        self._err.close(give_up)
