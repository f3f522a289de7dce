"""What `launch --print-as` prints, typed as it is: the real `deepspeed` over real ssh, and real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.observe.run_status import load_status
from tests.launch.training import losses, make_run
from tests.testbed.hosts import Testbed

pytestmark = pytest.mark.needs("root", "sshd", "namespaces", "pdsh")

TIMEOUT_S = 240.0
HOSTILE = [
    "a b", '{"k": "v w"}', "it's", '72" tall', "--p=x y", "", "two\nlines", "two\nlines more", "$HOME",
    "$HOME `id`", "*", "100%n", "100% %h", "-x", "a\\", "a \\b\\", ";", "tab\there", "ünïcode", "#",
    "~", "!x", "&& id", "--", "-", "--local_rank=7", "\udcff\udcfe",
]  # fmt: skip
SHOW = """\
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR", "DSLAUNCH_RUN_DIR", "A", "B", "C"]
told = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
open(f"told-{os.environ['RANK']}", "w").write(json.dumps(told))
"""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(2, tmp_path_factory.mktemp("testbed")) as hosts:
        yield hosts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return tmp_path


def on_hub(bed: Testbed, *words: str) -> str:
    done = subprocess.run(
        [*bed.hub(), *words],
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        env=os.environ,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def printed(bed: Testbed, *words: str) -> str:
    return on_hub(bed, sys.executable, "-m", "dslaunch", "launch", "--hostfile", "hosts", *words)


def test_argv_and_environment_arrive_byte_for_byte_under_deepspeed(bed: Testbed, here: Path) -> None:
    Path("show.py").write_text(SHOW)
    env = ["--env", 'A=it\'s "so" $HOME %n `id` \\', "--env", "B=", "--env", "C=50%",
           "--local-rank-arg", "--local-rank"]  # fmt: skip
    line = printed(bed, "--gpu", "cpu", "--print-as", "deepspeed", "--run-dir", "r", *env, "--",
                   sys.executable, "show.py", *HOSTILE)  # fmt: skip
    on_hub(bed, "bash", "-c", line)
    for rank in range(2):
        told = json.loads(Path(f"told-{rank}").read_text())
        assert told == {
            "argv": [*HOSTILE, "--local-rank=0"], "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
            "DS_ACCELERATOR": "cpu", "DSLAUNCH_RUN_DIR": str(here / "r"),
            "A": 'it\'s "so" $HOME %n `id` \\', "B": "", "C": "50%",
        }  # fmt: skip


def test_they_arrive_under_torchrun_on_unequal_hosts(bed: Testbed, here: Path) -> None:
    Path("show.py").write_text(SHOW)
    Path("hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    lines = printed(bed, "--gpu", "cpu", "--print-as", "torchrun", "--run-dir", "r", "--env", "A=$HOME %n",
                    "--local-rank-arg", "--local_rank",
                    "--", sys.executable, "show.py", *HOSTILE).splitlines()  # fmt: skip
    type_on_each(bed, lines)
    told = [json.loads(Path(f"told-{rank}").read_text()) for rank in range(3)]
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"], one["A"]) for one in told] == [
        (rank, "3", local_rank, "$HOME %n") for rank, local_rank in (("0", "0"), ("1", "1"), ("2", "0"))
    ]
    assert all(one["argv"] == [*HOSTILE, f"--local_rank={one['LOCAL_RANK']}"] for one in told)


def test_our_worker_trains_the_same_under_all_three(bed: Testbed, here: Path, ops_dir: Path) -> None:
    make_run(here)
    printed(bed, "run.yaml", "--run-dir", "ours")
    line = printed(bed, "run.yaml", "--run-dir", "deepspeed", "--print-as", "deepspeed")
    assert " --module dslaunch.train.worker --plan " in line
    on_hub(bed, "bash", "-c", line)
    lines = printed(bed, "run.yaml", "--run-dir", "torchrun", "--print-as", "torchrun").splitlines()
    type_on_each(bed, lines)
    assert len(losses("ours")) == 3
    assert losses("ours") == losses("deepspeed") == losses("torchrun")
    assert [load_status(Path(name)).state for name in ("ours", "deepspeed", "torchrun")] == ["done"] * 3
    assert [bed.programs(name) for name in bed.names] == [[], []]


def type_on_each(bed: Testbed, lines: list[str]) -> None:
    running = [
        subprocess.Popen([*bed.hub(), "ssh", name, f"{exported()} {line}"], stderr=subprocess.PIPE, text=True)
        for name, line in zip(bed.names, lines, strict=True)
    ]
    for process in running:
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, err[-3000:]


def exported() -> str:
    """The environment of the tests, for a shell that another host opens."""
    names = ("PATH", "PYTHONPATH", "TORCH_EXTENSIONS_DIR", "HF_HOME", "OMP_NUM_THREADS", "HOME")
    return " ".join(f"export {name}='{os.environ[name]}';" for name in names if name in os.environ)
