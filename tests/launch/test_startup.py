"""The start over many hosts, each an agent of this machine under an invented name."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.command import Command
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import Host, Topology
from dslaunch.launch import agent, startup, watch
from dslaunch.launch.link import AgentLink
from dslaunch.launch.links import Links
from dslaunch.launch.orders import encode_orders
from dslaunch.launch.screen import Screen
from dslaunch.launch.signals import SignalInbox
from dslaunch.launch.startup import HostsUnusable
from dslaunch.launch.supervisor import supervise
from tests.launch.launching import python

Supervise = Callable[..., tuple[int, str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """``start(num_hosts, before, code)``: the exit code and stderr of a launch by "ssh".

    ``before`` is what sh does on a host before the agent, by the host's name.
    """

    def run(num_hosts: int, before: Mapping[str, str], code: str = "") -> tuple[int, str]:
        def build(host: Host, orders: dict[str, Any], *_: Any) -> Command:
            script = f'{before.get(host.name, "")}\nexec "$0" -I -S "$1"'
            argv = ("sh", "-c", script, sys.executable, agent.__file__)
            return Command(argv=argv, stdin=encode_orders(orders))

        monkeypatch.setitem(startup.LAUNCHERS, "ssh", build)  # type: ignore[arg-type]
        hosts = tuple(Host(name=f"node{i}.invalid", slots=("0",)) for i in range(1, num_hosts + 1))
        plan = LaunchPlan(
            argv=tuple(python(code)), topology=Topology(hosts=hosts), run_dir=str(tmp_path / "run"),
            cwd=str(tmp_path), via="ssh", master_addr="127.0.0.2",  # 127.0.0.1 is refused for several
        )  # fmt: skip
        err = io.BytesIO()
        try:
            exit_code = supervise(plan, events=None, out=io.BytesIO(), err=err).exit_code
        except HostsUnusable as error:
            return error.exit_code, f"{err.getvalue().decode()}{error.message}\nhint: {error.hint}"
        return exit_code, err.getvalue().decode()

    return run


@pytest.mark.parametrize(
    "before",
    ["echo Connection refused >&2; sleep 2; exit 255", "sleep 60; exit 1", "setsid sleep 60; exit 1"],
)
def test_a_cancel_starts_no_agent_again(start: Supervise, before: str) -> None:
    # By the agent's own script: however slow this machine is, the launch is then there to be cancelled.
    cancel = f"{{ sleep 0.5; kill -INT {os.getpid()}; }} &"
    code, said = start(2, {"node2.invalid": f"{cancel}\n{before}"})
    assert code == 130
    assert "no rank was started" in said
    assert "trying again" not in said
    assert "does not answer" not in said  # as of an agent that nobody told to stop


def test_a_host_that_says_nothing_is_named(start: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_ANSWER_S", 3.0)
    code, said = start(2, {"node2.invalid": "exec sleep 30"})
    assert code == 3
    assert "host node2.invalid: no answer within 3 s; nothing was started" in said


def test_more_dead_hosts_than_may_connect_at_once(start: Supervise) -> None:
    num_hosts = startup._FANOUT + 10
    dead = {f"node{i}.invalid": "echo no route >&2; exit 255" for i in range(2, num_hosts + 1)}
    code, said = start(num_hosts, dead)
    assert code == 3
    assert f"{num_hosts - 1} of {num_hosts} hosts cannot be used; nothing was started:" in said
    assert "node2.invalid: the connection to node2.invalid ended: no route" in said


def test_a_host_that_turns_us_away_is_tried_again_in_a_moment(start: Supervise, tmp_path: Path) -> None:
    once = f"mkdir {tmp_path}/tried 2>/dev/null && {{ echo Connection refused >&2; exit 255; }}"
    code, said = start(1, {"node1.invalid": once}, "touch('ran')")
    assert code == 0, said
    assert "the connection to node1.invalid ended: Connection refused; trying again" in said
    assert (tmp_path / "ran").exists()


def test_a_host_that_turns_us_away_for_good(start: Supervise, tmp_path: Path) -> None:
    never = f"echo x >> {tmp_path}/tries; echo Connection refused >&2; exit 255"
    code, said = start(3, {"node2.invalid": never})
    assert code == 3
    assert said.count("trying again") == 2
    assert "host node2.invalid: the connection to node2.invalid ended: Connection refused" in said
    assert (tmp_path / "tries").read_text().count("x") == 3


def test_fewer_connect_at_once_where_some_are_turned_away(tmp_path: Path) -> None:
    hosts = tuple(Host(name=f"node{i}.invalid", slots=("0",)) for i in range(100))
    plan = LaunchPlan(argv=("x",), topology=Topology(hosts=hosts), run_dir="/r", cwd="/", via="ssh")
    begin = startup.Startup(plan)
    argv = ("sh", "-c", "echo Connection refused >&2; exit 255")
    begin._connect = lambda node_rank, host: startup.AgentLink(  # type: ignore[method-assign]
        host, Command(argv=argv), is_local=False
    )
    links = begin.start_agents()
    assert len(links) == startup._FANOUT
    for link in links:
        link.process.wait()
        link.read_stderr()
        assert begin.try_again(link)
        link.close(1.0)
    time.sleep(0.6)
    again = begin.start_agents()
    assert len(again) == startup._LEAST_FANOUT
    for link in again:
        link.close(1.0)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Permission denied (publickey).", "see that `ssh HOST true` asks nothing"),
        ("Host key verification failed.", "connect by hand once (ssh HOST)"),
        ("bash: /bin/sh: Permission denied", None),
        ("", "see that `ssh HOST echo` ends well"),
    ],
)
def test_what_ssh_refuses_has_a_hint(start: Supervise, said: str, hint: str | None) -> None:
    code, text = start(2, {"node2.invalid": f"echo '{said}' >&2; exit 255"})
    assert code == 3
    how = f": {said}" if said else " (code 255)"
    assert f"host node2.invalid: the connection to node2.invalid ended{how}; nothing was started" in text
    found = text.rpartition("hint: ")[2]
    leave = "leave out what cannot be used: --exclude node2.invalid"
    assert found == leave if hint is None else found.startswith(hint) and found.endswith(f"; or {leave}")


def test_it_is_said_which_hosts_are_waited_for(start: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_FIRST_WAIT_S", 0.8)
    code, said = start(3, {"node2.invalid": "sleep 2"})
    assert code == 0
    first, note = said.splitlines()  # the note: that they are one machine
    assert first == "dslaunch: 2 of 3 hosts have answered; waiting for node2.invalid"
    assert "note: node1.invalid, node2.invalid, node3.invalid: these are one machine" in note
    monkeypatch.setenv("DSLAUNCH_VERBOSE", "-1")
    assert start(3, {"node2.invalid": "sleep 2"}) == (0, "")


@pytest.mark.parametrize(
    ("bad", "hints", "hint"),
    [
        ("b", ["mend it"], "mend it; or leave out what cannot be used: --exclude b"),
        ("bc", ["mend it", "mend that"], "leave out what cannot be used: --exclude b@c"),
        ("b", [None], "leave out what cannot be used: --exclude b"),
        ("abc", ["mend it"] * 3, "mend it"),
        ("abc", [None] * 3, None),
    ],
)
def test_bad_hosts_are_named_with_an_exclude(bad: str, hints: list[str | None], hint: str | None) -> None:
    hosts = tuple(Host(name=name, slots=("0",)) for name in "abc")
    plan = LaunchPlan(argv=("x",), topology=Topology(hosts=hosts), run_dir="/r", cwd="/", via="ssh")
    state = startup.Startup(plan)
    for name, cure in zip(bad, hints, strict=True):
        link = AgentLink(hosts["abc".index(name)], Command(argv=("true",)))
        state._node_ranks[link] = "abc".index(name)
        state.note_unusable(link, "broken", cure)
        link.close(10.0)
    refusal = state.refusal()
    assert refusal is not None
    assert (refusal.hosts, refusal.hint) == (tuple(bad), hint)


def in_limits(soft: int, hard: int, num_hosts: int) -> str:
    """What a process with these limits of open files has after :func:`allow_open_files`, or what it says."""
    code = (
        "import resource\n"
        "from dslaunch.core.errors import DslaunchError\n"
        "from dslaunch.launch.ready import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "try:\n"
        f"    allow_open_files({num_hosts})\n"
        "    print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "except DslaunchError as error:\n"
        "    print(error.exit_code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_open_files_for_many_hosts() -> None:
    assert in_limits(256, 4096, 10) == "(256, 4096)\n"
    assert in_limits(256, 4096, 1000) == "(3128, 4096)\n"
    assert "3 10000 hosts take 30128 open files here, and the limit is 4096" in in_limits(256, 4096, 10_000)


@pytest.mark.parametrize(
    ("num_hosts", "via", "said"), [(1001, "ssh", True), (1001, "slurm", True), (1000, "ssh", False)]
)
def test_so_many_hosts_are_not_for_a_process_each(
    tmp_path: Path, num_hosts: int, via: Any, said: bool
) -> None:
    hosts = tuple(Host(name=f"node{i}", slots=("0",)) for i in range(num_hosts))
    plan = LaunchPlan(argv=("x",), topology=Topology(hosts=hosts), run_dir=str(tmp_path), cwd="/", via=via)
    err = io.BytesIO()
    screen = Screen(io.BytesIO(), err, str(tmp_path))
    watch.Watch(plan, startup.Startup(plan), screen, own_worker=False).say_what_is_known()
    screen.close(lambda: False)
    text = err.getvalue().decode()
    words = (
        f"note: {via} takes a process here for each of {num_hosts} hosts; it is good to about 1000. For more"
    )
    assert (f"{words} use srun or MPI by themselves" in text) == said


def test_what_does_not_end_is_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh whose channel something holds open. Together they have the second that each one has."""
    given: list[float] = []
    close = AgentLink.close

    def note(link: AgentLink, timeout_s: float) -> None:
        given.append(timeout_s)
        close(link, timeout_s)

    monkeypatch.setattr(AgentLink, "close", note)
    with SignalInbox() as inbox:
        links = Links(inbox.fd, inbox.drain)
        for number in range(12):
            host = Host(name=f"node{number}", slots=("0",))
            links.add(AgentLink(host, Command(argv=("sleep", "60")), is_local=False), lambda _: True)
        links.close(lambda _: 1.0)
    assert len(given) == 12 and sum(max(0.0, timeout_s) for timeout_s in given) <= 1.0
    assert all(link.process.returncode == -signal.SIGKILL for link in links)


def test_a_wrapper_around_ssh_is_killed_with_its_children() -> None:
    """They hold our pipes: while one lives, the end of the connection is not heard."""
    host = Host(name="a", slots=("0",))
    link = AgentLink(host, Command(argv=("sh", "-c", "sleep 60; exit 1"), stdin=b"x"), is_local=False)
    began = time.monotonic()
    link.kill()
    with pytest.raises(EOFError):
        list(link.read_events())
    link.close(1.0)
    assert time.monotonic() - began < 30
