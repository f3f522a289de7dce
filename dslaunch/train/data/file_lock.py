"""A lock between processes that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.1
_SAY_AFTER_S = 5.0
_SAY_EVERY_S = 60.0


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``. Waits as long as its holder lives, and says so on stderr.

    ``what`` names the work that the lock protects. The file stays: removing it
    would let two processes hold "the" lock.
    """
    with open(path, "ab") as stream:
        waiting = WaitNotice(f"waiting for another process: {what}")
        while not _try(stream, fcntl.LOCK_EX):
            waiting.tick()
        yield  # closing the file releases the lock


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file ``path`` now."""
    if not path.exists():
        return False
    with open(path, "ab") as stream:
        return not _try(stream, fcntl.LOCK_SH)


class WaitNotice:
    """Sleeps a little on each tick, and from five seconds on says now and then what is waited for."""

    poll_s = _POLL_S

    def __init__(self, text: str) -> None:
        self._text = text
        self._start = time.monotonic()
        self._next = self._start + _SAY_AFTER_S

    def tick(self) -> None:
        """One turn of a waiting loop."""
        time.sleep(_POLL_S)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAY_EVERY_S
            print(f"{self._text} ({now - self._start:.0f} s)", file=sys.stderr, flush=True)


def _try(stream: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
