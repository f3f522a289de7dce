"""SIGTERM, SIGUSR1 and SIGUSR2 ask a run to stop at the next step, at a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Set by a signal, looked at once a step. The handlers do nothing else."""

    def __init__(self) -> None:
        self.requested = False

    def catch_warnings(self) -> None:
        """From now on a scheduler's early warning is remembered instead of killing us.

        Slurm's ``--signal`` is mostly USR1; Grid Engine's ``-notify`` sends USR2 before a kill.
        """
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._ask)

    def catch_termination(self) -> None:
        """From now on SIGTERM is a request too: there is a model worth saving.

        Before that there is nothing to lose, and SIGTERM ends the process as ever.
        """
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
