"""Run as one rank by test_deepspeed_log.py: short fp16 runs of the real DeepSpeed, each with its log.

Run as ``python -m tests.observe.diagnose.ranks_deepspeed OUT_DIR``: writes CASE.log, and CASE.json with the
scale that each step ran with.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import torch
from deepspeed.utils import logger

from tests.train.rank_cases import OneWeight, bare_deepspeed, config

# case -> (ZeRO stage, hysteresis, consecutive_hysteresis, lines of progress every so many steps, overflows)
CASES = {
    "stage-0": (0, 1, False, 1, [1, 2, 3, 8, 9, 19]),
    "stage-1": (1, 1, False, 1, [1, 2, 3, 8, 9, 19]),
    "stage-2-hysteresis": (2, 2, False, 1, [1, 2, 3, 8, 9, 19]),
    "stage-3-consecutive": (3, 3, True, 1, [1, 2, 3, 8, 9, 19]),
    "at-minimum": (1, 1, False, 5, list(range(8, 30))),
}
STEPS = 30


def run(out: Path, name: str) -> None:
    stage, hysteresis, consecutive, every, overflows = CASES[name]
    fp16 = {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": hysteresis}
    settings = config(stage, "fp16", fp16={**fp16, "consecutive_hysteresis": consecutive})
    handler = logging.FileHandler(out / f"{name}.log")
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    scales = []
    try:
        with bare_deepspeed(OneWeight(), {**settings, "steps_per_print": every}) as engine:
            for step in range(1, STEPS + 1):
                scales.append(engine.optimizer.cur_scale if stage else engine.optimizer.loss_scale)
                engine.backward(engine(torch.tensor([math.inf if step in overflows else 0.01])))
                engine.step()
    except Exception as error:
        logger.error("%s: %s", type(error).__name__, error)
    finally:
        logger.removeHandler(handler)
    (out / f"{name}.json").write_text(json.dumps(scales))


if __name__ == "__main__":
    for case in CASES:
        run(Path(sys.argv[1]), case)
