"""How much memory this host lets us use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # cgroup v2, v1: controller -> file


def local_memory_bytes(root: Path = Path("/")) -> int | None:
    """The smaller of this host's RAM and the limit of our cgroup or one above it; None where neither is told.

    A batch system or a container gives a job less than the host has; the kernel kills what takes more.
    """
    known = [size for size in (_installed(root), *_limits(root)) if size is not None]
    return min(known, default=None)


def _installed(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _limits(root: Path) -> Iterator[int | None]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller not in _LIMITS:
                continue
            parts = [part for part in path.split("/") if part]
            for mount in (controller, "") if controller else ("", "unified"):
                top = root / "sys/fs/cgroup" / mount
                # The top as well: in a container it often is the container's own.
                for depth in range(len(parts), -1, -1):
                    yield _limit(top.joinpath(*parts[:depth], _LIMITS[controller]))


def _limit(path: Path) -> int | None:
    """Bytes; None without a limit: v2 writes ``max`` for that, v1 a number near 2**63."""
    try:
        size = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return size if 0 < size < 2**60 else None
