"""Starting again after a failure: from the last checkpoint, on other hosts, and not for ever."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import Host, Topology
from dslaunch.launch.ends import LostHost, RankEnd
from dslaunch.launch.restarts import Restarts
from dslaunch.launch.verdict import Outcome
from dslaunch.observe.run_status import load_status
from tests.launch.conftest import Launch
from tests.launch.launching import python, wait_until

HOSTS = Topology(hosts=(Host(name="a", slots=("0",)), Host(name="b", slots=("0",))))


def plan(run_dir: Path, **more: object) -> LaunchPlan:
    values: dict[str, object] = {"argv": ("w",), "topology": HOSTS, "cwd": "/", "max_restarts": 9, **more}
    return LaunchPlan(run_dir=str(run_dir), **values)  # type: ignore[arg-type]


def failed(code: int = 1, host: str = "b", **more: object) -> Outcome:
    end = RankEnd(rank=1, host=host, code=code, seconds=1.0, max_rss_bytes=0, asked=False)
    values: dict[str, object] = {"first_failure": end, "num_ranks": 2, "own_worker": True, **more}
    return Outcome(ends=(end,), **values)  # type: ignore[arg-type]


def checkpoint(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / f"step-{step}").mkdir(parents=True)


def test_the_worker_goes_on_from_its_checkpoint_and_a_command_runs_as_it_is(tmp_path: Path) -> None:
    ours = Restarts(plan(tmp_path), own_worker=True)
    theirs = Restarts(plan(tmp_path), own_worker=False)
    for restarts in (ours, theirs):
        assert restarts.next(failed(), ["b"], lived_s=1.0) is not None
        assert restarts.plan.env["DSLAUNCH_RESTART_COUNT"] == "1"
    assert (ours.plan.argv, theirs.plan.argv) == (("w", "--resume"), ("w",))


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(ends=(), num_ranks=2, cancelled_by=signal.SIGTERM),
        failed(2),
        failed(3),
        failed(70),
        failed(75),
        failed(76),
        Outcome(
            ends=(RankEnd(rank=0, host="a", code=0, seconds=1.0, max_rss_bytes=0, asked=False),), num_ranks=1
        ),
    ],
)
def test_ends_that_would_come_again_are_final(tmp_path: Path, outcome: Outcome) -> None:
    assert Restarts(plan(tmp_path), own_worker=True).next(outcome, [], lived_s=1.0) is None


def test_the_codes_of_a_command_are_its_own(tmp_path: Path) -> None:
    outcome = dataclasses.replace(failed(3), own_worker=False)
    assert Restarts(plan(tmp_path), own_worker=False).next(outcome, ["b"], lived_s=1.0) is not None


def test_the_number_of_restarts_is_a_limit(tmp_path: Path) -> None:
    restarts = Restarts(plan(tmp_path, max_restarts=2), own_worker=True)
    for step in (1, 2):
        checkpoint(tmp_path, step)
        assert restarts.next(failed(), ["b"], lived_s=1.0) is not None
    checkpoint(tmp_path, 3)
    assert restarts.next(failed(), ["b"], lived_s=1.0) is None


def test_a_crash_loop_ends_and_progress_is_none(tmp_path: Path) -> None:
    restarts = Restarts(plan(tmp_path), own_worker=True)
    assert restarts.next(failed(), ["b"], lived_s=900.0) is not None
    checkpoint(tmp_path, 10)
    assert restarts.next(failed(), ["b"], lived_s=900.0) is not None  # a checkpoint was gained
    assert restarts.next(failed(), ["b"], lived_s=900.0) is not None
    assert restarts.next(failed(), ["b"], lived_s=900.0) is None


def test_a_lost_host_is_no_crash_loop(tmp_path: Path) -> None:
    restarts = Restarts(plan(tmp_path), own_worker=True)
    lost = Outcome(ends=(), num_ranks=2, lost=LostHost(host="b", how="", seconds=1.0))
    delays = [restarts.next(lost, ["b"], lived_s=1.0) for _ in range(8)]
    assert [delay and delay.delay_s for delay in delays] == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_host_that_failed_twice_gives_way_to_a_spare_with_as_many_slots(tmp_path: Path) -> None:
    spares = (Host(name="wide", slots=("0", "1")), Host(name="c", slots=("0",)))
    restarts = Restarts(plan(tmp_path, spare_hosts=spares), own_worker=True)
    lost = Outcome(ends=(), num_ranks=2, lost=LostHost(host="b", how="", seconds=1.0))
    names = []
    for _ in range(4):
        restart = restarts.next(lost, ["b"], lived_s=1.0)
        assert restart is not None
        names.append(([host.name for host in restarts.plan.topology.hosts], restart.left_out))
    assert names == [(["a", "b"], ()), (["a", "c"], ("b",)), (["a", "c"], ()), (["a", "c"], ())]


def test_a_host_on_which_ranks_fail_at_once_gives_way_too_before_it_is_a_crash_loop(tmp_path: Path) -> None:
    spares = (Host(name="c", slots=("0",)), Host(name="d", slots=("0",)))
    restarts = Restarts(plan(tmp_path, spare_hosts=spares[:1], master_addr="10.0.0.1"), own_worker=False)
    left_out = []
    for host in ("b", "b", "c"):
        restart = restarts.next(failed(host=host), [host], lived_s=1.0)
        assert restart is not None
        left_out.append(restart.left_out)
    assert left_out == [(), ("b",), ()]
    assert restarts.plan.master_addr == "10.0.0.1"  # the first host's, which is there still
    assert restarts.next(failed(host="c"), ["c"], lived_s=1.0) is None
    assert restarts.is_crash_loop
    first = Restarts(plan(tmp_path, spare_hosts=spares[1:], master_addr="10.0.0.1"), own_worker=False)
    for _ in range(2):
        assert first.next(failed(host="a"), ["a"], lived_s=1.0) is not None
    assert ([host.name for host in first.plan.topology.hosts], first.plan.master_addr) == (["d", "b"], None)


def test_a_crash_loop_says_why_it_ends(launch: Launch) -> None:
    code, _, err = launch(python("sys.exit(9)"), "--max-restarts", "5").wait()
    assert code == 9
    assert err.count("starting again") == 1
    last = err[err.rindex("dslaunch: rank") :].splitlines()  # the block, and nothing behind it
    assert [line.split("  ")[1] for line in last[1:]] == [
        "it wrote nothing to stderr",
        "log",
        "others",
        "restarts",
    ]
    assert last[-1].endswith(
        "a crash loop: 2 starts in a row failed before anything was gained; not started again"
    )


def test_a_command_that_fails_once_is_run_again(launch: Launch, tmp_path: Path) -> None:
    code = (
        "count = os.environ.get('DSLAUNCH_RESTART_COUNT', '0')\n"
        "print('start', count)\n"
        "touch(f'start-{count}-{rank}')\n"
        "while not os.path.exists(f'start-{count}-0'): time.sleep(0.01)\n"
        "sys.exit(9 if count == '0' and rank == 1 else 0)"
    )
    launched = launch(python(code), "--max-restarts", "3")
    exit_code, _, err = launched.wait()
    assert exit_code == 0, err
    assert sorted(path.name for path in tmp_path.glob("start-*")) == [
        "start-0-0", "start-0-1", "start-1-0", "start-1-1",
    ]  # fmt: skip
    assert "dslaunch: starting again in 2 s (restart 1)" in err
    assert [event["number"] for event in launched.events("restart")] == [1]
    first, second = launched.events("launch_start")
    status = load_status(tmp_path / "run")
    assert (status.started, status.restarted, status.restarts) == (first["time"], second["time"], 1)
    log = (tmp_path / "run/logs/rank-1.log").read_text()
    assert re.fullmatch(r"start 0\n\n\[dslaunch: started anew 20\S+Z\]\nstart 1\n", log), log


REFUSED_LATER = (
    'touch(f\'start-{os.environ.get("DSLAUNCH_RESTART_COUNT", "0")}-{rank}\')\n'
    "os.rename('here', 'gone') if rank == 1 and os.path.exists('here') else None\n"  # the last to start
    "sys.exit(9 * rank)"
)


def test_a_restart_that_is_refused_does_not_hide_what_failed(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(sys.executable)
    command = ["./here", *python(REFUSED_LATER)[1:]]
    launched = launch(command, "--max-restarts", "1")
    exit_code, _, err = launched.wait()
    assert exit_code == 9, err
    _, refused, last = err.partition("dslaunch: restart 1: no program ./here; nothing was started\n")
    assert refused, err
    assert last.startswith("dslaunch: rank 1 on localhost failed first: it exited with code 9 ")
    status = load_status(tmp_path / "run")
    assert (status.state, status.exit_code, status.failed_rank) == ("failed", 9, 1)
    assert status.trouble[0] == "rank 1 on localhost failed first: it exited with code 9"
    assert len(launched.events("launch_start")) == 1


def test_a_cancel_while_it_waits_is_the_end(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python("sys.exit(9)"), "--max-restarts", "3")
    wait_until(lambda: launched.events("restart"), "it waits")
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.wait()
    assert code == 9
    _, told, last = err.partition("dslaunch: Ctrl-C: not started again\n")
    assert told, err
    assert last.startswith("dslaunch: rank ") and "failed first: it exited with code 9 " in last
    assert [event["signal"] for event in launched.events("launcher_signal")] == ["SIGINT"]
    assert len(launched.events("launch_start")) == 1


def test_the_plan_records_the_number(launch: Launch, tmp_path: Path) -> None:
    assert launch(python("pass"), "--max-restarts", "3").wait()[0] == 0
    assert json.loads((tmp_path / "run/plan.json").read_text())["launch"]["max_restarts"] == 3
