"""Run Python code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.ranks import REPO_ROOT


def run_python(
    *argv: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """``python ARGV``, e.g. ``"-c", code``, in this environment and ``env``; it imports our tree."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, argv)],
        cwd=REPO_ROOT,
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
