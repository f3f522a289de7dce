"""Launches inside of a real Slurm job: what ranks are given, what happens when something dies."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import (
    WAIT,
    Launched,
    check_signals_of_the_launcher,
    check_two_jobs_side_by_side,
    clear,
    python,
    up,
)
from tests.testbed.slurm import SlurmBed

REPO_ROOT = Path(__file__).resolve().parents[2]
PAGE = REPO_ROOT / "docs/launching.md"
pytestmark = pytest.mark.needs("root", "slurm", "namespaces")

# Each rank prints its arguments and the environment that it was given.
SHOW = "print([sys.argv[1:], dict(os.environ)], flush=True)"
# Stops at a checkpoint, which takes a moment, when asked to by the signal given as a word.
CHECKPOINT = """
def stop(*_):
    touch(f'asked-{rank}')
    time.sleep(1)
    touch(f'saved-{rank}')
    os._exit(75)
signal.signal(getattr(signal, sys.argv[1]), stop)
touch(f'up-{rank}')
while True:
    time.sleep(300)
"""
Over = Callable[..., Launched]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBed]:
    with SlurmBed([2, 1, 1], tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def jobs(bed: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBed]:
    """Where batch jobs are submitted; in the end nothing of them may be left on any node."""
    monkeypatch.chdir(tmp_path)
    yield bed
    bed.cancel_all()
    left = {name: bed.programs(name) for name in bed.names}
    assert not any(left.values()), left


@pytest.fixture
def over(jobs: SlurmBed, tmp_path: Path) -> Iterator[Over]:
    """``over(code, *options)`` runs Python code on each node of an allocation, started on the hub."""
    with ExitStack() as stack:

        def start(code: str, *options: str, run_dir: str = "run", under: Sequence[str] = ()) -> Launched:
            allocation = jobs.allocate(3, "--no-kill", "--mem=500")
            launched = Launched(
                ["--gpu", "cpu", *options], python(code), run_dir=tmp_path / run_dir, env=allocation,
                prefix=[*jobs.hub(), *under],
            )  # fmt: skip
            return stack.enter_context(launched)

        yield start
    for name in jobs.names:
        assert jobs.programs(name) == [], f"left behind on {name}"


def dslaunch(*words: str) -> str:
    return shlex.join([sys.executable, "-m", "dslaunch", *words])


def shown(num_ranks: int, run_dir: str = "run") -> list[tuple[list[str], dict[str, str]]]:
    """What each rank was given."""
    return [ast.literal_eval(Path(run_dir, f"logs/rank-{r}.log").read_text()) for r in range(num_ranks)]


def test_unequal_gpus_and_words_of_every_kind(jobs: SlurmBed) -> None:
    Path("hosts").write_text("n1 slots=2\nn2 slots=1\n")
    words = ["a b", 'it\'s "so"', "$HOME", "%n", "", "-x", "line\nline", "caf\u00e9", "--"]
    options = ["--hostfile", "hosts", "--via", "slurm", "--gpu", "a100", "--run-dir", "run"]
    launch = dslaunch("launch", *options, "--env", "SAID=a=b, c", "--", *python(SHOW, *words))
    value = 'it\'s "so" $HOME %n,x=y\nline'
    # Of the environment of the sbatch command the job has nothing, of the script's the ranks have all.
    exports = shlex.join(["export", f"PYTHONPATH={REPO_ROOT}", f"EXPORTED={value}"])
    script = f"{exports}\n{launch}"
    job = jobs.submit(script, "--nodelist=n1,n2", "--gpus=3", "--ntasks=3", "--mem=100", "--export=NONE")
    code, _, err = job.wait()
    assert code == 0, err
    places = [("0", "0", "2", "0", "0,1"), ("1", "1", "2", "0", "0,1"), ("2", "0", "1", "1", "0")]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
    for (argv, env), place in zip(shown(3), places, strict=True):
        assert argv == words
        assert tuple(env[name] for name in names) == place
        assert (env["EXPORTED"], env["SAID"], env["SLURM_JOB_ID"]) == (value, "a=b, c", job.id)
        assert (env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("3", jobs.address("n1"))
        # The place of the agent as a task of Slurm's is not that of a rank.
        own_place = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES")
        assert not [name for name in own_place if name in env]


def test_one_srun_starts_the_lines_of_torchrun(jobs: SlurmBed, tmp_path: Path) -> None:
    """As the documentation says of more hosts than an srun for each is good to. This torchrun only writes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    torchrun = tmp_path / "bin/torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > got-$(uname -n)\n")
    torchrun.chmod(0o755)
    found = re.search(r"```bash\n(dslaunch launch run.yaml.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    words = ["train.py", "a b", "$HOME", 'it\'s "so"', "two\nlines"]
    command = shlex.join([str(tmp_path / "bin/python3"), *words])
    lines = found[1].replace("dslaunch launch run.yaml", dslaunch("launch", "--gpu", "cpu"))
    script = lines.replace("--print-as torchrun", f"--print-as torchrun -- {command}")
    Path("hosts").write_text("n3 slots=1\nn2 slots=1\n")
    script = script.replace("--gpu cpu", "--gpu cpu --hostfile hosts --via slurm")
    code, _, err = jobs.submit(script, "--nodelist=n2,n3", "--mem=100").wait()
    assert code == 0, err
    for node_rank, name in enumerate(("n3", "n2")):
        argv = Path(f"got-{name}").read_text().split("\n", 5)
        assert argv[:4] == ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node_rank}",
                            f"--master-addr={jobs.address('n3')}"]  # fmt: skip
        assert argv[5] == "\n".join([*words, ""])


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        (["--gpus-per-task=1", "--ntasks-per-node=1", "--cpus-per-task=3"], "3"),
        (["--gpus=2", "--ntasks-per-node=2", "--mem-per-cpu=50"], "2"),
        (["--gres=gpu:1", "--exclusive", "--hint=nomultithread"], "4"),
    ],
)
def test_every_cpu_and_gpu_of_the_job_is_the_ranks(jobs: SlurmBed, options: list[str], cpus: str) -> None:
    # n1 has two GPUs: one that is asked for in total could come from there.
    launch = dslaunch("launch", "--run-dir", "run", "--", *python(SHOW))
    job = jobs.submit(f"unset DS_ACCELERATOR\n{launch}", "--nodelist=n2,n3", "--nodes=2", *options)
    code, _, err = job.wait()
    assert code == 0, err
    assert "hosts: SLURM_JOB_NODELIST: 2 nodes x 1 GPU" in err
    assert "launch.via slurm: n3 is a node of this Slurm job: srun reaches it" in err
    facts = ("NODE_RANK", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE")
    assert [tuple(env[name] for name in facts) for _, env in shown(2)] == [("0", "0", cpus), ("1", "0", cpus)]


def test_filters_choose_nodes_and_devices(jobs: SlurmBed) -> None:
    launch = dslaunch("launch", "--include", "n1:1@n3", "--gpu", "a100", "--run-dir", "run", "--")
    script = f"{launch} {shlex.join(python(SHOW))}"
    job = jobs.submit(script, "--nodes=3", "--gpus=4", "--ntasks=4", "--mem=100")
    code, _, err = job.wait()
    assert code == 2
    assert "SLURM_GPUS is 4 over 3 nodes, so they differ" in err
    Path("hosts").write_text("n1 slots=2\nn2 slots=1\nn3 slots=1\n")
    script = script.replace("--include", "--via slurm --hostfile hosts --include")
    job = jobs.submit(script, "--nodes=3", "--gpus=4", "--ntasks=4", "--mem=100")
    code, _, err = job.wait()
    assert code == 0, err
    facts = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
    assert [tuple(env[name] for name in facts) for _, env in shown(2)] == [("n1", "1", "2"), ("n3", "0", "2")]


def test_a_killed_rank_is_named_and_ends_all(over: Over) -> None:
    launched = over(WAIT)
    up(0, 1, 2)
    os.kill(launched.pid_of(1), signal.SIGKILL)
    code, _, err = launched.wait()
    assert code == 137
    assert "rank 1 on n2 failed first: it was killed by signal 9 (SIGKILL" in err


def test_a_node_that_loses_power(bed: SlurmBed, over: Over, tmp_path: Path) -> None:
    code, out, err = over(WAIT, "--dry-run", "--json").wait()
    assert code == 0, err
    plan = json.loads(out)["plan"]
    plan["launch"]["host_timeout_s"] = 3.0
    Path("plan.json").write_text(json.dumps(plan))
    allocation = bed.allocate(3, "--no-kill", "--mem=500")
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "env": allocation, "prefix": bed.hub()}
    with Launched(["--plan", "plan.json"], None, **options) as launched:
        up(0, 1, 2)
        bed.power_off("n3")
        try:
            code, _, err = launched.wait()
            assert code == 77, err
            assert launched.events("host_lost")[0]["host"] == "n3"
            assert "dslaunch: host n3 was lost" in err
        finally:
            bed.repair("n3")


def test_a_cancel_ends_every_node(over: Over) -> None:
    launched = over(WAIT)
    up(0, 1, 2)
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait()[0] == 130


def test_signals_of_the_launcher(over: Over) -> None:
    check_signals_of_the_launcher(over)


def test_a_killed_launcher_leaves_nothing(bed: SlurmBed, over: Over) -> None:
    launched = over("signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT)
    up(0, 1, 2)
    assert all(bed.programs(name) for name in bed.names)
    launched.process.kill()
    launched.process.wait()
    clear(bed, 30.0)


def test_two_jobs_side_by_side(over: Over) -> None:
    check_two_jobs_side_by_side(over)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("scancel", "SIGTERM"),
        ("scancel --full", "SIGTERM"),
        ("scancel --signal=USR1", "SIGUSR1"),  # the steps
        ("scancel --signal=USR1 --batch", "SIGUSR1"),  # the script
    ],
)
def test_ranks_reach_a_checkpoint_when_slurm_asks(jobs: SlurmBed, how: str, number: str) -> None:
    launch = dslaunch("launch", "--gpu", "cpu", "--run-dir", "run", "--", *python(CHECKPOINT, number))
    job = jobs.submit(f"exec {launch}", "--nodes=2", "--mem=100")
    up(0, 1)
    jobs.client(*how.split(), job.id)
    code, _, err = job.wait()
    assert Path("saved-0").exists(), err
    assert Path("saved-1").exists(), err
    assert code == 75, err


def test_a_job_that_is_gone(jobs: SlurmBed, tmp_path: Path) -> None:
    allocation = jobs.allocate(2)
    jobs.client("scancel", allocation["SLURM_JOB_ID"])
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "env": allocation, "prefix": jobs.hub()}
    with Launched(["--gpu", "cpu"], python("touch('started')"), **options) as launched:
        code, _, err = launched.wait()
    assert code == 3
    assert "2 of 2 hosts cannot be used; nothing was started:" in err
    assert "srun: error: " in err
    assert not Path("started").exists()


def test_doctor_asks_the_nodes_of_the_job(jobs: SlurmBed, tmp_path: Path) -> None:
    ops = f"export TORCH_EXTENSIONS_DIR={tmp_path}"  # other tests may build in theirs
    doctor = dslaunch("doctor", "--gpu", "cpu", "--json")
    job = jobs.submit(f"{ops}\nexec {doctor}", "--nodes=3", "--mem=100")
    code, out, err = job.wait()
    assert code == 0, out + err
    report = json.loads(out)
    assert list(report["inventory"]) == jobs.names
    assert report["master"]["addr"] == jobs.address("n1")
    assert not [finding for finding in report["findings"] if finding["severity"] != "info"]
