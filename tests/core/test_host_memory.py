"""The memory that a host lets us use: RAM, and the limits of cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.core.host_memory import local_memory_bytes

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


RAM = {"proc/meminfo": f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, 4),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/memory.max": f"{128 * GIB}\n"}, 64),
        (
            {
                "proc/self/cgroup": "5:cpuset:/x\n4:memory:/slurm/job_1\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": f"{16 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            },
            16,
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert local_memory_bytes(write(tmp_path, {**RAM, **files})) == expected * GIB


def test_a_host_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert local_memory_bytes(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal: many kB\n", "proc/self/cgroup": "0::/\n"})
    assert local_memory_bytes(tmp_path) is None
