"""What `--via pdsh` puts on a command line and into a file, and whom it talks to. Real hosts: test_mpi.py."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import bridge
from dslaunch.launch.pdsh import build_agent_command, check_hosts

HOST = Host(name="n2", slots=("0",))
# Stands for pdsh and the host: reads the file, is first a stranger, then the one that has the token.
CALLER = """\
import json, os, socket, stat, sys
path = bytes.fromhex(sys.argv[1])
file = open(path, "rb")
mode = stat.S_IMODE(os.stat(path).st_mode)
relay, where, rest = file.readline(), json.loads(file.readline()), file.read()
os.unlink(path)
for token in (b"", b"\\n", b"guess\\n" * 100, b"0" * 64 + b"\\n"):
    stranger = socket.create_connection(("127.0.0.1", where["port"]))
    try:
        stranger.sendall(token)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    except OSError:  # turned away already
        pass
link = socket.create_connection(("127.0.0.1", where["port"]))
link.sendall(where["token"].encode() + b"\\n")
told = {"mode": mode, "relay": relay.decode(), "rest": rest.decode()}
link.sendall(json.dumps(told).encode() + b"\\n")
with link.makefile("rb") as stream:
    link.sendall(stream.read().upper())
sys.exit(5)
"""


def orders(folder: Path) -> dict[str, object]:
    return {"env": {"DSLAUNCH_RUN_DIR": str(folder), "T": "s3cret %n"}, "argv": ["100%n", "it's"]}


def test_the_whole_command(tmp_path: Path) -> None:
    environ = {"PDSH_SSH_ARGS_APPEND": "-o Port=22"}
    command = build_agent_command(HOST, orders(tmp_path), environ, ["docker", "a%b"])
    assert command.argv == (sys.executable, "-I", "-S", bridge.__file__)
    assert command.env["PDSH_RCMD_TYPE"] == "ssh"
    assert command.env["PDSH_SSH_ARGS_APPEND"].startswith("-o Port=22 -o BatchMode=yes ")
    assert (
        build_agent_command(HOST, orders(tmp_path), {"PDSH_RCMD_TYPE": "mrsh"}).env["PDSH_RCMD_TYPE"]
        == "mrsh"
    )
    request, agent, told = (command.stdin or b"").splitlines()
    words = json.loads(request)["command"]
    assert words[:-1] == ["pdsh", "-S", "-N", "-f", "1", "-t", "15", "-w", "n2"]
    assert words[-1].startswith("exec 'docker' 'a%%b' '/bin/sh' '-c' ")
    assert words[-1].replace("%%", "").count("%") == 0  # pdsh rewrites what follows one
    assert b"s3cret" in told
    assert b"s3cret" not in request + agent


def test_orders_go_by_a_file_of_ones_own_and_strangers_are_turned_away(tmp_path: Path) -> None:
    request = {"command": [sys.executable, "-c", CALLER, bridge.PATH_IN_HEX], "folder": str(tmp_path),
               "host": "localhost", "relay": "relay\n"}  # fmt: skip
    argv = [sys.executable, "-I", "-S", str(bridge.__file__)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(json.dumps(request).encode() + b"\nagent\norders\n")
        told = json.loads(process.stdout.readline())
        assert told == {"mode": stat.S_IRUSR | stat.S_IWUSR, "relay": "relay\n", "rest": "agent\norders\n"}
        process.stdin.write(b"stop\n")
        process.stdin.close()
        assert process.stdout.read() == b"STOP\n"
        assert process.wait(20) == 5
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_left_where_pdsh_fails(tmp_path: Path) -> None:
    request = {"command": ["false"], "folder": str(tmp_path), "host": "nowhere.invalid", "relay": "relay\n"}
    argv = [sys.executable, "-I", "-S", str(bridge.__file__)]
    stdin = json.dumps(request).encode() + b"\nagent\norders\n"
    assert subprocess.run(argv, input=stdin, capture_output=True, timeout=30, check=False).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_a_host_does_not_see(tmp_path: Path) -> None:
    request = json.loads((build_agent_command(HOST, orders(tmp_path), {}).stdin or b"").splitlines()[0])
    remote = request["command"][-1].replace("%%", "%").replace(bridge.PATH_IN_HEX, b"/no/such".hex())
    done = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == (
        "the run directory is not seen here: --via pdsh needs one that all hosts share, --via ssh does not\n"
    )


def test_what_keeps_it_from_starting(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotReady, match="no pdsh in PATH"):
        check_hosts(Topology(hosts=(HOST,)), {"PATH": "/nowhere"})
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "pdsh", 0o755)
    check_hosts(Topology(hosts=(HOST,)), {"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="host fe80::1: pdsh takes names without user"):
        check_hosts(Topology(hosts=(Host(name="fe80::1", slots=("0",)),)), {"PATH": str(tmp_path)})
