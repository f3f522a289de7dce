"""The node agent alone: what it may use, how it starts, what it does without a supervisor."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launch import agent
from tests.launch.launching import wait_until

SOURCE = Path(agent.__file__).read_text(encoding="utf-8")


def orders(tmp_path: Path, argv: list[str], **more: Any) -> bytes:
    value = {
        "protocol": agent.PROTOCOL,
        "host": "here",
        "argv": argv,
        "cwd": str(tmp_path),
        "env": {},
        "visible_devices": None,
        "auto_threads": True,
        "failure_grace_s": 1.0,
        "checkpoint_grace_s": 1.0,
        "ranks": [{"rank": 0, "env": {}, "log": str(tmp_path / "logs" / "rank-0.log"), "show": "all"}],
        **more,
    }
    return json.dumps(value).encode() + b"\n"


def start(source: list[str] | None = None) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-S", *(source or [agent.__file__])]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def events(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_it_is_python_3_8() -> None:
    ast.parse(SOURCE, feature_version=(3, 8))
    assert "from __future__ import annotations" in SOURCE  # list[int] is no type at run time in 3.8


def test_it_imports_the_standard_library_alone() -> None:
    names = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= set(sys.stdlib_module_names)


def test_it_runs_without_its_file(tmp_path: Path) -> None:
    # As on a host that has no dslaunch: the source itself is what is sent.
    process = start(["-c", SOURCE])
    out, err = process.communicate(orders(tmp_path, ["true"]) + b"", timeout=30)
    assert process.returncode == 0, err
    # stdin was closed at once, so the rank may have been stopped; it was started and is gone.
    assert [event["event"] for event in events(out)][:2] == ["hello", "start"]
    assert events(out)[-1] == {"event": "done", "dropped": 0, "left": []}


def test_end_of_stdin_stops_ranks_that_ignore_term(tmp_path: Path) -> None:
    process = start()
    stubborn = "trap '' TERM; touch ready; while :; do sleep 1; done"
    assert process.stdin is not None
    process.stdin.write(orders(tmp_path, ["bash", "-c", stubborn]))
    process.stdin.flush()
    wait_until((tmp_path / "ready").exists, "the rank is up")
    out, _ = process.communicate(timeout=30)
    ends = [event for event in events(out) if event["event"] == "exit"]
    assert [(end["code"], end["asked"]) for end in ends] == [(-9, True)]


def test_term_stops_the_ranks(tmp_path: Path) -> None:
    process = start()
    assert process.stdin is not None
    process.stdin.write(orders(tmp_path, ["bash", "-c", "touch ready; exec sleep 300"]))
    process.stdin.flush()
    wait_until((tmp_path / "ready").exists, "the rank is up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    out, _ = process.communicate()
    assert [event["code"] for event in events(out) if event["event"] == "exit"] == [-15]


def test_kill_of_the_agent_kills_its_ranks(tmp_path: Path) -> None:
    process = start()
    assert process.stdin is not None
    process.stdin.write(orders(tmp_path, ["bash", "-c", "echo $$ > pid; exec sleep 300"]))
    process.stdin.flush()
    path = tmp_path / "pid"
    pid = int(wait_until(lambda: path.exists() and path.read_text(), "the rank is up"))
    process.kill()
    try:
        wait_until(lambda: ended(pid), "the rank is gone", 10.0)
    finally:
        process.communicate()


def ended(pid: int) -> bool:
    """No such process, or a zombie that some other process has not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_commands_that_come_with_the_orders_are_obeyed(tmp_path: Path) -> None:
    process = start()
    assert process.stdin is not None
    process.stdin.write(orders(tmp_path, ["sleep", "300"]) + b'{"command": "kill"}\n')
    process.stdin.flush()
    assert process.wait(30) == 0
    process.communicate()


def test_another_protocol_is_refused() -> None:
    process = start()
    _, err = process.communicate(b'{"protocol": 99}\n', timeout=30)
    assert process.returncode == 1
    assert b"protocol 99" in err


def test_a_wrong_device_starts_nothing(tmp_path: Path) -> None:
    devices = {"variable": "CUDA_VISIBLE_DEVICES", "slots": ["2"]}
    line = orders(tmp_path, ["touch", "started"], visible_devices=devices, env={"CUDA_VISIBLE_DEVICES": "5"})
    process = start()
    out, _ = process.communicate(line, timeout=30)
    assert process.returncode == 3
    refused = [event for event in events(out) if event["event"] == "refused"]
    assert refused[0]["message"] == "device 2 is not among the 1 visible here (5)"
    assert not (tmp_path / "started").exists()


def test_threads_are_cut_by_affinity() -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import agent;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(agent.usable_cores())"
    )
    folder = str(Path(agent.__file__).parent)
    shown = subprocess.run(
        [sys.executable, "-S", "-c", code, folder], capture_output=True, timeout=30, text=True
    )
    assert shown.stdout == "1\n", shown.stderr


def test_own_children_without_the_kernels_list(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in agent.own_children()
        real_open = open

        def no_children_file(path: str, *rest: Any, **more: Any) -> Any:
            if str(path).endswith("/children"):
                raise FileNotFoundError(path)
            return real_open(path, *rest, **more)

        monkeypatch.setattr("builtins.open", no_children_file)
        assert child.pid in agent.own_children()
        assert os.getppid() not in agent.own_children()
    finally:
        child.kill()
        child.wait()
