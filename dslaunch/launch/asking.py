"""A program on another machine that is asked, and answers, in lines of JSON within a time."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.events import parse_line
from dslaunch.launch.link import kill_with_descendants
from dslaunch.launch.orders import encode_orders
from dslaunch.launch.text import said

_KEEP_NOISE = 1024  # of lines that are no answer: a greeting, or why an account lets nobody in
_LOOK_S = 0.5  # between two looks at programs that stay when what they started has failed


class NoAnswer(Exception):
    """The host did not answer; the text says how."""


class Program:
    """A running probe. What it complains of, or the way to it, is in ``said``.

    ``has_given_up`` is asked of its process id whether what should answer has ended though it has not.
    """

    def __init__(self, command: Command, timeout_s: float, has_given_up: Callable[[int], bool]) -> None:
        self.timeout_s, self._has_given_up = timeout_s, has_given_up
        self._stderr = TemporaryFile()  # noqa: SIM115
        # A group of its own: a wrapper around ssh may have children that outlive it.
        self.process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._room = float("inf") if command.stdin_room is None else command.stdin_room
        self._unsent = self._unread = self._noise = b""

    def ask(self, question: bytes | dict[str, Any], event: str) -> dict[str, Any]:
        """Send ``question`` and wait for the answer of that name; other lines (login noise) are skipped.

        Raises NoAnswer where it does not come in time.
        """
        until = time.monotonic() + self.timeout_s
        self._unsent += question if isinstance(question, bytes) else encode_orders(question)
        for line in self._lines(until):
            found = parse_line(line) or {}
            if found.get("event") == "room":
                self._room += int(found.get("bytes", 0))
            elif found.get("event") == event:
                self._noise = b""
                return found
            else:
                self._noise = (self._noise + line + b"\n")[-_KEEP_NOISE:]
        raise NoAnswer(self._ending(until))

    def said(self) -> bytes:
        self._stderr.seek(0)
        return self._stderr.read()[-8192:]

    def close(self) -> None:
        """The end of its stdin ends it."""
        self._stdin.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._kill()
        self._stdout.close()
        self._stderr.close()

    def _lines(self, until: float) -> Iterator[bytes]:
        """What comes on its stdout, while ``_unsent`` is sent; ends with that, or with the time."""
        while (now := time.monotonic()) < until:
            while b"\n" in self._unread:  # what comes behind an answer is left for the next question
                line, _, self._unread = self._unread.partition(b"\n")
                yield line
            poll = select.poll()  # select.select knows no descriptor above 1023
            poll.register(self._stdout, select.POLLIN)
            if self._unsent and self._room > 0:
                poll.register(self._stdin, select.POLLOUT)
            ready = {fd for fd, _ in poll.poll(min(_LOOK_S, until - now) * 1000)}
            if self._stdin.fileno() in ready and not self._send():
                self._unsent = b""
            if self._stdout.fileno() in ready:
                data = os.read(self._stdout.fileno(), 65536)
                if not data:
                    return
                self._unread += data
            elif self._has_given_up(self.process.pid):
                return

    def _send(self) -> bool:
        """False where nobody reads any more: what it printed says why."""
        try:
            count = os.write(self._stdin.fileno(), self._unsent[: int(min(self._room, 65536))])
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._unsent = self._unsent[count:]
        self._room -= count
        return True

    def _kill(self) -> None:
        kill_with_descendants(self.process)
        self.process.wait()

    def _words(self) -> str:
        return said(self.said(), 500, noise=self._noise)

    def _ending(self, until: float) -> str:
        if self._has_given_up(self.process.pid):
            words = self._words()  # before our own KILL, of which a shell writes a word
            self._kill()
            return words or "it ended without a word"
        try:  # the end of its stdout need not be its own
            code = self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            words = self._words()
            self._kill()
            how = f"no answer within {self.timeout_s:g} s"
            return f"{how}; it said: {words}" if words else how
        return self._words() or f"it ended with code {code}"
