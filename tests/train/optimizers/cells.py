"""Which optimizer runs where in these tests: a pairwise cover of stage, precision, clipping and so on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dslaunch.config.optimizer import KINDS
from dslaunch.core.plan import OptimizerPlan, ParamGroupPlan, SchedulerPlan

STEPS, BAD_STEP = 7, 2  # in step 2 (from 0) rank 1 has inf in its gradient: all ranks skip it
DECAYED = {"weight_decay": 0.25}
SMALL, LARGE = ((3, 5), (7,)), ((90, 94), (7,))  # in 8 bit below 4,096 elements nothing is quantised
# Of three matrices that ZeRO puts one behind the other, two ranks have one each and share the third.
MATRICES = (*SMALL, (5, 2), (2, 3))


@dataclass(frozen=True)
class Cell:
    """One engine. ``clipping`` 0: none. ``offload``: of the optimizer, to the CPU."""

    kind: str
    stage: int
    precision: str = "fp32"
    clipping: float = 0.0
    accumulation: int = 1
    offload: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = (self.kind, f"z{self.stage}", self.precision, f"clip{self.clipping:g}",
                 f"gas{self.accumulation}", "offload" if self.offload else "", *self.params)  # fmt: skip
        return "-".join(filter(None, parts))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        if self.kind == "Muon":
            return MATRICES
        return LARGE if self.kind.endswith("8bit") else SMALL

    @property
    def plan(self) -> OptimizerPlan:
        """As dslaunch.config.optimizer resolves it for CPUs."""
        kind = KINDS[self.kind]
        params = {k: v for k, v in kind.defaults.items() if v is not None}
        params |= {"lr": 0.0625, **self.params}
        if self.kind in ("AdamW", "Adam", "Muon"):
            params["torch_adam"] = True
        if self.kind == "Adam":
            params["adam_w_mode"] = False
        ours = kind.ours or self.kind == "Lion"
        return OptimizerPlan(
            type=self.kind, lr=params["lr"], params=params, made_by="dslaunch" if ours else "deepspeed",
            no_decay=(),
        )  # fmt: skip


MIX = {"t_alpha": 4, "t_beta3": 5, "betas": (0.8, 0.9, 0.99), **DECAYED}
NESTEROV = {"momentum": 0.75, "nesterov": True}
MUON = {"adam_lr": 0.03125, **DECAYED}
DAMPED = {"momentum": 0.5, "dampening": 0.25, **DECAYED}
SUMMED_AND_OFFLOADED = Cell("AdamW", 2, "bf16", accumulation=2, offload=True)
CELLS = (
    Cell("AdamW", 0, params=DECAYED),
    Cell("AdamW", 1, "fp16", 1.0, params=DECAYED),
    SUMMED_AND_OFFLOADED,
    Cell("AdamW", 1, "bf16", accumulation=2, offload=True),
    Cell("AdamW", 2, "fp16", 1.0, accumulation=2, offload=True),
    Cell("AdamW", 3, "fp32", 1.0, 2),
    Cell("Adam", 1, "bf16", 1.0, 2, params=DECAYED),
    Cell("Adam", 2, "fp16", offload=True, params=DECAYED),
    Cell("Adam", 3, "fp16", 1.0),
    Cell("SGD", 0, "bf16", 1.0),
    Cell("SGD", 1, "fp32", accumulation=2, params=NESTEROV),
    Cell("SGD", 2, "fp16", 1.0, params=DAMPED),
    Cell("SGD", 3, "bf16", offload=True, params=NESTEROV),
    Cell("SGD", 0, "fp32", 1.0, params=DAMPED),
    Cell("Lion", 0, "fp16", params=DECAYED),
    Cell("Lion", 1, "bf16", 1.0, 2),
    Cell("Lion", 2, "fp32", 1.0, offload=True, params=DECAYED),
    Cell("Lion", 3, "fp16", accumulation=2, params=DECAYED),
    Cell("AdEMAMix", 0, "fp32", 1.0, 2, params=MIX),
    Cell("AdEMAMix", 1, "fp16", offload=True, params=MIX),
    Cell("AdEMAMix", 1, "bf16", 1.0, 2),
    Cell("AdEMAMix", 2, "bf16", 1.0, params=MIX),
    Cell("AdEMAMix", 3, "fp16", 1.0, offload=True, params=MIX),
    Cell("Adafactor", 0, "fp32", 1.0, 2, params=DECAYED),
    Cell("Muon", 0, "fp32", 1.0, 2, params=MUON),
    Cell("Muon", 0, "bf16", params=MUON),
    Cell("Muon", 1, "fp32", params={"adam_lr": 0.03125}),
    Cell("Muon", 1, "bf16", 1.0, 2, params=MUON),
    Cell("Muon", 2, "fp32", 1.0, 2, params=MUON),
    Cell("Muon", 2, "fp16", 1.0, params=MUON),
    Cell("Muon", 3, "fp16", 1.0, 2, params=MUON),
    Cell("Muon", 3, "bf16", params=MUON),
    Cell("AdamW8bit", 0, "fp32", 1.0, params=DECAYED),
    Cell("AdamW8bit", 1, "bf16", accumulation=2, params=DECAYED),
    Cell("AdamW8bit", 2, "fp16", 1.0, offload=True),
    Cell("AdamW8bit", 3, "fp16", params=DECAYED),
    Cell("PagedAdamW8bit", 3, "bf16", 1.0),
)  # fmt: skip

# Two groups, with a schedule, saved and resumed in the middle. The vector is a group of its own.
SAVED_AFTER = 4
RESUMED = (
    Cell("AdamW", 0, "fp32", params=DECAYED),
    Cell("AdEMAMix", 1, "bf16", accumulation=2, params=MIX),
    Cell("AdamW", 1, "fp16", 1.0, params=DECAYED),
    Cell("AdEMAMix", 2, "fp16", 1.0, offload=True, params=MIX),
    Cell("Lion", 3, "bf16", 1.0, params=DECAYED),
    Cell("AdamW8bit", 2, "bf16", params=DECAYED),
    Cell("AdamW8bit", 3, "fp16", params=DECAYED),
    Cell("Adafactor", 0, "fp32", params=DECAYED),
    Cell("Muon", 2, "bf16", 1.0, params=MUON),
    Cell("Muon", 3, "fp16", params=MUON),
)
VECTOR_LR = 0.5
SCHEDULE, TOTAL_STEPS = SchedulerPlan(type="linear", warmup_steps=2), 8


def in_groups(plan: OptimizerPlan) -> OptimizerPlan:
    """The same with a rate of its own for the vector, which by default does not decay."""
    return replace(plan, no_decay=None, groups=(ParamGroupPlan(match=("weights.1",), lr=VECTOR_LR),))


def start(cell: Cell) -> list[np.ndarray[Any, Any]]:
    """The first weights, which each precision holds exactly."""
    generator = np.random.default_rng(5)
    return [generator.integers(-16, 17, shape) / 16 for shape in cell.shapes]


def gradient(cell: Cell, step: int, micro: int, rank: int) -> list[np.ndarray[Any, Any]]:
    """A micro-batch's gradient: eighths, so that scaling and all sums are exact in 16 bit. None is 0."""
    generator = np.random.default_rng((step, micro, rank))
    signs = [np.where(generator.random(shape) < 0.5, -1, 1) for shape in cell.shapes]
    return [s * generator.integers(1, 8, shape) / 8 for s, shape in zip(signs, cell.shapes, strict=True)]


def applied_gradients(cell: Cell, world_size: int) -> list[list[np.ndarray[Any, Any]]]:
    """What the optimizer shall see in each applied step: the mean, clipped by DeepSpeed's coefficient."""
    found = []
    for step in (s for s in range(STEPS) if s != BAD_STEP):
        parts = [gradient(cell, step, m, r) for m in range(cell.accumulation) for r in range(world_size)]
        mean = [sum(tensors) / len(parts) for tensors in zip(*parts, strict=True)]
        norm = float(np.sqrt(sum((tensor**2).sum() for tensor in mean)))
        factor = min(1.0, cell.clipping / (norm + 1e-6)) if cell.clipping else 1.0
        found.append([tensor * factor for tensor in mean])
    return found
