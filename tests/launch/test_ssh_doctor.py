"""``dslaunch doctor`` over real ssh on three hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.hosts import Testbed

pytestmark = pytest.mark.needs("root", "sshd", "namespaces")

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doctor]:
    """``doctor(*options)`` on the control host, about CPU ranks; leaves nothing anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))  # other tests may build in theirs
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in bed.names))

    def run(*options: str, hostfile: str = "hosts", flag: str = "--hostfile") -> tuple[int, str, str]:
        argv = [sys.executable, "-m", "dslaunch", "doctor", flag, hostfile, "--gpu", "cpu", *options]
        done = subprocess.run([*bed.hub(), *argv], capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    yield run
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for name in bed.names:
        assert bed.programs(name) == [], f"left behind on {name}"


def findings(out: str) -> dict[str, list[dict[str, Any]]]:
    """Host -> what is wrong there; info left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(out)["findings"]:
        if finding["severity"] != "info":
            found.setdefault(finding["host"], []).append(finding)
    return found


def test_hosts_that_are_fine(bed: Testbed, doctor: Doctor) -> None:
    code, out, err = doctor()
    assert code == 0, out + err
    assert out.startswith("3 of 3 hosts answered, in ")
    assert f"ranks would meet at {bed.address('node1')} (node1); 2 of 2 others reach it (by eth0)\n" in out
    assert "versions, devices and CPUs are the same on all\n" in out
    # Debian's way of naming a host is no fault, since nobody here goes by it.
    assert "info     node1, node2, node3: its own name leads to 127.0.1.1" in out
    assert err.endswith("nothing is missing\n")
    code, out, _ = doctor("--json", flag="--hosts")
    report = json.loads(out)
    assert (code, report["ready"], findings(out)) == (0, True, {})
    assert list(report["inventory"]) == bed.names
    assert report["master"]["addr"] == bed.address("node1")
    assert len(report["hosts"]) == len(bed.names)
    assert all(abs(host["clock_skew_s"]) < 1 for host in report["hosts"])


def test_hosts_with_faults_are_named_and_can_be_left_out(
    bed: Testbed, doctor: Doctor, tmp_path: Path
) -> None:
    """Another torch installed on node3, a wall between node2 and node1, and a host that is not there."""
    installed = Path(
        str(metadata.distribution("torch").locate_file("")),
        f"torch-{metadata.version('torch')}.dist-info/METADATA",
    )
    other = tmp_path / "METADATA"
    other.write_text(
        installed.read_text().replace(f"Version: {metadata.version('torch')}", "Version: 1.2.3", 1)
    )
    Path("some").write_text("node1 slots=1\nnode2 slots=2\nnode3 slots=1\nnowhere slots=1\n")
    bed.bind("node3", other, installed)
    bed.forbid("node2", bed.address("node1"))
    try:
        code, out, _ = doctor("--json", hostfile="some")
        text = doctor(hostfile="some")[1]
        without = doctor("--exclude", json.loads(out)["exclude"], hostfile="some")
    finally:
        bed.allow("node2", bed.address("node1"))
        bed.power_off("node3")
        bed.boot("node3")
        bed.wait_until_up("node3")
    assert code == 1
    assert metadata.version("torch") != "1.2.3"  # node3 alone had it
    found = findings(out)
    assert {host: [f["code"] for f in faults] for host, faults in found.items()} == {
        "node2": ["shm", "connection"], "node3": ["versions"], "nowhere": ["unreachable"],
    }  # fmt: skip
    assert f"cannot reach node1 at {bed.address('node1')} port" in found["node2"][1]["message"]
    assert found["node3"][0]["message"] == f"torch 1.2.3, but {metadata.version('torch')} on other hosts"
    assert "Could not resolve hostname nowhere" in found["nowhere"][0]["message"]
    assert f"torch    {metadata.version('torch')}" in text
    assert "         1.2.3" in text
    assert "without what cannot be used: --exclude node2@node3@nowhere\n" in text
    assert without[0] == 0, without


def test_a_run_directory_that_is_not_shared(bed: Testbed, doctor: Doctor) -> None:
    code, out, _ = doctor("--json", "--run-dir", "/dev/shm/runs/x")
    assert code == 0  # a script of one's own need not use it
    assert {host: [f["code"] for f in faults] for host, faults in findings(out).items()} == {
        name: ["run-dir"] for name in bed.names
    }
    assert list(Path("/dev/shm").glob(".seen-by*")) == []


def test_login_noise_and_limits_of_a_login(bed: Testbed, doctor: Doctor) -> None:
    bed.bashrc("node2", "ulimit -n 300; echo welcome; echo '{\"event\": 1}'; printf 'no newline'")
    try:
        code, out, _ = doctor("--json")
    finally:
        bed.bashrc("node2", "")
    assert code == 0
    (found,) = findings(out)["node2"]
    assert found["message"] == "a process may open 300 files"


def test_a_host_that_is_cut_off_in_the_middle(bed: Testbed, doctor: Doctor) -> None:
    bed.cut("node1")  # the one that all others would connect to
    try:
        code, out, _ = doctor("--json", "--timeout", "8")  # which the others need not on a busy machine
    finally:
        bed.plug("node1")
    assert code == 1
    assert findings(out) == {"node1": [
        {"code": "unreachable", "severity": "error", "host": "node1", "hint": None,
         "message": findings(out)["node1"][0]["message"]}]}  # fmt: skip
    assert [host["python"] is None for host in json.loads(out)["hosts"][1:]] == [False, False]


def test_ops_are_built_once_on_every_host(
    doctor: Doctor, ops_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are built already here; each host looks, and says where."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(ops_dir))
    code, _, err = doctor("--build-ops")
    assert code == 0, err
    assert "built on 3 hosts; logs in " in err
    folder = Path(err.rpartition("logs in ")[2].strip())
    logs = [path.read_text() for path in sorted(folder.glob("logs/rank-*.log"))]
    assert len(logs) == 3
    assert all(f"the ops are in {ops_dir}" in log for log in logs)


def test_gpus_that_are_not_those_of_the_plan(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 of 8 GPUs on node2, another kind on node3, and an older driver there."""
    have = {
        "node1": (8, "NVIDIA A100-SXM4-80GB, 81920, 8.0", "550.54.14"),
        "node2": (4, "NVIDIA A100-SXM4-80GB, 81920, 8.0", "550.54.14"),
        "node3": (8, "Tesla V100-SXM2-32GB, 32768, 7.0", "470.82.01"),
    }
    cases = "".join(
        f"{name}) for i in $(seq 0 {count - 1}); do echo $i, '{row}, {driver}'; done;;\n"
        for name, (count, row, driver) in have.items()
    )
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $(uname -n) in\n{cases}esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path("gpus").write_text("".join(f"{name} slots=8\n" for name in have))
    code, out, err = doctor("--gpu", "a100", "--json", hostfile="gpus")
    text = doctor("--gpu", "a100", hostfile="gpus")[1]
    assert code == 1, err
    errors = {
        host: [(f["code"], f["message"]) for f in faults if f["severity"] == "error"]
        for host, faults in findings(out).items()
    }
    assert errors == {
        "node1": [],
        "node2": [("devices", "the plan is for GPU 4, but it shows 4 (0, 1, 2, 3)")],
        "node3": [("device-kind", "the plan is for a100 (sm_80), but it has v100 (sm_70)")],
    }
    older = "NVIDIA driver 470.82.01, but 550.54.14 on other hosts"
    assert [f["severity"] for f in findings(out)["node3"] if f["message"] == older] == ["warning"]
    assert json.loads(out)["exclude"] == "node2@node3"
    assert "without what cannot be used: --exclude node2@node3\n" in text
    assert "devices        8 x a100 (sm_80), 78.8 GiB   node1\n" in text
