"""Run by the ranks of the test beside it: ``python -m tests.train.optimizers.ranks_optimizers OUT_DIR``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.plan import OptimizerPlan
from dslaunch.train.checkpoint import load_checkpoint, save_checkpoint
from dslaunch.train.engine import Engine
from dslaunch.train.optimizers import build_optimizer, parameter_groups
from dslaunch.train.schedule import build_scheduler_factory
from tests.train.optimizers.cells import (
    BAD_STEP,
    CELLS,
    RESUMED,
    SAVED_AFTER,
    SCHEDULE,
    STEPS,
    SUMMED_AND_OFFLOADED,
    TOTAL_STEPS,
    Cell,
    gradient,
    in_groups,
    start,
)
from tests.train.rank_cases import RANK, Case, bare_deepspeed, config, engine_for, master, run_cases


class Given(torch.nn.Module):
    """loss = sum(w * x): the gradient of each weight is what it is given."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.tensor(v, dtype=torch.float32) for v in values)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(w * g.to(w.dtype)).float().sum() for w, g in pairs]).sum()


def settings(cell: Cell) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    if cell.offload:
        blocks["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    if cell.precision == "fp16":
        blocks["fp16"] = {"initial_scale_power": 8, "loss_scale_window": 1, "hysteresis": 1}
    if cell.precision == "bf16" and cell.accumulation > 1 and cell.stage:
        blocks["data_types"] = {"grad_accum_dtype": "fp32"}
    value = config(
        cell.stage, cell.precision, accumulation=cell.accumulation, clipping=cell.clipping, **blocks
    )
    if cell.plan.made_by == "dslaunch":
        del value["optimizer"]
        value["zero_force_ds_cpu_optimizer"] = False
    else:
        value["optimizer"] = {"type": cell.kind, "params": dict(cell.plan.params)}
    return value


@contextlib.contextmanager
def started(cell: Cell, plan: OptimizerPlan, **more: Any) -> Iterator[Engine]:
    model = Given(start(cell))
    groups = parameter_groups(model, plan).parameters
    with engine_for(
        model, settings(cell), optimizer=build_optimizer(plan, model), model_parameters=groups, **more
    ) as engine:
        yield engine


def weights_of(engine: Engine) -> list[list[float]]:
    return [master(p) for p in engine.module.parameters()]


def run_course(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = {"weights": [], "skipped": [], "scales": []}
    with started(cell, cell.plan) as engine:
        for step in range(STEPS):
            result = train(engine, cell, step)
            found["skipped"].append(result.skipped)
            found["scales"].append(result.loss_scale)
            found["weights"].append(weights_of(engine))
        found["states"] = state_types(engine)
        return found


def run_and_resume(cell: Cell, root: Path) -> dict[str, Any]:
    """Straight through, and from a checkpoint in a fresh engine: weights at the end, rates on the way."""
    found: dict[str, Any] = {"rates": []}
    plan, schedule = in_groups(cell.plan), build_scheduler_factory(SCHEDULE, TOTAL_STEPS)
    with started(cell, plan, lr_scheduler=schedule) as engine:
        for step in range(STEPS):
            found["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
            found.setdefault("reported", []).append(train(engine, cell, step).lr)
            if step + 1 == SAVED_AFTER:
                save_checkpoint(engine, root / cell.name, SAVED_AFTER, extra={})
        found["straight"] = weights_of(engine)
    with started(cell, plan, lr_scheduler=schedule) as engine:
        assert load_checkpoint(engine, root / cell.name) is not None
        found["resumed rates"] = []
        for step in range(SAVED_AFTER, STEPS):
            found["resumed rates"].append([group["lr"] for group in engine.optimizer.param_groups])
            train(engine, cell, step)
        found["resumed"] = weights_of(engine)
    return found


def train(engine: Engine, cell: Cell, step: int) -> Any:
    result = None
    for micro in range(cell.accumulation):
        engine.backward(engine(given(cell, step, micro)))
        result = engine.step()
    return result


def given(cell: Cell, step: int, micro: int) -> list[torch.Tensor]:
    found = [torch.tensor(g, dtype=torch.float32) for g in gradient(cell, step, micro, RANK)]
    if step == BAD_STEP and RANK == 1:
        found[0].view(-1)[1] = torch.inf
    return found


def state_types(engine: Engine) -> dict[str, str]:
    """Name -> type of the states of the largest parameter or shard."""
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    largest = max(inner.state, key=lambda p: p.numel(), default=None)
    states = inner.state[largest] if largest is not None else {}
    tensors = {name: value for name, value in states.items() if torch.is_tensor(value) and value.numel() > 1}
    return {name: str(value.dtype).removeprefix("torch.") for name, value in tensors.items()}


def bare_steps_after_a_bad_one(cell: Cell) -> list[bool]:
    """Which steps DeepSpeed itself applies. For F17."""
    with bare_deepspeed(Given(start(cell)), settings(cell)) as engine:
        found = []
        for step in range(STEPS):
            for micro in range(cell.accumulation):
                engine.backward(engine(given(cell, step, micro)))
                engine.step()
            found.append(bool(engine.was_step_applied()))
        return found


def bare_muon_momentum(precision: str) -> dict[str, Any]:
    """Its type after one step, and how many times it is what the gradients make of it; of one matrix."""
    cell = Cell("Muon", 2, precision)
    with bare_deepspeed(Given(start(cell)[:2]), settings(cell)) as engine:
        engine.backward(engine(given(cell, 0, 0)[:2]))
        engine.step()
        states = engine.optimizer.optimizer.state.values()
        momentum = next(s["momentum_buffer"] for s in states if "momentum_buffer" in s)
    share = 1 - cell.plan.params["momentum"]
    first = sum(gradient(cell, 0, 0, rank)[0].flat[0] for rank in range(2)) / 2
    found = float(momentum.flatten()[0]) / (share * first)
    return {"dtype": str(momentum.dtype), "times": found}


def all_cases(root: Path) -> dict[str, Case]:
    courses: dict[str, Case] = {cell.name: lambda c=cell: run_course(c) for cell in CELLS}  # type: ignore[misc]
    for cell in RESUMED:
        courses[f"resume/{cell.name}"] = lambda c=cell: run_and_resume(c, root)  # type: ignore[misc]
    for precision in ("bf16", "fp16"):
        courses[f"bare-muon/{precision}"] = lambda p=precision: bare_muon_momentum(p)  # type: ignore[misc]
    return {**courses, "bare": lambda: bare_steps_after_a_bad_one(SUMMED_AND_OFFLOADED)}


if __name__ == "__main__":
    os.environ["TORCH_COMPILE_DISABLE"] = os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Muon: most of a minute
    run_cases(all_cases(Path(sys.argv[1])), Path(sys.argv[1]), RANK)
