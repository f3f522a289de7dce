"""What a launch came to, and the words for it: exit codes, signals, the last block printed. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.core.command import quote
from dslaunch.core.errors import (
    EXIT_DIVERGED,
    EXIT_HOST_LOST,
    EXIT_NO,
    EXIT_NOT_READY,
    EXIT_OUR_BUG,
    EXIT_STOPPED_AT_CHECKPOINT,
    EXIT_USAGE,
)
from dslaunch.core.run_dir import RunDir
from dslaunch.launch.ends import HostFacts, LostHost, RankEnd, list_ranks
from dslaunch.launch.places import describe_places
from dslaunch.launch.progress import Progress
from dslaunch.launch.symptoms import is_time_out, recognise

_SIGNAL_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: see `dmesg`, or use less host memory",
    signal.SIGBUS: "bus error, often /dev/shm is full or too small: in a container raise its shm size",
    signal.SIGSEGV: "a crash in native code: a broken build, or packages that do not fit together",
    signal.SIGABRT: "native code gave up, often at a failed check in NCCL, gloo or C++",
    signal.SIGILL: "an op was compiled for another CPU: remove the JIT cache (TORCH_EXTENSIONS_DIR)",
    signal.SIGTERM: "somebody asked it to stop, such as a scheduler or another user of this account",
    signal.SIGXCPU: "its limit of CPU time was used up (ulimit -t)",
}
# Of our own worker alone: what a user's command means by these is its own affair.
_CODE_HINTS = {
    EXIT_USAGE: "usage or configuration",
    EXIT_NOT_READY: "the environment is not ready",
    EXIT_OUR_BUG: "an internal error",
    EXIT_STOPPED_AT_CHECKPOINT: "stopped at a checkpoint; go on with --resume",
    EXIT_DIVERGED: "training diverged",
}
_HOSTS_SHOWN = 8
_TAIL_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a launch. ``first_failure`` is the rank that failed before any other, by itself."""

    ends: tuple[RankEnd, ...]
    first_failure: RankEnd | None = None
    cancelled_by: int | None = None  # signal number
    lost: LostHost | None = None
    late: tuple[int, ...] = ()  # ranks that had to be stopped after others stopped at a checkpoint
    num_ranks: int = 0  # of the plan; some may never have started
    own_worker: bool = False  # the ranks ran dslaunch's worker, whose exit codes have dslaunch's meaning
    progress: Progress | None = None  # of dslaunch's worker, since this start
    unshared_hosts: tuple[str, ...] = ()  # that have the logs of their ranks themselves

    @property
    def places(self) -> list[str]:
        """Where each rank was, when the first failure is a time-out; else empty."""
        first = self.first_failure
        return [] if first is None or not is_time_out(first.tail) else describe_places(self.ends)

    @property
    def silent(self) -> list[int]:
        """The ranks of which no end was heard: not started, or on a host that was lost."""
        return sorted(set(range(self.num_ranks)) - {end.rank for end in self.ends})

    @property
    def is_complete(self) -> bool:
        """Every rank ended well, also where a signal came too late to stop them."""
        return 0 < self.num_ranks == len(self.ends) and all(end.code == 0 for end in self.ends)

    @property
    def exit_code(self) -> int:
        """The exit code of the launch; docs/launching.md has the table."""
        codes = {end.code for end in self.ends}
        if self.first_failure is not None:
            return self.first_failure.exit_code
        if self.is_complete:
            return 0
        if self.lost is not None:
            return EXIT_HOST_LOST
        if EXIT_STOPPED_AT_CHECKPOINT in codes and codes <= {0, EXIT_STOPPED_AT_CHECKPOINT}:
            return EXIT_STOPPED_AT_CHECKPOINT
        if self.cancelled_by is not None:
            return 128 + self.cancelled_by
        if self.late:
            return EXIT_NO
        # Ranks that were stopped for no reason known here must not pass for a run that went well.
        return next((end.exit_code for end in self.ends if end.code != 0), 0)


def describe_code(code: int, *, own_worker: bool = False, facts: HostFacts | None = None) -> str:
    """An exit code or a signal (-n) in words, e.g. ``was killed by signal 9 (SIGKILL: ...)``."""
    if code >= 0:
        known = own_worker and code in _CODE_HINTS
        return f"exited with code {code}" + (f" ({_CODE_HINTS[code]})" if known else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
    hint = _hint_of_host(-code, facts) or _SIGNAL_HINTS.get(signal.Signals(-code))
    return f"was killed by signal {-code} ({name}{': ' + hint if hint else ''})"


def _hint_of_host(number: int, facts: HostFacts | None) -> str | None:
    """Why a signal killed a rank, by what its host says."""
    if facts is None:
        return None
    if number == signal.SIGBUS and facts.shm_bytes is not None:
        size = f"{facts.shm_bytes / 2**30:.2f} GiB there"
        return f"bus error, often /dev/shm ({size}) is full: in a container raise its shm size"
    if number == signal.SIGKILL and facts.oom_kills:
        return "the kernel's out-of-memory killer struck there: use less host memory, or ask for more"
    if number == signal.SIGKILL and facts.oom_kills == 0:
        return (
            "not the kernel's out-of-memory killer, by its own count: something else sent it, such as a "
            "scheduler or another user of this account"
        )
    return None


def describe_briefly(code: int) -> str:
    """The same in a few words."""
    return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"


def render_end(
    outcome: Outcome, run_dir: RunDir, *, shown: frozenset[str] | None, can_replay: bool = False
) -> str:
    """The last words on stderr, lines ended; empty where all went well and nobody cancelled.

    ``shown``: the lines of stderr of the first failing rank that the user has
    seen already; None where that is all of them. ``can_replay``: the run kept the step that ended it.
    """
    if outcome.first_failure is not None:
        first = outcome.first_failure
        there = f"{first.host}:" if first.host in outcome.unshared_hosts else ""
        block = render_failure(outcome, f"{there}{run_dir.rank_log(first.rank)}", shown=shown)
        return block + (f"  next         dslaunch replay {quote(str(run_dir.path))}\n" if can_replay else "")
    if outcome.exit_code == EXIT_HOST_LOST and outcome.lost is not None:
        return render_lost(outcome, outcome.lost, run_dir)
    if outcome.exit_code == EXIT_STOPPED_AT_CHECKPOINT:
        if not outcome.own_worker:
            return "dslaunch: all ranks exited with code 75 or 0\n"
        script = quote(str(run_dir.launch_script))
        how = "all ranks stopped at a checkpoint (exit code 75); go on with"
        return f"dslaunch: {how}:\n  {script} --resume\n"
    if outcome.exit_code != 0:
        return f"dslaunch: {render_stop(outcome)}\n"
    if outcome.cancelled_by is not None:
        return "dslaunch: every rank had finished by then: exit code 0\n"
    return ""


def render_failure(outcome: Outcome, log_path: str, *, shown: frozenset[str] | None = frozenset()) -> str:
    """The last block on stderr when a rank failed: who, how, its last words, where to read on.

    Its last words are not repeated where the user has seen them all: see :func:`render_end`.
    """
    first = outcome.first_failure
    assert first is not None
    lines = [
        f"dslaunch: rank {first.rank} on {first.host} failed first: "
        f"it {describe_code(first.code, own_worker=outcome.own_worker, facts=first.facts)} "
        f"{first.seconds:.1f} s after the start"
    ]
    lines += _steps(outcome)
    if first.code < 0:
        lines.append(f"  peak memory  {_peak_memory(first)}")
    if not first.tail:
        lines += _words_for(first, outcome.ends)
    elif shown is not None and not shown.issuperset(first.tail):
        lines.append("  last lines of its stderr:")
        lines += [f"    | {line}" for line in first.tail[-_TAIL_SHOWN:]]
    if (known := recognise(first.tail)) is not None:
        lines.append(f"  looks like   {known}")
    if outcome.places:
        lines += ["  where the ranks were:", *(f"    | {line}" for line in outcome.places)]
    lines.append(f"  log          {log_path}")
    others = [end for end in outcome.ends if end.rank != first.rank]
    if others or outcome.silent:
        lines.append(f"  others       {_summarise_all(others, outcome.silent)}")
    if first.code < 0:
        lines.append(f"  exit code    {outcome.exit_code}")
    return "\n".join(lines) + "\n"


def _words_for(first: RankEnd, ends: Sequence[RankEnd]) -> list[str]:
    """What another rank wrote that ended as a silent one did: rank 0 may speak for all of them."""
    alike = (end for end in ends if end.code == first.code and end.tail and not end.was_stopped)
    if (other := min(alike, key=lambda end: end.rank, default=None)) is None:
        return ["  it wrote nothing to stderr"]
    said = f"  it wrote nothing to stderr; rank {other.rank} on {other.host} ended in the same way and wrote:"
    return [said, *(f"    | {line}" for line in other.tail[-_TAIL_SHOWN:])]


def render_lost(outcome: Outcome, lost: LostHost, run_dir: RunDir) -> str:
    """The same when a host was lost: which, how that was seen, its ranks, and what followed."""
    lines = [f"dslaunch: host {lost.host} was lost {lost.seconds:.1f} s after the start: {lost.how}"]
    lines += _steps(outcome)
    if lost.others:
        more = len(lost.others) - _HOSTS_SHOWN
        shown = ", ".join(lost.others[:_HOSTS_SHOWN]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"  also lost    {shown}")
    if silent := outcome.silent:
        who = "it" if len(silent) == 1 else "they"
        lines.append(f"  ranks        {list_ranks(silent)}: how {who} ended is not known")
        there = f"{lost.host}:" if lost.host in outcome.unshared_hosts else ""
        lines.append(f"  log          {there}{run_dir.rank_log(silent[0])}")
    if outcome.ends:
        lines.append(f"  others       {summarise(outcome.ends)}")
    lines.append(f"  exit code    {outcome.exit_code}")
    return "\n".join(lines) + "\n"


def _steps(outcome: Outcome) -> list[str]:
    """How far our own trainer was."""
    if not outcome.own_worker:
        return []
    done = "none was logged" if outcome.progress is None else f"the last logged was {outcome.progress.place}"
    return [f"  steps        {done}"]


def _peak_memory(end: RankEnd) -> str:
    limit = None if end.facts is None else end.facts.memory_limit_bytes
    of = f", the limit of its cgroup is {limit / 2**30:.2f} GiB" if limit is not None else ""
    return f"{end.max_rss_bytes / 2**30:.2f} GiB resident{of}"


def render_stop(outcome: Outcome) -> str:
    """The last line on stderr when no rank failed, but not all ended well: why, and how each ended."""
    if outcome.cancelled_by is not None:
        why = "cancelled"
    elif outcome.late:
        what = "stop at the checkpoint" if outcome.own_worker else "exit"
        why = f"{list_ranks(list(outcome.late))} did not {what} in time"
    else:
        why = "stopped"
    return f"{why}: {_summarise_all(outcome.ends, outcome.silent) or 'no rank ended by itself'}"


def _summarise_all(ends: Sequence[RankEnd], silent: list[int]) -> str:
    rest = [f"{list_ranks(silent)} not started, or lost"] if silent else []
    return "; ".join(filter(None, (summarise(ends), *rest)))


def summarise(ends: Sequence[RankEnd]) -> str:
    """Which ranks ended which way, in one line."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        name = f"signal {-end.code}" if end.code < 0 else f"code {end.code}"
        how = "stopped by dslaunch" if end.was_stopped else "ended"
        groups.setdefault(f"{how} ({name})", []).append(end.rank)
    return "; ".join(f"{list_ranks(ranks)} {how}" for how, ranks in groups.items())
