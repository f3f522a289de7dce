"""Signals to the launcher, collected to be handled in its loop and never in a handler."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any

# ALRM is how Flux says that a job's time is over.
CANCEL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
FORWARD = (signal.SIGUSR1, signal.SIGUSR2)

# A further signal means "kill now" only from this long after the first: one Ctrl-C may come twice,
# from the terminal and from a wrapper that passes it on, in the same instant. A hand needs longer.
# Whoever sends TERM twice (schedulers, supervisors) leaves seconds in between.
_KILL_AFTER_S = {signal.SIGINT: 0.3, signal.SIGTERM: 1.0}


def means_kill(number: int, seconds_after_first: float) -> bool:
    """Whether a cancel signal, so long after the first one, asks to kill the ranks at once.

    HUP never does: a terminal that closes sends it several times, and that is no
    reason to lose the checkpoint.
    """
    kill_after_s = _KILL_AFTER_S.get(signal.Signals(number))
    return kill_after_s is not None and seconds_after_first >= kill_after_s


class SignalInbox:
    """While entered, signals land in ``pending`` (number, monotonic time) and make ``fd`` readable.

    INT and HUP that are ignored already (nohup, a background job of a shell
    script) stay ignored, for the ranks too. Only a main thread can have handlers;
    elsewhere the inbox stays empty. ``watches_hosts``: Ctrl-Z does nothing, because agents on
    other hosts would take a launcher that sleeps for one that is gone.
    """

    def __init__(self, *, watches_hosts: bool = False) -> None:
        self._watches_hosts = watches_hosts
        self.pending: deque[tuple[int, float]] = deque()
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            for number in (*CANCEL, *FORWARD):
                if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._note)
            if self._watches_hosts:
                self._old[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._old:
            signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def wake(self) -> None:
        """Make ``fd`` readable; for other threads."""
        with contextlib.suppress(OSError):  # full: it is readable already; closed: nobody waits
            os.write(self._write_fd, b"\0")

    def drain(self) -> None:
        """Make ``fd`` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append((number, time.monotonic()))
