"""What is drawn on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch.screen import Screen
from dslaunch.launch.startup import Startup
from dslaunch.launch.watch import Watch
from tests.launch.launching import python

ERASE = "\r\x1b[K"


def on_terminal(folder: Path, code: str, *flags: str, columns: int = 100, out: bool = True) -> str:
    """All that two ranks' launch writes to a terminal; ``out``: its stdout goes there too."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    run = [sys.executable, "-m", "dslaunch", "launch", *flags, "--run-dir", str(folder / "run")]
    process = subprocess.Popen(
        [*run, "--num-gpus-per-node", "2", "--", *python(code)],
        cwd=folder, stdin=subprocess.DEVNULL, stderr=theirs, stdout=theirs if out else subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    data = b""
    with contextlib.suppress(OSError):  # how the end of a terminal reads
        while more := os.read(ours, 65536):
            data += more
    os.close(ours)
    assert process.wait(60) == 0, data
    return data.decode().replace("\r\n", "\n")


def left_on(text: str) -> list[str]:
    """The lines that stay: erased ones do not."""
    lines = []
    for line in text.split("\n"):
        lines.append(line.rpartition(ERASE)[2])
    return lines


def test_a_status_line_that_gives_way(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, "for i in range(4): print('step', i); time.sleep(0.3 if rank else 0.7)")
    assert "2 of 2 ranks up, 0:00:0" in text
    assert "1 of 2 ranks up, 0:00:0" in text
    assert left_on(text)[2:] == ["step 0", "step 1", "step 2", "step 3", ""]
    assert text.count(" up, ") <= 8  # twice a second


def test_it_is_cut_to_the_terminal(tmp_path: Path) -> None:
    text = on_terminal(tmp_path, "time.sleep(1.5)", columns=12)
    assert f"2 of 2 rank{ERASE}" in text


def test_it_stays_out_of_an_unfinished_line(tmp_path: Path) -> None:
    code = "if rank == 0:\n  for i in range(5): sys.stderr.write(f'\\r{i}%'); time.sleep(0.4)\n  print()"
    text = on_terminal(tmp_path, code)
    assert "\r0%\r1%\r2%\r3%\r4%\n" in text


def test_none_with_quiet(tmp_path: Path) -> None:
    assert on_terminal(tmp_path, "time.sleep(1.2)", "-q", out=False) == ""


class Recorded(Screen):
    """A screen on a terminal that keeps the states of its line."""

    def __init__(self, run_dir: Path) -> None:
        self.states: list[str] = []
        with (run_dir / "null").open("wb") as null:
            super().__init__(null, null, str(run_dir))
        self.is_terminal = True

    def show_status(self, text: str) -> None:
        self.states.append(text)


def states(run_dir: Path, ticks: Sequence[tuple[int, bool]]) -> list[str]:
    plan = LaunchPlan(argv=("x",), topology=local_topology(8), run_dir=str(run_dir), cwd="/")
    start, screen = Startup(plan), Recorded(run_dir)
    watch = Watch(plan, start, screen, own_worker=True)
    events, metrics = JsonlWriter(run_dir / "events.jsonl"), JsonlWriter(run_dir / "metrics.jsonl")
    watch.tick(watch.deadline, hosts_up=1, ranks_up=0, is_ending=False)
    start.has_started = True
    events.write("train_start", step=0, total_steps=100)
    for ranks_up, is_ending in ticks:
        watch.tick(watch.deadline, hosts_up=1, ranks_up=ranks_up, is_ending=is_ending)
        metrics.write("train", step=12, loss=2.34567, tokens_per_s=12345.6)
    return screen.states


class Asked(Startup):
    """Counts how often all hosts that are waited for are gone through."""

    num_asked = 0

    def describe_wait(self) -> str | None:
        self.num_asked += 1
        return super().describe_wait()


@pytest.mark.parametrize("on_terminal", [True, False])
def test_waiting_hosts_are_gone_through_when_it_is_time_and_not_at_each_event(
    tmp_path: Path, on_terminal: bool
) -> None:
    plan = LaunchPlan(argv=("x",), topology=local_topology(8), run_dir=str(tmp_path), cwd="/")
    start, screen = Asked(plan), Recorded(tmp_path)
    screen.is_terminal = on_terminal
    watch = Watch(plan, start, screen, own_worker=False)
    now, end = time.monotonic(), watch.deadline + 0.1
    for event in range(1000):
        watch.tick(now + event * (end - now) / 1000, hosts_up=1, ranks_up=0, is_ending=False)
    assert start.num_asked == 1


def test_ranks_that_end_well_while_others_run_on_are_told_of(tmp_path: Path) -> None:
    class Said(Recorded):
        def say(self, text: str) -> None:
            self.states.append(text)

    plan = LaunchPlan(argv=("x",), topology=local_topology(8), run_dir=str(tmp_path), cwd="/")
    start, screen = Startup(plan), Said(tmp_path)
    screen.is_terminal = False
    start.has_started = True
    watch = Watch(plan, start, screen, own_worker=False)
    before = time.monotonic()
    for rank in (3, 5):
        watch.note_ended(rank, "b")
    due = watch.deadline
    assert before + 10 <= due <= time.monotonic() + 10, "ranks may end one after the other"
    watch.tick(due - 0.1, hosts_up=1, ranks_up=6, is_ending=False)
    assert screen.states == []
    watch.tick(due, hosts_up=1, ranks_up=6, is_ending=False)
    watch.tick(due + 100, hosts_up=1, ranks_up=6, is_ending=False)
    assert screen.states == ["rank 3 on b and 1 more ended with code 0, while 6 ranks run on"]
    watch.note_ended(6, "b")
    watch.tick(watch.deadline, hosts_up=1, ranks_up=0, is_ending=False)
    assert len(screen.states) == 1, "all have ended"


def test_its_words(tmp_path: Path) -> None:
    assert states(tmp_path, [(8, False), (8, False), (3, True)]) == [
        "waiting for localhost",
        "8 of 8 ranks up, 0:00:01",
        "8 of 8 ranks up, step 12 of 100, loss 2.346, 12,346 tokens/s, 0:00:01",
        "stopping: 3 of 8 ranks up, step 12 of 100, loss 2.346, 12,346 tokens/s, 0:00:02",
    ]
