"""Launching on several hosts: `dslaunch launch` beside the `deepspeed` command and torchrun, in one run.

    python benchmarks/launch.py [--hosts 3] [--rounds 3] [--json]

Real ssh hosts in network namespaces of this machine (tests/testbed; needs root, sshd and pdsh).
Each launcher starts a script that imports nothing on one rank of each host. Seconds, medians over
the rounds:

    started       from the command to the last rank's first line
    ended         from the command to its end, for a script that only prints
    kill a rank   from SIGKILL of rank 1, while no rank communicates, to the launcher's end
    Ctrl-C        from SIGINT of the launcher to its end
    kill it       nothing to time: how many of the ranks live on 10 s after SIGKILL of the launcher

with the exit code, and what is left on the hosts 2 s after the end. `> N` is a launcher that had
not ended after N seconds. Exit code 1 where dslaunch takes more than a third of deepspeed's time
to start the ranks, or leaves anything behind.
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

PATIENCE_S = 40.0
SCRIPT = """\
import os, sys, time
open(os.path.join(sys.argv[1], 'up-' + os.environ['RANK']), 'w').write(str(os.getpid()))
print('rank', os.environ['RANK'], flush=True)
time.sleep(float(sys.argv[2]))
"""


@dataclass
class Case:
    """One launch of one launcher."""

    bed: Testbed
    folder: Path

    def words(self, launcher: str, seconds: float) -> list[str]:
        script = [str(self.folder / "script.py"), str(self.folder), str(seconds)]
        hostfile = str(self.folder / "hosts")
        if launcher == "dslaunch":
            run = ["-m", "dslaunch", "launch", "--hostfile", hostfile, "--gpu", "cpu"]
            return [
                sys.executable,
                *run,
                "--run-dir",
                str(self.folder / "run"),
                "--",
                sys.executable,
                *script,
            ]
        if launcher == "deepspeed":
            return [
                shutil.which("deepspeed") or "deepspeed",
                "--hostfile",
                hostfile,
                "--no_local_rank",
                *script,
            ]
        return ["bash", str(self.folder / "torchrun.sh"), *script]

    def start(self, launcher: str, seconds: float) -> subprocess.Popen[bytes]:
        for old in self.folder.glob("up-*"):
            old.unlink()
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        log = (self.folder / "log").open("wb")
        with log:
            return subprocess.Popen(
                [*self.bed.hub(), *self.words(launcher, seconds)], env=environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ranks(self) -> list[Path]:
        return list(self.folder.glob("up-*"))

    def wait_for_ranks(self, process: subprocess.Popen[bytes]) -> None:
        wait(lambda: len(self.ranks()) == len(self.bed.names), PATIENCE_S * 3, process, self.folder / "log")

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
    lines = ["trap 'kill $(jobs -p)' EXIT INT TERM"]
    for rank, name in enumerate(bed.names):
        python = f"env DS_ACCELERATOR=cpu {sys.executable} -m torch.distributed.run"
        flags = f"--nnodes={len(bed.names)} --nproc-per-node=1 --node-rank={rank}"
        where = f"--master-addr={bed.address(bed.names[0])} --master-port=29533"
        lines.append(f'ssh -tt {name} "cd $PWD && {python} {flags} {where} $*" &')
    return "\n".join([*lines, "wait -n; code=$?; exit $code", ""])


def wait(done: Callable[[], bool], limit_s: float, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline or process.poll() not in (None, 0):
            sys.exit(f"the ranks did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.01)


def until_end(process: subprocess.Popen[bytes]) -> float | None:
    """Seconds from now to its end; None where it outlives our patience."""
    begin = time.monotonic()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - begin


def measure(case: Case, launcher: str) -> dict[str, object]:
    begin = time.monotonic()
    process = case.start(launcher, 0)
    case.wait_for_ranks(process)
    found: dict[str, object] = {"started": time.monotonic() - begin}
    ended = until_end(process)
    found["ended"] = None if ended is None else time.monotonic() - begin
    case.clear(process)
    for name, fault in (("kill a rank", kill_rank), ("Ctrl-C", interrupt)):
        process = case.start(launcher, 600)
        case.wait_for_ranks(process)
        time.sleep(1)
        fault(case, process)
        found[name] = until_end(process)
        found[f"{name}: exit code"] = process.returncode
        time.sleep(2)
        found[f"{name}: left"] = case.left()
        case.clear(process)
    process = case.start(launcher, 600)
    case.wait_for_ranks(process)
    process.kill()  # the launcher itself: the words before it exec it
    time.sleep(10)
    found["kill it: left"] = case.left()
    case.clear(process)
    return found


def kill_rank(case: Case, process: subprocess.Popen[bytes]) -> None:
    for pid in case.bed.pids(case.bed.names[1]):
        with suppress(OSError):
            if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def interrupt(case: Case, process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, object]]] = {"dslaunch": [], "deepspeed": [], "torchrun": []}
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        (folder / "bed").mkdir()
        with Testbed(arguments.hosts, folder / "bed") as bed:
            (folder / "script.py").write_text(SCRIPT)
            (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in bed.names))
            (folder / "torchrun.sh").write_text(torchrun_script(bed))
            for _ in range(arguments.rounds):
                for launcher in rows:
                    rows[launcher].append(measure(Case(bed, folder), launcher))
    return report(rows, arguments.json)


def report(rows: dict[str, list[dict[str, object]]], as_json: bool) -> int:
    table = {
        launcher: {key: middle([r[key] for r in rounds]) for key in rounds[0]}
        for launcher, rounds in rows.items()
    }
    if as_json:
        print(json.dumps({"schema_version": 1, "rounds": rows, "medians": table}, indent=2))
    else:
        for key in table["dslaunch"]:
            print(
                f"{key:24}"
                + "".join(f"{launcher} {shown(row[key]):>10}   " for launcher, row in table.items())
            )
    ours, theirs = table["dslaunch"], table["deepspeed"]
    slow = float(str(ours["started"])) > float(str(theirs["started"])) / 3
    return int(slow or any(ours[key] for key in ours if key.endswith("left")))


def middle(values: list[object]) -> object:
    numbers = [value for value in values if isinstance(value, (int, float))]
    return statistics.median(numbers) if len(numbers) == len(values) else None


def shown(value: object) -> str:
    if value is None:
        return f"> {PATIENCE_S:g}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
