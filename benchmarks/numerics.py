"""Every update of every cell against the float64 oracle: the whole matrix that the tests cover in pairs.

    python benchmarks/numerics.py [--ranks 1|2] [--only TEXT] [--compiled-adam cpu|fused] [--json]

Precision (5) x stage (4) x accumulation (2) x clip (2) x offload (2) x optimizer (2) x straight, rolled
back or resumed (3) x ranks (2), each a course of 17 to 19 steps with overflows, growths, hysteresis and
minimum scale; see tests/train/engine/matrix.py. Cells that differ are printed with step and value.
Exit code 1 where any does. About half an hour on two idle cores.

With --compiled-adam the cells of AdamW run with DeepSpeed's own instead: cpu the 360 that are offloaded,
fused the 480 that are not (FusedAdam as it is compiled for a CPU; CUDA's kernel needs a GPU). They are
compiled first, for a minute or more (TORCH_EXTENSIONS_DIR says where).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.ranks import describe, run_ranks
from tests.train.engine import matrix
from tests.train.engine.matrix import Cell

AT_ONCE = 60  # cells that one set of processes runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="cells of this many ranks alone")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--compiled-adam", choices=tuple(matrix.COMPILED), help="DeepSpeed's own Adam")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    kind = options.compiled_adam
    every = matrix.all_cells() if kind is None else matrix.compiled_cells(kind)
    cells = [c for c in every if options.ranks in (None, c.ranks) and options.only in c.name]
    began, wrong = time.monotonic(), {}
    for ranks in (1, 2):
        chosen = [cell for cell in cells if cell.ranks == ranks]
        for first in range(0, len(chosen), AT_ONCE):
            part = chosen[first : first + AT_ONCE]
            wrong |= run_part(part, ranks)
            done = min(first + AT_ONCE, len(chosen))
            print(f"{ranks} ranks: {done} of {len(chosen)} cells, {len(wrong)} wrong", file=sys.stderr)
    minutes = (time.monotonic() - began) / 60
    if options.json:
        print(json.dumps({"schema_version": 1, "cells": len(cells), "wrong": wrong}))
    else:
        for name, found in wrong.items():
            print(f"{name}: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
        print(f"{len(cells)} cells, {len(wrong)} wrong, {minutes:.0f} min")
    return 1 if wrong else 0


def run_part(cells: list[Cell], ranks: int) -> dict[str, list[str]]:
    """The differences of those cells that have any, on any rank."""
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="numerics-") as folder:
        names = [cell.name for cell in cells]
        argv = ["-W", "ignore", "-m", "tests.train.engine.cases_matrix", folder, *names]
        results = run_ranks(argv, world_size=ranks, timeout_s=3600)
        if any(result.returncode for result in results):
            print(describe(results), file=sys.stderr)
        for rank in range(ranks):
            path = Path(folder, f"rank-{rank}.json")
            measured = json.loads(path.read_text()) if path.exists() else {}
            for cell in cells:
                found = judge(cell, measured.get(f"matrix/{cell.name}"))
                if found:
                    wrong.setdefault(cell.name, found)
    return wrong


def judge(cell: Cell, result: dict | None) -> list[str]:
    if result is None:
        return ["not run"]
    if "error" in result:
        return [result["error"].strip().splitlines()[-1]]
    return matrix.differences(cell, result["value"]["steps"])


if __name__ == "__main__":
    sys.exit(main())
