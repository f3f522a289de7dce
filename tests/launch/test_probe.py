"""What a probe finds on this machine, and on one that is made up of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.host_memory import local_memory_bytes
from dslaunch.core.inventory import NVIDIA_SMI, inventory_of
from dslaunch.core.topology import Host
from dslaunch.launch import probe
from dslaunch.launch.probing import HostFacts, Probed, ProbeRequest, probe_hosts, root_of
from tests.launch.launching import wait_until

HERE = Host(name="localhost", slots=("0",))


def ask(
    tmp_path: Path, *, host: Host = HERE, environ: dict[str, str] | None = None, **changes: Any
) -> Probed:
    request = {
        "python": sys.executable, "packages": ["click", "no-such-package"], "cwd": str(tmp_path),
        "environ": {"TORCH_EXTENSIONS_DIR": "set"} if environ is None else environ,
        "witness": None, "cache": str(tmp_path / "not/yet/there"), "ops": str(tmp_path / "ops"),
        "smi": NVIDIA_SMI, **changes,
    }  # fmt: skip
    (found,) = probe_hosts([host], ProbeRequest(**request), timeout_s=30)
    return found


def facts(tmp_path: Path, **changes: Any) -> HostFacts:
    found = ask(tmp_path, **changes)
    assert found.facts is not None, found.problem
    return found.facts


def test_this_machine(tmp_path: Path) -> None:
    found = facts(tmp_path)
    assert found.node == os.uname().nodename
    assert found.interpreter.version == sys.version.split()[0]
    assert found.interpreter.packages["click"] is not None
    assert found.interpreter.packages["no-such-package"] is None
    assert found.has_cwd
    assert found.cache_problem is None
    assert found.shm.total_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    with root_of(found) as root:
        assert local_memory_bytes(root) == local_memory_bytes()
    assert not (tmp_path / "not").exists()


def test_what_is_not_there(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho cannot find libpython >&2; exit 127\n")
    broken.chmod(0o755)
    found = facts(tmp_path, python=str(broken), cwd="/no/such/folder", cache="/proc/nothing")
    assert found.interpreter.problem == f"{broken} does not work: cannot find libpython"
    assert not found.has_cwd
    assert found.cache_problem is not None
    missing = facts(tmp_path, python="/no/such/python")
    assert missing.interpreter.problem == "no program /no/such/python"


def test_the_ops_of_another_cpu_lie_elsewhere(tmp_path: Path) -> None:
    assert facts(tmp_path, environ={}).ops == str(tmp_path / "ops")  # the launcher's own CPU
    request = {"python": "x", "packages": [], "env": {}, "ops": "/ops", "ops_cpu": "another", "smi": ["no"],
               "cache": "/", "cwd": "/", "witness": None, "names": []}  # fmt: skip
    assert probe.facts(request)["ops"].startswith("/ops-")


def test_locks_of_torch(tmp_path: Path) -> None:
    for name in ("held", "left"):
        (tmp_path / "ops" / name).mkdir(parents=True)
        (tmp_path / "ops" / name / "lock").touch()
    code = "import sys, time; f = open(sys.argv[1]); print('open', flush=True); time.sleep(300)"
    argv = [sys.executable, "-c", code, str(tmp_path / "ops/held/lock")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            wait_until(holder.stdout.readline, "the holder has it open")
            locks = {Path(lock.path).parent.name: lock.held for lock in facts(tmp_path).locks}
        finally:
            holder.kill()
    assert {name: locks[name] for name in ("held", "left")} == {"held": True, "left": False}


def test_a_machine_of_files(tmp_path: Path) -> None:
    """GPUs, memory and cgroup as they are read here, and sent as text to be read there."""
    root = tmp_path / "root"
    files = {
        "proc/cpuinfo": "processor: 0\nflags: avx512_bf16\nmodel name: Xeon\n\nprocessor: 1\n",
        "proc/meminfo": "MemTotal:       16777216 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{4 * 2**30}\n",
        "sys/fs/cgroup/job/cpu.max": "100000 100000\n",
        "proc/driver/nvidia/gpus/01:00.0/information": "Model: \t NVIDIA A100-SXM4-80GB\nDevice Minor: 0\n",
        "proc/driver/nvidia/gpus/02:00.0/information": "Model: \t NVIDIA A100-SXM4-80GB\nDevice Minor: 1\n",
        "dev/nvidia0": "",
        "dev/shm/x": "",
        "sys/class/infiniband/mlx5_0": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    request = {"python": "x", "packages": [], "env": {}, "ops": "/ops", "ops_cpu": None, "smi": ["no"],
               "cache": "/", "cwd": "/", "witness": None, "names": []}  # fmt: skip
    found = probe.facts(request, str(root))
    assert (found["cpu"], found["cores"], found["infiniband"]) == ("Xeon", 1, True)
    sent = json.loads(json.dumps(found))
    moved = {path.removeprefix(str(root)): text for path, text in sent["files"].items()}
    devices = [path.removeprefix(str(root)) for path in sent["device_files"]]
    there = type("Facts", (), {"files": moved, "device_files": devices})
    with root_of(there) as copy:  # type: ignore[arg-type]
        inventory = inventory_of({}, "", root=copy)
        assert [str(a.device) for a in inventory.accelerators] == ["a100 (sm_80)"]  # the other has no device
        assert inventory.cpu.bf16 == "yes"
        assert local_memory_bytes(copy) == 4 * 2**30


def test_a_file_that_would_leave_its_root_is_not_written(tmp_path: Path) -> None:
    there = type("Facts", (), {"files": {"/../../evil": "x", "/proc/ok": "y"}, "device_files": ()})
    with root_of(there) as root:  # type: ignore[arg-type]
        assert [path.name for path in root.rglob("*") if path.is_file()] == ["ok"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo Permission denied >&2; exit 255", "Permission denied"),
        ("exit 7", "it ended with code 7"),
        ("echo No account.; exit 1", "No account."),
        ("echo careful >&2; echo No account.; exit 1", "careful; on its stdout: No account."),
        ("echo working on it >&2; exec sleep 60", "no answer within 1 s; it said: working on it"),
        ("exec sleep 60", "no answer within 1 s"),
        ("exec sleep 60 >&-", "no answer within 1 s"),  # it says no more, and lives on
        ("sleep 60; exit 1", "no answer within 1 s"),  # a wrapper, whose child has our pipes
    ],
)
def test_a_host_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [Host(name="no-such-host.invalid", slots=("0",)), HERE]
    request = ProbeRequest(python=sys.executable, packages=[], environ={}, cwd="/", witness=None,
                           cache="/", ops="/ops", smi=["no"])  # fmt: skip
    # The first host is the one that the second would connect to: it must not wait for it.
    began = time.monotonic()
    lost, fine = probe_hosts(hosts, request, timeout_s=1 if "sleep" in script else 30)
    assert time.monotonic() - began < 20
    assert lost.problem == says
    assert fine.facts is not None or "sleep" in script


def test_no_password_of_a_proxy_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\nexec timeout 0.5 cat > "${0%/*}/sent"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {"HTTPS_PROXY": "http://bob:s3cret@proxy", "http_proxy": "http://open-proxy:1"}
    ask(tmp_path, host=Host(name="no-such-host.invalid", slots=("0",)), environ=environ)
    sent = (tmp_path / "sent").read_bytes()
    assert b"http://open-proxy:1" in sent
    assert b"s3cret" not in sent
