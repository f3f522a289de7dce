"""Courses of the fp16 loss scale, with overflows and growths, and what upstream does at a growth."""

from __future__ import annotations

import math
from typing import Any

import torch

from dslaunch.train.engine import Diverged
from tests.train.rank_cases import (
    RANK,
    STAGES,
    WORLD_SIZE,
    Case,
    OneWeight,
    bare_deepspeed,
    config,
    engine_for,
    master,
    step_once,
)

COURSE_OVERFLOWS = {1, 2, 3, 8, 9, 18}
COURSE_STEPS = 22


def course(
    stage: int, *, accumulation: int = 1, blocks: dict[str, Any] | None = None, **fp16: Any
) -> dict[str, Any]:
    """The gradient is .01 each step, or inf on one of the ranks at the overflow steps."""
    scale = {"initial_scale_power": 8, "loss_scale_window": 3, **fp16}
    settings = {**config(stage, "fp16", accumulation=accumulation, fp16=scale), **(blocks or {})}
    used, after, weights, norms, skips = [], [], [], [], []
    with engine_for(OneWeight(), settings) as engine:
        for step in range(COURSE_STEPS):
            bad = step in COURSE_OVERFLOWS and RANK == step % WORLD_SIZE
            for k in range(accumulation):
                result = step_once(engine, math.inf if bad and k == 0 else 0.01)
            assert result is not None
            used.append(result.loss_scale)
            after.append(engine.loss_scale)
            weights.append(master(engine.module.w)[0])
            norms.append(result.grad_norm)
            skips.append(result.skip_reason)
        return {
            "used": used,
            "after": after,
            "weights": weights,
            "norms": norms,
            "skips": skips,
            "stage": engine.zero_stage,
            "notes": list(engine.notes),
            "global_step": engine.global_step,
            "skipped_steps": engine.skipped_steps,
        }


def at_minimum_scale(stage: int) -> dict[str, Any]:
    """Scale 4, then 2, then 1, then nowhere to go; one rank overflows."""
    settings = config(stage, "fp16", fp16={"initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1})
    scales = []
    with engine_for(OneWeight(), settings) as engine:
        for _ in range(6):
            try:
                step_once(engine, math.inf if RANK == 0 else 0.01)
            except Diverged as error:
                return {"scales": scales, "error": str(error), "exit_code": error.exit_code}
            scales.append(engine.loss_scale)
    return {"scales": scales}


class NoGradient(OneWeight):
    """A loss of 0 whose gradient is 0 in fp32, whatever finite number it is multiplied by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w.float() * 0).sum()


def growth_without_end(stage: int) -> dict[str, Any]:
    """Window 1 from 2^63 on, and no gradient that could overflow: float32 ends at 2^128."""
    settings = config(stage, "fp16", fp16={"initial_scale_power": 63, "loss_scale_window": 1})
    with engine_for(NoGradient(start=1.0), settings) as engine:
        results = [step_once(engine, 0.0) for _ in range(72)]
        return {
            "used": [result.loss_scale for result in results],
            "skipped": sum(result.skipped for result in results),
            "weight": master(engine.module.w),
        }


def bare_course(stage: int) -> dict[str, Any]:
    """The same without our cures, no overflow, window 2: what upstream does at a growth."""
    settings = config(stage, "fp16", fp16={"initial_scale_power": 8, "loss_scale_window": 2})
    weights, norms = [], []
    with bare_deepspeed(OneWeight(), settings) as ds:
        for _ in range(6):
            ds.backward(ds(torch.tensor([0.01])))
            ds.step()
            weights.append(master(ds.module.w)[0])
            norms.append(float(ds.get_global_grad_norm()))
    return {"weights": weights, "norms": norms}


def growth_under_clipping(stage: int) -> list[float]:
    """Gradient norm .01 * sqrt(32) = .0566; clip .04 lies between half of it and itself."""
    settings = config(stage, "fp16", clipping=0.04, fp16={"initial_scale_power": 8, "loss_scale_window": 2})
    weights = []
    with engine_for(OneWeight(size=32), settings) as engine:
        for _ in range(6):
            engine.backward(engine(torch.full((32,), 0.01)))
            engine.step()
            weights.append(master(engine.module.w)[0])
    return weights


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for stage in STAGES:
        for hysteresis in (1, 2):
            cases[f"course/{stage}/{hysteresis}"] = lambda s=stage, h=hysteresis: course(s, hysteresis=h)
        cases[f"course-accumulated/{stage}"] = lambda s=stage: course(s, accumulation=2, hysteresis=1)
        cases[f"course-static/{stage}"] = lambda s=stage: course(s, loss_scale=256)
        cases[f"growth-clip/{stage}"] = lambda s=stage: growth_under_clipping(s)
        cases[f"minimum/{stage}"] = lambda s=stage: at_minimum_scale(s)
    for stage in (1, 3):
        cases[f"without-end/{stage}"] = lambda s=stage: growth_without_end(s)
    for stage in (1, 2, 3):
        offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        cases[f"course-offload/{stage}"] = lambda s=stage, z=offload: course(
            s, hysteresis=1, blocks={"zero_optimization": z, "zero_force_ds_cpu_optimizer": False}
        )
        cases[f"bare-course/{stage}"] = lambda s=stage: bare_course(s)
    return cases
