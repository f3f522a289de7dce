"""Real training by DeepSpeed on ranks of several hosts, reached by ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching import TIMEOUT_S, rank_pid, wait_until
from tests.launch.training import losses, make_run
from tests.testbed.hosts import Testbed

pytestmark = pytest.mark.needs("root", "sshd", "namespaces")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(2, tmp_path_factory.mktemp("testbed")) as hosts:
        yield hosts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops_dir: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return tmp_path


def start(bed: Testbed, *options: str) -> subprocess.Popen[str]:
    words = [*bed.hub(), sys.executable, "-m", "dslaunch", "launch", "run.yaml", *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


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


def test_a_rank_killed_in_training_is_named(bed: Testbed, here: Path) -> None:
    options = ["--hostfile", "hosts", "--run-dir", "run", "--set", "max_steps=100000"]
    process = start(bed, *options)
    metrics = Path("run/metrics.jsonl")
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step", 4 * TIMEOUT_S)
    os.kill(rank_pid(1, b"DSLAUNCH_RUN_DIR=" + str(here / "run").encode()), signal.SIGKILL)
    code, err = finish(process)
    assert code == 137, err
    # Rank 0 complains of a closed connection at the same time: that is not what failed first.
    assert "rank 1 on node2 failed first: it was killed by signal 9 (SIGKILL" in err
    assert [bed.programs(name) for name in bed.names] == [[], []]


def test_a_run_directory_that_hosts_do_not_share_starts_nothing(bed: Testbed, here: Path) -> None:
    code, err = finish(start(bed, "--hostfile", "hosts", "--run-dir", "/dev/shm/dslaunch-test-run"))
    subprocess.run(["rm", "-rf", "/dev/shm/dslaunch-test-run"], check=True)
    assert code == 3
    assert "is not seen here (No such file or directory)" in err
    assert "--run-dir on a file system that all hosts share" in err


def test_what_is_recorded_names_the_hosts(bed: Testbed, here: Path) -> None:
    done = subprocess.run(
        [*bed.hub(), sys.executable, "-m", "dslaunch", "plan", "run.yaml", "--hostfile", "hosts", "--json"],
        capture_output=True, text=True, env=os.environ, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    launch = json.loads(done.stdout)["plan"]["launch"]
    assert (launch["via"], launch["host_timeout_s"]) == ("ssh", 30.0)
    assert [host["name"] for host in launch["topology"]["hosts"]] == ["node1", "node2"]
