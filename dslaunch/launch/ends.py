"""How ranks ended, as their agents report it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dslaunch.core.errors import EXIT_STOPPED_AT_CHECKPOINT
from dslaunch.core.topology import span
from dslaunch.launch.text import without_controls

_SPANS_SHOWN = 8
# How a rank ends that was asked to stop and did so; with anything else it failed by itself.
_STOPPED = {128 + signal.SIGTERM, EXIT_STOPPED_AT_CHECKPOINT}


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the host of a killed rank says; None where it does not."""

    memory_limit_bytes: int | None = None  # of its cgroup
    oom_kills: int | None = None  # since its agent started, by the kernel's out-of-memory killer
    shm_bytes: int | None = None  # size of /dev/shm


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
    last: str = ""  # the line that it wrote last, to stdout or stderr
    state: str = ""  # of its process when it was told to stop (see proc(5)); empty where it was not
    facts: HostFacts | None = None  # where a signal killed it

    @classmethod
    def from_event(cls, event: Mapping[str, Any], *, host: str, seconds: float) -> RankEnd:
        """From the agent's ``exit``."""
        facts = event.get("facts")
        return cls(
            rank=event["rank"], host=host, code=event["code"], seconds=seconds, asked=event["asked"],
            max_rss_bytes=event["max_rss_kib"] * 1024, tail=tuple(map(without_controls, event["tail"])),
            last=without_controls(event["last"]), state=event["state"],
            facts=None if facts is None else HostFacts(**facts),
        )  # fmt: skip

    @property
    def exit_code(self) -> int:
        """As a shell reports it: the code itself, 128+n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because dslaunch asked it to."""
        return self.asked and (self.code < 0 or self.code in _STOPPED)


@dataclass(frozen=True, kw_only=True)
class LostHost:
    """One of whose ranks nothing more is heard. ``how``: as its agent, or the way to it, was seen to end."""

    host: str
    how: str
    seconds: float  # from the start of the launch, by the supervisor's clock
    others: tuple[str, ...] = ()  # hosts that were lost after it


def list_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-4, 7``; of many gaps the first few."""
    shown = span(sorted(ranks), _SPANS_SHOWN)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
