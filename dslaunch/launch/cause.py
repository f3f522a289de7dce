"""Why a launch ends: which rank, host, signal or refusal came first. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.launch.ends import LostHost, RankEnd

# Failures so close together are one event, and news of two hosts take different times.
SAME_EVENT_S = 2.0


@dataclass
class Cause:
    """What made a launch end, or nothing yet."""

    first_failure: RankEnd | None = None
    cancelled_by: int | None = None  # signal number
    lost: LostHost | None = None
    refusal: EnvironmentNotReady | None = None
    late: tuple[int, ...] = ()  # ranks that had not stopped when others had, at a checkpoint

    @property
    def is_known(self) -> bool:
        """Whether the ranks were told to stop: what ends from then on is not the reason for it."""
        reasons = (self.first_failure, self.cancelled_by, self.lost, self.refusal)
        return bool(self.late) or any(reason is not None for reason in reasons)

    def revise(self, end: RankEnd) -> bool:
        """Take ``end`` for the first failure, where the one before followed from it and not the other way.

        A rank that a signal killed before it was told to stop is the cause; the exception of
        one on another host that had been talking to it is not.
        """
        first = self.first_failure
        if first is None or end.asked or end.code >= 0 or end.code in (-signal.SIGABRT, -signal.SIGTERM):
            return False
        if first.code < 0 or first.host == end.host or end.seconds - first.seconds > SAME_EVENT_S:
            return False
        self.first_failure = end
        return True

    def note_lost(self, host: str, how: str, seconds: float) -> bool:
        """Take the loss of ``host`` for the cause; False where the launch was ending for another reason.

        Ranks elsewhere fail at once when a host goes: their failure is then what followed.
        """
        first = self.first_failure
        follows = first is not None and first.host != host and seconds - first.seconds < SAME_EVENT_S
        if self.is_known and not follows:
            if self.lost is not None:  # one switch, or this launcher asleep: it was not that host alone
                self.lost = replace(self.lost, others=(*self.lost.others, host))
            return False
        self.lost, self.first_failure = LostHost(host=host, how=how, seconds=seconds), None
        return True
