"""Start the ranks of a test as real processes, and leave none of them behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. ``returncode`` is -n for signal n (-9 after a timeout)."""

    returncode: int
    stdout: str
    stderr: str


class RanksTimedOut(AssertionError):
    """The ranks did not end in time. The message holds what each wrote."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_env(rank: int, world_size: int, port: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of one rank of a one-machine job: this process's, the rank's numbers, ``env``."""
    numbers = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # The repository root, so that a rank's script can import tests.support as well.
    paths = [str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **numbers, **(env or {})}


def run_ranks(
    script_or_module_argv: Sequence[str | Path],
    *,
    world_size: int,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> list[RankResult]:
    """Run ``python ARGV`` once per rank, e.g. ``[script, "--x"]`` or ``["-m", "module"]``.

    Returns one result per rank, in rank order. Each rank is a process group of its
    own; all groups are killed before this returns, whatever happened. When one rank
    fails the others get 10 s to end by themselves. Raises RanksTimedOut after ``timeout_s``.
    """
    argv = [sys.executable, *map(str, script_or_module_argv)]
    port = free_port()
    # Files, not pipes: a rank never blocks on a full pipe, and a timeout still shows its output.
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(world_size)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, (out, err) in enumerate(outputs):
                with out.open("wb") as out_stream, err.open("wb") as err_stream:
                    processes.append(
                        subprocess.Popen(
                            argv,
                            env=rank_env(rank, world_size, port, env),
                            stdin=subprocess.DEVNULL,
                            stdout=out_stream,
                            stderr=err_stream,
                            start_new_session=True,
                        )
                    )
            in_time = _wait(processes, timeout_s)
        finally:
            _kill_groups(processes)
        texts = [(_read(out), _read(err)) for out, err in outputs]
    results = [RankResult(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    if not in_time:
        raise RanksTimedOut(f"ranks did not end within {timeout_s} s\n{describe(results)}")
    return results


def check_ranks(results: Sequence[RankResult]) -> None:
    """Fail the test, showing what each rank wrote, unless every rank ended with 0."""
    assert all(result.returncode == 0 for result in results), "\n" + describe(results)


def describe(results: Sequence[RankResult]) -> str:
    """Each rank's code and the end of what it wrote, for a failure message."""
    return "\n".join(
        f"--- rank {rank}: code {result.returncode}\n"
        f"stdout: {result.stdout[-3000:]}\nstderr: {result.stderr[-5000:]}"
        for rank, result in enumerate(results)
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Until all ended (True), 10 s after the first failed (True), or ``timeout_s`` passed (False)."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.returncode for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.05)
    return True


def _kill_groups(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # start_new_session: the group's id is the pid
        process.wait()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
