"""Launches over real ssh on three hosts: what ranks are given, what happens when something dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.launching import (
    DETACH,
    WAIT,
    Launched,
    check_signals_of_the_launcher,
    check_two_jobs_side_by_side,
    clear,
    parent_of,
    python,
    up,
    wait_until,
)
from tests.testbed.hosts import Testbed

pytestmark = pytest.mark.needs("root", "sshd", "namespaces")

SHOW = "import json; print(json.dumps({k: v for k, v in os.environ.items()}), flush=True)"
# Longer than a test waits for an end: what ends within a test was not the work of these.
NO_HELP = tuple(
    word
    for name in ("failure_grace_s", "checkpoint_grace_s", "host_timeout_s")
    for word in ("--set", f"launch.{name}=1000")
)
UNSEEN = (
    "the run directory {} of the launcher is not seen there (No such file or directory);"
    " the logs of its ranks stay there: put --run-dir on a file system that all hosts share"
)
Over = Callable[..., Launched]


@pytest.fixture
def over(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Over]:
    """``over(code, *options)`` runs Python code once on each host, started on the control host."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in bed.names))
    with ExitStack() as stack:

        def start(
            code: str,
            *options: str,
            run_dir: str = "run",
            hostfile: str = "hosts",
            ssh: str | None = None,
            under: Sequence[str] = (),
        ) -> Launched:
            flags = ["--hostfile", hostfile, "--gpu", "cpu", *options]
            env = {} if ssh is None else {"PATH": with_ssh(tmp_path, ssh)}
            prefix = [*bed.hub(), *under]
            launched = Launched(flags, python(code), run_dir=tmp_path / run_dir, prefix=prefix, env=env)
            return stack.enter_context(launched)

        yield start
    for name in bed.names:
        assert bed.programs(name) == [], f"left behind on {name}"


def with_ssh(folder: Path, script: str) -> str:
    """A PATH whose ssh is a wrapper around the real one, which it finds in $ssh."""
    (folder / "bin").mkdir()
    path = folder / "bin/ssh"
    path.write_text(f"#!/bin/bash\nssh={shutil.which('ssh')}\n{script}\n")
    path.chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def test_each_rank_has_its_place_and_the_address_of_rank_0(bed: Testbed, over: Over) -> None:
    launched = over(SHOW, "--env", 'SAID=it\'s "so" $HOME %n')
    code, out, err = launched.wait()
    assert code == 0, err
    environments = [json.loads(Path(f"run/logs/rank-{rank}.log").read_text()) for rank in range(3)]
    for rank, env in enumerate(environments):
        wanted = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank), "MASTER_ADDR": bed.address("node1"), "GLOO_SOCKET_IFNAME": "eth0",
            "DS_ACCELERATOR": "cpu", "PYTHONNOUSERSITE": "1", "SAID": "it's \"so\" $HOME %n",
        }  # fmt: skip
        assert {name: env[name] for name in wanted} == wanted
    assert len({env["MASTER_PORT"] for env in environments}) == 1
    assert json.loads(out)["RANK"] == "0"


def test_gpus_of_other_kinds_and_numbers(bed: Testbed, over: Over) -> None:
    """Of a command, too: what hosts have is compared, and with what --gpu says."""
    Path("two").write_text("node2 slots=1\nnode3 slots=1\n")
    Path("four").write_text("node2 slots=1\nnode3 slots=0,4\n")
    Path("twice").write_text(f"node3 slots=2\n[{bed.address6('node3')}] slots=1\n")
    bed.show_gpus("node2", "NVIDIA A100-SXM4-80GB")
    bed.show_gpus("node3", "Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB")
    try:
        code, _, err = over(
            "print(os.environ['CUDA_VISIBLE_DEVICES'])", "--gpu", "a100", hostfile="two"
        ).wait()
        refused = over("touch('ran')", "--gpu", "a100", hostfile="four", run_dir="no").wait()
        twice = over("touch('ran')", "--gpu", "v100", hostfile="twice", run_dir="twice-run").wait()
    finally:
        for name in ("node2", "node3"):
            bed.power_off(name)
            bed.boot(name)
            bed.wait_until_up(name)
    assert code == 0, err
    assert "note: hosts differ: ranks may hang, or compute something else; --exclude node3 leaves" in err
    assert "\nGPU      NVIDIA A100-SXM4-80GB  node2\n         Tesla V100-SXM2-32GB   node3\n" in err
    assert "note: node3: the plan is for a100 (sm_80), but it has v100 (sm_70); name what" in err
    assert Path("run/logs/rank-1.log").read_text() == "0\n"
    assert refused[0] == 3
    assert "host node3: the plan is for GPU 4, and this host has 2 (0,1); nothing was started" in refused[2]
    assert "leave out what cannot be used: --exclude node3" in refused[2]
    assert twice[0] == 3
    assert f"host {bed.address6('node3')}: it is the same machine as node3, and both have slot 0" in twice[2]
    assert (
        f"names, with all slots; or leave out what cannot be used: --exclude [{bed.address6('node3')}]\n"
        in twice[2]
    )
    assert not Path("ran").exists()


def test_an_address_that_is_not_the_first_hosts(bed: Testbed, over: Over) -> None:
    code, _, err = over("touch('ran')", "--master-addr", bed.address("node2")).wait()
    assert code == 3
    assert f"host node1: no other host reaches it at {bed.address('node2')} port" in err
    assert "hint: leave --master-addr (cluster.master_addr) out, or give one of the first host's" in err
    assert "what cannot be used: --exclude node1\n" in err
    assert not Path("ran").exists()


def test_login_noise_does_no_harm(bed: Testbed, over: Over) -> None:
    """Nor does a limit that a login sets, which is told."""
    daemon = "sleep 299 >/dev/null 2>&1 </dev/null &"
    noise = "echo welcome; echo '{\"event\": 1}'; echo careful >&2; printf 'no newline'"
    bed.bashrc("node2", f"ulimit -n 300\n{daemon}\n{noise}")
    try:
        code, _, err = over("print('here')").wait()
        assert bed.programs("node2") == ["sleep 299"]  # the login's own: not for us to end
    finally:
        bed.bashrc("node2", "")
    assert code == 0, err
    assert "dslaunch: note: node2: a process may open 300 files; ulimit -n 65536\n" in err
    assert Path("run/logs/rank-1.log").read_text() == "here\n"


def test_no_environment_and_no_secret_on_a_command_line(
    bed: Testbed, over: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-value")
    with over(WAIT, "--env", "MY_TOKEN") as launched:
        up(0, 1, 2)
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not [line for line in lines if b"s3cret-value" in line]
        environ = Path(f"/proc/{launched.pid_of(1)}/environ").read_bytes()
        assert b"MY_TOKEN=s3cret-value" in environ.split(b"\0")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.wait()[0] == 143
    assert "s3cret-value" not in Path("run/plan.json").read_text()


def test_a_killed_rank_is_named_and_ends_all(bed: Testbed, over: Over) -> None:
    launched = over(WAIT, *NO_HELP)
    up(0, 1, 2)
    os.kill(launched.pid_of(1), signal.SIGKILL)
    code, _, err = launched.wait()
    assert code == 137
    assert "rank 1 on node2 failed first: it was killed by signal 9 (SIGKILL" in err
    ends = [(end["rank"], end["signal"], end["asked"]) for end in launched.events("rank_exit")]
    # No collective tells the others: only we do.
    assert ends[0] == (1, 9, False)
    assert sorted(ends[1:]) == [(0, 15, True), (2, 15, True)]


def test_the_agent_on_a_host_is_killed(bed: Testbed, over: Over) -> None:
    launched = over(DETACH + WAIT)
    up(0, 1, 2)
    os.kill(parent_of(launched.pid_of(1)), signal.SIGKILL)
    code, _, err = launched.wait()
    assert code == 77
    assert "dslaunch: the connection to node2 ended: the agent was killed by signal 9; its ranks" in err
    clear(bed)


def test_an_exception_on_one_host(bed: Testbed, over: Over) -> None:
    code, _, err = over("if rank == 2: raise ValueError('on purpose')\ntime.sleep(300)").wait()
    assert code == 1
    assert "rank 2 on node3 failed first: it exited with code 1" in err
    assert "ValueError: on purpose" in err


def test_a_host_that_loses_power(bed: Testbed, over: Over) -> None:
    launched = over(WAIT, *NO_HELP)
    up(0, 1, 2)
    bed.power_off("node3")
    try:
        code, _, err = launched.wait()
        assert code == 77
        assert "node3" in launched.events("host_lost")[0]["host"]
        assert "dslaunch: host node3 was lost" in err
    finally:
        bed.boot("node3")
        bed.wait_until_up("node3")


def test_a_launcher_that_was_put_to_sleep_says_so(bed: Testbed, over: Over) -> None:
    launched = over(WAIT, "--set", "launch.host_timeout_s=3")
    up(0, 1, 2)
    launched.process.send_signal(signal.SIGSTOP)
    clear(bed)  # the agents took it for gone
    launched.process.send_signal(signal.SIGCONT)
    code, _, err = launched.wait()
    assert code == 77
    assert err.count("dslaunch: this launcher did not run for ") == 1
    assert err.index("hosts may have taken it for gone\n") < err.index("its ranks are lost")
    last_block = err[err.index("dslaunch: host node") :]  # the host is not to blame
    assert re.match(r"dslaunch: host .* was lost .*; this launcher did not run for \d+ s\n", last_block)
    assert re.search(r"\n  also lost    node\d, node\d\n", last_block)


def test_a_port_that_is_taken_on_the_first_host(bed: Testbed, over: Over) -> None:
    hold = "import socket, time; s = socket.create_server(('', 29876)); print(flush=True); time.sleep(60)"
    argv = ["ssh", "node1", f'exec {sys.executable} -c "{hold}"']
    with subprocess.Popen([*bed.hub(), *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        code, _, err = over(WAIT, "--master-port", "29876").wait()
        bed.end_programs("node1")
    assert code == 3
    assert re.search(r"host node1: master_port 29876 is taken by process \d+ \(python.*\); nothing", err), err


def test_a_cable_that_is_cut(bed: Testbed, over: Over) -> None:
    # A wrapper that is gone by then, around an ssh that would never give up.
    ssh = 'exec 3<&0; "$ssh" -o ServerAliveInterval=0 "$@" <&3 & exit 0'
    launched = over(WAIT, "--set", "launch.host_timeout_s=3", ssh=ssh)
    up(0, 1, 2)
    bed.cut("node2")
    try:
        code, _, err = launched.wait()
        assert code == 77
        assert "no sign of life from node2 for 3 s" in err
        assert "\n  ranks        rank 1: how it ended is not known\n" in err
        # Behind the cut cable the agent gives up too.
        wait_until(lambda: not bed.programs("node2"), "the agent on node2 stops its rank", 20.0)
    finally:
        bed.plug("node2")


@pytest.mark.parametrize(
    ("number", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_cancel_ends_every_host(bed: Testbed, over: Over, number: int, wanted: int) -> None:
    launched = over(WAIT)
    up(0, 1, 2)
    launched.process.send_signal(number)
    assert launched.wait()[0] == wanted


def test_signals_of_the_launcher(over: Over) -> None:
    check_signals_of_the_launcher(over)


def test_a_launcher_that_watches_hosts_is_not_put_to_sleep(bed: Testbed, over: Over) -> None:
    launched = over(WAIT)
    up(0, 1, 2)
    launched.process.send_signal(signal.SIGTSTP)
    time.sleep(0.5)
    state = Path(f"/proc/{launched.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state != "T"
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait()[0] == 143


def test_a_killed_launcher_leaves_nothing(bed: Testbed, over: Over) -> None:
    launched = over(DETACH + "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT)
    up(0, 1, 2)
    assert all(bed.programs(name) for name in bed.names)
    launched.process.kill()
    launched.process.wait()
    clear(bed, 30.0)


def test_two_jobs_side_by_side(bed: Testbed, over: Over) -> None:
    check_two_jobs_side_by_side(over)


def test_hosts_that_cannot_be_used_are_all_named_and_nothing_starts(bed: Testbed, over: Over) -> None:
    Path("some").write_text("node1 slots=1\nnode2 slots=1\nnowhere slots=1\nnode3:2200 slots=1\n")
    code, _, err = over("touch('started')", hostfile="some").wait()
    assert code == 3
    assert "2 of 4 hosts cannot be used; nothing was started:" in err
    assert "nowhere: " in err
    assert "Could not resolve hostname nowhere" in err
    assert "Connection refused" in err
    assert "--exclude nowhere@node3" in err
    assert not Path("started").exists()


def test_a_program_that_one_host_has_not(bed: Testbed, over: Over, tmp_path: Path) -> None:
    launched = Launched(
        ["--hostfile", "hosts", "--gpu", "cpu"],
        ["/dev/shm/only-here"],
        run_dir=tmp_path / "run",
        prefix=bed.hub(),
    )
    with launched:
        code, _, err = launched.wait()
    assert code == 3
    assert "no program /dev/shm/only-here" in err
    assert "3 of 3 hosts cannot be used; nothing was started:" in err


def test_what_is_doubtful_of_hosts_is_said_before_ranks_start(
    bed: Testbed, over: Over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it in one launch, which starts all the same; no host sees its run directory."""
    for name in bed.names:  # what is installed on each: /dev/shm is a host's own
        metadata = f"lib/python3.11/site-packages/torch-{2 if name == 'node3' else 1}.0.dist-info"
        script = f"mkdir -p /dev/shm/env/bin /dev/shm/env/{metadata}; cp /bin/sh /dev/shm/env/bin/sh"
        subprocess.run([*bed.hub(), "ssh", name, script], check=True, timeout=30)
    Path("some").write_text("node1 slots=1\nnode2 slots=2\nnode3 slots=1\n")
    lock = tmp_path / "ops/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("DSLAUNCH_CACHE", "/proc/cache")
    flags = ["--hostfile", "some", "--gpu", "cpu"]
    command = ["/dev/shm/env/bin/sh", "-c", "echo here; exit $((RANK == 3))"]
    run_dir = Path(f"/dev/shm/{tmp_path.name}-run")
    try:
        with Launched(flags, command, run_dir=run_dir, prefix=bed.hub()) as launched:
            code, _, err = launched.wait()
        read = [sys.executable, "-m", "dslaunch"]
        status = subprocess.run([*read, "status", run_dir], capture_output=True, text=True, check=True)
        logs = subprocess.run([*read, "logs", run_dir], capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        for name in bed.names:
            subprocess.run([*bed.hub(), "ssh", name, "rm -r /dev/shm/env"], check=True, timeout=30)
    assert code == 1, err
    notes = {line.partition(": ")[2] for line in err.splitlines() if line.startswith("dslaunch: note: ")}
    assert "node1, node2, node3: " + UNSEEN.format(run_dir) in err
    assert (
        "dslaunch: note: hosts differ: ranks may hang, or compute something else; --exclude node3 leaves that"
        " out\ndiffers  value  hosts\ntorch    1.0    node1, node2\n         2.0    node3\n"
    ) in err
    for words in (
        "node2: /dev/shm is 1.0 GiB for 2 ranks",
        "node1, node2, node3: cannot write the cache /proc/cache: No such file or directory; set DSLAUNCH",
        f"node1, node2, node3: no process has {lock} open: a killed build left it",
    ):
        assert [note for note in notes if note.startswith(f"note: {words}")], err
    assert len(notes) == 5
    log = f"{run_dir}/logs/rank-3.log"
    assert f"\n  log          node3:{log}\n" in err
    assert f"\nlog      node3:{log}\n" in status.stdout
    assert (logs.returncode, logs.stdout) == (2, "")
    assert f"Error: rank 3 has its log on node3, which does not see this run directory: {log}" in logs.stderr


def test_filters_choose_hosts(bed: Testbed, over: Over) -> None:
    # The end of the agent is the end, whoever else holds the pipes of a wrapper around ssh.
    ssh = 'sleep 300 & exec "$ssh" "$@"'
    code, _, err = over("print(os.uname().nodename)", "--exclude", "node1", ssh=ssh).wait()
    assert code == 0, err
    assert "starting 2 ranks on node2, node3 by ssh" in err
    assert [Path(f"run/logs/rank-{r}.log").read_text() for r in range(2)] == ["node2\n", "node3\n"]


def test_a_lost_host_gives_way_to_a_spare(bed: Testbed, over: Over) -> None:
    wait = "time.sleep(2 if os.environ.get('DSLAUNCH_RESTART_COUNT') else 300)"
    code = f"touch(f'up-{{rank}}-{{os.uname().nodename}}'); {wait}"
    launched = over(code, "--num-nodes", "2", "--max-restarts", "5")
    wait_until(lambda: Path("up-1-node2").exists(), "rank 1 is up on node2")
    bed.power_off("node2")
    try:
        exit_code, _, err = launched.wait()
    finally:
        bed.boot("node2")
        bed.wait_until_up("node2")
    assert exit_code == 0, err
    assert Path("up-1-node3").exists()
    assert [event["left_out"] for event in launched.events("restart")] == [[], ["node2"]]
