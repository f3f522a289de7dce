"""`--via openmpi`: real mpirun, which reaches real hosts by ssh."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.topology import Host, Topology
from dslaunch.launch.carried import loader_argv
from dslaunch.launch.openmpi import build_agent_command, check_hosts
from tests.launch.launching import Launched, python, rank_pid, wait_until
from tests.testbed.hosts import Testbed

real = pytest.mark.needs("root", "sshd", "namespaces", "openmpi")
Over = Callable[..., Launched]
HOSTILE = ["a b", "", "$HOME", "it's", "100%n", "two\nlines", "-x", '{"k": "v"}']
WAIT = "touch(f'up-{rank}'); time.sleep(300)"


def test_the_whole_command() -> None:
    command = build_agent_command(
        Host(name="n2", slots=("0",)), {"env": {"T": "s3cret"}}, {}, ["docker", "x"]
    )
    words = list(command.argv)
    assert words[:8] == ["mpirun", "-np", "1", "--bind-to", "none", "--host", "n2", "docker"]
    assert words[-2:] == list(loader_argv()[-2:])
    assert words[-3].startswith("unset OMPI_COMM_WORLD_RANK ")
    assert "s3cret" not in " ".join(words)
    assert b"s3cret" in (command.stdin or b"")


def test_what_keeps_it_from_starting() -> None:
    topology = Topology(hosts=(Host(name="a", slots=("0",)), Host(name="b", slots=("0",), port=22)))
    with pytest.raises(EnvironmentNotReady, match="no mpirun in PATH"):
        check_hosts(topology, {"PATH": "/nowhere"})
    if shutil.which("mpirun"):
        with pytest.raises(ConfigError, match="host b: mpirun takes names without user"):
            check_hosts(topology, dict(os.environ))


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(2, tmp_path_factory.mktemp("testbed")) as hosts:
        yield hosts


@pytest.fixture
def over(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Over]:
    """``over(code, *words)`` runs Python code on each slot of the hosts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))  # mpirun may be another MPI's
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    with ExitStack() as stack:

        def start(code: str, *words: str) -> Launched:
            flags = ["--hostfile", "hosts", "--gpu", "cpu", "--via", "openmpi", "--env", "MY_TOKEN=s3cret"]
            launched = Launched(flags, python(code, *words), run_dir=tmp_path / "run", prefix=bed.hub())
            return stack.enter_context(launched)

        yield start
    wait_until(lambda: not any(map(bed.programs, bed.names)), "nothing is left on the hosts", 20.0)


@real
def test_argv_environment_and_places(bed: Testbed, over: Over) -> None:
    show = "import json; print(json.dumps([sys.argv[1:], dict(os.environ), len(os.sched_getaffinity(0))]))"
    code, out, err = over(show, *HOSTILE).wait()
    assert code == 0, err
    for rank, local_rank in enumerate(("0", "1", "0")):
        argv, env, cores = json.loads(Path(f"run/logs/rank-{rank}.log").read_text())
        assert argv == HOSTILE
        wanted = {"RANK": str(rank), "LOCAL_RANK": local_rank, "WORLD_SIZE": "3", "MY_TOKEN": "s3cret",
                  "MASTER_ADDR": bed.address("node1")}  # fmt: skip
        assert {name: env[name] for name in wanted} == wanted
        assert not [name for name in env if name.startswith(("OMPI_COMM_", "PMIX_RANK"))]
        assert cores == len(os.sched_getaffinity(0))  # no rank is pinned
    assert json.loads(out)[0] == HOSTILE


@real
def test_a_killed_rank_is_named_and_ends_all(bed: Testbed, over: Over) -> None:
    launched = over(WAIT)
    launched.wait_for_files(Path(), "up-0", "up-1", "up-2")
    os.kill(rank_pid(2, f"DSLAUNCH_TEST_ID={launched.mark}".encode()), signal.SIGKILL)
    code, _, err = launched.wait()
    assert code == 137
    assert "rank 2 on node2 failed first: it was killed by signal 9 (SIGKILL" in err


@real
@pytest.mark.parametrize(("number", "wanted"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_the_launcher_ends_every_host(bed: Testbed, over: Over, number: int, wanted: int) -> None:
    launched = over(WAIT)
    launched.wait_for_files(Path(), "up-0", "up-1", "up-2")
    launched.process.send_signal(number)
    assert launched.process.wait(60) == wanted


@real
def test_a_host_that_loses_power(bed: Testbed, over: Over) -> None:
    launched = over(WAIT)
    launched.wait_for_files(Path(), "up-0", "up-1", "up-2")
    bed.power_off("node2")
    try:
        code, _, err = launched.wait()
    finally:
        bed.boot("node2")
        bed.wait_until_up("node2")
    assert code == 77
    assert "dslaunch: host node2 was lost" in err


@real
def test_a_host_that_is_not_there(bed: Testbed, over: Over) -> None:
    Path("hosts").write_text("node1 slots=1\nnowhere slots=1\n")
    code, _, err = over("touch('started')").wait()
    assert code == 3
    assert "host nowhere: " in err
    assert "--exclude nowhere" in err
    assert not Path("started").exists()
