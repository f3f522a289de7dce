"""16 bit at stage 0: ours from its first step, and what upstream does there."""

from __future__ import annotations

from typing import Any

import torch

from tests.train.rank_cases import (
    STAGES,
    Case,
    OneWeight,
    bare_deepspeed,
    config,
    engine_for,
    master,
    step_once,
)

ADAMW = {
    "type": "AdamW",
    "params": {"lr": 0.1, "weight_decay": 0.5, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True},
}


def adamw_course(stage: int, precision: str) -> dict[str, Any]:
    """Weight 1, gradient .01, decay .5, four steps: nothing may happen before the first."""
    settings = config(stage, precision, optimizer=ADAMW)
    if precision == "fp16":
        settings["fp16"]["loss_scale"] = 256
    with engine_for(OneWeight(start=1.0), settings) as engine:
        weights = [master(engine.module.w)[0]]
        for _ in range(4):
            step_once(engine, 0.01)
            weights.append(master(engine.module.w)[0])
        return {"weights": weights, "stage": engine.zero_stage, "notes": list(engine.notes)}


def bare_stage_0_fp16_update() -> float:
    """SGD lr 1, gradient .01, scale 256, straight through DeepSpeed's stage 0."""
    settings = config(0, "fp16", fp16={"loss_scale": 256})
    with bare_deepspeed(OneWeight(), settings) as ds:
        ds.backward(ds(torch.tensor([0.01])))
        ds.step()
        return float(ds.optimizer.fp32_groups[0][0].item())


def bare_stage_0_scales() -> list[float]:
    """The scale after each of four overflows: hysteresis 2, and 64 is the minimum."""
    scale = {"initial_scale_power": 8, "hysteresis": 2, "min_loss_scale": 64}
    with bare_deepspeed(OneWeight(), config(0, "fp16", fp16=scale)) as ds:
        scales = []
        for _ in range(4):
            ds.backward(ds(torch.tensor([float("inf")])))
            ds.step()
            scales.append(float(ds.optimizer.loss_scale_config.cur_scale))
        return scales


def bare_stage_0_phantom_step(precision: str) -> float:
    """AdamW's fp32 master right after initialize, where nothing has been trained."""
    settings = config(0, precision, optimizer=ADAMW)
    with bare_deepspeed(OneWeight(start=1.0), settings) as ds:
        optimizer = ds.optimizer
        groups = getattr(optimizer, "fp32_groups_flat", None) or optimizer.fp32_groups[0]
        return float(groups[0].flatten()[0].item())


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        f"adamw/{stage}/{precision}": lambda s=stage, p=precision: adamw_course(s, p)  # type: ignore[misc]
        for stage in STAGES
        for precision in ("fp32", "bf16", "fp16")
    }
    cases["bare-stage-0-fp16"] = bare_stage_0_fp16_update
    cases["bare-stage-0-scales"] = bare_stage_0_scales
    cases["bare-phantom/fp16"] = lambda: bare_stage_0_phantom_step("fp16")
    cases["bare-phantom/bf16"] = lambda: bare_stage_0_phantom_step("bf16")
    return cases
