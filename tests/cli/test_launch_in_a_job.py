"""dslaunch launch -- COMMAND inside of a batch job: its hosts, or this machine where that is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "2")


def plan_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["launch", "--dry-run", "--json", *flags, "--", "true"]) == 0
    captured = capsys.readouterr()
    launch: dict[str, Any] = json.loads(captured.out)["plan"]["launch"]
    told = "note: hosts: SLURM_JOB_NODELIST: " in captured.err
    assert told == ("--hostfile" not in flags and "local" not in flags)
    return launch


def hosts(launch: dict[str, Any]) -> dict[str, list[str]]:
    return {host["name"]: host["slots"] for host in launch["topology"]["hosts"]}


def test_the_hosts_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    launch = plan_of(capsys)
    assert hosts(launch) == {"gpu07": ["0", "1"], "gpu08": ["0", "1"]}
    assert (launch["via"], launch["device_type"]) == ("slurm", "cuda")
    assert hosts(plan_of(capsys, "--num-gpus-per-node", "1")) == {"gpu07": ["0"], "gpu08": ["0"]}
    assert hosts(plan_of(capsys, "--exclude", "gpu07")) == {"gpu08": ["0", "1"]}


def test_the_way_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_of(capsys, "--via", "ssh")["via"] == "ssh"
    assert main(["launch", "--dry-run", "--via", "rsh", "--", "true"]) == 2
    assert "--via 'rsh' is not one of auto, local, ssh, slurm" in capsys.readouterr().err


def test_this_machine_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert hosts(plan_of(capsys, "--via", "local", "--num-gpus-per-node", "2")) == {"localhost": ["0", "1"]}


def test_a_hostfile_beats_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    assert hosts(plan_of(capsys, "--hostfile", "hosts")) == {"a": ["0"], "b": ["0"]}


def test_a_job_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-")
    assert main(["launch", "--dry-run", "--", "true"]) == 2
    assert "SLURM_JOB_NODELIST:4: '[' is not closed" in capsys.readouterr().err


def test_gen_config_says_for_which_hosts_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--zero-stage", "1", "--precision", "bf16", "--train-batch-size", "32", "--lr", "1e-4"]
    assert main(["gen-config", *flags]) == 0
    captured = capsys.readouterr()
    assert "note: hosts: SLURM_JOB_NODELIST: 2 nodes x 2 GPUs (SLURM_GPUS_PER_NODE)\n" in captured.err
    assert json.loads(captured.out)["train_batch_size"] == 32
