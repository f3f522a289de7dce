"""The logs of a run's ranks: their last lines, and what is added while one watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dslaunch.core.errors import ConfigError
from dslaunch.core.run_dir import RunDir
from dslaunch.core.topology import span

_CHUNK = 1 << 16
_POLL_S = 0.2


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


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines; of a long log only its end is read. Progress bars show their last state."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        data = b""
        while size > 0 and data.count(b"\n") <= count:
            step = min(_CHUNK, size)
            size -= step
            stream.seek(size)
            data = stream.read(step) + data
    lines = data.decode("utf-8", "replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:]] if count else []


def group_tails(run_dir: Path, ranks: Sequence[int], count: int) -> list[tuple[list[int], list[str]]]:
    """The last lines of each rank; ranks that say the same are one group."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(tuple(last_lines(RunDir(run_dir).rank_log(rank), count)), []).append(rank)
    return [(members, list(lines)) for lines, members in groups.items()]


def follow(run_dir: Path, ranks: Sequence[int], is_over: Callable[[], bool]) -> Iterator[tuple[int, str]]:
    """Lines that are added to the ranks' logs from now on, each with its rank, until ``is_over()``."""
    paths = {rank: RunDir(run_dir).rank_log(rank) for rank in ranks}
    places = {rank: path.stat().st_size for rank, path in paths.items()}
    rest = dict.fromkeys(ranks, b"")
    while True:
        over = is_over()  # looked at first: what is written before the end is still read
        for rank, path in paths.items():
            with path.open("rb") as stream:
                stream.seek(places[rank])
                data = stream.read()
            places[rank] += len(data)
            *lines, rest[rank] = (rest[rank] + data).split(b"\n")
            for line in lines:
                yield rank, line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if over:
            return
        time.sleep(_POLL_S)
