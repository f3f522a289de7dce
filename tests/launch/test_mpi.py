"""`--via openmpi|mpich|pdsh`: real mpirun, mpiexec and pdsh, which reach real hosts by ssh."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import mpich, openmpi, relay
from dslaunch.launch.carried import loader_argv
from tests.launch.launching import Launched, python, wait_until
from tests.testbed.hosts import Testbed

real = pytest.mark.needs("root", "sshd", "namespaces")
WAYS = [
    pytest.param("openmpi", marks=pytest.mark.needs("openmpi")),
    pytest.param("mpich", marks=pytest.mark.needs("mpich")),
]
PDSH = pytest.param("pdsh", marks=pytest.mark.needs("pdsh"))
Over = Callable[..., Launched]
HOSTILE = ["a b", "", "$HOME", "it's", "100%n", "two\nlines", "-x", '{"k": "v"}']
WAIT = "touch(f'up-{rank}'); time.sleep(300)"
UP = ("up-0", "up-1", "up-2")


def programs(folder: Path) -> dict[str, str]:
    """An environment in whose PATH are mpirun and mpiexec.hydra that do nothing."""
    for name in ("mpirun", "mpiexec.hydra"):
        path = folder / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (openmpi, ["mpirun", "-np", "1", "--bind-to", "none", "--host", "n2"]),
        (mpich, ["mpiexec.hydra", "-genvnone", "-wdir", "/", "-bind-to", "none", "-n", "1", "-hosts", "n2"]),
    ],
)
def test_the_whole_command(way: ModuleType, words: list[str], tmp_path: Path) -> None:
    host, orders = Host(name="n2", slots=("0",)), {"env": {"T": "s3cret"}}
    command = way.build_agent_command(host, orders, programs(tmp_path), ["docker", "x"])
    assert list(command.argv[:-5]) == [*words, "docker", "x"]
    assert command.argv[-2:] == loader_argv()[-2:]
    assert command.argv[-3].startswith("unset OMPI_COMM_WORLD_RANK " if way is openmpi else "unset PMI_FD ")
    assert "s3cret" not in " ".join(command.argv)
    assert b"s3cret" in (command.stdin or b"")


@pytest.mark.parametrize(("way", "program"), [(openmpi, "mpirun"), (mpich, "mpiexec.hydra or mpiexec.mpich")])
def test_what_keeps_it_from_starting(way: ModuleType, program: str, tmp_path: Path) -> None:
    topology = Topology(hosts=(Host(name="a", slots=("0",)), Host(name="b", slots=("0",), port=22)))
    with pytest.raises(EnvironmentNotReady, match=f"no {program} in PATH"):
        way.check_hosts(topology, {"PATH": "/nowhere"})
    with pytest.raises(ConfigError, match=r"host b: mpi.* takes names without user"):
        way.check_hosts(topology, programs(tmp_path))


def test_an_mpirun_that_started_with_another_one_is_started_again(tmp_path: Path) -> None:
    """As 4.1.4 says it where two want to make the folder of the host's sessions in the same instant."""
    words = "A call to mkdir was unable to create the desired directory:\n\n  Error:     File exists\n"
    said = shlex.quote("-" * 74 + "\n" + words)
    once = f"mkdir {tmp_path}/tried 2>/dev/null && {{ echo {said} >&2; exit 213; }}"
    program = Path(programs(tmp_path)["PATH"], "mpirun")
    program.write_text(f'#!/bin/sh\n{once}\nshift 6\nexec "$@"\n')  # -np 1 --bind-to none --host NAME
    (tmp_path / "hosts").write_text("n2.invalid slots=1\n")
    flags = ["--hostfile", f"{tmp_path}/hosts", "--gpu", "cpu", "--via", "openmpi"]
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with Launched(flags, python("print('up')"), run_dir=tmp_path / "run", env=env) as launched:
        code, out, err = launched.wait()
    assert (code, out) == (0, "up\n"), err
    assert f"the connection to n2.invalid ended: {words.strip()}; trying again" in err


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(2, tmp_path_factory.mktemp("testbed")) as hosts:
        yield hosts


def put_in_path(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin").mkdir()
    if way == "openmpi":
        (folder / "bin/mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))  # may be another MPI's
    monkeypatch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(params=[*WAYS, PDSH])
def over(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Over]:
    """``over(code, *words)`` runs Python code on each slot of the hosts."""
    monkeypatch.chdir(tmp_path)
    put_in_path(request.param, tmp_path, monkeypatch)
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    with ExitStack() as stack:

        def start(code: str, *words: str) -> Launched:
            flags = [
                "--hostfile",
                "hosts",
                "--gpu",
                "cpu",
                "--via",
                request.param,
                "--env",
                "MY_TOKEN=s3cret",
            ]
            launched = Launched(flags, python(code, *words), run_dir=tmp_path / "run", prefix=bed.hub())
            return stack.enter_context(launched)

        yield start
    wait_until(lambda: not any(map(bed.programs, bed.names)), "nothing is left on the hosts", 20.0)
    assert list(tmp_path.glob("run/.orders*")) == []  # nor of what was written for them


@real
def test_argv_environment_and_places(bed: Testbed, over: Over, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more of both than a pipe holds."""
    long = {f"HF_LONG_{i}": f"{i}" * 100_000 for i in range(3)}
    for name, value in long.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "eth0")  # the user's word for Open MPI: we have none
    show = "import json; print(json.dumps([sys.argv[1:], dict(os.environ), len(os.sched_getaffinity(0))]))"
    code, out, err = over(show, *HOSTILE, "x" * 100_000).wait()
    assert code == 0, err
    for rank, local_rank in enumerate(("0", "1", "0")):
        argv, env, cores = json.loads(Path(f"run/logs/rank-{rank}.log").read_text())
        assert argv == [*HOSTILE, "x" * 100_000]
        wanted = {"RANK": str(rank), "LOCAL_RANK": local_rank, "WORLD_SIZE": "3", "MY_TOKEN": "s3cret",
                  "MASTER_ADDR": bed.address("node1"), **long}  # fmt: skip
        assert {name: env[name] for name in wanted} == wanted
        assert not [n for n in env if n.startswith(("OMPI_COMM_", "PMIX_RANK", "PMI_", "MPI_LOCAL"))]
        assert env.get("OMPI_MCA_btl_tcp_if_include") == ("eth0" if "by openmpi" in err else None)
        assert cores == len(os.sched_getaffinity(0))  # no rank is pinned
    assert json.loads(out)[0] == [*HOSTILE, "x" * 100_000]


@real
def test_a_killed_rank_is_named_and_ends_all(bed: Testbed, over: Over) -> None:
    launched = over(WAIT)
    launched.wait_for_files(Path(), *UP)
    os.kill(launched.pid_of(2), signal.SIGKILL)
    code, _, err = launched.wait()
    assert code == 137
    assert "rank 2 on node2 failed first: it was killed by signal 9 (SIGKILL" in err


@real
@pytest.mark.parametrize(("number", "wanted"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_the_launcher_ends_every_host(bed: Testbed, over: Over, number: int, wanted: int) -> None:
    """Ranks are asked to stop, whatever became of mpirun, and have time for it."""
    stop = "def stop(*_): time.sleep(0.5); touch(f'saved-{rank}'); sys.exit(1)\nsignal.signal(15, stop)\n"
    launched = over(stop + WAIT)
    launched.wait_for_files(Path(), *UP)
    launched.process.send_signal(number)
    assert launched.wait_for_end() == wanted
    launched.wait_for_files(Path(), "saved-0", "saved-1", "saved-2")


@real
def test_a_host_that_loses_power(bed: Testbed, over: Over) -> None:
    launched = over(WAIT)
    launched.wait_for_files(Path(), *UP)
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
    assert "ssh: Could not resolve hostname nowhere" in err
    assert "-----" not in err
    assert "--exclude nowhere" in err
    assert not Path("started").exists()


@pytest.mark.needs("mpich")
def test_upstream_mpich_gives_up_where_more_than_a_pipe_of_stdin_waits() -> None:
    """Where this fails the relay need not make room any more."""
    command = ["mpiexec.hydra", "-n", "1", "-hosts", os.uname().nodename, "sh", "-c", "sleep 1; wc -c"]
    said = []
    for _ in range(5):  # it may end before it has read the last words of its proxy
        done = subprocess.run(command, input=b"x" * 200_000, capture_output=True, timeout=30, check=False)
        assert done.returncode != 0
        said.append(done.stderr)
        if b"reading stdin too slowly" in done.stderr:
            break
    assert b"reading stdin too slowly" in said[-1], said


@pytest.mark.needs("mpich")
def test_upstream_mpich_waits_for_ever_for_an_ssh_that_has_failed() -> None:
    """Where this fails `has_given_up` may go."""
    command = [
        "mpiexec.hydra",
        "-launcher",
        "ssh",
        "-launcher-exec",
        "/bin/false",
        "-hosts",
        "n.invalid",
        "true",
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: mpich.has_given_up(process.pid), "its child has ended", 20.0)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.needs("pdsh")
def test_upstream_pdsh_hands_stdin_to_no_host() -> None:
    """Where this fails agent and orders could go over it."""
    command = ["pdsh", "-R", "exec", "-w", "a", "sh", "-c", "timeout 1 cat; echo end"]
    done = subprocess.run(command, input=b"said\n", capture_output=True, timeout=30, check=False)
    assert done.stdout == b"a: end\n"


class _Relay:
    """relay.py with ``data`` on its stdin, sent as it makes room."""

    def __init__(self, data: bytes) -> None:
        argv = [sys.executable, "-I", "-S", str(relay.__file__)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.room, self.most_on_the_way, self.unsent = relay.ROOM, 0, data
        self._send()

    def __enter__(self) -> _Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def answer(self) -> bytes:
        """The first line that is the program's."""
        assert self.process.stdout is not None
        while True:
            line: bytes = self.process.stdout.readline()
            assert line, "no answer"
            if line.startswith(b'{"event": "room"'):
                self.room += json.loads(line)["bytes"]
                self._send()
            elif line.strip():
                return line

    def _send(self) -> None:
        assert self.process.stdin is not None
        some, self.unsent = self.unsent[: self.room], self.unsent[self.room :]
        self.most_on_the_way = max(self.most_on_the_way, len(some))
        self.room -= len(some)
        self.process.stdin.write(some)


@real
@pytest.mark.parametrize("way", WAYS)
def test_doctor_asks_hosts_that_way(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LONG", "x" * 100_000)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    put_in_path(way, tmp_path, monkeypatch)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\nnowhere slots=1\n")
    argv = ["-m", "dslaunch", "doctor", "--hostfile", "hosts", "--gpu", "cpu", "--via", way, "--json"]
    command = [*bed.hub(), sys.executable, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["master"]["addr"] == bed.address("node1")
    wrong = {f["host"]: f["message"] for f in report["findings"] if f["severity"] == "error"}
    assert list(wrong) == ["nowhere"]
    assert "nowhere" in wrong["nowhere"]
    assert "no answer within" not in wrong["nowhere"]
    assert report["exclude"] == "nowhere"


def test_a_program_is_run_by_the_relay_as_room_is_made() -> None:
    """It keeps to what a pipe holds, passes a signal on, and ends as the program does."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "print(len(sys.stdin.readline()), flush=True)\n"
        "time.sleep(60)\n"
    )
    packed = mpich.packed(program.encode())
    with _Relay(packed + b"y" * 200_000 + b"\n") as running:
        assert running.answer() == b"200001\n"
        running.process.send_signal(signal.SIGUSR1)
        assert running.process.wait(20) == 7
    assert running.most_on_the_way <= relay.ROOM


def test_a_program_sees_the_end_when_its_relay_is_killed(tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = (
        "import sys\n"
        "sys.stdin.readline(); print('up', flush=True)\n"
        f"sys.stdin.read(); open({str(done)!r}, 'w').close()\n"
    )
    with _Relay(mpich.packed(program.encode()) + b"\n") as running:
        assert running.answer() == b"up\n"
        running.process.kill()
    wait_until(done.exists, "the program saw the end of its stdin", 10.0)
