"""What a launch came to, and the words for it: exit codes, signals, the last block printed. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dslaunch.core.errors import (
    EXIT_DIVERGED,
    EXIT_HOST_LOST,
    EXIT_NO,
    EXIT_NOT_READY,
    EXIT_OUR_BUG,
    EXIT_STOPPED_AT_CHECKPOINT,
    EXIT_USAGE,
)

_SIGNAL_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: see `dmesg`, or use less host memory",
    signal.SIGBUS: "bus error, often /dev/shm is full or too small: in a container raise its shm size",
    signal.SIGSEGV: "a crash in native code: a broken build, or packages that do not fit together",
    signal.SIGABRT: "native code gave up: its message is above, often a failed check in NCCL, gloo or C++",
    signal.SIGILL: "an op was compiled for another CPU: remove the JIT cache (TORCH_EXTENSIONS_DIR)",
    signal.SIGTERM: "somebody asked it to stop, such as a scheduler or another user of this account",
    signal.SIGXCPU: "its limit of CPU time was used up (ulimit -t)",
}
_CODE_HINTS = {
    EXIT_USAGE: "usage or configuration",
    EXIT_NOT_READY: "the environment is not ready",
    EXIT_OUR_BUG: "an internal error",
    EXIT_STOPPED_AT_CHECKPOINT: "stopped at a checkpoint; go on with --resume",
    EXIT_DIVERGED: "training diverged",
}
_TAIL_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended. ``code`` is its exit code, or -n where signal n killed it."""

    rank: int
    host: str
    code: int
    seconds: float  # from the start of the launch, by the supervisor's clock
    max_rss_bytes: int
    asked: bool  # dslaunch had asked it to stop
    tail: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """As a shell reports it: the code itself, 128+n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a launch. ``first_failure`` is the rank that failed before any other, by itself."""

    ends: tuple[RankEnd, ...]
    first_failure: RankEnd | None = None
    cancelled_by: int | None = None  # signal number
    lost_host: str | None = None
    late: tuple[int, ...] = ()  # ranks that had to be stopped after others stopped at a checkpoint

    @property
    def exit_code(self) -> int:
        """The exit code of the launch; docs/launching.md has the table."""
        codes = {end.code for end in self.ends}
        if self.first_failure is not None:
            return self.first_failure.exit_code
        if self.lost_host is not None:
            return EXIT_HOST_LOST
        if EXIT_STOPPED_AT_CHECKPOINT in codes and codes <= {0, EXIT_STOPPED_AT_CHECKPOINT}:
            return EXIT_STOPPED_AT_CHECKPOINT
        if self.cancelled_by is not None:
            return 128 + self.cancelled_by
        if self.late:
            return EXIT_NO
        # Ranks that were stopped for no reason known here must not pass for a run that went well.
        return next((end.exit_code for end in self.ends if end.code != 0), 0)


def describe_code(code: int) -> str:
    """An exit code or a signal (-n) in words, e.g. ``killed by signal 9 (SIGKILL: ...)``."""
    if code >= 0:
        return f"exited with code {code}" + (f" ({_CODE_HINTS[code]})" if code in _CODE_HINTS else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
    hint = _SIGNAL_HINTS.get(signal.Signals(-code))
    return f"was killed by signal {-code} ({name}{': ' + hint if hint else ''})"


def render_failure(outcome: Outcome, log_path: str) -> str:
    """The last block on stderr when a rank failed: who, how, its last words, where to read on."""
    first = outcome.first_failure
    assert first is not None
    lines = [
        f"dslaunch: rank {first.rank} on {first.host} failed first: "
        f"it {describe_code(first.code)} {first.seconds:.1f} s after the start"
    ]
    if first.code < 0:
        lines.append(f"  peak memory  {first.max_rss_bytes / 2**30:.2f} GiB resident")
    if first.tail:
        lines.append("  last lines of its stderr:")
        lines += [f"    | {line}" for line in first.tail[-_TAIL_SHOWN:]]
    else:
        lines.append("  it wrote nothing to stderr")
    lines.append(f"  log          {log_path}")
    others = [end for end in outcome.ends if end.rank != first.rank]
    if others:
        lines.append(f"  others       {summarise(others)}")
    lines.append(f"  exit code    {outcome.exit_code}")
    return "\n".join(lines) + "\n"


def render_stop(outcome: Outcome) -> str:
    """The last line on stderr when no rank failed, but not all ended well: why, and how each ended."""
    if outcome.cancelled_by is not None:
        why = "cancelled"
    elif outcome.lost_host is not None:
        why = f"host {outcome.lost_host} was lost"
    elif outcome.late:
        why = f"{list_ranks(list(outcome.late))} did not stop at the checkpoint in time"
    else:
        why = "stopped"
    return f"{why}: {summarise(list(outcome.ends)) or 'no rank ended by itself'}"


def summarise(ends: list[RankEnd]) -> str:
    """How many ranks ended which way, in one line; the first few ranks of each way by number."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        name = f"signal {-end.code}" if end.code < 0 else f"code {end.code}"
        groups.setdefault(f"{'stopped by dslaunch' if end.asked else 'ended'} ({name})", []).append(end.rank)
    return "; ".join(f"{list_ranks(ranks)} {how}" for how, ranks in groups.items())


def list_ranks(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0, 1``; of many the first eight."""
    ranks = sorted(ranks)
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
