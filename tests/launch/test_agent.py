"""The node agent alone: what it may use, how it starts, what it does without a supervisor."""

from __future__ import annotations

import ast
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.command import Command
from dslaunch.core.topology import Host
from dslaunch.launch import agent, pdsh
from dslaunch.launch.carried import LOADER, loader_argv, packed_agent
from dslaunch.launch.link import AgentLink
from dslaunch.launch.startup import hint_for
from tests.launch.launching import wait_until
from tests.support.machine import CANNOT_RUN

SOURCE = Path(agent.__file__).read_text(encoding="utf-8")


START = b'{"command": "start", "env": {}, "net": false, "time": "now"}\n'


def orders(tmp_path: Path, argv: list[str], **more: Any) -> bytes:
    value = {
        "protocol": agent.PROTOCOL,
        "host": "here",
        "argv": argv,
        "cwd": str(tmp_path),
        "env": {},
        "visible_devices": None,
        "auto_threads": True,
        "ops_cpu": None,
        "witness": None,
        "cache": {"path": str(tmp_path), "needed": False},
        "packages": [],
        "host_timeout_s": None,
        "meet": None,
        "failure_grace_s": 1.0,
        "checkpoint_grace_s": 1.0,
        "ranks": [{"rank": 0, "env": {}, "log": str(tmp_path / "logs" / "rank-0.log"), "show": "all"}],
        **more,
    }
    return json.dumps(value).encode() + b"\n" + START


def start(source: list[str] | None = None) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-S", *(source or [agent.__file__])]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def events(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line]


def test_it_is_python_3_8() -> None:
    ast.parse(SOURCE, feature_version=(3, 8))
    assert "from __future__ import annotations" in SOURCE  # list[int] is no type at run time in 3.8


def real_python(version: str) -> str:
    """One of this version, by its name or as pyenv keeps it. Skips the test where this machine has none."""
    found = shutil.which(f"python{version}") or ""  # may be a word of pyenv's for one that is not chosen
    kept = sorted(map(str, Path(found).parents[1].glob(f"versions/{version}.*/bin/python"))) if found else []
    for python in [*kept, *filter(None, [found])]:
        if subprocess.run([python, "--version"], capture_output=True, timeout=30).returncode == 0:
            return python
    pytest.skip(f"{CANNOT_RUN}there is no Python {version}")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_an_older_python_is_told_in_words(version: str) -> None:
    python = real_python(version)
    for loader in (LOADER, pdsh._LOADER):
        argv = [python, "-c", loader, "00"]
        done = subprocess.run(argv, input=packed_agent(), capture_output=True, timeout=30)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(f"{python} is Python {version}.".encode())
        assert done.stderr.endswith(b": 3.8 or newer is needed\n")
    assert (hint_for(done.stderr) or "").startswith("have a newer python3 first")


def test_it_runs_under_python_3_8(tmp_path: Path) -> None:
    python = real_python("3.8")
    environ = {"env": {"SAID": "it's %n"}, "packages": ["torch"], "host_timeout_s": 30.0}
    stdin = packed_agent() + orders(tmp_path, ["/bin/sh", "-c", 'echo "$SAID"; exit 7'], **environ)
    with subprocess.Popen(
        [python, "-I", "-S", "-c", LOADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(stdin)
        process.stdin.flush()
        said = events(process.stdout.read())
    assert said[0]["python"].startswith("3.8.")
    assert [event["code"] for event in said if event["event"] == "exit"] == [7]
    assert [event["data"] for event in said if event["event"] == "output"] == ["it's %n\n"]


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
    assert [event["event"] for event in events(out)][:3] == ["hello", "ready", "start"]
    assert events(out)[-1] == {"event": "done", "dropped": 0, "left": []}


def test_a_way_that_hands_no_stdin_on_is_told_in_words() -> None:
    done = subprocess.run(loader_argv(), stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"nothing came on stdin: does ssh -n, StdinNull or a wrapper keep it?\n"


def test_a_stop_comes_between_the_starts_of_many_ranks(tmp_path: Path) -> None:
    rank = {"env": {}, "log": str(tmp_path / "log"), "show": "all"}
    ranks = [{"rank": number, **rank} for number in range(300)]
    process = start()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(orders(tmp_path, ["sh", "-c", "echo up; exec sleep 300"], ranks=ranks))
    process.stdin.flush()
    said = b""
    while b'"output"' not in said:  # comes while others start
        line = process.stdout.readline()
        assert line, said
        said += line
    process.stdin.write(b'{"command": "stop", "grace_s": 5}\n')
    process.stdin.flush()
    happened = events(said + process.stdout.read())
    assert process.wait(30) == 0
    starts = [event["rank"] for event in happened if event["event"] == "start"]
    ends = [(event["rank"], event["code"]) for event in happened if event["event"] == "exit"]
    assert len(starts) < len(ranks)
    assert sorted(ends) == [(number, -signal.SIGTERM) for number in starts]


def test_a_login_that_reads_what_was_meant_for_us_is_told_in_words(tmp_path: Path) -> None:
    """`read` takes the first line, and others a part of it."""
    sent = packed_agent() + orders(tmp_path, ["true"])
    for left in (sent[len(packed_agent()) :], sent[1:], sent[20000:]):
        done = subprocess.run(loader_argv(), input=left, capture_output=True, timeout=30)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"a part of stdin was taken there: does a login script (.bashrc)")


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
    wanted = {"slots": ["2"], "of": ["2"], "variable": None}
    line = orders(tmp_path, ["touch", "started"], visible_devices=wanted, env={"CUDA_VISIBLE_DEVICES": "5"})
    process = start()
    out, _ = process.communicate(line, timeout=30)
    assert process.returncode == 3
    refused = [event for event in events(out) if event["event"] == "refused"]
    assert refused[0]["message"] == "slot 2 of 2 is not among the 1 devices visible here (5)"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("lacks", ["cache", "witness"])
def test_what_the_ranks_need_and_what_they_can_do_without(tmp_path: Path, lacks: str) -> None:
    for needed in (True, False):
        wanted: dict[str, Any] = {"path": "/proc/nothing", "needed": needed}
        wanted |= {"text": "x"} if lacks == "witness" else {}
        out, _ = start().communicate(orders(tmp_path, ["true"], **{lacks: wanted}), timeout=30)
        said = {event["event"]: event for event in events(out)}
        assert ("refused" in said, "start" in said) == (needed, not needed)
        if needed:
            what = {"cache": "cannot write the cache /proc/nothing: {}",
                    "witness": "the run directory /proc of the launcher is not seen there ({})"}  # fmt: skip
            assert said["refused"]["message"] == what[lacks].format("No such file or directory")
        else:
            assert (said["ready"]["unseen"] is not None) == (lacks == "witness")
            assert (said["ready"]["surroundings"]["cache"]["problem"] is not None) == (lacks == "cache")


def test_it_is_ready_soon_though_it_looks_around(tmp_path: Path) -> None:
    """CPU time: on a busy machine the other says nothing. Without a bytecode cache it compiles itself."""
    process = start()
    process.communicate(orders(tmp_path, ["true"]), timeout=30)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        start().communicate(orders(tmp_path, ["true"], packages=["torch", "deepspeed"]), timeout=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 3 < 0.5


def test_nothing_is_started_for_a_supervisor_that_is_gone(tmp_path: Path) -> None:
    ranks = [
        {"rank": rank, "env": {}, "log": str(tmp_path / f"{rank}.log"), "show": "all"} for rank in range(3)
    ]
    read_fd, write_fd = os.pipe()
    os.close(read_fd)  # what the agent says first finds no reader
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", agent.__file__], stdin=subprocess.PIPE, stdout=write_fd
    )
    os.close(write_fd)
    assert process.stdin is not None
    process.stdin.write(orders(tmp_path, ["bash", "-c", "touch started-$$; sleep 300"], ranks=ranks))
    process.stdin.flush()
    assert process.wait(30) == 0
    process.stdin.close()
    assert list(tmp_path.glob("started-*")) == []


def test_commands_reach_the_agent_whole(tmp_path: Path) -> None:
    # Signals cut a write to a full pipe short: the agent here takes none for a while.
    script = 'sleep 0.5; cat > "$0"'
    data = os.urandom(1 << 20)
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        link = AgentLink(
            Host(name="x", slots=("0",)),
            Command(argv=("bash", "-c", script, str(tmp_path / "got")), stdin=data),
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    link.close(30.0)
    assert (tmp_path / "got").read_bytes() == data


def test_descriptors_may_have_large_numbers() -> None:
    """select.select knows none above 1023; the pipes of the 340th host are."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    held = [os.dup(0) for _ in range(1100)]
    try:
        link = AgentLink(Host(name="x", slots=("0",)), Command(argv=("sh", "-c", "echo bye >&2")))
        assert link.stderr_fd > 1023
        link.drain_stderr()
        link.close(30.0)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert link.stderr == b"bye\n"


def test_an_acknowledgement_waits_until_it_is_worth_it(tmp_path: Path) -> None:
    link = AgentLink(
        Host(name="x", slots=("0",)), Command(argv=("bash", "-c", 'cat > "$0"', str(tmp_path / "got")))
    )
    assert not link.note_written(40_000)
    link.send_ack()
    assert link.note_written(40_000)
    link.send_ack()
    link.send_ack()
    link.close(30.0)
    assert (tmp_path / "got").read_text() == '{"command": "ack", "bytes": 80000}\n'


@pytest.mark.parametrize(("ranks", "threads"), [(1, b"12"), (3, b"4"), (5, b"2"), (64, b"1")])
def test_threads_are_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, threads: bytes
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(agent, "usable_cores", lambda: 12)
    each = [{"rank": n, "env": {}, "log": str(tmp_path / f"{n}.log"), "show": "all"} for n in range(ranks)]
    _, env, _ = agent.Agent(json.loads(orders(tmp_path, ["true"], ranks=each).splitlines()[0]), b"").prepare()
    assert env[b"OMP_NUM_THREADS"] == threads


def v1(folder: str, quota: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


V1 = "12:cpu,cpuacct:/job\n3:memory:/job\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (None, {}, 8),
        ("", {}, 8),
        ("0::/a/b\n", {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"cpu.max": "400000 100000\n"}, 4),  # a container's own, under another path
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "1600000 100000\n"}, 8),
        (V1, {}, 8),
        (V1, v1("cpu,cpuacct/job", -1), 8),
        (V1, v1("cpu,cpuacct/job", 350000), 3),
        (V1, v1("cpu", 200000), 2),
        (V1 + "0::/x\n", {"unified/x/cpu.max": "100000 100000\n"}, 1),
        ("4:memory:/job\n", v1("cpu/job", 100000), 8),
    ],
)
def test_threads_are_cut_by_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str | None, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "proc/self").mkdir(parents=True)
    if cgroup is not None:
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
    write_cgroups(tmp_path, files)
    assert agent.usable_cores(str(tmp_path)) == cores


def write_cgroups(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "vmstat", "limit", "kills"),
    [
        ("0::/a/b\n", {}, None, None, None),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.events": "oom 9\noom_kill 2\n"}, 5, None, 2),
        ("0::/a/b\n", {"a/memory.max": "4096\n", "a/b/memory.max": "8192\n"}, 5, 4096, 5),
        ("0::/\n", {"memory.max": "4096\n", "memory.events": "oom_kill 0\n"}, 5, 4096, 0),
        (
            V1,
            {
                "memory/job/memory.limit_in_bytes": "2048\n",
                "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            },
            5,
            2048,
            3,
        ),
    ],
)
def test_what_the_kernel_says_of_memory(
    tmp_path: Path,
    cgroup: str,
    files: dict[str, str],
    vmstat: int | None,
    limit: int | None,
    kills: int | None,
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    if vmstat is not None:
        (tmp_path / "proc/vmstat").write_text(f"nr_free_pages 1\noom_kill {vmstat}\nother 1\n")
    write_cgroups(tmp_path, files)
    assert agent.memory_limit(str(tmp_path)) == limit
    assert agent.oom_kills(str(tmp_path)) == kills


@pytest.mark.parametrize(
    ("there", "given", "expected"),
    [
        ([], [], "CUDA_VISIBLE_DEVICES"),
        ([], ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES"),
        (["proc/driver/nvidia/gpus", "dev/kfd"], ["HIP_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES"),
        (["dev/kfd"], [], "HIP_VISIBLE_DEVICES"),
        (["dev/kfd"], ["ROCR_VISIBLE_DEVICES"], "ROCR_VISIBLE_DEVICES"),
        (["dev/kfd"], ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES"),
        (["dev/kfd"], ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"], "HIP_VISIBLE_DEVICES"),
    ],
)
def test_ids_go_back_to_the_variable_that_they_are_counted_in(
    tmp_path: Path, there: list[str], given: list[str], expected: str
) -> None:
    for name in there:
        (tmp_path / name).mkdir(parents=True)
    env = {name.encode(): b"2,3" for name in given}
    assert agent.device_variable(env, str(tmp_path)) == expected.encode()


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


def test_native_code_is_told_apart_by_the_first_core(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    first = "processor : 0\nflags : fpu avx2\nmodel name : Some CPU @ 2: fast\n"
    (tmp_path / "proc/cpuinfo").write_text(first + "\nprocessor : 1\nmodel name : Another\n")
    assert agent.cpu_model(str(tmp_path)).splitlines()[1:] == [
        "flags=fpu avx2",
        "model name=Some CPU @ 2: fast",
    ]
    assert agent.cpu_model(str(tmp_path / "nothing")) == os.uname().machine
