"""SIGTERM and SIGUSR1 ask a run to stop at the next step, at a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Set by a signal, looked at once a step. The handlers do nothing else."""

    def __init__(self) -> None:
        self.requested = False

    def catch_warnings(self) -> None:
        """From now on SIGUSR1, a scheduler's early warning, is remembered instead of killing us."""
        signal.signal(signal.SIGUSR1, self._ask)

    def catch_termination(self) -> None:
        """From now on SIGTERM is a request too: there is a model worth saving.

        Before that there is nothing to lose, and SIGTERM ends the process as ever.
        """
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
