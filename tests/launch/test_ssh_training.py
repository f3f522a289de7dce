"""Real training by DeepSpeed on ranks of several hosts, reached by ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import TIMEOUT_S, clear, rank_pid, wait_until
from tests.launch.training import losses, make_run
from tests.support.plans import read_rows
from tests.testbed.hosts import Testbed

pytestmark = pytest.mark.needs("root", "sshd", "namespaces")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops_dir: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return tmp_path


def start(bed: Testbed, *options: str) -> subprocess.Popen[str]:
    words = [*bed.hub(), sys.executable, "-m", "dslaunch", "launch", "run.yaml", *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def events(run_dir: str, kind: str) -> list[dict[str, Any]]:
    return read_rows(Path(run_dir, "events.jsonl"), kind)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=4 * TIMEOUT_S)
    return process.returncode, err


def test_two_hosts_train_as_two_ranks_of_one_do(bed: Testbed, here: Path) -> None:
    code, err = finish(start(bed, "--hostfile", "hosts", "--run-dir", "two-hosts"))
    assert code == 0, err
    code, err = finish(start(bed, "--num-gpus-per-node", "2", "--run-dir", "one-host"))
    assert code == 0, err
    assert len(losses("two-hosts")) == 3
    assert losses("two-hosts") == losses("one-host")
    assert not Path("two-hosts/.seen-by-all-hosts").exists()
    # A step of it again, on its hosts: from the start, as no checkpoint lies before it.
    words = ["replay", "two-hosts", "--step", "2", "--json"]
    replay = subprocess.run(
        [*bed.hub(), sys.executable, "-m", "dslaunch", *words], capture_output=True, text=True, timeout=240
    )
    assert replay.returncode == 1, replay.stderr  # all was finite
    report = json.loads(replay.stdout)
    assert (report["world_size"], report["findings"]) == (2, [])
    assert [len(of_rank) for of_rank in report["losses"]] == [2, 2]  # of each rank's micro-batches
    assert Path("two-hosts/replays/step-2/hostfile").read_text() == Path("two-hosts/hostfile").read_text()


FAULTS = ("--set", "train_batch_size=2", "--set", "max_steps=100000")


def start_on(bed: Testbed, names: str, run_dir: str, *options: str) -> subprocess.Popen[str]:
    """A training without end on two hosts."""
    hostfile = Path(f"{run_dir}.hosts")
    hostfile.write_text("".join(f"{name} slots=1\n" for name in names.split()))
    return start(bed, *FAULTS, "--hostfile", str(hostfile), "--run-dir", run_dir, *options)


def trains(run_dir: str, beyond: int = 0) -> None:
    """Until a step after ``beyond`` was logged."""
    metrics = Path(run_dir, "metrics.jsonl")
    wait_until(
        lambda: metrics.exists() and any(row["step"] > beyond for row in read_rows(metrics, "train")),
        f"a step after {beyond}", 4 * TIMEOUT_S,
    )  # fmt: skip


def last_step(run_dir: str) -> int:
    return max(row["step"] for row in read_rows(Path(run_dir, "metrics.jsonl"), "train"))


def pid_in(run_dir: str, rank: int) -> int:
    return rank_pid(rank, f"DSLAUNCH_RUN_DIR={Path(run_dir).resolve()}".encode())


def test_a_killed_rank_an_exception_and_the_restart_between(bed: Testbed, here: Path) -> None:
    options = ("--max-restarts", "5", "--set", "output.save_steps=1")
    process = start_on(bed, "node1 node2", "run", *options)
    trains("run", 1)
    os.kill(pid_in("run", 1), signal.SIGKILL)
    wait_until(lambda: events("run", "restart"), "it starts again")
    reached = last_step("run")
    trains("run", reached)
    # The checkpoint cannot be written by this rank any more: an OSError, and no start again for it.
    subprocess.run(["prlimit", "--pid", str(pid_in("run", 1)), "--fsize=1"], check=True)
    code, err = finish(process)
    assert code == 3, err
    # Rank 0 complains of a closed connection at the same time: that is not what failed first.
    assert "rank 1 on node2 failed first: it was killed by signal 9 (SIGKILL" in err
    assert "rank 1 on node2 failed first: it exited with code 3" in err
    assert "rank 1: Error: the checkpoint could not be written to" in err
    assert f"the last logged was step {last_step('run')} of 100000" in err
    steps = [row["step"] for row in read_rows(Path("run/metrics.jsonl"), "train")]
    assert steps.count(1) == 1  # from the checkpoint, not from the start
    assert [event["number"] for event in events("run", "restart")] == [1]
    clear(bed, 30.0)


def test_a_rank_that_does_not_come_is_told_from_those_that_wait(bed: Testbed, here: Path) -> None:
    process = start_on(bed, "node1 node2", "run", "--set", "launch.ddp_timeout_s=4")
    trains("run")
    os.kill(pid_in("run", 1), signal.SIGSTOP)
    code, err = finish(process)
    assert code == 77, err
    block = err[err.rindex("failed first") :]
    assert "waited 4 s in all_reduce for a rank that did not come" in err
    assert "  where the ranks were:\n    | rank 1 on node2: its process was stopped (SIGSTOP)\n" in block
    assert events("run", "launch_end")[0]["places"][0] == "rank 1 on node2: its process was stopped (SIGSTOP)"
    clear(bed, 30.0)


def test_a_killed_launcher_does_not_touch_another_run_whose_cable_is_then_cut(
    bed: Testbed, here: Path
) -> None:
    killed = start_on(bed, "node1 node3", "killed")
    lives = start_on(bed, "node1 node2", "lives", "--set", "launch.host_timeout_s=3")
    trains("killed")
    trains("lives")
    killed.kill()
    killed.communicate(timeout=TIMEOUT_S)
    clear(bed, 30.0, "/killed/")
    trains("lives", last_step("lives"))
    bed.cut("node2")
    try:
        code, err = finish(lives)
        clear(bed, 30.0)
    finally:
        bed.plug("node2")
    assert code == 77, err
    assert "dslaunch: host node2 was lost" in err


def test_a_host_without_power_does_not_touch_another_run_which_ctrl_c_then_stops(
    bed: Testbed, here: Path
) -> None:
    dies = start_on(bed, "node1 node3", "dies")
    lives = start_on(bed, "node1 node2", "lives")
    trains("dies")
    trains("lives")
    bed.power_off("node3")
    try:
        code, err = finish(dies)
    finally:
        bed.boot("node3")
        bed.wait_until_up("node3")
    assert code == 77, err
    assert "dslaunch: host node3 was lost" in err
    clear(bed, 30.0, "/dies/")
    trains("lives", last_step("lives"))
    lives.send_signal(signal.SIGINT)
    code, err = finish(lives)
    assert code == 75, err
    step = events("lives", "train_stopped")[0]["step"]
    assert Path(f"lives/checkpoints/step-{step}").is_dir()
    clear(bed, 30.0)


def test_a_run_directory_that_hosts_do_not_share_starts_nothing(bed: Testbed, here: Path) -> None:
    code, err = finish(start(bed, "--hostfile", "hosts", "--run-dir", "/dev/shm/dslaunch-test-run"))
    subprocess.run(["rm", "-rf", "/dev/shm/dslaunch-test-run"], check=True)
    assert code == 3
    assert "is not seen there (No such file or directory)" in err
    assert "--run-dir on a file system that all hosts share" in err


def test_what_is_recorded_names_the_hosts(bed: Testbed, here: Path) -> None:
    done = subprocess.run(
        [*bed.hub(), sys.executable, "-m", "dslaunch", "plan", "run.yaml", "--hostfile", "hosts", "--json"],
        capture_output=True, text=True, env=os.environ, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    launch = json.loads(done.stdout)["plan"]["launch"]
    assert (launch["via"], launch["host_timeout_s"]) == ("ssh", 30.0)
    assert [host["name"] for host in launch["topology"]["hosts"]] == ["node1", "node2"]
