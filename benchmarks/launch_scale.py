"""What a launch over many hosts costs the machine that it is started on.

    python benchmarks/launch_scale.py [--hosts 25 50 100 200] [--json]

The real supervisor starts a real agent for each of so many hosts, all of them processes of this
machine under invented names, with one rank each that only sleeps. When all ranks are up the launch
is cancelled. With --ssh (root and sshd are needed) they are started by real ssh clients, all through
one sshd in a network namespace (tests/testbed).

    start         CPU seconds of the supervisor until all ranks are up
    end           CPU seconds of the supervisor from the cancel to its end
    theirs        CPU seconds of all agents with their ranks; with --ssh of the ssh clients
    their memory  what they take together once all ranks are up, shared pages counted once
    wall          seconds until all ranks are up: of this machine, which is every host at once
    memory        peak resident memory of the supervisor
    files         open files of the supervisor

The cost per host is the slope between the two largest numbers of hosts; what it makes of 1,000 and
10,000 hosts is said below the table. Exit code 1 where the slope grew by more than half from the two
smallest to the two largest numbers of hosts: something then grows faster than the number of hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dslaunch.core.command import Command  # noqa: E402
from dslaunch.core.plan import LaunchPlan  # noqa: E402
from dslaunch.core.topology import Host, Topology  # noqa: E402
from dslaunch.launch import local, ssh, startup  # noqa: E402
from dslaunch.launch.supervisor import supervise  # noqa: E402

LINEAR = 1.5
GUESSES = (1_000, 10_000)


class Meter:
    """Takes the events of a launch; cancels it once every rank is up."""

    def __init__(self, num_ranks: int) -> None:
        self.left = num_ranks
        self.began = time.monotonic()
        self.cpu_before = time.process_time()
        self.found: dict[str, Any] = {"hosts": num_ranks}

    def write(self, kind: str, **fields: Any) -> None:
        if kind != "rank_start":
            return
        self.left -= 1
        if self.left == 0:
            self.found["wall"] = time.monotonic() - self.began
            self.found["start"] = time.process_time() - self.cpu_before
            self.found["files"] = len(os.listdir("/proc/self/fd"))
            self.found["their_memory"] = children_memory()
            os.kill(os.getpid(), signal.SIGTERM)


def children_memory() -> float:
    """MiB of this process' children."""
    me, total = os.getpid(), 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == me:
                rollup = (entry / "smaps_rollup").read_text()
                total += int(rollup.partition("Pss:")[2].split()[0])
    return total / 1024


def run_one(num_hosts: int, folder: Path, server: str | None) -> dict[str, Any]:
    """One launch, in this process; ``server``: the name that ssh goes to for every host."""
    names = [f"host{i:05}.invalid" for i in range(num_hosts)]

    def build(
        host: Host, orders: dict[str, Any], environ: Mapping[str, str], within: Sequence[str]
    ) -> Command:
        if server is None:
            return local.build_agent_command(host, orders, environ)
        return ssh.build_agent_command(dataclasses.replace(host, name=server), orders, environ)

    startup.LAUNCHERS["ssh"] = build  # type: ignore[index]
    plan = LaunchPlan(
        argv=("/bin/sleep", "600"), cwd=str(folder), run_dir=str(folder / f"run-{num_hosts}"), via="ssh",
        topology=Topology(hosts=tuple(Host(name=name, slots=("0",)) for name in names)),
        master_addr="127.0.0.2", host_timeout_s=600.0,  # each is this machine; 127.0.0.1 is refused
    )  # fmt: skip
    Path(plan.run_dir).mkdir()
    meter = Meter(num_hosts)
    with open(os.devnull, "wb") as null:
        supervise(plan, events=meter, out=null, err=null)  # type: ignore[arg-type]
    if meter.left:
        sys.exit(f"{meter.left} of {num_hosts} ranks did not start")
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    meter.found["end"] = time.process_time() - meter.cpu_before - meter.found["start"]
    meter.found["theirs"] = children.ru_utime + children.ru_stime
    meter.found["memory"] = own.ru_maxrss / 1024
    return meter.found


def measure(num_hosts: int, folder: Path, prefix: list[str], server: str | None) -> dict[str, Any]:
    """One launch, in a process of its own."""
    argv = [*prefix, sys.executable, __file__, "--one", str(num_hosts), "--folder", str(folder)]
    argv += [] if server is None else ["--server", server]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=1200)
    if done.returncode:
        sys.exit(f"failed: {shlex.join(argv)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def over_ssh(numbers: list[int], folder: Path) -> list[dict[str, Any]]:
    from tests.testbed.hosts import Testbed

    (folder / "bed").mkdir()
    with Testbed(1, folder / "bed") as bed:
        return [measure(number, folder, bed.hub(), bed.names[0]) for number in numbers]


def slope(rows: list[dict[str, Any]], key: str) -> float:
    few, many = rows
    return float((many[key] - few[key]) / (many["hosts"] - few["hosts"]))


def report(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'hosts':>6}{'start':>9}{'end':>9}{'wall':>9}{'memory':>11}{'files':>7}{'theirs':>10}  their memory"
    )
    for row in rows:
        print(
            f"{row['hosts']:>6}{row['start']:>7.2f} s{row['end']:>7.2f} s{row['wall']:>7.2f} s"
            f"{row['memory']:>7.1f} MiB{row['files']:>7}{row['theirs']:>8.2f} s"
            f"{row['their_memory']:>10.1f} MiB"
        )
    last = rows[-2:]
    cpu_s = slope(last, "start") + slope(last, "end")
    print(
        f"per host: {1000 * cpu_s:.2f} ms of CPU, {1024 * slope(last, 'memory'):.0f} KiB, "
        f"{slope(last, 'files'):.1f} files; the other process {1000 * slope(last, 'theirs'):.0f} ms of CPU, "
        f"{slope(last, 'their_memory'):.1f} MiB"
    )
    for number in GUESSES:
        guess = {
            key: rows[-1][key] + (number - rows[-1]["hosts"]) * slope(last, key)
            for key in ("start", "memory", "files", "theirs", "their_memory")
        }
        print(
            f"{number:>6} hosts: {guess['start']:.1f} s of CPU to start, {guess['memory']:.0f} MiB, "
            f"{guess['files']:.0f} open files; the other processes {guess['theirs']:.0f} s of CPU, "
            f"{guess['their_memory'] / 1024:.1f} GiB"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--ssh", action="store_true")
    parser.add_argument("--json", action="store_true")
    for name, kind in (("--one", int), ("--folder", Path), ("--server", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_one(options.one, options.folder, options.server)))
        return 0
    with tempfile.TemporaryDirectory(prefix="launch-scale-") as name:
        if options.ssh:
            rows = over_ssh(options.hosts, Path(name))
        else:
            rows = [measure(number, Path(name), [], None) for number in options.hosts]
    if options.json:
        print(json.dumps({"schema_version": 1, "rows": rows}))
    else:
        report(rows)
    grew = slope(rows[-2:], "start") / slope(rows[:2], "start")
    if not options.json:
        print(f"the cost of a further host grew {grew:.2f} x (limit {LINEAR} x)")
    return int(grew > LINEAR)


if __name__ == "__main__":
    sys.exit(main())
