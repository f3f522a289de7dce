"""Resumed and straight runs, frozen parts, and what DeepSpeed's converter reads back."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dslaunch.core.plan import SchedulerPlan
from dslaunch.losses.sft import token_nll
from dslaunch.train.checkpoint import load_checkpoint, save_checkpoint
from dslaunch.train.engine import Engine
from dslaunch.train.schedule import build_scheduler_factory
from tests.train.checkpoint.saving import OUT, error_of, settings
from tests.train.rank_cases import RANK, SAMPLES, STAGES, Case, TinyLM, bare_deepspeed, engine_for, master

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-accum32")


TOTAL = 12
HALF = 6
OVERFLOWS = {2, 3, 7}


def schedule() -> Any:
    return build_scheduler_factory(SchedulerPlan(type="cosine", warmup_steps=3), TOTAL)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(engine: Engine, first: int, last: int) -> list[list[Any]]:
    """Steps ``first`` .. ``last``-1 with dropout; each rank's own samples; overflows under fp16."""
    engine.train()
    records = []
    for step in range(first, last):
        for k in range(2):
            ids, targets = SAMPLES[(step * 4 + k * 2 + RANK) % len(SAMPLES)]
            loss = token_nll(engine(torch.tensor([ids])), torch.tensor([targets])).sum
            if engine.precision == "fp16" and step in OVERFLOWS and RANK == 1 and k == 1:
                loss = loss * 1e30
            engine.backward_token_sum(loss, num_tokens=10 + step)
            result = engine.step()
        assert result is not None
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        records.append([result.step, result.loss, result.grad_norm, result.lr, result.loss_scale, *draws])
    return records


def weights(engine: Engine) -> list[list[float]]:
    return [master(p) for p in engine.module.parameters() if p.requires_grad]


def resume(stage: int, precision: str) -> dict[str, Any]:
    """Twelve steps straight, and six, saved, and six more in a fresh engine from another seed."""
    root = OUT / f"resume-{stage}-{precision}"
    seed_all(100 + RANK)
    with engine_for(TinyLM(dropout=0.1), settings(stage, precision), lr_scheduler=schedule()) as engine:
        straight = train(engine, 0, TOTAL)
        straight_end = weights(engine)
    seed_all(100 + RANK)
    with engine_for(TinyLM(dropout=0.1), settings(stage, precision), lr_scheduler=schedule()) as engine:
        train(engine, 0, HALF)
        save_checkpoint(engine, root, HALF, extra={"position": [HALF, "a"]})
        continued = train(engine, HALF, TOTAL)
    seed_all(7)
    other = TinyLM(dropout=0.1)
    with torch.no_grad():
        other.head.weight.normal_()
    with engine_for(other, settings(stage, precision), lr_scheduler=schedule()) as engine:
        extra = load_checkpoint(engine, root)
        step = engine.global_step
        resumed = train(engine, HALF, TOTAL)
        resumed_end = weights(engine)
        skipped = engine.skipped_steps
    return {
        "straight": straight[HALF:],
        "continued": continued,
        "resumed": resumed,
        "straight_end": straight_end,
        "resumed_end": resumed_end,
        "extra": extra,
        "step": step,
        "skipped": skipped,
    }


def frozen_embedding() -> TinyLM:
    model = TinyLM()
    model.embedding.requires_grad_(False)
    return model


def adapters(stage: int) -> dict[str, Any]:
    """A frozen part is not in the checkpoint, and the trained part comes back."""
    root = OUT / f"adapters-{stage}"
    with engine_for(frozen_embedding(), settings(stage, "fp32")) as engine:
        train(engine, 0, 2)
        path = save_checkpoint(engine, root, 2, extra={})
        expected = train(engine, 2, 4)
    with engine_for(frozen_embedding(), settings(stage, "fp32")) as engine:
        load_checkpoint(engine, root)
        resumed = train(engine, 2, 4)
    with engine_for(TinyLM(), settings(stage, "fp32")) as engine:
        error = error_of(lambda: load_checkpoint(engine, root))
    keys: list[str] = []
    if RANK == 0 and stage < 3:
        state = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)
        keys = sorted(state["module"])
    return {"expected": expected, "resumed": resumed, "keys": keys, "error": error}


def convert(root: Path, tag: str) -> dict[str, list[float]]:
    """DeepSpeed's own converter; its progress goes to stderr."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(sys.stderr):
        state = get_fp32_state_dict_from_zero_checkpoint(str(root), tag=tag)
    return {name: tensor.double().flatten().tolist() for name, tensor in state.items()}


def converted(stage: int, precision: str) -> dict[str, Any]:
    """The fp32 weights as the engine holds them and as they are read back from a checkpoint."""
    root = OUT / f"converted-{stage}-{precision}"
    with engine_for(TinyLM(), settings(stage, precision)) as engine:
        train(engine, 0, 2)
        save_checkpoint(engine, root, 2, extra={})
        held = {name: master(p) for name, p in engine.module.named_parameters()}
    return {"held": held, "read": convert(root, "step-2") if RANK == 0 else held}


def bare_bf16_converted() -> str:
    """The same without our cures, for stage 1 with fp32 accumulation."""
    root = OUT / "bare-converted"
    with bare_deepspeed(TinyLM(), settings(1, "bf16-accum32")) as ds:
        for _ in range(2):
            ds.backward(ds(torch.tensor([[1, 2]])).float().sum())
            ds.step()
        ds.save_checkpoint(str(root), tag="step-2")
    return error_of(lambda: convert(root, "step-2")) if RANK == 0 else ""


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {"bare-converted": bare_bf16_converted}
    for stage in STAGES:
        for precision in PRECISIONS:
            cases[f"resume/{stage}/{precision}"] = lambda s=stage, p=precision: resume(s, p)  # type: ignore[misc]
        cases[f"adapters/{stage}"] = lambda s=stage: adapters(s)  # type: ignore[misc]
    for stage in (1, 2, 3):
        for precision in PRECISIONS:
            cases[f"converted/{stage}/{precision}"] = lambda s=stage, p=precision: converted(s, p)  # type: ignore[misc]
    return cases
