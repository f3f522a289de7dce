"""In which order a step happens, and what it costs in talk between the ranks and in waiting."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dslaunch.train.engine import Engine, cures
from tests.train.rank_cases import RANK, Case, OneWeight, bare_deepspeed, config, engine_for

# DeepSpeed's own methods, by the part of a step that each of them is.
PARTS = {
    "finite check": ("check_overflow",),
    "norm": ("scaled_global_norm", "_get_norm_groups", "get_grads_for_norm"),
    "unscale and clip": ("unscale_and_clip_grads",),
}


MEASURE = cures.measure_fp32_stage_0

# Every kind of optimizer that DeepSpeed may take for a run.
KINDS = [(0, "fp32"), (1, "fp16"), (2, "fp16"), (2, "bf16"), (3, "fp16"), (3, "bf16")]


def order(stage: int, precision: str) -> dict[str, list[str]]:
    """The parts of a step in the order in which they began: of a good one, of one with inf on one rank."""
    seen: list[str] = []
    with engine_for(OneWeight(), _config(stage, precision), lr_scheduler=_constant) as engine:
        _record(engine, seen)
        engine.backward(engine(torch.tensor([1.0])))
        engine.step()
        good = seen.copy()
        seen.clear()
        engine.backward(engine(torch.tensor([math.inf if RANK == 0 else 1.0])))
        engine.step()
    cures.measure_fp32_stage_0 = MEASURE
    return {"good": good, "skipped": seen}


def _config(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    settings = config(stage, precision, clipping=1.0, **more)
    if precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 8
    return settings


def _constant(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda applied: 1.0)


def _record(engine: Engine, seen: list[str]) -> None:
    ds, optimizer = engine.deepspeed, engine.deepspeed.optimizer
    for part, names in PARTS.items():
        for name in names:
            if hasattr(optimizer, name):
                _note(optimizer, name, part, seen)
    if engine.zero_stage == 0:  # plain fp32: norm and check are ours, in one function
        _note(cures, "measure_fp32_stage_0", "finite check", seen)
    _note(engine._window, "reduce", "one small vector", seen)
    _note(ds, "clip_fp32_gradients", "unscale and clip", seen)
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is not optimizer:
        _note(inner, "step", "optimizer", seen)
    if engine.precision == "fp16":  # DeepSpeed's idle scaler of the other precisions says nothing
        _note(optimizer.loss_scaler, "update_scale", "loss scale", seen)
    _note(ds.lr_scheduler, "step", "schedule", seen)


def _note(owner: Any, name: str, part: str, seen: list[str]) -> None:
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not seen or seen[-1] != part:
            seen.append(part)
        return original(*args, **kwargs)

    setattr(owner, name, noted)


class Counting(TorchDispatchMode):
    """Counts what ranks say to each other, and each time that the host waits for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::") or name == "aten::_local_scalar_dense":
            self.counts[name] += 1
        if name == "c10d::allreduce_":
            self.sizes.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


def talk(stage: int, precision: str) -> dict[str, Any]:
    """What one window of two micro-batches costs, in bare DeepSpeed and here; the second window counts."""
    settings = _config(stage, precision, accumulation=2)
    with bare_deepspeed(OneWeight(size=8), settings) as ds:
        bare = [_count(ds, ds) for _ in range(2)][-1]
    with engine_for(OneWeight(size=8), settings, watch={}) as engine:
        ours = [_count(engine, engine) for _ in range(2)][-1]
    more = Counter(ours.counts)
    more.subtract(bare.counts)
    return {
        "more": {name: count for name, count in more.items() if count},
        "bare": sum(bare.counts.values()),
        "sizes": list((Counter(ours.sizes) - Counter(bare.sizes)).elements()),
    }


def _count(forward: Any, owner: Any) -> Counting:
    with Counting() as counting:
        for k in range(2):
            owner.backward(forward(torch.full((8,), 1.0 + k)))
            owner.step()
    return counting


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for stage, precision in KINDS:
        cases[f"order/{stage}/{precision}"] = lambda s=stage, p=precision: order(s, p)
        cases[f"talk/{stage}/{precision}"] = lambda s=stage, p=precision: talk(s, p)
    return cases
