"""What a launch takes for each host, as benchmarks/launch_scale.py measures it; here of a few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dslaunch.launch.ready import _FILES_PER_AGENT

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/launch_scale.py"


def test_a_host_takes_three_open_files() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--hosts", "3", "6", "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    few, many = json.loads(done.stdout)["rows"]  # its exit code judges times, which say little of so few
    assert (few["hosts"], many["hosts"]) == (3, 6), done.stderr
    assert many["files"] - few["files"] == 3 * _FILES_PER_AGENT
