"""Ctrl-C, TERM, HUP and KILL of the launcher: a chance to write a checkpoint, then nothing is left."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslaunch.core.events import JsonlWriter
from dslaunch.core.file_lock import is_held
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch.signals import SignalInbox, means_kill
from dslaunch.launch.supervisor import supervise
from tests.launch.conftest import Launch
from tests.launch.launching import python, wait_until

WAIT = "touch(f'ready-{rank}')\nwhile True: time.sleep(0.05)\n"
ON_TERM = (
    "def stop(*_):\n    touch(f'checkpoint-{rank}')\n    sys.exit(75)\nsignal.signal(signal.SIGTERM, stop)\n"
)
STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: touch(f'asked-{rank}'))\n"


@pytest.mark.parametrize(("number", "expected"), [(2, 130), (15, 143), (1, 129), (14, 142)])
def test_cancelled(launch: Launch, tmp_path: Path, number: int, expected: int) -> None:
    launched = launch(python("subprocess.Popen(['sleep', '300'])\n" + WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(number)
    code, _, err = launched.wait()
    assert code == expected
    assert "cancelled: ranks 0-1 stopped by dslaunch (signal 15)" in err
    assert "failed first" not in err
    assert launched.alive() == []
    assert [event["signal"] for event in launched.events("launcher_signal")] == [signal.Signals(number).name]


@pytest.mark.parametrize("number", [2, 15])
def test_ranks_that_write_a_checkpoint_make_it_75(launch: Launch, tmp_path: Path, number: int) -> None:
    launched = launch(python(ON_TERM + WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(number)
    assert launched.wait()[0] == 75
    assert (tmp_path / "checkpoint-0").exists()
    assert (tmp_path / "checkpoint-1").exists()


def test_second_ctrl_c_kills_at_once(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python(STUBBORN + WAIT))  # would have 120 s for its checkpoint
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for_files(tmp_path, "asked-0", "asked-1")
    time.sleep(0.5)  # a hand does not press it twice in less
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait()[0] == 130
    assert launched.alive() == []


def test_a_terminal_that_closes_sends_hup_twice_and_kills_nothing(launch: Launch, tmp_path: Path) -> None:
    slow = "def stop(*_):\n    touch(f'asked-{rank}')\n    while not os.path.exists('go'): time.sleep(0.02)\n"
    launched = launch(python(slow + "    sys.exit(75)\nsignal.signal(signal.SIGTERM, stop)\n" + WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(signal.SIGHUP)
    launched.wait_for_files(tmp_path, "asked-0", "asked-1")
    launched.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(launched.events("launcher_signal")) == 2, "both were heard")
    (tmp_path / "go").touch()
    assert launched.wait()[0] == 75


@pytest.mark.parametrize(
    ("number", "seconds_after_first", "expected"),
    [
        (signal.SIGINT, 0.01, False),  # from the terminal, and again from a wrapper
        (signal.SIGINT, 0.3, True),
        (signal.SIGTERM, 0.3, False),
        (signal.SIGTERM, 1.0, True),
        (signal.SIGHUP, 100.0, False),
        (signal.SIGHUP, float("inf"), False),
    ],
)
def test_what_asks_to_kill_at_once(number: int, seconds_after_first: float, expected: bool) -> None:
    assert means_kill(number, seconds_after_first) is expected


@pytest.mark.parametrize(("on_term", "expected"), [("", 143), (ON_TERM, 75)])
def test_term_of_the_agent_is_no_failure_of_a_rank(
    launch: Launch, tmp_path: Path, on_term: str, expected: int
) -> None:
    launched = launch(python(on_term + WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    os.kill(launched.agent_pid(), signal.SIGTERM)
    code, _, err = launched.wait()
    assert code == expected
    assert "SIGTERM to the agent on localhost: ranks were asked to stop" in err
    assert "failed first" not in err
    assert launched.events("first_failure") == []


def test_the_run_directory_is_locked_until_the_ranks_are_gone(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python(STUBBORN + WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    agent = launched.agent_pid()
    os.kill(agent, signal.SIGSTOP)  # so that it does not end before we look
    launched.process.kill()
    launched.process.wait()
    try:
        assert is_held(launched.run_dir / ".lock")
    finally:
        os.kill(agent, signal.SIGCONT)
    launched.nothing_left()
    # A process that ends gives up its memory, by which it is found, before its files.
    wait_until(lambda: not is_held(launched.run_dir / ".lock"), "the lock is held by nobody that lives", 5.0)


def test_data_loader_workers_are_let_be_until_their_rank_has_ended(launch: Launch, tmp_path: Path) -> None:
    # A worker killed by TERM would make its rank fail in the middle of the checkpoint.
    worker = (
        "import signal, time\n"
        "signal.signal(15, lambda *_: open('worker-asked', 'w'))\n"
        "open('worker-ready', 'w')\n"
        "while True: time.sleep(1)\n"
    )
    code = (
        f"worker = subprocess.Popen([sys.executable, '-S', '-c', {worker!r}])\n"
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        "    touch('early' if os.path.exists('worker-asked') else 'in-peace')\n"
        "    worker.kill()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n" + WAIT
    )
    launched = launch(python(code), num_ranks=1)
    launched.wait_for_files(tmp_path, "ready-0", "worker-ready")
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait()[0] == 75
    assert (tmp_path / "in-peace").exists()


def test_the_program_under_a_shell_gets_its_chance(launch: Launch, tmp_path: Path) -> None:
    inner = python(
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), touch('saved'), sys.exit(0)))\n" + WAIT
    )
    launched = launch(["bash", "-c", '"$@"; echo never', "bash", *inner], num_ranks=1)
    launched.wait_for_files(tmp_path, "ready-0")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait()[0] == 143
    assert (tmp_path / "saved").exists()
    assert launched.alive() == []


def test_nohup_is_respected(launch: Launch, tmp_path: Path) -> None:
    code = "touch(f'ready-{rank}')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    launched = launch(python(code), prefix=["nohup"])
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert launched.wait()[0] == 0
    assert launched.events("launcher_signal") == []


@pytest.mark.parametrize("ranks", [WAIT, STUBBORN + "subprocess.Popen(['sleep', '300'])\n" + WAIT])
def test_kill_of_the_launcher_leaves_nothing(launch: Launch, tmp_path: Path, ranks: str) -> None:
    launched = launch(python(ranks))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    assert len(launched.alive()) >= 4  # the agent, its keeper and two ranks
    launched.process.kill()
    launched.nothing_left()


def test_usr1_reaches_the_ranks(launch: Launch, tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n" + WAIT
    launched = launch(python(code))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(signal.SIGUSR1)
    assert launched.wait()[0] == 75


def test_two_launches_side_by_side_do_not_touch_each_other(launch: Launch, tmp_path: Path) -> None:
    code = "name = sys.argv[1]; touch(f'{name}-{rank}')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    first = launch(python(code, "first"), run_dir="a")
    second = launch(python(code, "second"), run_dir="b")
    first.wait_for_files(tmp_path, "first-0", "first-1", "second-0", "second-1")
    assert first.events("launch_start")[0]["master_port"] != second.events("launch_start")[0]["master_port"]
    first.process.send_signal(signal.SIGINT)
    assert first.wait()[0] == 130
    assert len(second.alive()) == 4  # two ranks, the agent, its keeper
    (tmp_path / "go").touch()
    assert second.wait()[0] == 0


def test_a_failing_rank_after_a_cancel_does_not_change_the_code(launch: Launch, tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n" + WAIT
    launched = launch(python(code))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait()[0] == 130


def test_cancel_while_a_failure_is_being_cleaned_up(launch: Launch, tmp_path: Path) -> None:
    failing = "while not os.path.exists('ready-0'): time.sleep(0.02)\n"
    code = f"{STUBBORN}if rank == 1:\n  {failing}  sys.exit(4)\n{WAIT}"
    launched = launch(python(code))
    launched.wait_for_files(tmp_path, "asked-0")
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait()[0] == 4
    assert launched.alive() == []


def test_a_stopped_rank_is_stopped_for_good(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python(WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    os.kill(launched.events("rank_start")[0]["pid"], signal.SIGSTOP)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait()[0] == 143
    wait_until(lambda: not launched.alive(), "nothing left")


def test_a_terminal_that_goes_away_is_a_hup_and_holds_nothing_up(launch: Launch, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    talk = (
        "while True: print('x' * 100, flush=True); print('y', file=sys.stderr, flush=True); time.sleep(0.01)"
    )
    argv = [sys.executable, "-m", "dslaunch", "launch", "--num-gpus-per-node", "2", "--run-dir", "run"]
    process = subprocess.Popen(
        ["setsid", "--ctty", *argv, "--", *python(f"{ON_TERM}touch(f'ready-{{rank}}')\n{talk}")],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    while not (tmp_path / "ready-0").exists() or not (tmp_path / "ready-1").exists():
        os.read(ours, 65536)
    os.close(ours)
    assert process.wait(60) == 75
    signals = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert "SIGHUP" in [event["signal"] for event in signals if event["kind"] == "launcher_signal"]
    assert (tmp_path / "checkpoint-1").exists()


def test_an_agent_that_somebody_stopped_is_no_obstacle(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python(ON_TERM + WAIT))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    os.kill(launched.agent_pid(), signal.SIGSTOP)
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.wait()
    assert code == 75
    assert "does not answer" not in err


def test_only_the_launcher_hears_the_terminals_ctrl_c(launch: Launch, tmp_path: Path) -> None:
    # Ranks and agent are in sessions of their own: a terminal signals one foreground group.
    code = "signal.signal(signal.SIGINT, lambda *_: touch('hurt'))\n" + ON_TERM + WAIT
    launched = launch(python(code))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    os.killpg(launched.process.pid, signal.SIGINT)
    assert launched.wait()[0] == 75
    assert not (tmp_path / "hurt").exists()


def test_a_term_that_comes_too_late_is_no_cancel(launch: Launch, tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAIT
    launched = launch(python(code))
    launched.wait_for_files(tmp_path, "ready-0", "ready-1")
    launched.process.send_signal(signal.SIGTERM)
    code_, _, err = launched.wait()
    assert code_ == 0
    assert "cancelled" not in err


def test_a_signal_before_the_first_rank_is_a_recorded_end(tmp_path: Path) -> None:
    plan = LaunchPlan(
        argv=("touch", "started"), topology=local_topology(2), run_dir=str(tmp_path), cwd=str(tmp_path)
    )
    with SignalInbox() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: signals.pending, "it was caught")
        outcome = supervise(
            plan, events=JsonlWriter(tmp_path / "events.jsonl"), out=io.BytesIO(), err=io.BytesIO(),
            signals=signals,
        )  # fmt: skip
    assert outcome.exit_code == 130
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["launch_start", "launcher_signal", "launch_end"]
    assert lines[-1]["exit_code"] == 130
    assert not (tmp_path / "started").exists()


def test_ctrl_c_as_soon_as_the_start_is_announced(launch: Launch) -> None:
    launched = launch(python(WAIT))
    assert launched.process.stderr is not None
    while b"starting 2 ranks" not in launched.process.stderr.readline():
        pass
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait()[0] == 130
    assert len(launched.events("launch_start")) == 1
    assert [event["exit_code"] for event in launched.events("launch_end")] == [130]
    launched.nothing_left()
