"""What the engine costs: CPU time of a step with all watches on, over a bare DeepSpeed loop.

    python benchmarks/engine_overhead.py [--rounds 3] [--steps 20] [--tokens 512]
                                         [--precision fp32|bf16] [--control] [--json]

Both engines live in one process, on copies of one model (17 million weights in 16 linear layers), and
take turns: each step of the one is followed by one of the other, the first of a pair changing. A round
is a fresh process, as where the tensors of an engine lie in memory changes its time by a percent or two,
and the engine that is made first changes from round to round. A round's figure is the median over its
pairs of the ratio of their CPU times, all threads; the result is the median over the rounds. Beside it
stand the page faults of a step: what a change does to the heap shows there first. ``--control`` puts a
second bare engine in the place of ours: how far from 1 its ratio lies is what the measure says by
itself. Exit code 1 where a ratio is above 1.03, or where a bare step takes less than 0.3 s (then the
model is too small to tell).
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

LIMIT, SHORTEST_S = 1.03, 0.3
WIDTH, LAYERS = 512, 8
PRECISIONS = ("fp32", "bf16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each precision")
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps in a round")
    parser.add_argument("--tokens", type=int, default=512, help="rows of the batch")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="these alone")
    parser.add_argument("--control", action="store_true", help="two bare engines: what the measure says")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for precision in options.precision or PRECISIONS:
        rounds = [
            in_fresh_process(precision, options.steps, options.tokens, options.control, bool(number % 2))
            for number in range(options.rounds)
        ]
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        rows.append({"precision": precision, **middle, "rounds": rounds})
        if not options.json:
            tell(rows[-1], "a second bare engine" if options.control else "ours")
    if options.json:
        print(json.dumps({"schema_version": 2, "control": options.control, "rows": rows}))
    return 0 if all(row["ratio"] <= LIMIT and row["bare_s"] >= SHORTEST_S for row in rows) else 1


def tell(row: dict[str, Any], second: str) -> None:
    ratios = ", ".join(f"{r['ratio']:.4f}" for r in row["rounds"])
    print(
        f"{row['precision']}: bare {row['bare_s']:.3f} s of CPU a step, {second} {row['second_s']:.3f} s, "
        f"ratio {row['ratio']:.4f} (rounds: {ratios}; limit {LIMIT}); "
        f"page faults {row['bare_faults']:.0f} and {row['second_faults']:.0f}",
        flush=True,
    )


def in_fresh_process(*arguments: Any) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def join_alone() -> None:
    """A process group of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), DS_LOG_LEVEL="error",
    )  # fmt: skip


def measure(precision: str, pairs: int, tokens: int, control: bool, second_first: bool) -> dict[str, float]:
    """One round: see the top."""
    join_alone()
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

    def bare_engine() -> Any:
        own = copy.deepcopy(model)
        with hold_deepspeeds_prints():
            return deepspeed.initialize(model=own, config=config, model_parameters=list(own.parameters()))[0]

    def second_engine() -> Any:
        return bare_engine() if control else initialize(copy.deepcopy(model), config)

    making = {"bare": bare_engine, "second": second_engine}
    engines = {name: making[name]() for name in sorted(making, reverse=second_first)}
    x = torch.randn(tokens, WIDTH).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def step(engine: Any) -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    for engine in engines.values():
        step(engine)
        step(engine)
    seconds: dict[str, list[float]] = {"bare": [], "second": []}
    faults: dict[str, list[int]] = {"bare": [], "second": []}
    for pair in range(pairs):
        for name in sorted(engines, reverse=bool(pair % 2)):
            began, met = time.process_time(), page_faults()
            step(engines[name])
            seconds[name].append(time.process_time() - began)
            faults[name].append(page_faults() - met)
    return {
        "bare_s": statistics.median(seconds["bare"]),
        "second_s": statistics.median(seconds["second"]),
        "ratio": statistics.median(b / a for a, b in zip(seconds["bare"], seconds["second"], strict=True)),
        "bare_faults": statistics.median(faults["bare"]),
        "second_faults": statistics.median(faults["second"]),
    }


def page_faults() -> int:
    """Those of this process so far that no disk was read for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    sys.exit(main())
