"""What the engine costs: CPU time of a step with all watches on, over a bare DeepSpeed loop.

    python benchmarks/engine_overhead.py [--steps 40] [--tokens 512] [--json]

Both engines live in one process, on copies of one model (17 million weights in 16 linear layers), and
take turns: each step of the one is followed by one of the other, the first of a pair changing. The
figure is the median over the pairs of the ratio of their CPU times, all threads. Exit code 1 where it
is above 1.03, or where a bare step takes less than 0.3 s (then the model is too small to tell).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

LIMIT, SHORTEST_S = 1.03, 0.3
WIDTH, LAYERS = 512, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps")
    parser.add_argument("--tokens", type=int, default=512, help="rows of the batch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    join_alone()
    rows = [measure(precision, options.steps, options.tokens) for precision in ("fp32", "bf16")]
    for row in rows:
        if not options.json:
            print(
                f"{row['precision']}: bare {row['bare_s']:.3f} s of CPU a step, ours {row['ours_s']:.3f} s, "
                f"ratio {row['ratio']:.4f} (median of {options.steps} pairs; limit {LIMIT})"
            )
    if options.json:
        print(json.dumps({"schema_version": 1, "rows": rows}))
    return 0 if all(row["ratio"] <= LIMIT and row["bare_s"] >= SHORTEST_S for row in rows) else 1


def join_alone() -> None:
    """A process group of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), DS_LOG_LEVEL="error",
    )  # fmt: skip


def measure(precision: str, pairs: int, tokens: int) -> dict[str, Any]:
    import torch

    from dslaunch.train.dist import hold_deepspeeds_prints, init_world
    from dslaunch.train.engine import initialize

    init_world()
    import deepspeed

    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*blocks)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 2**31 - 1,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    bare_model = copy.deepcopy(model)
    with hold_deepspeeds_prints():
        bare = deepspeed.initialize(
            model=bare_model, config=config, model_parameters=list(bare_model.parameters())
        )[0]
    ours = initialize(model, config)
    x = torch.randn(tokens, WIDTH).to(next(model.parameters()).dtype)

    def step_of(engine: Any) -> Callable[[], None]:
        def step() -> None:
            engine.backward(engine(x).float().square().mean())
            engine.step()

        return step

    steps = {"bare": step_of(bare), "ours": step_of(ours)}
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for pair in range(pairs):
        for name in ("bare", "ours") if pair % 2 else ("ours", "bare"):
            began = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - began)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["bare"], strict=True)]
    bare.destroy()
    ours.deepspeed.destroy()
    return {
        "precision": precision,
        "pairs": pairs,
        "bare_s": statistics.median(seconds["bare"]),
        "ours_s": statistics.median(seconds["ours"]),
        "ratio": statistics.median(ratios),
    }


if __name__ == "__main__":
    sys.exit(main())
