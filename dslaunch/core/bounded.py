"""Bounds for what a user's file may take: bytes, waiting, and memory and time of what it has us compute."""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

WRITER_WAIT_S = 3  # for one end of a pipe to be opened after the other
LARGEST_READ = 16 * 2**20  # of run files, configs, templates: the largest seen are below 1 MiB


class NotRead(OSError):
    """What could be read, and is not."""

    def __init__(self, number: int, why: str, name: str, hint: str) -> None:
        super().__init__(number, why, name)
        self.hint = hint


def hint_of(error: BaseException) -> str | None:
    """What to do about an error of reading, where it tells."""
    return error.hint if isinstance(error, NotRead) else None


def read_bounded(path: Path) -> bytes:
    """The content of a file that people write. Raises OSError, also for one of more than 16 MiB."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        begin = _first_byte(descriptor, path) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else b""
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return begin + read_stream(stream, str(path))
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a file that is read by parts. Raises OSError, also for a pipe or device, which may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        directory = stat.S_ISDIR(mode)
        number, why = (
            (errno.EISDIR, "Is a directory") if directory else (errno.EINVAL, "it is no regular file")
        )
        raise OSError(number, why, str(path))
    return os.fdopen(descriptor, "rb")


def _first_byte(descriptor: int, path: Path) -> bytes:
    """What comes first out of a pipe that was opened without waiting. Raises OSError without a writer."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * WRITER_WAIT_S)
    try:
        first = os.read(descriptor, 1)
    except BlockingIOError:
        return b""  # somebody has it open, and is slow
    if not first:
        hint = "start what writes to it first, or have it write a file and name that"
        raise NotRead(errno.EPIPE, "it is a pipe that nothing writes to", str(path), hint)
    return first


def read_stream(stream: BinaryIO, name: str) -> bytes:
    """As :func:`read_bounded`, of what is open."""
    data = stream.read(LARGEST_READ + 1)
    if len(data) > LARGEST_READ:
        hint = "name a text of the usual size: data, logs and weights are not read here"
        raise NotRead(errno.EFBIG, "it has more than 16 MiB", name, hint)
    return data


@contextmanager
def bounded(memory_bytes: int, cpu_s: float) -> Iterator[None]:
    """Let what runs inside take so much memory and CPU time. Raises MemoryError or TimeoutError beyond that.

    Memory is the process's address space, so other threads have the same bound for as long. The time
    is kept in the main thread alone: Python has signals nowhere else.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    there = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    timed = threading.current_thread() is threading.main_thread()
    old_handler = signal.signal(signal.SIGVTALRM, _too_long) if timed else None
    try:
        with suppress(ValueError, OSError):  # a system without this limit
            resource.setrlimit(resource.RLIMIT_AS, (min([_address_space() + memory_bytes, *there]), hard))
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, old_handler)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Bytes of address space that this process has."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):  # no Linux
        return 2**40
    return pages * resource.getpagesize()


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError
