"""What 10,000 hosts cost: their hostfile, filters, a Slurm list, the plan and the dry run of a launch.

    python benchmarks/hosts.py [--hosts 10000] [--runs 5] [--json]

Each figure is the median over the rounds of user + system time of the whole process,
as in cli.py. Exit code 1 where a row takes more than 2 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from cli import RUN_FILE, SCRIPTS, measure, report

LIMIT_S = 2.0


def commands(num_hosts: int, folder: Path) -> dict[str, list[str]]:
    """Row name -> argv. Writes the hostfile that they read to ``folder``."""
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"node{i:05d} slots=8\n" for i in range(num_hosts)), encoding="ascii")
    half = "@".join(f"node{i:05d}:0,1" for i in range(0, num_hosts, 2))
    flags = ["--hostfile", str(hostfile), "--gpu", "a100", "--num-gpus-per-node", "8"]
    dry_run = ["launch", "--hostfile", str(hostfile), "--dry-run"]
    command = ["--", "python", "train.py"]
    rows = {
        "launch --hostfile FILE --dry-run": [*dry_run, *command],
        "launch --exclude (half of them) --dry-run": [*dry_run, "--exclude", half, *command],
        "hosts FILE": ["hosts", str(hostfile)],
        "hosts FILE --include (half of them)": ["hosts", str(hostfile), "--include", half],
        "hosts FILE -o FILE": ["hosts", str(hostfile), "-o", "-"],
        "hosts, in a Slurm job": ["hosts"],
        "plan RUN.yaml --hostfile FILE": [
            "plan",
            str(RUN_FILE),
            *flags,
            "--set",
            f"train_batch_size={8 * num_hosts}",
        ],
    }
    return {f"dslaunch {name}": [str(SCRIPTS / "dslaunch"), *argv] for name, argv in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=10_000, help="number of hosts (default 10000)")
    parser.add_argument("--runs", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    os.environ |= {"SLURM_JOB_NODELIST": f"node[00001-{options.hosts:05d}]", "SLURM_GPUS_PER_NODE": "8"}
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(commands(options.hosts, Path(folder)), options.runs)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    broken = [
        f"{name}: {value:.3f} s, limit {LIMIT_S} s" for name, value in median.items() if value > LIMIT_S
    ]
    title = f"CPU seconds, {options.hosts} hosts"
    return report(seconds, broken, title=title, width=52, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
