"""What holds on every way to a host alike, as users of other launchers have missed it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from dslaunch.core.command import Command
from dslaunch.core.plan import Via
from dslaunch.core.topology import Host
from dslaunch.launch.agent import Refusal, own_address
from dslaunch.launch.carried import packed_agent
from dslaunch.launch.orders import encode_orders
from dslaunch.launch.ssh import OPTIONS, build_agent_command, build_command
from dslaunch.launch.startup import LAUNCHERS
from tests.cli.launching import dslaunch, error_of
from tests.launch.conftest import Launch

ORDERS: dict[str, Any] = {
    "argv": ["p", "a b", "100%n", "$HOME", "two\nlines", "", "-x", '{"k": "v w"}', "it's", '72" tall', "*"],
    "env": {"DSLAUNCH_RUN_DIR": "/r", "X": "64(x2)", "J": '{"a": "b"}', "L": "1\n2", "MY_TOKEN": "s3cret"},
    "visible_devices": None,
    "ranks": [{"rank": 0, "log": "/r/logs/rank-0.log", "env": {"RANK": "0"}, "args": []}],
}


def test_every_way_that_a_plan_may_name_is_there() -> None:
    assert set(LAUNCHERS) == set(get_args(Via))


@pytest.mark.parametrize("way", sorted(LAUNCHERS))
def test_all_that_a_rank_is_to_have_goes_every_way_alike(way: str, tmp_path: Path) -> None:
    """As data: nothing of it is a word that a shell or another launcher would read."""
    for name in ("mpirun", "mpiexec.hydra", "pdsh", "srun", "ssh"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    command = LAUNCHERS[way](Host(name="n2", slots=("0",)), ORDERS, {"PATH": str(tmp_path)}, ())
    assert isinstance(command, Command)
    assert (command.stdin or b"").endswith(encode_orders(ORDERS))
    assert json.loads((command.stdin or b"").splitlines()[-1]) == ORDERS
    if way != "local":
        assert packed_agent() in (command.stdin or b"")
    shown = " ".join([*command.argv, *command.env, *command.env.values()])
    assert not [word for word in ("s3cret", "100%n", "64(x2)", "72", "a b") if word in shown]


def test_one_ssh_command_for_asking_and_for_starting() -> None:
    host = Host(name="n2", slots=("0",), user="alice", port=2222)
    started = build_agent_command(host, ORDERS, {}).argv
    asked = build_command(host, b"").argv
    assert started == asked
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    assert list(asked[:-1]) == ["ssh", "-T", *options, "-p", "2222", "-l", "alice", "--", "n2"]
    assert OPTIONS["BatchMode"] == "yes"


def test_an_address_that_others_find_is_never_a_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    with pytest.raises(
        Refusal, match=r"at which address the other hosts \(localhost, no\.invalid\) find"
    ) as caught:
        own_address(["localhost", "no.invalid"])
    assert caught.value.hint == "give it: --master-addr"
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.7 22")  # names of an ssh_config alone
    assert own_address(["no.invalid"]) == "10.0.0.7"
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 50000 127.0.0.1 22")
    with pytest.raises(Refusal):
        own_address(["no.invalid"])


def test_without_a_client_nothing_is_started_and_it_is_said_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1.invalid slots=1\nn2.invalid slots=1\n")
    path = str(Path(sys.executable).parent)
    install = {"ssh": "an OpenSSH client; without one there are --via openmpi", "pdsh": "pdsh"}
    for way, program in (("auto", "ssh"), ("pdsh", "pdsh")):  # of the MPIs: test_mpi.py
        options = ("--hostfile", "hosts", "--gpu", "cpu", "--via", way)
        done = dslaunch(*options, command=("--", "true"), cwd=tmp_path, PATH=path)
        assert f"no {program} in PATH; nothing was started" in error_of(done, 3)
        assert f"hint: install {install[program]}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_no_rank_is_given_an_option_that_it_did_not_ask_for(launch: Launch, tmp_path: Path) -> None:
    script = (
        "import argparse, os\n"
        "argparse.ArgumentParser().parse_args()\n"
        "open('local-' + os.environ['LOCAL_RANK'], 'w').close()\n"
    )
    code, _, err = launch([sys.executable, "-c", script]).wait()
    assert code == 0, err
    assert sorted(path.name for path in tmp_path.glob("local-*")) == ["local-0", "local-1"]


@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_a_local_rank_that_was_asked_for(launch: Launch, tmp_path: Path, spelling: str) -> None:
    """Behind all other words, also when the recorded plan is run again."""
    show = "import os, sys; open('told-' + os.environ['RANK'], 'a').write(' '.join(sys.argv[1:]) + ';')"
    code, _, err = launch([sys.executable, "-c", show, "x"], "--local-rank-arg", spelling).wait()
    assert code == 0, err
    again = [str(tmp_path / "run/launch.sh"), "--run-dir", str(tmp_path / "run2")]
    subprocess.run(again, check=True, capture_output=True, timeout=60)
    for rank in range(2):
        assert (tmp_path / f"told-{rank}").read_text() == f"x {spelling}={rank};" * 2


def test_a_local_rank_is_for_commands_alone(tmp_path: Path) -> None:
    done = dslaunch("--local-rank-arg", "--local_rank", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
