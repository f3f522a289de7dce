"""Ending a launch: when its agents are told to stop their ranks, and what becomes of one that does not."""

from __future__ import annotations

import time
from collections.abc import Callable

from dslaunch.core.plan import LaunchPlan
from dslaunch.launch.links import Links

SLACK_S = 20.0  # an agent that has been told to stop and is silent this much longer is killed
_ANSWER_S = 0.5  # for ranks to say where they are, before they are told to stop
# Ignored by whoever does not know it: so it does no harm to any command. Our worker answers it, see
# dslaunch.train.whereabouts.
_WHERE_ARE_YOU = "URG"


class Stopping:
    """Tells the agents of ``links``; ``deadline`` is when :meth:`tick` is due (monotonic time)."""

    def __init__(self, plan: LaunchPlan, links: Links, say: Callable[[str], None]) -> None:
        self._plan, self._links, self._say = plan, links, say
        self._stop_at = self._kill_agents_at = float("inf")
        self.checkpoint_deadline = float("inf")  # when ranks must have stopped at a checkpoint as others did

    @property
    def deadline(self) -> float:
        return min(self.checkpoint_deadline, self._stop_at, self._kill_agents_at)

    def stop(self, grace_s: float, command: str = "stop") -> None:
        """TERM to all ranks, KILL after ``grace_s``; with "kill" at once."""
        for link in self._links:
            link.rouse()
            link.send(command, grace_s=grace_s)
        limit = time.monotonic() + grace_s + self._plan.failure_grace_s + SLACK_S
        self._kill_agents_at = min(self._kill_agents_at, limit)
        self.checkpoint_deadline = self._stop_at = float("inf")

    def ask_and_stop(self) -> None:
        """The same after a failure, but let the ranks say first where they are."""
        self.pass_on(_WHERE_ARE_YOU)
        self._stop_at = min(self._stop_at, time.monotonic() + _ANSWER_S)

    def pass_on(self, name: str) -> None:
        """A signal to all ranks, by its name without SIG."""
        for link in self._links:
            link.send("signal", name=name)

    def wait_for_checkpoint(self) -> None:
        """A rank has stopped at a checkpoint: the others are about to do so too."""
        by = time.monotonic() + self._plan.checkpoint_grace_s
        self.checkpoint_deadline = min(self.checkpoint_deadline, by)

    def tick(self, now: float) -> None:
        """Do what is due by ``now``."""
        if now >= self._stop_at:
            self.stop(self._plan.failure_grace_s)
        if now < self._kill_agents_at:
            return
        self._kill_agents_at = float("inf")
        for link in self._links:
            if not link.done:
                what = "killing it and its ranks" if link.is_local else "it ends by itself what it started"
                self._say(f"the agent on {link.host.name} does not answer; {what}")
                link.kill()
