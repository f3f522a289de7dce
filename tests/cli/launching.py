"""Start `dslaunch launch` as a command and look at what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dslaunch.core.plan import to_json
from tests.launch.plans import run_plan

HELLO = ("--", sys.executable, "-S", "-c", "import os; print('rank', os.environ['RANK'])")


def dslaunch(
    *argv: str, cwd: Path, command: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", "launch", *argv, *command],
        cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def error_of(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def record(run_dir: Path, *argv: str, **more: Any) -> Path:
    """A run directory with the plan of a training run whose ranks run ``argv``. ``more`` replaces fields."""
    run_dir.mkdir()
    plan = run_plan(run_dir, argv=argv, **more)
    (run_dir / "plan.json").write_text(json.dumps(to_json(plan)))
    return run_dir / "plan.json"
