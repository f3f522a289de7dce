"""Starting again after a failure: whether, after how long, and on which hosts."""

from __future__ import annotations

import dataclasses
import select
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dslaunch.core.errors import (
    EXIT_DIVERGED,
    EXIT_NOT_READY,
    EXIT_OUR_BUG,
    EXIT_STOPPED_AT_CHECKPOINT,
    EXIT_USAGE,
    EnvironmentNotReady,
)
from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.core.tell import tell
from dslaunch.core.topology import Host, Topology
from dslaunch.launch.orders import RESTART_COUNT
from dslaunch.launch.signals import SignalInbox
from dslaunch.launch.startup import HostsUnusable
from dslaunch.launch.supervisor import supervise
from dslaunch.launch.verdict import Outcome, render_end

_FIRST_DELAY_S, _LONGEST_DELAY_S = 2.0, 60.0
_FRUITLESS_STARTS = 2  # in a row: a rank failed before anything was gained
_LIVED_S = 60.0  # so long a command must run to have gained something
_FAILURES_OF_A_HOST = 2
# How our own worker ends where the next start would end the same way.
_FINAL_CODES = {EXIT_USAGE, EXIT_NOT_READY, EXIT_OUR_BUG, EXIT_STOPPED_AT_CHECKPOINT, EXIT_DIVERGED}


def supervise_with_restarts(
    plan: LaunchPlan, *, signals: SignalInbox, events: JsonlWriter | None, own_worker: bool, **more: Any
) -> Outcome:
    """:func:`supervise`, and again up to ``plan.max_restarts`` times where a rank or host fails.

    Our own worker goes on from its last checkpoint; a command is run again as it is and finds
    the number of the start in DSLAUNCH_RESTART_COUNT. Not after a cancel, a stop at a checkpoint
    or an end that would come again (a wrong config, a diverged run), and not for ever: two starts
    in a row that a failing rank ended before anything was gained are a crash loop, unless a spare
    host takes the place of the one on which they failed.
    """
    restarts = Restarts(plan, own_worker=own_worker)
    last: Outcome | None = None
    while True:
        started = time.monotonic()
        refusal: EnvironmentNotReady | None = None
        outcome: Outcome | None = None
        try:
            outcome = supervise(
                restarts.plan, events=events, signals=signals, own_worker=own_worker,
                restart=restarts.number, **more,
            )  # fmt: skip
        except EnvironmentNotReady as error:
            if last is None:
                raise
            refusal = error
        last = outcome or last
        culprits = refusal.hosts if isinstance(refusal, HostsUnusable) else _culprit(outcome)
        again = restarts.next(outcome, culprits, lived_s=time.monotonic() - started)
        if again is not None and _wait(again, signals, events):
            continue
        assert last is not None
        if restarts.is_crash_loop:  # one more line of the last block, as that is
            what = f"{_FRUITLESS_STARTS} starts in a row failed before anything was gained"
            tell(f"  restarts     a crash loop: {what}; not started again")
        if refusal is not None:
            _tell_refused(restarts.number, refusal, last, events)
        # Where something was said behind the block, it is said once more: it is to be the last.
        if refusal is not None or again is not None:
            tell(render_end(last, RunDir(Path(plan.run_dir)), shown=frozenset()).rstrip("\n"))
        return last


@dataclasses.dataclass(frozen=True)
class Restart:
    """A start that is to follow, in words and after how long."""

    number: int
    delay_s: float
    left_out: tuple[str, ...]


class Restarts:
    """The starts of one launch so far. ``plan`` is what runs next, ``number`` counts the restarts."""

    def __init__(self, plan: LaunchPlan, *, own_worker: bool) -> None:
        self.plan = plan
        self.number = 0
        self.is_crash_loop = False
        self._own_worker = own_worker
        self._limit = plan.max_restarts
        self._spares = list(plan.spare_hosts)
        self._failures: Counter[str] = Counter()
        self._fruitless = 0
        self._gained = self._checkpoints()

    def next(self, outcome: Outcome | None, culprits: Sequence[str], *, lived_s: float) -> Restart | None:
        """What follows a start that ended so; None where none does. ``outcome`` is None for a refused one."""
        if self.number >= self._limit or (outcome is not None and not self._worth(outcome)):
            return None
        gained = self._checkpoints()
        if gained > self._gained or (not self._own_worker and lived_s >= _LIVED_S):
            self._fruitless = 0
        elif outcome is not None and outcome.lost is None:
            self._fruitless += 1
        self._gained = gained
        self._failures.update(culprits)
        left_out = self._replace_hosts()
        if left_out:  # other hardware: that is a new attempt
            self._fruitless = 0
        self.is_crash_loop = self._fruitless >= _FRUITLESS_STARTS
        if self.is_crash_loop:
            return None
        self.number += 1
        self.plan = dataclasses.replace(
            self.plan,
            argv=self._argv(),
            env={**self.plan.env, RESTART_COUNT: str(self.number)},
        )
        delay_s = min(_FIRST_DELAY_S * 2 ** (self.number - 1), _LONGEST_DELAY_S)
        return Restart(self.number, delay_s, left_out)

    def _worth(self, outcome: Outcome) -> bool:
        if outcome.exit_code == 0 or outcome.cancelled_by is not None:
            return False
        return not (self._own_worker and outcome.exit_code in _FINAL_CODES)

    def _argv(self) -> tuple[str, ...]:
        if not self._own_worker or "--resume" in self.plan.argv:
            return self.plan.argv
        return (*self.plan.argv, "--resume")

    def _replace_hosts(self) -> tuple[str, ...]:
        """Put a spare host with as many slots in the place of each one that failed twice."""
        left_out, hosts = [], []
        for host in self.plan.topology.hosts:
            spare = self._spare_for(host) if self._failures[host.name] >= _FAILURES_OF_A_HOST else None
            if spare is not None:
                left_out.append(host.name)
            hosts.append(spare or host)
        first_is_new = hosts[0] is not self.plan.topology.hosts[0]  # an address that was given is not its
        self.plan = dataclasses.replace(
            self.plan,
            topology=Topology(hosts=tuple(hosts)),
            master_addr=None if first_is_new else self.plan.master_addr,
        )
        return tuple(left_out)

    def _spare_for(self, host: Host) -> Host | None:
        found = next((spare for spare in self._spares if len(spare.slots) == len(host.slots)), None)
        if found is not None:
            self._spares.remove(found)
        return found

    def _checkpoints(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return max(RunDir(Path(self.plan.run_dir)).checkpoint_steps(), default=0)


def _tell_refused(
    number: int, refusal: EnvironmentNotReady, last: Outcome, events: JsonlWriter | None
) -> None:
    """A restart that could not be is not why the launch failed: that is what came before it."""
    tell(f"dslaunch: restart {number}: {refusal.message}")
    if events is not None:
        events.write("launch_end", exit_code=last.exit_code)


def _culprit(outcome: Outcome | None) -> list[str]:
    if outcome is None:
        return []
    first = outcome.first_failure
    host = outcome.lost.host if outcome.lost is not None else None if first is None else first.host
    return [] if host is None else [host]


def _wait(restart: Restart, signals: SignalInbox, events: JsonlWriter | None) -> bool:
    """Wait before a start; False where a signal comes first."""
    without = f" without {', '.join(restart.left_out)}" if restart.left_out else ""
    text = f"dslaunch: starting again{without} in {restart.delay_s:g} s (restart {restart.number})"
    tell(text)
    if events is not None:
        events.write(
            "restart", number=restart.number, delay_s=restart.delay_s, left_out=list(restart.left_out)
        )
    deadline = time.monotonic() + restart.delay_s
    while not signals.pending and (left := deadline - time.monotonic()) > 0:
        select.select([signals.fd], [], [], left)
        signals.drain()
    if not signals.pending:
        return True
    name = signal.Signals(signals.pending[0][0]).name
    tell(f"dslaunch: {'Ctrl-C' if name == 'SIGINT' else name}: not started again")
    if events is not None:
        events.write("launcher_signal", signal=name)
    return False
