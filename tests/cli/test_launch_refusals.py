"""What `dslaunch launch` does not start, in one sentence each, and a dry run the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launch.record import hold_run_dir
from tests.cli.launching import HELLO, dslaunch, error_of, record


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "give one of: a run file"),
        (("run.yaml", "--", "true"), "both a run file (run.yaml) and a command after -- were given"),
        (("--num-gpus-per-node", "2", "bash", "foo.sh"), "launch ... -- bash foo.sh"),
        (("--num-gpus-per-node", "2", "foo.py", "--lr", "3"), "launch ... -- python foo.py --lr 3"),
        (("bash",), "put -- before the command"),
        (("--run-dir", "bash", "run.yaml", "--bogus"), "No such option"),
        (("--dry-run", "bash", "-c", "true"), "put -- before the command"),
        (("--plan", "full.yaml"), "this is a run file, not a recorded plan"),
        (("--plan", "."), "there is no plan.json in it"),
        (("--run-dir", "r", "--resume"), "no plan at"),
        (("--",), "there is no command to run"),
        (("--", ""), "there is no command to run"),
        (
            ("--num-gpus-per-node", "1", "--set", "seed=1", "--", "true"),
            "without a run file only",
        ),
        (
            ("--num-gpus-per-node", "1", "--set", "launch.failure_grace=1", "--", "true"),
            "did you mean launch.failure_grace_s?",
        ),
        (("--num-gpus-per-node", "1", "--set", "launch.host_timeout_s=0", "--", "true"), "0 is not > 0"),
        (("--hostfile", "h", "--", "true"), "hostfile not found"),
        (("--via", "pigeon", "--", "true"), "is not one of auto, local, ssh"),
        (("--num-gpus-per-node", "0", "--", "true"), "at least 1"),
        (("--master-port", "70000", "--", "true"), "a port is 1 to 65535"),
        (
            ("--num-gpus-per-node", "1", "--master-addr", "a b", "--", "true"),
            "'a b' is no host name",
        ),
        (("--", "true"), "say it: --num-gpus-per-node 2"),
        (("--num-gpus-per-node", "1", "--env", "=x", "--", "true"), "write NAME=VALUE"),
        (("--num-gpus-per-node", "1", "--env", "RANK=3", "--", "true"), "RANK is set by dslaunch"),
        (("--num-gpus-per-node", "1", "--resume", "--", "true"), "--resume needs the run directory"),
        (("--plan", "no/plan.json"), "no plan at"),
        (("no-such-run.yaml",), "no-such-run.yaml"),
    ],
)
def test_what_makes_no_sense_starts_and_writes_nothing(
    tmp_path: Path, argv: tuple[str, ...], words: str
) -> None:
    assert words in error_of(dslaunch(*argv, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_is_not_set(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--env", "NOT_SET_HERE")
    text = error_of(dslaunch(*options, command=HELLO, cwd=tmp_path), 3)
    assert "NOT_SET_HERE is to be passed to the ranks but is not set here" in text
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_gpus_does_not_start_without_them(tmp_path: Path, run_file: Path) -> None:
    options = ("--gpu", "a100", "--set", "precision=bf16", "--run-dir", "r")
    done = dslaunch("mine.yaml", *options, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    text = error_of(done, 3)
    assert "nothing was started" in text
    assert "leave --gpu out" in text
    assert not (tmp_path / "r").exists()
    written = ("--set", "cluster.gpu=a100", *options[2:])
    text_of_set = error_of(dslaunch("mine.yaml", *written, cwd=tmp_path, CUDA_VISIBLE_DEVICES=""), 3)
    assert "leave cluster.gpu (--set) out" in text_of_set
    dry = dslaunch("mine.yaml", *options, "--dry-run", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert error_of(dry, 3) == text


def test_a_port_that_is_taken_is_found_before_anything_is_made(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        options = ("--num-gpus-per-node", "1", "--run-dir", "r", "--master-port", str(port))
        for more in ((), ("--dry-run",)):
            done = dslaunch(*options, *more, command=HELLO, cwd=tmp_path)
            assert f"master_port {port} is taken" in error_of(done, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "code"), [("launch.python=./none", 2), ("launch.cwd=./none", 3)])
def test_a_dry_run_refuses_what_the_launch_does(tmp_path: Path, run_file: Path, key: str, code: int) -> None:
    options = ("mine.yaml", "--run-dir", "r", "--set", key)
    real, dry = dslaunch(*options, cwd=tmp_path), dslaunch(*options, "--dry-run", cwd=tmp_path)
    assert error_of(dry, code) == error_of(real, code)
    assert not (tmp_path / "r").exists()


def test_a_dry_run_sees_a_run_that_is_going_on(tmp_path: Path) -> None:
    record(tmp_path / "r", "true")
    with hold_run_dir(tmp_path / "r"):
        for more in (("--resume",), ("--num-gpus-per-node", "1", "--gpu", "cpu", "--", "true")):
            done = dslaunch("--run-dir", "r", "--dry-run", *more, cwd=tmp_path)
            assert f"is still going on (process {os.getpid()} on " in error_of(done)
    assert dslaunch("--run-dir", "r", "--resume", "--dry-run", cwd=tmp_path).returncode == 0


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    argv = [sys.executable, "-m", "dslaunch", "launch", "--num-gpus-per-node", "1", *HELLO]
    done = subprocess.run(["bash", "-c", script, "bash", *argv], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": os.getcwd()},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "the current directory is gone" in error_of(done, 3)


@pytest.mark.parametrize(
    "argv", [("--version",), ("launch", "--num-gpus-per-node", "1", "--dry-run", "--", "true")]
)
def test_a_full_disk_under_stdout_is_no_bug_of_ours(tmp_path: Path, argv: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dslaunch", *argv],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "Error: cannot write the output: No space left on device\n")


def test_our_trainer_is_for_nvidia_amd_and_the_cpu(tmp_path: Path) -> None:
    plan = record(tmp_path / "run", "true")
    value = json.loads(plan.read_text())
    value["launch"] |= {"device_type": "cuda", "devices": ["gaudi2"]}
    plan.write_text(json.dumps(value))
    said = error_of(dslaunch("--plan", str(plan), "--dry-run", cwd=tmp_path))
    assert (
        "runs on NVIDIA's and AMD's GPUs and on CPUs, and the plan is for gaudi2; nothing was started" in said
    )
