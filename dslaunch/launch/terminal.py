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
from dslaunch.launch.symptoms import recognise
from dslaunch.launch.verdict import RankEnd, describe_code


class StreamWriter:
    """Writes chunks in order, in a thread. A reader that went away costs output, not the run.

    ``problem`` says why not all could be written (a full disk); a reader that went away is none.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[tuple[bytes, Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._broken = False
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="dslaunch-writer", daemon=True)
        self._thread.start()

    def write(self, data: bytes, on_written: Callable[[], None] | None = None) -> None:
        """Queue ``data``; ``on_written`` is called, in the thread, once it is out (or given up)."""
        self._queue.put((data, on_written))

    def close(self, give_up: Callable[[], bool]) -> None:
        """Wait until all is written, or ``give_up()`` turns true."""
        self._queue.put(None)
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.05)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            data, on_written = item
            if not self._broken:
                self._write(data)
            if on_written is not None:
                on_written()

    def _write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._broken = True
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.problem = error.strerror
            self._discard_rest()

    def _discard_rest(self) -> None:
        # What is left in the stream's buffer would fail again when Python exits.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
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

    def write_first_failure(self, end: RankEnd, *, own_worker: bool) -> None:
        """``first_failure``: the rank that failed before any other, in words, with its last lines."""
        self.write(
            "first_failure", rank=end.rank, host=end.host, stderr=list(end.tail),
            how=describe_code(end.code, own_worker=own_worker, facts=end.facts),
            looks_like=recognise(end.tail),
        )  # fmt: skip
