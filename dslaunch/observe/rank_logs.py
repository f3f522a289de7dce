"""The logs of a run's ranks: their last lines, and what is added while one watches."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dslaunch.core.errors import ConfigError
from dslaunch.core.run_dir import RunDir
from dslaunch.core.topology import span, without_rank

_CHUNK = 1 << 16
_POLL_S = 0.2


class Tail(NamedTuple):
    """The last lines of a log; ``end``: the offset at which what follows them begins."""

    lines: tuple[str, ...]
    end: int


def find_ranks(run_dir: Path, wanted: Sequence[int] | None = None) -> list[int]:
    """The ranks that have a log, or those of ``wanted``. Raises ConfigError for one that has none."""
    folder = RunDir(run_dir).logs
    there = sorted(int(p.stem[5:]) for p in folder.glob("rank-*.log") if p.stem[5:].isdigit())
    if not there:
        raise ConfigError(
            f"{run_dir}: no rank has written a log", hint="no rank was started yet, or this is no run"
        )
    missing = sorted(set(wanted or ()) - set(there))
    if missing:
        raise ConfigError(f"rank {missing[0]} has no log in {folder}", hint=f"there are ranks {span(there)}")
    return there if wanted is None else sorted(set(wanted))


def read_tails(run_dir: Path, ranks: Sequence[int], count: int, *, finished: bool) -> dict[int, Tail]:
    """The last ``count`` lines of each rank's log; see :func:`read_tail`."""
    return {rank: read_tail(RunDir(run_dir).rank_log(rank), count, finished=finished) for rank in ranks}


def read_tail(path: Path, count: int, *, finished: bool) -> Tail:
    """The last ``count`` lines; of a long log only its end is read. Progress bars show their last state.

    Of lines that take more than 64 KiB on the average the beginning is left out.
    ``finished``: a last line without its end is not among them, and is left for :func:`follow`.
    """
    with path.open("rb") as stream:
        start = end = stream.seek(0, os.SEEK_END)
        chunks: deque[bytes] = deque()
        newlines = 0
        while start > 0 and newlines <= count and len(chunks) <= count:
            step = min(_CHUNK, start)
            start -= step
            stream.seek(start)
            chunks.appendleft(stream.read(step))
            newlines += chunks[0].count(b"\n")
    *lines, rest = b"".join(chunks).split(b"\n")
    if finished:
        end -= len(rest)
    elif rest:
        lines.append(rest)
    return Tail(tuple(map(_shown, lines[-count:])) if count else (), end)


def _read_from(path: Path, place: int) -> bytes:
    try:
        with path.open("rb") as stream:
            stream.seek(place)
            return stream.read()
    except FileNotFoundError:  # a start that failed takes its directory along
        return b""


def _shown(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]


def group_tails(tails: Mapping[int, Tail]) -> list[tuple[list[int], tuple[str, ...]]]:
    """Ranks and their last lines; ranks that say the same but for their own number are one group."""
    groups: dict[bytes, list[int]] = {}
    for rank, tail in tails.items():
        groups.setdefault(without_rank("\n".join(tail.lines).encode(), rank), []).append(rank)
    return [(members, tails[members[0]].lines) for members in groups.values()]


def follow(
    run_dir: Path, places: Mapping[int, int], is_over: Callable[[], bool]
) -> Iterator[tuple[int, str]]:
    """Lines of the ranks' logs from the offsets ``places`` on, each with its rank, until ``is_over()``.

    At the end also a last line that was not finished.
    """
    paths = {rank: RunDir(run_dir).rank_log(rank) for rank in places}
    places = dict(places)
    rest = dict.fromkeys(places, b"")
    while True:
        over = is_over()  # looked at first: what is written before the end is still read
        for rank, path in paths.items():
            data = _read_from(path, places[rank])
            places[rank] += len(data)
            *lines, rest[rank] = (rest[rank] + data).split(b"\n")
            for line in lines:
                yield rank, _shown(line)
        if over:
            yield from ((rank, _shown(line)) for rank, line in rest.items() if line)
            return
        time.sleep(_POLL_S)
