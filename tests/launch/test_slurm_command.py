"""The srun command of a node, and what keeps a launch by srun from starting. Needs no Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main
from dslaunch.core.errors import ConfigError, DslaunchError, EnvironmentNotReady
from dslaunch.core.topology import Host, Topology
from dslaunch.launch.slurm import build_agent_command, check_job, nodes_of_this_job

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
SRUN = [
    "srun", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none",
    "--export=ALL", "--chdir=/",
]  # fmt: skip
N2 = Host(name="n2", slots=("0", "1"))


def argv(environ: dict[str, str], devices: list[str] | None = None, host: Host = N2) -> list[str]:
    """The words up to the program that srun starts."""
    orders: dict[str, Any] = {"visible_devices": devices, "env": {"TOKEN": "s3cret"}, "argv": ["a;b"]}
    command = build_agent_command(host, orders, environ)
    assert not command.env
    assert b'"argv": ["a;b"]' in (command.stdin or b"")
    words = list(command.argv)
    assert words[-4:-2] == ["-c", words[-3]]
    assert words[-2] == sys.executable
    assert "s3cret" not in " ".join(words)
    return words[: words.index("/bin/sh")]


def test_what_is_run() -> None:
    assert argv(JOB) == ["env", *SRUN, "--nodelist=n2"]
    assert argv({**JOB, "SLURM_GPUS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}, ["0", "1"]) == [
        "env", "-u", "SLURM_CPUS_PER_TASK", "-u", "SLURM_GPUS_PER_NODE", *SRUN, "--nodelist=n2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "devices", "gpus"),
    [
        ({"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, ["0", "1"], "--gpus=4"),
        ({"SLURM_GPUS": "5", "SLURM_GPUS_ON_NODE": "3"}, ["0", "1"], "--gpus=2"),  # nodes differ: the slots
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "4,2"}, ["1"], "--gpus=2"),
        ({"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, None, "--gres=none"),
    ],
)
def test_gpus_that_were_not_asked_for_by_node(
    asked: dict[str, str], devices: list[str] | None, gpus: str
) -> None:
    assert argv({**JOB, **asked}, devices)[-len(SRUN) - 2 :] == [*SRUN, gpus, "--nodelist=n2"]


def test_slots_of_nodes_that_differ_are_places_among_their_gpus() -> None:
    job = {**JOB, "SLURM_GPUS": "5", "SLURM_GPUS_ON_NODE": "3"}
    assert argv(job, ["2"], Host(name="n2", slots=("2",)))[-2] == "--gpus=3"
    assert argv(job, ["GPU-1", "GPU-2"], Host(name="n2", slots=("GPU-1", "GPU-2")))[-2] == "--gpus=2"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    return {**JOB, "PATH": str(tmp_path)}


def test_nodes_of_the_job(environ: dict[str, str]) -> None:
    check_job(Topology(hosts=(N2,)), environ)
    check_job(Topology(hosts=(N2, Host(name="n1", slots=("0",)))), environ)


@pytest.mark.parametrize(
    ("host", "changes", "kind", "text"),
    [
        (N2, {"SLURM_JOB_ID": ""}, EnvironmentNotReady, "this is no Slurm job"),
        (N2, {"SLURM_JOB_NODELIST": ""}, EnvironmentNotReady, "this is no Slurm job"),
        (N2, {"PATH": "/nowhere"}, EnvironmentNotReady, "no srun in PATH"),
        (
            Host(name="n3", slots=("0",)), {}, ConfigError,
            r"n3: not among the nodes of this Slurm job \(SLURM_JOB_NODELIST: n\[1-2\]\); nothing was",
        ),
        (Host(name="n2", slots=("0",), user="me"), {}, ConfigError, "has a user or port"),
        (Host(name="n2", slots=("0",), port=2200), {}, ConfigError, "has a user or port"),
    ],
)  # fmt: skip
def test_what_srun_cannot_reach(
    environ: dict[str, str], host: Host, changes: dict[str, str], kind: type[DslaunchError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        check_job(Topology(hosts=(host,)), {**environ, **changes})


def test_a_recorded_plan_runs_on_the_nodes_of_another_job(environ: dict[str, str]) -> None:
    recorded = Topology(hosts=(Host(name="m7", slots=("0", "1")), Host(name="m8", slots=("GPU-1",))))
    hosts = nodes_of_this_job(recorded, environ)
    assert hosts == (Host(name="n1", slots=("0", "1")), Host(name="n2", slots=("0",)))
    check_job(Topology(hosts=hosts), environ)
    more = Topology(hosts=(*recorded.hosts, Host(name="m9", slots=("0",))))
    assert nodes_of_this_job(more, environ) is None  # the job is too small: check_job says it
    assert nodes_of_this_job(Topology(hosts=(N2,)), environ) is None
    assert nodes_of_this_job(recorded, {"PATH": "/"}) is None


def test_launch_sh_goes_on_in_another_job(
    environ: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**environ, "SLURM_GPUS_PER_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    first = ["launch", "--run-dir", "r", "--gpu", "cpu", "--dry-run", "--json", "--", "true"]
    assert main(first) == 0
    Path("plan.json").write_text(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "m[5-7]")
    assert main(["launch", "--plan", "plan.json", "--run-dir", "r2", "--dry-run", "--json"]) == 0
    said = capsys.readouterr()
    assert [host["host"] for host in json.loads(said.out)["hosts"]] == ["m5", "m6"]
    assert "made in another Slurm job; its ranks run on this job's nodes: m5, m6" in said.err
