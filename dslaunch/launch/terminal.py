"""Writing to stdout, stderr and events.jsonl without ever being held up by them.

A pager that is not scrolled or a terminal stopped by Ctrl-S must not keep the
supervisor from seeing a rank die. Each stream has a thread that may wait; how
much is on its way is bounded by acknowledgements to the agents (agent.WINDOW).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from dslaunch.core.events import JsonlWriter
from dslaunch.launch.ends import RankEnd
from dslaunch.launch.symptoms import recognise
from dslaunch.launch.verdict import Outcome, describe_code

_ERASE = b"\r\x1b[K"
_Item = tuple[bytes, "Callable[[], None] | None", BinaryIO, bool]


def is_terminal(stream: BinaryIO) -> bool:
    """Whether lines on it can be erased again."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_same_terminal(one: BinaryIO, other: BinaryIO) -> bool:
    """Whether what is written to both comes out on one screen."""
    if not (one.isatty() and other.isatty()):
        return False
    return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev


class StreamWriter:
    """Writes chunks in order, in a thread. A reader that went away costs output, not the run.

    ``problem`` says why not all could be written (a full disk); a reader that went away is none.
    On a terminal, :meth:`show_status` draws a last line there, which goes when anything else is written.
    """

    def __init__(self, stream: BinaryIO, twin: BinaryIO | None = None) -> None:
        """``twin``: another stream that ends at the same terminal, for :meth:`write`."""
        self._stream, self._twin = stream, twin
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._broken = False
        self._status = self._drawn = ""
        self._is_status_due = False
        self._column = False  # whether the cursor stands behind text, where no status may go
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="dslaunch-writer", daemon=True)
        self._thread.start()

    def write(
        self, data: bytes, on_written: Callable[[], None] | None = None, stream: BinaryIO | None = None
    ) -> None:
        """Queue ``data``; ``on_written`` is called, in the thread, once it is out (or given up).

        ``stream``: the twin, where it is to go there.
        """
        self._queue.put((data, on_written, stream or self._stream, False))

    def tell(self, data: bytes, on_written: Callable[[], None] | None = None) -> None:
        """The same for lines of our own: not behind a line that a rank has begun and not ended."""
        self._queue.put((data, on_written, self._stream, True))

    def show_status(self, text: str) -> None:
        """Draw ``text`` (of printable characters) below what is written so far, or erase what is drawn."""
        self._status = text
        if text != self._drawn and not self._is_status_due:
            self._is_status_due = True
            self._queue.put((b"", None, self._stream, False))

    def close(self, give_up: Callable[[], bool]) -> None:
        """Wait until all is written, or ``give_up()`` turns true."""
        self._queue.put(None)
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.05)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            data, on_written, stream, is_own = item
            if on_written is None and not data:
                self._draw_status()
            elif data:
                data = b"\n" + data if is_own and self._column else data
                self._column = not data.endswith(b"\n")
                self._erase_status()
                self._write(data, stream)
            if on_written is not None:
                on_written()
        self._erase_status()

    def _draw_status(self) -> None:
        self._is_status_due = False
        text = self._status
        self._erase_status()
        if text and not self._column:
            self._drawn = text
            self._write(self._fit(text), self._stream)

    def _erase_status(self) -> None:
        if self._drawn:
            self._drawn = ""
            self._write(_ERASE, self._stream)

    def _write(self, data: bytes, stream: BinaryIO) -> None:
        if self._broken:
            return
        try:
            stream.write(data)
            stream.flush()
        except (OSError, ValueError) as error:
            self._broken = True
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.problem = error.strerror
            self._discard_rest()

    def _fit(self, text: str) -> bytes:
        """So much of it as has room in one line."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            columns = 80
        return text[: max(0, columns - 1)].encode("utf-8", "replace")

    def _discard_rest(self) -> None:
        # What is left in a stream's buffer would fail again when Python exits (with 120), and what is
        # said to the twin later would, too.
        for stream in (self._stream, self._twin):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, stream.fileno())
                    os.close(null)


class SafeEvents:
    """events.jsonl; a full disk costs events, never the run."""

    def __init__(self, writer: JsonlWriter | None) -> None:
        self._writer = writer
        self.problem: str | None = None

    def write(self, kind: str, **fields: Any) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(kind, **fields)
        except OSError as error:
            self.problem = error.strerror

    def write_exit(self, end: RankEnd, pid: int) -> None:
        """``rank_exit``: how one rank ended."""
        how = {"exit_code": end.code} if end.code >= 0 else {"signal": -end.code}
        facts = {} if end.facts is None else vars(end.facts)
        self.write(
            "rank_exit", rank=end.rank, host=end.host, pid=pid, seconds=round(end.seconds, 3),
            max_rss_bytes=end.max_rss_bytes, asked=end.asked, **how, **facts,
        )  # fmt: skip

    def write_end(self, outcome: Outcome) -> None:
        """``launch_end``: the exit code; after a time-out also where each rank was."""
        places = {"places": outcome.places} if outcome.places else {}
        self.write("launch_end", exit_code=outcome.exit_code, **places)

    def write_first_failure(self, end: RankEnd, *, own_worker: bool) -> None:
        """``first_failure``: the rank that failed before any other, in words, with its last lines."""
        self.write(
            "first_failure", rank=end.rank, host=end.host, stderr=list(end.tail),
            how=describe_code(end.code, own_worker=own_worker, facts=end.facts),
            looks_like=recognise(end.tail),
        )  # fmt: skip
