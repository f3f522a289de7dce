"""Bounds for what a user's file may take: bytes to read, and memory and time of what it has us compute."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

LARGEST_READ = 16 * 2**20  # of run files, configs, templates: the largest seen are below 1 MiB


def read_bounded(path: Path) -> bytes:
    """The content of a file that people write. Raises OSError, also for one of more than 16 MiB."""
    with path.open("rb") as stream:
        return read_stream(stream, str(path))


def read_stream(stream: BinaryIO, name: str) -> bytes:
    """As :func:`read_bounded`, of what is open."""
    data = stream.read(LARGEST_READ + 1)
    if len(data) > LARGEST_READ:
        raise OSError(errno.EFBIG, "it has more than 16 MiB", name)
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
