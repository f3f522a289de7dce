"""Ranks in containers. The runtime is a small program that makes new namespaces and runs the rest there."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import ContainerPlan, LaunchPlan
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import local, slurm, ssh
from dslaunch.launch.carried import loader_argv
from dslaunch.launch.container import check_container, enter_words
from tests.cli.launching import dslaunch, error_of
from tests.launch.launching import Launched, python, wait_until
from tests.testbed.hosts import Testbed

HOST = Host(name="n1", slots=("0",))
# What docker does as far as we can see: own process ids and environment; the client's death ends nothing.
RUNTIME = """\
#!/bin/sh
for word; do printf '%s\\n' "$word"; done > "{folder}/argv-$(uname -n)"
while [ "$1" != box ]; do shift; done
shift
exec unshare --pid --mount --fork --mount-proc sh -c '{setup}
exec env -i PATH=/usr/bin:/bin IN=box "$@"' sh "$@"
"""
# srun with pyxis: its own words end where the program begins.
SRUN = """\
#!/bin/sh
for word; do printf '%s\\n' "$word"; done > "{folder}/argv-srun"
while [ "${{1#--}}" != "$1" ]; do shift; done
exec unshare --pid --mount --fork --mount-proc sh -c 'exec env -i PATH=/usr/bin:/bin IN=box "$@"' sh "$@"
"""
SHOW = """\
import json
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "pid": os.getpid()}
open(f"told-{rank}", "w").write(json.dumps(told))
print("said", rank)
"""
HOSTILE = ["a b", "", "$HOME", "it's", "100%n", "two\nlines", "-x", '{"k": "v"}']


def plan(container: ContainerPlan, device_type: str = "cpu") -> LaunchPlan:
    return LaunchPlan(
        argv=("p",), topology=Topology(hosts=(HOST,)), run_dir="/r", cwd="/w", container=container,
        device_type=device_type,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("container", "device_type", "words"),
    [
        (
            ContainerPlan(runtime="apptainer", image="/i m.sif", args=("--bind", "/data")), "cuda",
            ["apptainer", "exec", "--nv", "--bind", "/r", "--bind", "/w", "--bind", "/data", "/i m.sif"],
        ),
        (
            ContainerPlan(runtime="apptainer", image="docker://x"), "cpu",
            ["apptainer", "exec", "--bind", "/r", "--bind", "/w", "docker://x"],
        ),
        (ContainerPlan(runtime="docker", name="box"), "cuda", ["docker", "exec", "-i", "box"]),
        (
            ContainerPlan(runtime="podman", name="b", args=("-u", "1")), "cpu",
            ["podman", "exec", "-i", "-u", "1", "b"],
        ),
        (
            ContainerPlan(runtime="pyxis", image="nvcr.io#a/b:1", args=("--container-writable",)), "cuda",
            ["--container-image=nvcr.io#a/b:1", "--container-mounts=/r:/r,/w:/w", "--container-writable"],
        ),
    ],
)  # fmt: skip
def test_the_whole_command_on_every_way(container: ContainerPlan, device_type: str, words: list[str]) -> None:
    assert list(enter_words(plan(container, device_type))) == words
    orders = {"visible_devices": None}
    assert list(local.build_agent_command(HOST, orders, {}, words).argv) == [*words, *loader_argv()]
    srun = slurm.build_agent_command(HOST, orders, {}, words).argv
    assert list(srun[-len(words) - 5 : -5]) == words
    remote = ssh.build_agent_command(HOST, orders, {}, words).argv[-1]
    quoted = " ".join(f"'{word}'" for word in words)
    assert remote.startswith(f"exec {quoted} '/bin/sh' '-c' ")


def test_the_root_of_the_file_system_is_not_bound() -> None:
    apptainer = ContainerPlan(runtime="apptainer", image="/i.sif")
    words = enter_words(dataclasses.replace(plan(apptainer), cwd="/"))
    assert words == ("apptainer", "exec", "--bind", "/r", "/i.sif")
    pyxis = dataclasses.replace(plan(ContainerPlan(runtime="pyxis", image="i")), cwd="/", run_dir="/")
    assert enter_words(pyxis) == ("--container-image=i",)


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
@pytest.mark.parametrize("path", ["/a:b", "/a,b"])
def test_a_directory_that_cannot_be_bound(runtime: Any, path: str) -> None:
    made = plan(ContainerPlan(runtime=runtime, image="/i"))
    with pytest.raises(ConfigError, match=f"{path} cannot be bound into a container: {runtime} takes"):
        check_container(dataclasses.replace(made, run_dir=path, via="slurm"), {}, here=False)


def test_pyxis_is_a_part_of_srun(tmp_path: Path) -> None:
    pyxis = plan(ContainerPlan(runtime="pyxis", image="i"))
    check_container(dataclasses.replace(pyxis, via="slurm"), {"PATH": ""}, here=True)
    with pytest.raises(ConfigError, match="pyxis is a part of srun, and hosts are reached by ssh"):
        check_container(dataclasses.replace(pyxis, via="ssh"), {}, here=False)
    options = ("--num-gpus-per-node", "1", "--container", "pyxis:i.sqsh")
    done = dslaunch(*options, command=("--", "true"), cwd=tmp_path)
    assert "pyxis is a part of srun" in error_of(done)
    assert "start it in a Slurm job" in done.stderr


def test_without_a_container_nothing_stands_in_front() -> None:
    assert enter_words(LaunchPlan(argv=("p",), topology=Topology(hosts=(HOST,)), run_dir="/", cwd="/")) == ()


def write_runtime(folder: Path, setup: str = "") -> Path:
    """A folder for PATH with docker and apptainer in it; what they were told is written to ``folder``."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("docker", "apptainer"):
        (programs / name).write_text(RUNTIME.format(folder=folder, setup=setup))
        (programs / name).chmod(0o755)
    return programs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{write_runtime(tmp_path)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    monkeypatch.setenv("WANDB_PROJECT", "p q")
    return tmp_path


def told(rank: int) -> dict[str, object]:
    value: dict[str, object] = json.loads(Path(f"told-{rank}").read_text())
    return value


def check_told(rank: int, world_size: int, here: Path) -> None:
    value = told(rank)
    env = value["env"]
    assert isinstance(env, dict)
    assert (value["argv"], value["cwd"]) == (HOSTILE, str(here))
    assert isinstance(value["pid"], int)
    assert value["pid"] < 100  # of a namespace of its own
    wanted = {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "IN": "box", "PATH": "/usr/bin:/bin", "A": "b $c",
        "MY_TOKEN": "s3cret", "WANDB_PROJECT": "p q", "DSLAUNCH_RUN_DIR": str(here / "run"),
    }  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted
    assert not {"PYTHONPATH", "TORCH_EXTENSIONS_DIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME"} & set(env)


OPTIONS = ["--env", "A=b $c", "--env", "MY_TOKEN"]


@pytest.mark.needs("root", "namespaces")
class TestHere:
    """A container on this machine."""

    def start(self, here: Path, code: str, *words: str, container: str = "docker:box") -> Launched:
        options = ["--num-gpus-per-node", "2", "--container", container, *OPTIONS]
        return Launched(options, python(code, *words), run_dir=here / "run")

    def test_argv_environment_and_stdin_arrive(self, here: Path) -> None:
        with self.start(here, SHOW, *HOSTILE) as launched:
            code, out, err = launched.wait()
        assert (code, out) == (0, "said 0\n"), err
        for rank in range(2):
            check_told(rank, 2, here)
            assert (here / f"run/logs/rank-{rank}.log").read_text() == f"said {rank}\n"
        said = (here / f"argv-{os.uname().nodename}").read_text()
        assert said.startswith("exec\n-i\nbox\n/bin/sh\n-c\n")
        assert "s3cret" not in said

    def test_a_rank_that_fails_ends_the_others(self, here: Path) -> None:
        with self.start(here, "if rank: sys.exit(9)\ntime.sleep(300)") as launched:
            code, _, err = launched.wait()
            launched.nothing_left()
        assert code == 9
        assert "rank 1 on localhost failed first: it exited with code 9" in err

    def test_nothing_is_left_where_the_launcher_was_killed(self, here: Path) -> None:
        """Process ids in there are not those out here: nothing may be killed by them."""
        with self.start(here, "touch(f'up-{rank}'); time.sleep(300)", *HOSTILE) as launched:
            launched.wait_for_files(here, "up-0", "up-1")
            launched.process.send_signal(signal.SIGKILL)
            launched.process.wait()
            wait_until(lambda: not ranks_of(here / "run"), "the ranks end", 20.0)

    def test_a_container_that_does_not_see_the_run_directory(self, here: Path) -> None:
        write_runtime(here, setup=f"mount -t tmpfs hidden {here}/run")
        with self.start(here, "touch('up')") as launched:
            code, _, err = launched.wait()
        assert code == 3
        assert "is not seen there (No such file or directory)" in err
        assert "--run-dir on a file system that all hosts share, and their containers" in err
        assert not Path("up").exists()

    def test_apptainer_binds_what_is_needed(self, here: Path) -> None:
        with self.start(here, "pass", container="apptainer:box") as launched:
            code, _, err = launched.wait()
        # The made-up runtime stops at the word box; the image is an absolute path.
        assert code == 3, err
        words = (here / f"argv-{os.uname().nodename}").read_text().splitlines()
        assert words[:7] == ["exec", "--bind", f"{here}/run", "--bind", str(here), f"{here}/box", "/bin/sh"]

    def test_pyxis(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not pyxis itself, which takes a cluster: a made-up srun that does as it does."""
        (here / "bin/srun").write_text(SRUN.format(folder=here))
        (here / "bin/srun").chmod(0o755)
        for name, value in {"ID": "7", "NODELIST": os.uname().nodename, "NUM_NODES": "1"}.items():
            monkeypatch.setenv(f"SLURM_JOB_{name}", value)
        (here / "hosts").write_text(f"{os.uname().nodename} slots=2\n")
        options = ["--hostfile", "hosts", "--gpu", "cpu", "--via", "slurm", "--container", "pyxis:i.sqsh"]
        with Launched([*options, *OPTIONS], python(SHOW, *HOSTILE), run_dir=here / "run") as launched:
            code, out, err = launched.wait()
        assert (code, out) == (0, "said 0\n"), err
        for rank in range(2):
            check_told(rank, 2, here)
        words = (here / "argv-srun").read_text().splitlines()
        at = words.index("/bin/sh")
        mounts = f"--container-mounts={here}/run:{here}/run,{here}:{here}"
        assert words[at - 2 : at] == [f"--container-image={here}/i.sqsh", mounts]


def ranks_of(run_dir: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"DSLAUNCH_RUN_DIR={run_dir}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            pass
    return found


@pytest.fixture
def bed(tmp_path_factory: pytest.TempPathFactory, here: Path) -> Iterator[Testbed]:
    with Testbed(2, tmp_path_factory.mktemp("testbed")) as hosts:
        for name in hosts.names:
            hosts.bashrc(name, f"PATH={here}/bin:$PATH")
        yield hosts


@pytest.mark.needs("root", "sshd", "namespaces")
def test_containers_on_hosts_reached_by_ssh(bed: Testbed, here: Path) -> None:
    Path("hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    options = ["--hostfile", "hosts", "--gpu", "cpu", "--container", "docker:box", *OPTIONS]
    launched = Launched(options, python(SHOW, *HOSTILE), run_dir=here / "run", prefix=bed.hub())
    with launched:
        code, out, err = launched.wait()
    assert (code, out) == (0, "said 0\n"), err
    for rank, name in enumerate(bed.names):
        check_told(rank, 2, here)
        assert Path(f"argv-{name}").read_text().startswith("exec\n-i\nbox\n/bin/sh\n-c\n")
    assert [bed.programs(name) for name in bed.names] == [[], []]


def test_a_runtime_that_is_not_there(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--container", "podman:box")
    done = dslaunch(*options, command=("--", "true"), cwd=tmp_path, PATH=str(Path(sys.executable).parent))
    assert "no podman in PATH; nothing was started" in error_of(done, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["docker", "docker:", "lxc:box", ""])
def test_what_is_no_container(tmp_path: Path, text: str) -> None:
    done = dslaunch("--num-gpus-per-node", "1", "--container", text, command=("--", "true"), cwd=tmp_path)
    assert "is not RUNTIME:WHAT" in error_of(done)


def test_other_launchers_know_nothing_of_it(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--container", "docker:box", "--print-as", "torchrun")
    done = dslaunch(*options, command=("--", "true"), cwd=tmp_path)
    assert "torchrun knows nothing of containers; nothing was written" in error_of(done)
