"""Start `dslaunch launch` as a user would, watch every process it leads to, leave none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.testbed.network import Network

TIMEOUT_S = 60.0
# A rank's daemon, in a session of its own and without a parent. It is up when this is through.
DETACH = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        touch(f'daemon-{rank}')
        os.execvp('sleep', ['sleep', '300'])
    os._exit(0)
os.wait()
while not os.path.exists(f'daemon-{rank}'): time.sleep(0.01)
"""
_MARK = "DSLAUNCH_TEST_ID"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Poll until ``condition()`` is true; its value. Fails the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


class Launched:
    """A running `dslaunch launch`; everything it starts carries a mark in its environment."""

    def __init__(
        self,
        options: Sequence[str],
        command: Sequence[str | bytes] | None,
        *,
        run_dir: Path,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        stdout: Any = subprocess.PIPE,
        stderr: Any = subprocess.PIPE,
    ) -> None:
        self.run_dir = run_dir
        self.mark = uuid.uuid4().hex
        argv = [*prefix, sys.executable, "-m", "dslaunch", "launch", "--run-dir", str(run_dir), *options]
        words = [] if command is None else ["--", *command]
        self.process = subprocess.Popen(
            [*argv, *words],
            env={**os.environ, **(env or {}), _MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def alive(self) -> list[int]:
        """Ids of all living processes of this launch but the launcher itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            with suppress(OSError):
                ended = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
                if not ended and f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) at the end."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return (
            self.process.returncode,
            (out or b"").decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
        )

    def wait_for_end(self) -> int:
        """The exit code. Fails with what the launch has said, and when, where it does not end."""
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            happened = (self.run_dir / "events.jsonl").read_text(encoding="utf-8")
            said = f"{self._said_so_far()}\nand wrote\n{happened}"
            raise AssertionError(f"the launch did not end within {TIMEOUT_S} s; it said:\n{said}") from None

    def wait_for_files(self, directory: Path, *names: str) -> None:
        """Until the ranks have made these files. Fails with what the launch has said on stderr."""
        try:
            wait_until(lambda: all((directory / name).exists() for name in names), f"{names} in {directory}")
        except AssertionError as error:
            ended, said = self.process.poll(), self._said_so_far()
            raise AssertionError(f"{error}; the launch (exit code {ended}) said:\n{said}") from None

    def _said_so_far(self) -> str:
        if self.process.stderr is None:
            return ""
        os.set_blocking(self.process.stderr.fileno(), False)
        return (self.process.stderr.read() or b"").decode("utf-8", "replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind in events.jsonl."""
        path = self.run_dir / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def agent_pid(self) -> int:
        """The process id of the agent, once a rank has been started."""
        return parent_of(wait_until(lambda: self.events("rank_start"), "a rank is up")[0]["pid"])

    def pid_of(self, rank: int) -> int:
        """The process id, as this machine sees it, of a rank that may be elsewhere."""
        return rank_pid(rank, f"{_MARK}={self.mark}".encode())

    def nothing_left(self) -> None:
        """Fails where a process of this launch still lives."""
        wait_until(lambda: not self.alive(), f"processes {self.alive()} left behind", 15.0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rank_pid(rank: int, mark: bytes) -> int:
    """Process id, as this machine sees it, of a rank elsewhere with ``mark`` (K=V) in its environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environ and mark in environ:
                    return int(entry.name)
    raise AssertionError(f"rank {rank} does not run")


# Ranks that note that they run and then wait, and until when.
WAIT = "touch(f'up-{rank}'); time.sleep(300)"


def up(*ranks: int) -> None:
    wait_until(lambda: all(Path(f"up-{rank}").exists() for rank in ranks), f"ranks {ranks} are up")


def clear(bed: Network, within_s: float = 15.0, mark: str = "") -> None:
    """Until no program runs on the machines, or none with ``mark`` in its command line."""
    left: dict[str, list[str]] = {}

    def is_clear() -> bool:
        left.update({name: [p for p in bed.programs(name) if mark in p] for name in bed.names})
        return not any(left.values())

    try:
        wait_until(is_clear, "the machines are clear", within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {left}") from None


def check_two_jobs_side_by_side(over: Callable[..., Launched]) -> None:
    """On three machines: the end of one is not that of the other."""
    first = over(WAIT)
    up(0, 1, 2)
    second = over("touch(f'second-{rank}'); time.sleep(300)", run_dir="run2")
    wait_until(lambda: Path("second-2").exists(), "the second job is up")
    first.process.send_signal(signal.SIGINT)
    assert first.wait()[0] == 130
    assert second.process.poll() is None
    assert second.pid_of(2)
    second.process.send_signal(signal.SIGINT)
    assert second.wait()[0] == 130


def check_signals_of_the_launcher(over: Callable[..., Launched]) -> None:
    """On three machines, under nohup: HUP is nothing, USR1 goes to the ranks, a second Ctrl-C kills."""
    ranks = (
        "signal.signal(signal.SIGUSR1, lambda *_: touch(f'usr-{rank}'))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "touch(f'up-{rank}')\n"
        "while True: time.sleep(300)"
    )
    launched = over(ranks, under=["nohup"])
    up(0, 1, 2)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        launched.process.send_signal(number)
    wait_until(lambda: all(Path(f"usr-{rank}").exists() for rank in range(3)), "USR1 has come to all")
    launched.process.send_signal(signal.SIGINT)
    wait_until(lambda: launched.events("launcher_signal")[1:], "Ctrl-C is heard")
    time.sleep(0.4)  # a hand needs as long
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.wait()
    assert code == 130, err
    assert "dslaunch: SIGINT again: killing what is left\n" in err
    assert err.endswith("dslaunch: cancelled: ranks 0-2 stopped by dslaunch (signal 9)\n")
    signals = [event["signal"] for event in launched.events("launcher_signal")]
    assert signals == ["SIGUSR1", "SIGINT", "SIGINT"]


def python(code: str, *words: str) -> list[str]:
    """A command that runs ``code`` in each rank, with RANK as ``rank`` and ``touch(name)`` at hand."""
    start = (
        "import os, signal, subprocess, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def touch(name): open(name, 'w').close()\n"
    )
    return [sys.executable, "-S", "-c", start + code, *words]
