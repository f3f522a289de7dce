"""What runs on a GPU: of the engine's matrix each precision at each stage and two with offload, and more."""

from __future__ import annotations

from typing import Any

from tests.support.plans import LORA
from tests.train.engine.matrix import CLIPPING, LEVELS, Cell

CELLS = [
    *(
        Cell(precision, stage, 2, CLIPPING, False, "AdamW", "resumed", 1)
        for precision in LEVELS["precision"]
        for stage in LEVELS["stage"]
    ),
    Cell("bf16", 2, 1, CLIPPING, True, "AdamW", "straight", 1),
    Cell("fp16 dynamic", 3, 2, 0.0, True, "SGD", "rolled back", 1),
]
# With DeepSpeed's own fused AdamW, which only a GPU has, in place of torch's.
FUSED = [
    Cell(precision, stage, 1, CLIPPING, False, "AdamW", "straight", 1)
    for precision, stage in (("fp32", 0), ("bf16", 2), ("fp16 dynamic", 3))
]
# Plants of tests/train/replay/plants.py that one rank meets.
REPLAYED = (
    "nan weight, stage 3 bf16",
    "LoRA B blown up, stage 2 fp16",
    "the gradient overflows at this scale, stage 1 fp16",
)
# Runs whose memory is compared with the plan; their numbers are make_plan's.
MEMORY: dict[str, dict[str, Any]] = {
    "full, stage 0": {"zero_stage": 0},
    "full, stage 2": {"zero_stage": 2},
    "full, stage 3, checkpointed": {"zero_stage": 3, "model": {"gradient_checkpointing": True}},
    "engine torch": {"engine": "torch"},
    "LoRA, stage 2": {"zero_stage": 2, "adapter": LORA},
}
