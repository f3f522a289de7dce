"""What a launch tells of itself while it goes on: which hosts it waits for, and how far it is."""

from __future__ import annotations

import time
from pathlib import Path

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.core.verbosity import QUIET, verbosity
from dslaunch.launch.progress import Progress, ProgressReader
from dslaunch.launch.ready import many_hosts_problem
from dslaunch.launch.screen import Screen
from dslaunch.launch.startup import Startup

_STATUS_S = 0.5  # between two states of the line on a terminal
_FIRST_WAIT_S, _NEXT_WAIT_S = 5.0, 60.0  # when it is said, where there is no such line, what is waited for
_FIRST_ENDED_S, _NEXT_ENDED_S = 10.0, 60.0  # that ranks may end one after the other


class Watch:
    """Keeps the user informed; ``deadline`` is when :meth:`tick` is due (monotonic time).

    ``own_worker``: the ranks are dslaunch's own, so that their progress is known.
    """

    def __init__(self, plan: LaunchPlan, startup: Startup, screen: Screen, *, own_worker: bool) -> None:
        self._plan, self._startup, self._screen = plan, startup, screen
        self._reader = ProgressReader(RunDir(Path(plan.run_dir))) if own_worker else None
        self._began = time.monotonic()
        self._quiet = verbosity() <= QUIET
        self._has_line = screen.is_terminal and not self._quiet
        self._next_status = self._began + _STATUS_S
        self._next_wait = self._began + _FIRST_WAIT_S
        self._ended: list[str] = []  # ranks that ended well and were not told of
        self._ended_grace_s = _FIRST_ENDED_S
        self._next_ended = float("inf")

    @property
    def deadline(self) -> float:
        status = self._next_status if self._has_line else float("inf")
        waits = not (self._has_line or self._quiet or self._startup.has_started)
        wait = self._next_wait if waits else float("inf")
        return min(self._screen.deadline, status, wait, self._next_ended)

    def say_what_is_known(self) -> None:
        """What the user should know before a start."""
        if (problem := many_hosts_problem(self._plan)) is not None:
            self.note(problem)

    def note(self, text: str) -> None:
        """Something that the user should know but need not act on."""
        if not self._quiet:
            self._screen.say(f"note: {text}")

    def note_ended(self, rank: int, host: str) -> None:
        """A rank has ended with code 0. Where others run on for long, they may wait for it for ever."""
        if not self._ended:
            self._next_ended = time.monotonic() + self._ended_grace_s
        self._ended.append(f"rank {rank} on {host}")

    def tick(self, now: float, *, hosts_up: int, ranks_up: int, is_ending: bool) -> None:
        """Tell what is due by ``now``."""
        self._screen.tick(now)
        if now >= self._next_ended:
            self._tell_ended(ranks_up, is_ending=is_ending)
        if self._has_line and now >= self._next_status:
            self._next_status = now + _STATUS_S
            state = self._status(now, hosts_up, ranks_up, is_ending=is_ending)
            self._screen.show_status(self._startup.describe_wait() or state)
        elif not (self._has_line or self._quiet or is_ending) and now >= self._next_wait:
            self._next_wait = now + _NEXT_WAIT_S
            if (wait := self._startup.describe_wait()) is not None:
                self._screen.say(wait)

    def _tell_ended(self, ranks_up: int, *, is_ending: bool) -> None:
        first, others = self._ended[0], len(self._ended) - 1
        if ranks_up and not is_ending and not self._quiet:
            more = f" and {others} more" if others else ""
            others_run = "another rank runs on" if ranks_up == 1 else f"{ranks_up} ranks run on"
            self._screen.say(f"{first}{more} ended with code 0, while {others_run}")
        self._ended, self._next_ended, self._ended_grace_s = [], float("inf"), _NEXT_ENDED_S

    def read_progress(self) -> Progress | None:
        """The last step of our own worker that was logged since this start."""
        if self._reader is None:
            return None
        self._reader.read()
        return self._reader.progress

    def _status(self, now: float, hosts_up: int, ranks_up: int, *, is_ending: bool) -> str:
        topology = self._plan.topology
        hosts = f"{hosts_up} of {topology.num_nodes} hosts, " if topology.num_nodes > 1 else ""
        parts = [f"{'stopping: ' if is_ending else ''}{hosts}{ranks_up} of {topology.world_size} ranks up"]
        if (progress := self.read_progress()) is not None:
            parts.append(progress.place)
            if progress.loss is not None:
                parts.append(f"loss {progress.loss:.4g}")
            if progress.tokens_per_s is not None:
                parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
        minutes, seconds = divmod(int(now - self._began), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02}")
        return ", ".join(parts)
