"""Lines for people, on stderr."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Write a line to stderr, if that can be: a full disk or a reader that is gone ends nothing."""
    if sys.stderr is None:  # closed; print would take stdout
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
