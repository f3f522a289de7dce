"""What a process says while it waits for another one."""

from __future__ import annotations

import sys
from collections.abc import Callable


def waiting_for(what: str) -> Callable[[str, float], None]:
    """An ``on_wait`` of ``core.file_lock.exclusive`` that says on stderr what its holder is busy with."""

    def say(holder: str, waited_s: float) -> None:
        print(f"waiting for {holder}: {what} ({waited_s:.0f} s)", file=sys.stderr, flush=True)

    return say
