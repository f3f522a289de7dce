"""Run by the ranks of the tests beside it: all cases in one set of processes, results as JSON.

Run as ``python -m tests.train.engine.ranks_engine OUT_DIR [gradients]``.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.plan import SchedulerPlan
from dslaunch.losses.sft import token_nll
from dslaunch.train.engine import Diverged, Engine
from dslaunch.train.schedule import build_scheduler_factory
from tests.train.rank_cases import (
    SAMPLES,
    Case,
    OneWeight,
    TinyLM,
    bare_deepspeed,
    config,
    engine_for,
    gradient,
    master,
    run_cases,
)

STAGES = (0, 1, 2, 3)
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
COURSE_OVERFLOWS = {1, 2, 3, 8, 9, 18}
COURSE_STEPS = 22


# --- the gradient is the global token mean, however the batch is cut -----------------------------


def rows(indices: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as one padded micro-batch (ids, targets)."""
    chosen = [SAMPLES[i] for i in indices]
    width = max(len(ids) for ids, _ in chosen)
    ids = torch.tensor([s + [0] * (width - len(s)) for s, _ in chosen])
    targets = torch.tensor([t + [-100] * (width - len(t)) for _, t in chosen])
    return ids, targets


def token_mean_gradient(stage: int, micro: int) -> dict[str, Any]:
    """One window over all eight samples in micro-batches of ``micro``."""
    accumulation = len(SAMPLES) // (micro * WORLD_SIZE)
    num_tokens = sum(target != -100 for _, targets in SAMPLES for target in targets)
    model = TinyLM()
    with engine_for(model, config(stage, micro=micro, accumulation=accumulation)) as engine:
        start = [master(p) for p in engine.module.parameters()]
        for k in range(accumulation):
            first = (k * WORLD_SIZE + RANK) * micro
            ids, targets = rows(range(first, first + micro))
            loss = token_nll(engine(ids), targets)
            engine.backward_token_sum(loss.sum, num_tokens=num_tokens)
            if k < accumulation - 1:
                assert engine.step() is None
        grads = [gradient(p) for p in engine.module.parameters()]
        result = engine.step()
        assert result is not None
        end = [master(p) for p in engine.module.parameters()]
        return {
            "start": start,
            "gradients": grads,
            "end": end,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "grad_norm_clipped": result.grad_norm_clipped,
            "num_tokens": result.num_tokens,
        }


def mean_of_micro_batches(stage: int) -> dict[str, Any]:
    """``backward``: rank r, micro-batch k has gradient 1 + 2r + 10k; 2 x 2 of them."""
    with engine_for(OneWeight(), config(stage, accumulation=2)) as engine:
        for k in range(2):
            engine.backward(engine(torch.tensor([1.0 + 2 * RANK + 10 * k])) + 3.0)
            result = engine.step()
        assert result is not None
        return {"end": master(engine.module.w), "loss": result.loss, "num_tokens": result.num_tokens}


# --- the loss scale: courses with overflows and growths -------------------------------------------


def step_once(engine: Engine, value: float) -> Any:
    """One micro-batch whose gradient is ``value``, then step()."""
    engine.backward(engine(torch.tensor([value])))
    return engine.step()


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


# --- clipping, norms, non-finite gradients ---------------------------------------------------------


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


# --- 16 bit at stage 0 --------------------------------------------------------------------------


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


def bare_stage_0_phantom_step(precision: str) -> float:
    """AdamW's fp32 master right after initialize, where nothing has been trained."""
    settings = config(0, precision, optimizer=ADAMW)
    with bare_deepspeed(OneWeight(start=1.0), settings) as ds:
        optimizer = ds.optimizer
        groups = getattr(optimizer, "fp32_groups_flat", None) or optimizer.fp32_groups[0]
        return float(groups[0].flatten()[0].item())


# --- small behaviour --------------------------------------------------------------------------------


def lazy_and_flag() -> dict[str, Any]:
    """A flag raised by one rank in the first micro-batch reaches all; read on rank 0 only, late."""
    with engine_for(OneWeight(), config(2, accumulation=2)) as engine:
        results = []
        for step in range(3):
            for k in range(2):
                engine.backward(engine(torch.tensor([float(step)])) + step)
                result = engine.step(flag=step == 1 and k == 0 and RANK == WORLD_SIZE - 1)
            results.append(result)
        if RANK != 0:
            return {"read": "nothing"}
        return {"flags": [r.flag for r in results], "losses": [r.loss for r in results]}


def wrong_token_counts() -> list[str]:
    """A count that changes inside a window, and one of zero."""
    messages = []
    with engine_for(OneWeight(), config(1, accumulation=2)) as engine:
        try:
            engine.backward_token_sum(engine(torch.tensor([1.0])), num_tokens=0)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        engine.backward_token_sum(engine(torch.tensor([1.0])), num_tokens=5)
        engine.step()
        try:
            engine.backward_token_sum(engine(torch.tensor([1.0])), num_tokens=6)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def refused(settings: dict[str, Any], **more: Any) -> str:
    """The error of an initialize that must not work."""
    try:
        with engine_for(OneWeight(), settings, **more):
            return "accepted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def renamed_upstream() -> str:
    """An optimizer whose ``_update_scale`` has another name, as after an upgrade of DeepSpeed."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    update_scale = DeepSpeedZeroOptimizer._update_scale
    del DeepSpeedZeroOptimizer._update_scale
    try:
        return refused(config(2, "fp16"))
    finally:
        DeepSpeedZeroOptimizer._update_scale = update_scale


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
    accum32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    cases: dict[str, Case] = dict(gradient_cases())
    for stage in STAGES:
        cases[f"mean/{stage}"] = lambda s=stage: mean_of_micro_batches(s)
        for hysteresis in (1, 2):
            cases[f"course/{stage}/{hysteresis}"] = lambda s=stage, h=hysteresis: course(s, hysteresis=h)
        cases[f"course-accumulated/{stage}"] = lambda s=stage: course(s, accumulation=2, hysteresis=1)
        cases[f"course-static/{stage}"] = lambda s=stage: course(s, loss_scale=256)
        cases[f"growth-clip/{stage}"] = lambda s=stage: growth_under_clipping(s)
        for precision in ("fp32", "bf16", "fp16"):
            cases[f"clip/{stage}/{precision}"] = lambda s=stage, p=precision: clipped(s, p)
            cases[f"adamw/{stage}/{precision}"] = lambda s=stage, p=precision: adamw_course(s, p)
        for precision in ("fp32", "bf16"):
            for bad in (math.nan, math.inf):
                cases[f"nan/{stage}/{precision}/{bad}"] = lambda s=stage, p=precision, b=bad: nan_on_one_rank(
                    s, p, b
                )
        cases[f"autocast/{stage}/bfloat16"] = lambda s=stage: autocast(s, "bfloat16")
    cases["clip/1/bf16-accum32"] = lambda: clipped(1, "bf16", **accum32)
    cases["nan/1/bf16-accum32"] = lambda: nan_on_one_rank(1, "bf16", math.nan, **accum32)
    for stage in STAGES:
        cases[f"minimum/{stage}"] = lambda s=stage: at_minimum_scale(s)
    for stage in (1, 2, 3):
        offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        cases[f"course-offload/{stage}"] = lambda s=stage, z=offload: course(
            s, hysteresis=1, blocks={"zero_optimization": z, "zero_force_ds_cpu_optimizer": False}
        )
    cases["bf16-sum-in-bf16"] = lambda: bf16_sum(2)
    cases["bf16-sum/0"] = lambda: bf16_sum(0)
    for stage in (1, 2, 3):
        cases[f"bf16-sum/{stage}"] = lambda s=stage: bf16_sum(s, **accum32)
    cases["frozen/0/fp32"] = lambda: frozen(0, "fp32")
    for precision in ("bf16", "fp16"):
        cases[f"frozen/3/{precision}"] = lambda p=precision: frozen(3, p)
    cases["renamed"] = renamed_upstream
    cases["callable"] = made_by_callable
    cases["lazy"] = lazy_and_flag
    cases["token-counts"] = wrong_token_counts
    for stage in (1, 2, 3):
        cases[f"bare-course/{stage}"] = lambda s=stage: bare_course(s)
    cases["bare-stage-0-fp16"] = bare_stage_0_fp16_update
    cases["bare-phantom/fp16"] = lambda: bare_stage_0_phantom_step("fp16")
    cases["bare-phantom/bf16"] = lambda: bare_stage_0_phantom_step("bf16")
    cases["bare-fp32-stage-0"] = bare_fp32_stage_0
    cases.update(refusal_cases())
    # Last: float16 autocast leaves its scaler behind in the process (F6).
    cases["autocast/0/float16"] = lambda: autocast(0, "float16")
    return cases


def frozen(stage: int, precision: str) -> list[float]:
    """No optimizer: a forward on 2 with weight 3."""
    settings = config(stage, precision)
    del settings["optimizer"]
    with engine_for(OneWeight(start=3.0), settings) as engine, torch.no_grad():
        return [float(engine(torch.tensor([2.0]))), engine.zero_stage, engine.loss_scale]


def made_by_callable() -> list[Any]:
    """``optimizer`` given as a partial of a class: its name decides, and it trains."""
    make = functools.partial(torch.optim.SGD, lr=1.0)
    with engine_for(OneWeight(), config(0, "bf16", optimizer={}), optimizer=make) as engine:
        step_once(engine, 1.0)
        return [engine.zero_stage, *master(engine.module.w)]


def refusal_cases() -> dict[str, Case]:
    adafactor = {"type": "Adafactor", "params": {"lr": 0.1}}
    autocast16 = {"enabled": True, "dtype": "float16"}
    return {
        "refused/both": lambda: refused(config(1, "fp16", bf16={"enabled": True})),
        "refused/autocast": lambda: refused(config(2, torch_autocast=autocast16)),
        "refused/adafactor": lambda: refused(
            {**config(0, "bf16", optimizer=adafactor), "zero_allow_untested_optimizer": False}
        ),
        "refused/callable": lambda: refused(
            {**config(0, "bf16", optimizer={}), "zero_allow_untested_optimizer": False},
            optimizer=functools.partial(torch.optim.Adafactor, lr=1.0),
        ),
        "refused/enabled": lambda: refused(config(1, bf16={"enabled": "yes"})),
        "refused/batch": lambda: refused({**config(1, micro=2, accumulation=2), "train_batch_size": 7}),
        "refused/stage": lambda: refused(config(5)),
        "refused/norm": lambda: refused(config(2, zero_optimization={"compute_grad_norm": False})),
        "refused/path": lambda: refused("nowhere/ds.json"),  # type: ignore[arg-type]
    }


def gradient_cases() -> dict[str, Case]:
    micros = (1, len(SAMPLES) // WORLD_SIZE)
    return {
        f"gradient/{stage}/{micro}": lambda s=stage, m=micro: token_mean_gradient(s, m)  # type: ignore[misc]
        for stage in STAGES
        for micro in micros
    }


if __name__ == "__main__":
    chosen = gradient_cases() if sys.argv[2:] == ["gradients"] else all_cases()
    run_cases(chosen, Path(sys.argv[1]), RANK)
