"""Every cell of docs/adapters.md: what is trained x weights x precision x ZeRO stage, on two real ranks.

    python benchmarks/adapters.py [--only TEXT] [--json FILE]

Trains three steps of SGD on a tiny model with odd sizes in each, stage 3 with every weight gathered where it
is used, and compares the trained weights with float64 on the values that the codes stand for. What is refused
in run files is run all the same. Prints one line a cell, and exits 1 where one that is let through is further
off than its precision's digits, or does not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

KINDS = (
    "lora",
    "dora",
    "nf4",
    "nf4-single",
    "fp4",
    "on-disk",
    "gguf",
    "rslora",
    "qdora",
    "int8",
    "int8-dora",
)
PRECISIONS = ("fp32", "bf16", "fp16")
CELLS = [(kind, precision, stage) for kind in KINDS for precision in PRECISIONS for stage in range(4)]


def is_refused(kind: str, stage: int) -> bool:
    """Whether a run file with it is refused on CPUs, and its failure expected here."""
    return (kind == "qdora" and stage == 3) or kind == "int8-dora"


def worker(out: Path, models: Path, only: str) -> None:
    """One rank: every cell, its distance from the oracle or its error."""
    import gc

    from tests.train import rank_quantised as cells

    cells.OUT, cells.MODELS = out, models
    found: dict[str, Any] = {}
    for cell in CELLS:
        name = "/".join(map(str, cell))
        if only not in name:
            continue
        try:
            found[name] = cells.run_of(*cell).get("away")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        gc.collect()
        (out / f"rank-{cells.RANK}.json").write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name holds this text, such as nf4/bf16")
    parser.add_argument("--json", type=Path, help="write every number here as well")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker, args.only)
        return 0
    from tests.support.ranks import check_ranks, run_ranks
    from tests.train.test_quantization import CLOSE, make_models

    with tempfile.TemporaryDirectory() as folder:
        models, out = make_models(Path(folder, "models")), Path(folder, "out")
        out.mkdir()
        argv = [__file__, "--worker", out, models, "--only", args.only]
        check_ranks(run_ranks(argv, world_size=2, timeout_s=3600))
        found = json.loads((out / "rank-0.json").read_text())
    wrong = 0
    for name, away in found.items():
        kind, precision, stage = name.split("/")
        right = isinstance(away, float) and away < CLOSE[precision]
        refused = is_refused(kind, int(stage))
        wrong += not right and not refused
        said = f"{away:.1e} of the way" if isinstance(away, float) else away
        print(f"{'ok' if right else 'refused' if refused else 'WRONG':<8}{name:<24}{said}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
