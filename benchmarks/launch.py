"""Launching on several hosts: `dslaunch launch` beside the `deepspeed` command and torchrun, in one run.

    python benchmarks/launch.py [--hosts 3] [--rounds 1] [--patience 60] [--only FAULT ...] [--json]

Real ssh hosts in network namespaces of this machine (tests/testbed; needs root, sshd and pdsh).
Each launcher starts a script on one rank of each host. Seconds, medians over the rounds:

    started       from the command to the last rank's first line
    ended         from the command to its end, for a script that only prints

and for each fault the seconds from it to the launcher's end, its exit code, and how many processes
are left on the hosts 2 s after that (of a cut cable: 10 s). `> 60` is a launcher that had not ended after
`--patience` seconds; what is left is counted then. Ranks only sleep, except for `in a collective`, where
they call all_reduce (gloo) without end. Exit code 1 where dslaunch takes more than a third of deepspeed's
time to start
the ranks, does not end, or leaves anything behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.testbed.hosts import Testbed  # noqa: E402

START_S = 180.0  # for all ranks to be up, on a busy machine
SCRIPT = """\
import os, sys, time
folder, seconds, talks = sys.argv[1], float(sys.argv[2]), sys.argv[3] == 'talks'
rank = os.environ['RANK']
if talks:
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'eth0')
    import torch
    torch.distributed.init_process_group('gloo')
    torch.distributed.all_reduce(torch.ones(1))
open(os.path.join(folder, 'up-' + rank), 'w').write(str(os.getpid()))
print('rank', rank, flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    if talks:
        torch.distributed.all_reduce(torch.ones(1 << 16))
    elif os.path.exists(os.path.join(folder, 'raise-' + rank)):
        raise ValueError('on purpose')
    else:
        time.sleep(0.05)
"""


@dataclass
class Case:
    """One launch of one launcher."""

    bed: Testbed
    folder: Path
    patience_s: float

    def words(self, launcher: str, seconds: float, talks: bool) -> list[str]:
        script = [str(self.folder / "script.py"), str(self.folder), str(seconds), "talks" if talks else "-"]
        hostfile = str(self.folder / "hosts")
        if launcher == "dslaunch":
            flags = ["--hostfile", hostfile, "--gpu", "cpu", "--run-dir", str(self.folder / "run")]
            return [sys.executable, "-m", "dslaunch", "launch", *flags, "--", sys.executable, *script]
        if launcher == "deepspeed":
            program = shutil.which("deepspeed") or "deepspeed"
            return [program, "--hostfile", hostfile, "--no_local_rank", *script]
        return ["bash", str(self.folder / "torchrun.sh"), *script]

    def start(self, launcher: str, seconds: float, *, talks: bool = False) -> subprocess.Popen[bytes]:
        for old in (*self.folder.glob("up-*"), *self.folder.glob("raise-*")):
            old.unlink()
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        log = (self.folder / "log").open("wb")
        with log:
            return subprocess.Popen(
                [*self.bed.hub(), *self.words(launcher, seconds, talks)], env=environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # of use under nohup, too
            )  # fmt: skip

    def wait_for_ranks(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while len(list(self.folder.glob("up-*"))) < len(self.bed.names):
            if time.monotonic() > deadline or process.poll() not in (None, 0):
                said = (self.folder / "log").read_text(errors="replace")[-3000:]
                sys.exit(f"the ranks did not start:\n{said}")
            time.sleep(0.01)

    def until_end(self, process: subprocess.Popen[bytes]) -> float | None:
        """Seconds from now to its end; None where it outlives our patience."""
        begin = time.monotonic()
        try:
            process.wait(self.patience_s)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - begin

    def left(self) -> int:
        return sum(len(self.bed.programs(name)) for name in self.bed.names)

    def clear(self, process: subprocess.Popen[bytes]) -> None:
        """End what a launcher left: all processes of the hosts but their sshd."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name in self.bed.names:
            self.bed.end_programs(name)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": path,
    }


def torchrun_script(bed: Testbed) -> str:
    """What people write to start torchrun on every host."""
    lines = ["trap 'kill $(jobs -p)' EXIT INT TERM HUP"]
    for rank, name in enumerate(bed.names):
        python = f"env DS_ACCELERATOR=cpu {sys.executable} -m torch.distributed.run"
        flags = f"--nnodes={len(bed.names)} --nproc-per-node=1 --node-rank={rank}"
        where = f"--master-addr={bed.address(bed.names[0])} --master-port=29533"
        lines.append(f'ssh -tt {name} "cd $PWD && {python} {flags} {where} $*" &')
    return "\n".join([*lines, "wait -n; code=$?; exit $code", ""])


# --- faults -----------------------------------------------------------------------------------------


def kill_rank(case: Case, process: subprocess.Popen[bytes]) -> None:
    for pid in case.bed.pids(case.bed.names[1]):
        with suppress(OSError):
            if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def fail(case: Case, process: subprocess.Popen[bytes]) -> None:
    (case.folder / "raise-1").touch()


def cut(case: Case, process: subprocess.Popen[bytes]) -> None:
    case.bed.cut(case.bed.names[1])


def plug(case: Case) -> None:
    case.bed.plug(case.bed.names[1])


def power_off(case: Case, process: subprocess.Popen[bytes]) -> None:
    case.bed.power_off(case.bed.names[-1])


def power_on(case: Case) -> None:
    case.bed.boot(case.bed.names[-1])
    case.bed.wait_until_up(case.bed.names[-1])


def signal_group(number: int) -> Callable[[Case, subprocess.Popen[bytes]], None]:
    """As a terminal does."""
    return lambda case, process: os.killpg(process.pid, number)


def signal_launcher(number: int) -> Callable[[Case, subprocess.Popen[bytes]], None]:
    return lambda case, process: process.send_signal(number)  # the words before it exec it


@dataclass
class Fault:
    do: Callable[[Case, subprocess.Popen[bytes]], None]
    talks: bool = False  # ranks are in collectives
    undo: Callable[[Case], None] | None = None
    look_after_s: float = 2.0


FAULTS = {
    "SIGKILL of a rank": Fault(kill_rank),
    "SIGKILL in a collective": Fault(kill_rank, talks=True),
    "exception": Fault(fail),
    "cable cut": Fault(cut, undo=plug, look_after_s=10.0),
    "power off": Fault(power_off, undo=power_on),
    "Ctrl-C": Fault(signal_group(signal.SIGINT)),
    "TERM": Fault(signal_launcher(signal.SIGTERM)),
    "HUP": Fault(signal_group(signal.SIGHUP)),
    "KILL of the launcher": Fault(signal_launcher(signal.SIGKILL), look_after_s=10.0),
}


def measure_start(case: Case, launcher: str) -> dict[str, object]:
    begin = time.monotonic()
    process = case.start(launcher, 0)
    case.wait_for_ranks(process)
    started = time.monotonic() - begin
    ended = case.until_end(process)
    case.clear(process)
    return {"started": started, "ended": None if ended is None else started + ended}


def measure_fault(case: Case, launcher: str, fault: Fault) -> dict[str, object]:
    process = case.start(launcher, 600, talks=fault.talks)
    try:
        case.wait_for_ranks(process)
        time.sleep(1)
        fault.do(case, process)
        seconds = case.until_end(process)
        code = process.poll()
        time.sleep(fault.look_after_s)
        return {"seconds": seconds, "exit code": code, "left": case.left()}
    finally:
        case.clear(process)
        if fault.undo is not None:
            fault.undo(case)


def measure(case: Case, launcher: str, faults: list[str]) -> dict[str, object]:
    found = measure_start(case, launcher)
    for name in faults:
        for key, value in measure_fault(case, launcher, FAULTS[name]).items():
            found[f"{name}: {key}"] = value
        print(f"{launcher}: {name}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, object]]] = {"dslaunch": [], "deepspeed": [], "torchrun": []}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        (folder / "bed").mkdir()
        with Testbed(arguments.hosts, folder / "bed") as bed:
            (folder / "script.py").write_text(SCRIPT)
            (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in bed.names))
            (folder / "torchrun.sh").write_text(torchrun_script(bed))
            for _ in range(arguments.rounds):
                for launcher in rows:
                    rows[launcher].append(
                        measure(Case(bed, folder, arguments.patience), launcher, arguments.only)
                    )
                    loads.append(os.getloadavg()[0])
    return report(rows, loads, arguments)


def report(
    rows: dict[str, list[dict[str, object]]], loads: list[float], arguments: argparse.Namespace
) -> int:
    table = {
        launcher: {key: middle([r[key] for r in rounds]) for key in rounds[0]}
        for launcher, rounds in rows.items()
    }
    machine = f"{os.cpu_count()} cores, load {min(loads):.1f} to {max(loads):.1f}"
    if arguments.json:
        whole = {"schema_version": 1, "machine": machine, "rounds": rows, "medians": table}
        print(json.dumps(whole, indent=2))
    else:
        print(machine)
        print(f"{'':34}" + "".join(f"{launcher:>12}" for launcher in table))
        for key in table["dslaunch"]:
            cells = (shown(row[key], key, arguments.patience) for row in table.values())
            print(f"{key:34}" + "".join(f"{cell:>12}" for cell in cells))
    ours, theirs = table["dslaunch"], table["deepspeed"]
    slow = float(str(ours["started"])) > float(str(theirs["started"])) / 3
    hangs = any(value is None for value in ours.values())
    return int(slow or hangs or any(ours[key] for key in ours if key.endswith("left")))


def middle(values: list[object]) -> object:
    numbers = [value for value in values if isinstance(value, (int, float))]
    return statistics.median(numbers) if len(numbers) == len(values) else None


def shown(value: object, key: str, patience_s: float) -> str:
    if value is None:
        return "-" if key.endswith("code") else f"> {patience_s:g}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
