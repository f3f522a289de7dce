"""Ranks in containers of the real podman and docker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.core.packages import COMPARED
from tests.launch.launching import Launched, python, wait_until
from tests.testbed.containers import Container

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip

HOSTILE = ["a b", "", "$HOME", "it's", "100%n", "two\nlines", "-x", '{"k": "v"}']
SHOW = "import json; print(json.dumps([sys.argv[1:], dict(os.environ), sys.executable, os.getcwd()]))"
WAIT = "touch(f'up-{rank}'); time.sleep(300)"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("podman", marks=pytest.mark.needs("root", "podman")),
        pytest.param("docker", marks=pytest.mark.needs("root", "docker")),
    ],
)
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder, shared = tmp_path_factory.mktemp("box"), tmp_path_factory.mktemp("shared")
    with Container(request.param, folder, shared) as container:
        yield container


@pytest.fixture
def folder(box: Container, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks and tests both are."""
    path = box.shared / request.node.name.replace("[", "-").strip("]")
    path.mkdir()
    monkeypatch.chdir(path)
    for name, value in {**box.env, "MY_TOKEN": "s3cret"}.items():
        monkeypatch.setenv(name, value)
    return path


def start(box: Container, folder: Path, code: str, *words: str) -> Launched:
    options = ["--num-gpus-per-node", "2", "--container", f"{box.runtime}:box", "--env", "MY_TOKEN"]
    return Launched(options, ["python3", *python(code, *words)[1:]], run_dir=folder / "run")


def programs_in(box: Container) -> list[str]:
    """What runs in the container besides what keeps it."""
    listed = box.do("exec", "box", "sh", "-c", "cat /proc/[0-9]*/comm").split()
    return [name for name in listed if name not in ("sleep", "sh", "cat")]


def test_argv_environment_and_output(box: Container, folder: Path) -> None:
    with start(box, folder, SHOW, *HOSTILE) as launched:
        code, out, err = launched.wait()
    assert code == 0, err
    for rank in range(2):
        argv, env, program, cwd = json.loads((folder / f"run/logs/rank-{rank}.log").read_text())
        assert (argv, cwd) == (HOSTILE, str(folder))
        assert program == "/usr/bin/python3" != sys.executable  # the container's own
        wanted = {"RANK": str(rank), "WORLD_SIZE": "2", "MY_TOKEN": "s3cret"}
        assert {name: env[name] for name in wanted} == wanted
        assert "PYTHONPATH" not in env
    assert json.loads(out)[0] == HOSTILE
    assert programs_in(box) == []


def test_a_killed_rank_is_named(box: Container, folder: Path) -> None:
    with start(box, folder, "if rank: os.kill(os.getpid(), 9)\ntime.sleep(300)") as launched:
        code, _, err = launched.wait()
    assert code == 137
    assert "rank 1 on localhost failed first: it was killed by signal 9 (SIGKILL" in err
    assert programs_in(box) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_what_it_started(box: Container, folder: Path, number: int) -> None:
    with start(box, folder, WAIT) as launched:
        launched.wait_for_files(folder, "up-0", "up-1")
        os.kill(launched.process.pid, number)
        launched.process.wait(30)
        wait_until(lambda: programs_in(box) == [], "nothing is left in the container", 20.0)


def test_doctor_looks_inside(box: Container, folder: Path) -> None:
    """At the container's Python, which has no torch, and not at ours."""
    argv = ["-m", "dslaunch", "doctor", "--gpu", "cpu", "--container", f"{box.runtime}:box", "--json"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (host,) = report["hosts"]
    python = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True, check=True)
    assert f"Python {host['python']}" == python.stdout.strip()
    found = {f["code"]: f["message"] for f in report["findings"] if f["severity"] == "error"}
    assert found["packages"] == "torch, deepspeed are not installed"
    assert "run-dir" not in found
    assert programs_in(box) == []


def test_ops_are_built_inside(box: Container, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Python that the run file names, where it says, with logs that can be read here.

    That Python has what doctor asks for, and writes what it is given: a real build takes minutes.
    """
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    has = {
        "version": "3.11.2",
        "packages": dict.fromkeys(COMPARED, "1"),
        "torch_cuda": None,
        "has_headers": True,
    }
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\n[ $1 = -c ] && echo '{json.dumps(has)}' || echo $* in $TORCH_EXTENSIONS_DIR\n"
    )
    python.chmod(0o755)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    (folder / "train.jsonl").write_text('{"text": "x"}\n')
    run = {
        "model": "model", "data": {"train": "train.jsonl"}, "train_batch_size": 1, "cluster": {"gpu": "cpu"},
        "launch": {"python": str(python), "env": {"TORCH_EXTENSIONS_DIR": "/ops"}},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run))
    argv = ["doctor", "run.yaml", "--container", f"{box.runtime}:box", "--build-ops"]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ops        /ops\n" in done.stdout
    logs = Path(done.stderr.rpartition("logs in ")[2].strip())
    assert logs.parents[1] == folder / "runs"  # the container sees it; our cache it does not
    said = "-m dslaunch.train.build_ops in /ops\n"
    assert (logs / "logs/rank-0.log").read_text() == said
    assert programs_in(box) == []
