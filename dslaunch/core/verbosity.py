"""How much is said: one number in the environment, which ``-q`` and ``-v`` set and the ranks inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "DSLAUNCH_VERBOSE"
QUIET, NORMAL, VERBOSE = -1, 0, 1


def verbosity(environ: Mapping[str, str] = os.environ) -> int:
    """QUIET, NORMAL or VERBOSE: a number below, at or above 0; other text that is not empty is VERBOSE."""
    text = environ.get(VARIABLE, "").strip()
    try:
        number = int(text or NORMAL)
    except ValueError:
        return VERBOSE
    return max(QUIET, min(VERBOSE, number))
