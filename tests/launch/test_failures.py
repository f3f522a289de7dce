"""A rank fails: everything stops, the exit code is its own, the report names it first."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest

from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch.supervisor import supervise
from dslaunch.launch.verdict import Outcome
from tests.launch.conftest import Launch
from tests.launch.launching import DETACH, parent_of, python

SLEEP = "time.sleep(300)\n"


def test_every_rank_fine(launch: Launch) -> None:
    launched = launch(python("print('hello', rank)"), num_ranks=3)
    code, out, err = launched.wait()
    assert code == 0
    assert out == "hello 0\n"
    assert "hello" not in err
    assert [(launched.run_dir / "logs" / f"rank-{n}.log").read_text() for n in range(3)] == [
        "hello 0\n",
        "hello 1\n",
        "hello 2\n",
    ]
    assert [event["exit_code"] for event in launched.events("launch_end")] == [0]
    launched.nothing_left()


def test_first_failure_stops_ranks_that_do_not_communicate(launch: Launch) -> None:
    launched = launch(
        python("if rank == 2: print('ValueError: no such thing', file=sys.stderr); sys.exit(3)\n" + SLEEP),
        num_ranks=4,
    )
    code, _, err = launched.wait()
    assert code == 3
    last_block = err[err.rindex("failed first") :]
    assert "rank 2 on localhost failed first: it exited with code 3" in err
    assert "localhost:2| ValueError: no such thing\n" in err
    assert "ValueError" not in last_block  # it was shown when it came
    assert "ranks 0-1, 3 stopped by dslaunch (signal 15)" in last_block
    assert str(launched.run_dir / "logs" / "rank-2.log") in last_block
    launched.nothing_left()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (9, "out-of-memory killer"),
        (7, "/dev/shm"),
        (11, "native code"),
        (6, "native code"),
        (15, "asked it to stop"),
    ],
)
def test_death_by_signal_in_words(launch: Launch, number: int, words: str) -> None:
    launched = launch(python(f"if rank == 1: os.kill(os.getpid(), {number})\n" + SLEEP))
    code, _, err = launched.wait()
    assert code == 128 + number
    block = err[err.rindex("failed first") :]
    assert f"was killed by signal {number} ({signal.Signals(number).name}" in block
    assert words in block
    assert [event["signal"] for event in launched.events("rank_exit") if event["rank"] == 1] == [number]


def test_ranks_that_ignore_term_and_fork_are_killed(launch: Launch, tmp_path: Path) -> None:
    stubborn = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(2): subprocess.Popen(['sleep', '300'])\n"  # they ignore TERM as well
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "touch(f'ready-{rank}')\n"
        "while rank == 0 and not os.path.exists('ready-1'): time.sleep(0.01)\n"
        "if rank == 0: sys.exit(5)\n" + SLEEP
    )
    plan = launch(python(stubborn))
    code, _, _ = plan.wait()
    assert code == 5
    assert plan.alive() == []
    assert [event["signal"] for event in plan.events("rank_exit") if event["rank"] == 1] == [9]


def test_a_daemon_does_not_outlive_the_launch(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python(DETACH))
    code, _, err = launched.wait()
    assert code == 0
    assert launched.alive() == []
    assert "(sleep) on localhost outlived its rank; stopped" in err
    assert len(launched.events("leftover")) == 2


def test_a_daemon_is_not_touched_while_its_rank_runs_on(launch: Launch, tmp_path: Path) -> None:
    code = (
        "child = subprocess.Popen(['bash', '-c', 'sleep 0.3; touch helper-done'], start_new_session=True)\n"
        "while not os.path.exists('helper-done'): time.sleep(0.01)\n"
        "sys.exit(child.wait())\n"
    )
    launched = launch(python(code), num_ranks=1)
    assert launched.wait()[0] == 0
    assert launched.events("leftover") == []


def test_a_helper_that_ends_with_its_rank_is_let_end(launch: Launch, tmp_path: Path) -> None:
    # As the resource tracker of multiprocessing does: it cleans up once its rank is gone.
    helper = "import sys; sys.stdin.read(); open('cleaned-up', 'w')"
    code = f"subprocess.Popen([sys.executable, '-S', '-c', {helper!r}], stdin=subprocess.PIPE)"
    launched = launch(python(code), num_ranks=1)
    assert launched.wait()[0] == 0
    assert (tmp_path / "cleaned-up").exists()
    assert launched.events("leftover") == []


def test_all_stopped_at_a_checkpoint_is_75(tmp_path: Path) -> None:
    outcome, err = supervised(tmp_path, "sys.exit(75)")
    assert outcome.exit_code == 75
    assert err.endswith(f"go on with:\n  {tmp_path}/run/launch.sh --resume\n")


def test_a_commands_own_75_says_nothing_of_checkpoints(launch: Launch) -> None:
    launched = launch(python("time.sleep(0.3 * rank); sys.exit(75)"))
    code, _, err = launched.wait()
    assert code == 75
    assert "all ranks exited with code 75" in err
    assert "checkpoint" not in err
    assert [event["asked"] for event in launched.events("rank_exit")] == [False, False]


def test_a_failure_while_others_stop_at_a_checkpoint_is_a_failure(launch: Launch) -> None:
    code, _, err = launch(python("time.sleep(0.3 * rank); sys.exit([75, 9][rank])")).wait()
    assert code == 9
    assert "rank 1 on localhost failed first" in err


def supervised(tmp_path: Path, code: str) -> tuple[Outcome, str]:
    """Two ranks that have a moment to stop at a checkpoint together."""
    plan = LaunchPlan(
        argv=tuple(python(code)),
        topology=local_topology(2),
        run_dir=str(tmp_path / "run"),
        cwd=str(tmp_path),
        checkpoint_grace_s=0.2,
    )
    err = io.BytesIO()
    events = JsonlWriter(tmp_path / "events.jsonl")
    outcome = supervise(plan, events=events, out=io.BytesIO(), err=err, own_worker=True)
    return outcome, err.getvalue().decode()


@pytest.mark.parametrize("on_term", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"])
def test_a_rank_that_does_not_come_to_the_checkpoint_is_no_failure_of_its_own(
    tmp_path: Path, on_term: str
) -> None:
    code = (
        f"{on_term}touch(f'ready-{{rank}}')\nif rank == 1: time.sleep(300)\n"
        "while not os.path.exists('ready-1'): time.sleep(0.01)\nsys.exit(75)"
    )
    outcome, err = supervised(tmp_path, code)
    assert (outcome.exit_code, outcome.late, outcome.first_failure) == (1, (1,), None)
    assert "rank 1 did not stop at the checkpoint that others stopped at" in err
    assert "rank 1 did not stop at the checkpoint in time: rank 0 ended (code 75)" in err
    assert "failed first" not in err
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["ranks"] for event in events if event["kind"] == "checkpoint_late"] == [[1]]
    assert "first_failure" not in {event["kind"] for event in events}


def test_a_rank_that_comes_to_the_checkpoint_when_asked_makes_it_75(tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\ntouch(f'ready-{rank}')\n"
        "if rank == 1: time.sleep(300)\n"
        "while not os.path.exists('ready-1'): time.sleep(0.01)\nsys.exit(75)"
    )
    outcome, err = supervised(tmp_path, code)
    assert (outcome.exit_code, outcome.late) == (75, (1,))
    assert "all ranks stopped at a checkpoint" in err


@pytest.mark.parametrize("own", [2, 70, 76])
def test_a_ranks_own_code_is_told_from_ours(launch: Launch, own: int) -> None:
    launched = launch(python(f"sys.exit({own})"), num_ranks=1)
    assert launched.wait()[0] == own
    assert [event["exit_code"] for event in launched.events("rank_exit")] == [own]


def test_an_error_of_rank_0_is_shown_once(launch: Launch) -> None:
    code = "if rank == 0: print('Error: bad data\\n\\nhint: mend it', file=sys.stderr); sys.exit(3)\n" + SLEEP
    launched = launch(python(code))
    exit_code, _, err = launched.wait()
    assert exit_code == 3
    assert err.count("Error: bad data") == err.count("hint: mend it") == 1
    assert "the environment is not ready" not in err  # the command's own code has the command's meaning
    assert launched.events("first_failure")[0]["stderr"] == ["Error: bad data", "hint: mend it"]


def test_a_traceback_of_another_rank_is_shown_with_its_context(launch: Launch) -> None:
    code = "if rank == 1: raise ValueError('boom')\n" + SLEEP
    _, _, err = launch(python(code)).wait()
    block = err[err.rindex("failed first") :]
    assert "| Traceback" in block
    assert "| ValueError: boom" in block


def test_errors_of_other_ranks_are_shown_with_their_rank(launch: Launch) -> None:
    code = "print('fine', file=sys.stderr); print('ERROR disk on fire', file=sys.stderr)"
    _, out, err = launch(python(code)).wait()
    assert out == ""
    assert "localhost:1| ERROR disk on fire\n" in err
    assert err.count("fine\n") == 1  # rank 0's, as it was
    assert "localhost:0|" not in err


def test_ranks_that_say_the_same_are_shown_once(launch: Launch) -> None:
    code = (
        "if rank: print(f'[rank{rank}]: ERROR disk on fire', file=sys.stderr)\n"
        "else: print('\\r 50%|\\r100%|\\ndone', file=sys.stderr)\n"
        "time.sleep(1)"
    )
    _, _, err = launch(python(code), num_ranks=6).wait()
    assert "localhost:1-5| [rank" in err
    assert err.count("disk on fire") == 1
    assert "\n100%|\ndone\n" in err  # no terminal: a bar's last state
    assert "\r" not in err
    assert "50%" not in err


def test_a_program_that_is_not_there(launch: Launch) -> None:
    launched = launch(["no-such-program-here"])
    code, _, err = launched.wait()
    assert code == 3
    assert "no program no-such-program-here in PATH; nothing was started" in err
    assert "hint:" in err
    assert "Traceback" not in err
    assert launched.events("rank_start") == []


def test_a_file_that_is_no_program(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    code, _, err = launch(["./notes"]).wait()
    assert code == 3
    assert "./notes is not executable" in err
    (tmp_path / "notes").chmod(0o755)
    code, _, err = launch(["./notes"], run_dir="second").wait()
    assert code == 3
    assert "name its interpreter" in err


def test_the_agent_itself_is_killed(launch: Launch) -> None:
    code = DETACH + "subprocess.Popen(['sleep', '300']); touch(f'ready-{rank}')\n" + SLEEP
    launched = launch(python(code))
    launched.wait_for_files(launched.run_dir.parent, "ready-0", "ready-1")
    os.kill(launched.agent_pid(), signal.SIGKILL)
    exit_code, _, err = launched.wait()
    assert exit_code == 77
    assert "the agent on localhost was killed by signal 9" in err
    launched.nothing_left()


def test_the_agents_keeper_is_killed(launch: Launch) -> None:
    code = DETACH + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); touch(f'ready-{rank}')\n" + SLEEP
    launched = launch(python(code))
    launched.wait_for_files(launched.run_dir.parent, "ready-0", "ready-1")
    os.kill(parent_of(launched.agent_pid()), signal.SIGKILL)
    exit_code, _, err = launched.wait()
    assert exit_code == 75  # they had the time to write a checkpoint
    assert "SIGKILL to the agent on localhost: ranks were asked to stop" in err
    launched.nothing_left()


def test_our_lines_begin_anew_and_no_rank_can_erase_them(launch: Launch) -> None:
    code = """
if rank == 0: os.write(2, b'unfinished'); touch('begun'); time.sleep(300)
while not os.path.exists('begun'): time.sleep(0.01)
os.write(2, b'\\x1b[2J\\x1b]0;title\\x07\\x1b[31mError: red\\x1b[0m \\x00caf\\xc3\\xa9\\tend\\r\\n')
time.sleep(1)
os.write(2, b'\\x1b[1Alast words\\n')
sys.exit(3)
"""
    code_of_launch, _, err = launch(python(code)).wait()
    assert code_of_launch == 3
    shown = err[err.index("unfinished") :].splitlines()
    assert shown[:3] == [
        "unfinished",
        "localhost:1| Error: red café\tend",
        "dslaunch: rank 1 on localhost exited with code 3; stopping the others",
    ]
    assert shown[5:7] == ["    | Error: red café\tend", "    | last words"]
    assert "\x1b" not in err
    assert b"\x1b[2J" in Path("run/logs/rank-1.log").read_bytes()
