"""A worker whose rank 1 sends itself a signal once two steps are in metrics.jsonl.

``rank_signals.py SIGNAL --plan PLAN.json``: the rest is the worker's command line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from dslaunch.train.worker import main


def signal_at_step_2(metrics: Path, number: int) -> None:
    while not (metrics.exists() and b'"step": 2,' in metrics.read_bytes()):
        time.sleep(0.01)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        metrics_file = Path(sys.argv[3]).parent / "metrics.jsonl"
        number = signal.Signals[sys.argv[1]]
        threading.Thread(target=signal_at_step_2, args=(metrics_file, number), daemon=True).start()
    sys.exit(main(sys.argv[2:]))
