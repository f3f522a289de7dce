"""dslaunch hosts: what a run would have, as text, as JSON and as a hostfile for deepspeed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main

HOSTS = """worker-0 slots=8\r
alice@worker-1:2222 slots=0,1,4  # two are broken\r
[fe80::1] slots=GPU-8f,MIG-1\r
"""


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_bytes(HOSTS.encode())
    return "hosts"


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(["hosts", *words]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_text(capsys: pytest.CaptureFixture[str], hostfile: str) -> None:
    out, err = run(capsys, hostfile)
    assert out.splitlines() == [
        "ranks  host                 slots",
        "0-7    worker-0             0,1,2,3,4,5,6,7",
        "8-10   alice@worker-1:2222  0,1,4",
        "11-12  [fe80::1]            GPU-8f,MIG-1",
    ]
    assert err == f"3 nodes, world size 13; 3 of 3 hosts of {Path.cwd()}/hosts\n"
    assert run(capsys, "--hostfile", hostfile)[0] == out


def test_json(capsys: pytest.CaptureFixture[str], hostfile: str) -> None:
    out, _ = run(capsys, hostfile, "--json", "--include", "worker-1:0,4@[fe80::1]")
    assert json.loads(out) == {
        "schema_version": 1,
        "hosts": [
            {"name": "worker-1", "user": "alice", "port": 2222, "slots": ["0", "4"]},
            {"name": "fe80::1", "user": None, "port": None, "slots": ["GPU-8f", "MIG-1"]},
        ],
        "world_size": 4,
    }


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        (["--exclude", "worker-0@worker-1:1"], {"worker-1": "0,4", "fe80::1": "GPU-8f,MIG-1"}),
        (["--num-nodes", "2"], {"worker-0": "0,1,2,3,4,5,6,7", "worker-1": "0,1,4"}),
        (["--num-gpus-per-node", "1"], {"worker-0": "0", "worker-1": "0", "fe80::1": "GPU-8f"}),
    ],
)
def test_filters(
    capsys: pytest.CaptureFixture[str], hostfile: str, flags: list[str], hosts: dict[str, str]
) -> None:
    found = json.loads(run(capsys, hostfile, "--json", *flags)[0])
    assert {host["name"]: ",".join(host["slots"]) for host in found["hosts"]} == hosts


def test_a_hostfile_for_deepspeed(capsys: pytest.CaptureFixture[str], hostfile: str) -> None:
    out, err = run(capsys, hostfile, "-o", "for-deepspeed", "--exclude", "[fe80::1]")
    assert out == ""
    assert Path("for-deepspeed").read_text() == "worker-0 slots=8\nworker-1 slots=5\n"
    assert "add to the deepspeed command: --include worker-0@worker-1:0,1,4\n" in err
    assert "note: worker-1: set User alice in ~/.ssh/config" in err
    assert "exists already" in run(capsys, hostfile, "-o", "for-deepspeed", code=2)[1]
    assert run(capsys, hostfile, "-o", "-", "--num-nodes", "1")[0] == "worker-0 slots=8\n"
    both = run(capsys, hostfile, "-o", "for-deepspeed", "--force", "--json", "--num-nodes", "1")[0]
    assert json.loads(both)["world_size"] == 8
    assert Path("for-deepspeed").read_text() == "worker-0 slots=8\n"


def test_stdin(capsys: pytest.CaptureFixture[str], hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(HOSTS.encode())))
    _, err = run(capsys, "-")
    assert err == "3 nodes, world size 13; 3 of 3 hosts of stdin\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a slots=1\nb lots=8\nc slots=x!\n")))
    _, err = run(capsys, "-", code=2)
    assert "<stdin>:2:3: 'lots=8' is not slots=N\n\nhint: write b slots=8" in err
    assert "<stdin>:3:9: slots=x!" in err  # all wrong lines at once


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "--num-gpus-per-node", "2")
    assert out.splitlines()[1:] == ["0-1    localhost  0,1"]
    assert err.startswith("1 node, world size 2; ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nope"], "hostfile not found: "),
        (["host"], "hint: did you mean "),
        (["hosts", "--hostfile", "hosts"], "hosts and --hostfile hosts are both given"),
        (["hosts", "--include", "worker-9"], "there is no host worker-9"),
        (["hosts", "--num-nodes", "4"], "num_nodes 4, but there are 3 hosts"),
        (["hosts", "--json", "-o", "-"], "--json and -o - both write to stdout"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], hostfile: str, words: list[str], part: str
) -> None:
    out, err = run(capsys, *words, code=2)
    assert (out, part in err) == ("", True), err


def test_ten_thousand_hosts(capsys: pytest.CaptureFixture[str], hostfile: str) -> None:
    Path("many").write_text("".join(f"node{i:05d} slots=8\n" for i in range(10_000)))
    found: dict[str, Any] = json.loads(run(capsys, "many", "--json", "--exclude", "node00000")[0])
    assert (len(found["hosts"]), found["world_size"]) == (9_999, 79_992)


def test_a_batch_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "2")
    out, err = run(capsys)
    assert out.splitlines() == ["ranks  host   slots", "0-1    gpu07  0,1", "2-3    gpu08  0,1"]
    assert "SLURM_JOB_NODELIST: 2 nodes x 2 GPUs (SLURM_GPUS_PER_NODE)" in err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-")
    assert "SLURM_JOB_NODELIST:4: '[' is not closed" in run(capsys, code=2)[1]


def test_a_file_is_read_also_inside_of_a_job(
    capsys: pytest.CaptureFixture[str], hostfile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-")
    assert "worker-0" in run(capsys, hostfile)[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(HOSTS.encode())))
    assert "worker-0" in run(capsys, "-")[0]
