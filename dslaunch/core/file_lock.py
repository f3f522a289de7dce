"""A lock between processes that the kernel releases when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dslaunch.core.errors import EnvironmentNotReady

SAY_AFTER_S = 5.0
SAY_EVERY_S = 60.0
POLL_S = 0.1


class LockTimeout(EnvironmentNotReady):
    """Another process still holds the lock. ``holder`` is its note, such as ``process 7 on node-1``."""

    def __init__(self, path: Path, holder: str, waited_s: float) -> None:
        super().__init__(
            f"{path} is held by {holder}" + (f", for {waited_s:.0f} s now" if waited_s >= 1 else ""),
            hint="wait for that process, or end it; the file itself can stay",
        )
        self.holder = holder


class LocksUnsupported(OSError):
    """The file system has no locks (some network file systems)."""


@contextmanager
def exclusive(
    path: Path, *, timeout_s: float | None = None, on_wait: Callable[[str, float], None] | None = None
) -> Iterator[int]:
    """Hold the lock file ``path``, made where it is missing. Gives its descriptor.

    A child process that inherits the descriptor holds the lock too, until it
    ends. The lock file stays: removing it would let two processes hold "the"
    lock. In it stands who holds it.

    Waits for another holder as long as it lives; at most ``timeout_s`` seconds
    where given (0: not at all). From five seconds on, ``on_wait(holder,
    waited_s)`` is called now and then; without one, a line on stderr says it.

    Raises LockTimeout where it is not had in time, LocksUnsupported (an OSError)
    on a file system without locks, OSError where the file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        say = on_wait or (lambda holder, waited_s: _say_on_stderr(path, holder, waited_s))
        start = time.monotonic()
        if not poll(lambda: _try(fd, path), timeout_s=timeout_s, on_wait=lambda s: say(_holder(fd), s)):
            raise LockTimeout(path, _holder(fd), time.monotonic() - start)
        _note_holder(fd)
        yield fd
    finally:
        os.close(fd)  # releases it, unless a child has the descriptor


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file ``path`` now. Raises OSError as :func:`exclusive`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(fd, path, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def poll(
    condition: Callable[[], bool], *, timeout_s: float | None = None, on_wait: Callable[[float], None]
) -> bool:
    """Wait until ``condition()``; False where it does not hold within ``timeout_s`` (None: no limit).

    ``on_wait(waited_s)`` is called after five seconds and then once a minute, so
    that nobody has to wonder what a silent process waits for.
    """
    start = time.monotonic()
    say_at = start + SAY_AFTER_S
    while not condition():
        now = time.monotonic()
        if timeout_s is not None and now - start >= timeout_s:
            return False
        if now >= say_at:
            say_at = now + SAY_EVERY_S
            on_wait(now - start)
        time.sleep(POLL_S)
    return True


def _try(fd: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LocksUnsupported(error.errno, f"no file locks here: {error.strerror}", str(path)) from error
    return True


def _note_holder(fd: int) -> None:
    note = f"process {os.getpid()} on {os.uname().nodename}\n".encode()
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, note, 0)
    except OSError:  # a full disk: the lock holds all the same, only nobody can read whose it is
        pass


def _holder(fd: int) -> str:
    return os.pread(fd, 256, 0).decode("utf-8", "replace").strip() or "another process"


def _say_on_stderr(path: Path, holder: str, waited_s: float) -> None:
    print(f"waiting for {holder}, which holds {path} ({waited_s:.0f} s)", file=sys.stderr, flush=True)
