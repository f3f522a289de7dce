"""What the command line costs before it does anything: whole-process CPU seconds.

    python benchmarks/cli.py [--runs 9] [--json]

Rows are run in turn, round after round, so that a busy machine slows all of them
alike; each figure is the median over the rounds of user + system time of the whole
process, start of the interpreter and imports included. Commands that are not
installed are named and left out. Exit code 1 where a limit is broken:
`dslaunch --help` 0.12 s; `dslaunch gen-config` 2 x a process that only imports
click, jinja2, pydantic and yaml; `dslaunch check` 2 x one that imports click. A run file is
checked by resolving and rendering it as gen-config does, with the same libraries and so the same
limit. All are measured in the same rounds, with the bytecode of an installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = ROOT / "examples" / "quickstart.yaml"
CONFIG = ROOT / "tests" / "golden" / "ds_config" / "a100-bf16-accumulation-stage3.json"
SCRIPTS = Path(sys.executable).parent

HELP_LIMIT_S = 0.12
GEN_CONFIG_LIMIT = 2.0  # times the imports alone

HELP = "dslaunch --help"
GEN_CONFIG = "dslaunch gen-config RUN.yaml"
CLICK = "import click"
IMPORTS = "import click, jinja2, pydantic, yaml"
CHECK_LIMIT = 2.0  # times the imports of the libraries that the kind of file needs
# What dslaunch check reads -> (its file, those imports).
CHECKS = {
    "dslaunch check CONFIG.json": (CONFIG, CLICK),
    "dslaunch check HOSTFILE": (ROOT / "hostfiles" / "two-nodes", CLICK),
    "dslaunch check JOB.sh": (None, CLICK),  # written for the measurement
    "dslaunch check RUN.yaml": (RUN_FILE, IMPORTS),
}
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
set -o pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'torchrun --nnodes 2 --node_rank $SLURM_NODEID train.py' | tee log
"""

FLAGS = ["--zero-stage", "2", "--num-gpus-per-node", "2", "--precision", "fp32", "--train-batch-size", "8"]


def commands(script: Path) -> dict[str, list[str]]:
    """Row name -> argv, of everything that is installed. ``script``: where SCRIPT is written."""
    rows = {
        "python -c pass": [sys.executable, "-c", "pass"],
        HELP: [str(SCRIPTS / "dslaunch"), "--help"],
        IMPORTS: [sys.executable, "-c", IMPORTS],
        GEN_CONFIG: [str(SCRIPTS / "dslaunch"), "gen-config", str(RUN_FILE)],
        "dslaunch gen-config (flags)": [str(SCRIPTS / "dslaunch"), "gen-config", *FLAGS, "--lr", "1e-4"],
        CLICK: [sys.executable, "-c", CLICK],
        **{
            name: [str(SCRIPTS / "dslaunch"), "check", str(file or script)]
            for name, (file, _) in CHECKS.items()
        },
        "dslaunch plan RUN.yaml": [str(SCRIPTS / "dslaunch"), "plan", str(RUN_FILE)],
    }
    for name in ("deepspeed", "trl"):
        program = shutil.which(name, path=f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}")
        if program:
            rows[f"{name} --help"] = [program, "--help"]
        else:
            print(f"{name} is not installed: left out", file=sys.stderr)
    return rows


def cpu_seconds(argv: list[str]) -> float:
    """User + system seconds of one whole process and its children. Raises where it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        check=True,
        timeout=300,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


def measure(rows: dict[str, list[str]], runs: int) -> dict[str, list[float]]:
    """``runs`` rounds over all rows, after one round that fills the file cache and is thrown away."""
    for argv in rows.values():
        cpu_seconds(argv)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(runs):
        for name, argv in rows.items():
            seconds[name].append(cpu_seconds(argv))
    return seconds


def broken_limits(median: dict[str, float]) -> list[str]:
    """The limits that these medians break, in words."""
    broken = []
    if median[HELP] > HELP_LIMIT_S:
        broken.append(f"{HELP}: {median[HELP]:.3f} s, limit {HELP_LIMIT_S} s")
    limit = GEN_CONFIG_LIMIT * median[IMPORTS]
    if median[GEN_CONFIG] > limit:
        broken.append(f"{GEN_CONFIG}: {median[GEN_CONFIG]:.3f} s, limit {limit:.3f} s (2 x the imports)")
    for name, (_, imports) in CHECKS.items():
        limit = CHECK_LIMIT * median[imports]
        if median[name] > limit:
            broken.append(f"{name}: {median[name]:.3f} s, limit {limit:.3f} s (2 x the imports)")
    return broken


def report(
    seconds: dict[str, list[float]], broken: list[str], *, title: str, width: int, as_json: bool
) -> int:
    """Print the rows and the limits that they break; the exit code."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    if as_json:
        print(json.dumps({"schema_version": 1, "cpu_seconds": seconds, "median": median, "broken": broken}))
    else:
        print(f"{title:<{width}} {'median':>8} {'least':>8} {'most':>8}")
        for name, values in seconds.items():
            print(f"{name:<{width}} {median[name]:8.3f} {min(values):8.3f} {max(values):8.3f}")
        print("\n".join(f"OVER THE LIMIT  {line}" for line in broken) or "within the limits")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.sh"
        script.write_text(SCRIPT, encoding="utf-8")
        seconds = measure(commands(script), options.runs)
    broken = broken_limits({name: statistics.median(values) for name, values in seconds.items()})
    title = "CPU seconds of the whole process"
    return report(seconds, broken, title=title, width=40, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
