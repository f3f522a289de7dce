"""Gradients that are clipped, not finite, or added up in 16 bit."""

from __future__ import annotations

import math
from typing import Any

import torch

from dslaunch.core.plan import SchedulerPlan
from dslaunch.train.schedule import build_scheduler_factory
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

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def clipped(stage: int, precision: str, **blocks: Any) -> dict[str, Any]:
    """Gradient (3, 4), clip 1; under fp16 the scale is 1024."""
    settings = config(stage, precision, clipping=1.0, **blocks)
    if precision == "fp16":
        settings["fp16"]["loss_scale"] = 1024
    with engine_for(OneWeight(size=2), settings) as engine:
        engine.backward(engine(torch.tensor([3.0, 4.0])))
        result = engine.step()
        assert result is not None
        return {
            "end": master(engine.module.w),
            "grad_norm": result.grad_norm,
            "grad_norm_clipped": result.grad_norm_clipped,
            "loss_scale": result.loss_scale,
        }


def nan_on_one_rank(stage: int, precision: str, bad: float, **blocks: Any) -> dict[str, Any]:
    """Good, bad on the last rank, good; with a schedule that shows whether it moved."""
    schedule = build_scheduler_factory(SchedulerPlan(type="constant", warmup_steps=4), 8)
    settings = config(stage, precision, **blocks)
    records = []
    with engine_for(OneWeight(), settings, lr_scheduler=schedule) as engine:
        for step in range(3):
            broken = step == 1 and RANK == WORLD_SIZE - 1
            result = step_once(engine, bad if broken else 1.0)
            assert result is not None
            records.append(
                {
                    "lr": result.lr,
                    "skipped": result.skipped,
                    "reason": result.skip_reason,
                    "norm": result.grad_norm,
                    "clipped": result.grad_norm_clipped,
                    "weight": master(engine.module.w)[0],
                }
            )
        return {"steps": records, "global_step": engine.global_step, "skipped_steps": engine.skipped_steps}


def bare_fp32_stage_0() -> dict[str, Any]:
    """What upstream does with a nan gradient in fp32 at stage 0."""
    with bare_deepspeed(OneWeight(), config(0, clipping=1.0)) as ds:
        ds.backward(ds(torch.tensor([math.nan])))
        ds.step()
        return {"weight": float(ds.module.w), "norm": ds.get_global_grad_norm()}


def bf16_sum(stage: int, **blocks: Any) -> float:
    """64 micro-batches of gradient .01: the update, which is their mean."""
    with engine_for(OneWeight(), config(stage, "bf16", accumulation=64, **blocks)) as engine:
        for _ in range(64):
            step_once(engine, 0.01)
        return master(engine.module.w)[0]


def autocast(stage: int, dtype: str) -> dict[str, Any]:
    """torch_autocast: bfloat16 at every stage, float16 at stage 0 with an overflow."""
    settings = config(stage, clipping=1.0, torch_autocast={"enabled": True, "dtype": dtype})
    steps = []
    with engine_for(OneWeight(size=2), settings) as engine:
        for value in (1.0, math.inf, 1.0):
            engine.backward(engine(torch.tensor([3.0 * value, 4.0 * value])))
            result = engine.step()
            assert result is not None
            steps.append([result.grad_norm, result.skipped, *master(engine.module.w)])
    return {"steps": steps}


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for stage in STAGES:
        for precision in ("fp32", "bf16", "fp16"):
            cases[f"clip/{stage}/{precision}"] = lambda s=stage, p=precision: clipped(s, p)
        for precision in ("fp32", "bf16"):
            for bad in (math.nan, math.inf):
                cases[f"nan/{stage}/{precision}/{bad}"] = lambda s=stage, p=precision, b=bad: nan_on_one_rank(
                    s, p, b
                )
        cases[f"autocast/{stage}/bfloat16"] = lambda s=stage: autocast(s, "bfloat16")
    cases["clip/1/bf16-accum32"] = lambda: clipped(1, "bf16", **ACCUM32)
    cases["nan/1/bf16-accum32"] = lambda: nan_on_one_rank(1, "bf16", math.nan, **ACCUM32)
    cases["bf16-sum-in-bf16"] = lambda: bf16_sum(2)
    cases["bf16-sum/0"] = lambda: bf16_sum(0)
    for stage in (1, 2, 3):
        cases[f"bf16-sum/{stage}"] = lambda s=stage: bf16_sum(s, **ACCUM32)
    cases["bare-fp32-stage-0"] = bare_fp32_stage_0
    return cases


class HalfLinear(torch.nn.Module):
    """A layer that autocast runs in 16 bit: with scale 65536 its gradient overflows float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().sum()


def bare_float16_autocast(stage: int) -> list[float]:
    """F5: the first weight after each of eight steps."""
    settings = config(stage, torch_autocast={"enabled": True, "dtype": "float16"})
    weights = []
    with bare_deepspeed(HalfLinear(), settings) as ds:
        for _ in range(8):
            ds.backward(ds(torch.tensor([[1.0, 2.0]])))
            ds.step()
            weights.append(master(ds.module.layer.weight)[0])
    return weights


def norm_beside_another_engine(bare: bool) -> float:
    """F6: the norm of (3, 4) in a fp32 engine of stage 1, made after one with float16 autocast."""
    autocast = config(0, torch_autocast={"enabled": True, "dtype": "float16"})
    with engine_for(OneWeight(size=2), autocast):
        make = bare_deepspeed if bare else engine_for
        with make(OneWeight(size=2), config(1)) as engine:
            engine.backward(engine(torch.tensor([3.0, 4.0])))
            result = engine.step()
            return float(engine.get_global_grad_norm()) if bare else result.grad_norm


def clipping_left_out(bare: bool) -> list[Any]:
    """F7: gradient (3, 4) without ``gradient_clipping``: the update and what was said."""
    settings = config(1)
    del settings["gradient_clipping"]
    said: list[str] = []
    more = {} if bare else {"on_note": said.append}
    with (bare_deepspeed if bare else engine_for)(OneWeight(size=2), settings, **more) as engine:
        engine.backward(engine(torch.tensor([3.0, 4.0])))
        engine.step()
        return [master(engine.module.w), said]


class OneMatrix(torch.nn.Module):
    """loss = sum(w * x) over a matrix, which Muon wants."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 4))
        self.w.use_muon = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def bare_muon() -> float:
    """F11: the norm that is reported for a gradient of norm .02."""
    settings = config(1, optimizer={"type": "Muon", "params": {"lr": 1.0, "momentum": 0.0}})
    torch.compiler.set_stance("force_eager")  # its kernels take half a minute to compile
    try:
        with bare_deepspeed(OneMatrix(), settings) as ds:
            ds.backward(ds(torch.eye(4) * 0.01))
            ds.step()
            return float(ds.get_global_grad_norm())
    finally:
        torch.compiler.set_stance("default")


def last_cases() -> dict[str, Case]:
    """float16 autocast leaves its state in the process (F6): what is bare must not come after it."""
    cases: dict[str, Case] = {
        f"clipping-left-out/{bare}": lambda b=bare: clipping_left_out(b) for bare in (True, False)
    }
    cases["bare-muon"] = bare_muon
    cases["autocast/0/float16"] = lambda: autocast(0, "float16")
    for bare in (True, False):
        cases[f"autocast-leak/{bare}"] = lambda b=bare: norm_beside_another_engine(b)
    cases["bare-autocast/1"] = lambda: bare_float16_autocast(1)
    return cases
