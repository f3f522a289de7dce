"""Runs the cells of matrix.py on real engines."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dslaunch.train.engine import Diverged, Engine
from tests.oracles import mixed_precision as oracle
from tests.train.engine import matrix
from tests.train.engine.matrix import Cell
from tests.train.rank_cases import (
    RANK,
    WORLD_SIZE,
    Case,
    bare_deepspeed,
    config,
    engine_for,
    master,
    shared_folder,
)


class TwoWeights(torch.nn.Module):
    """loss = sum(w * x) over two parameters of odd and even size; the sum is fp32."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        first, second = torch.tensor(values, dtype=torch.float32).split(matrix.SIZES)
        self.first = torch.nn.Parameter(first.clone())
        self.second = torch.nn.Parameter(second.clone().reshape(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.to(self.first.dtype).split(matrix.SIZES)
        products = torch.cat([self.first * first, (self.second * second.reshape(2, 3)).flatten()])
        return products.float().sum()


def settings(cell: Cell) -> dict[str, Any]:
    adamw = {"lr": oracle.LR, "betas": list(oracle.BETAS), "eps": oracle.EPS,
             "weight_decay": oracle.WEIGHT_DECAY, "torch_adam": cell.optimizer == "AdamW"}  # fmt: skip
    sgd = {"lr": oracle.LR, "momentum": oracle.MOMENTUM, "dampening": oracle.DAMPENING}
    params = sgd if cell.optimizer == "SGD" else adamw
    value = config(
        cell.stage,
        cell.dtype,
        accumulation=cell.accumulation,
        clipping=cell.clipping,
        optimizer={"type": "SGD" if cell.optimizer == "SGD" else "AdamW", "params": params},
    )
    if cell.precision == "fp16 static":
        value["fp16"]["loss_scale"] = matrix.STATIC_SCALE
    if cell.precision == "fp16 dynamic":
        value["fp16"] |= {
            "initial_scale_power": matrix.INITIAL_POWER, "loss_scale_window": matrix.WINDOW,
            "hysteresis": matrix.HYSTERESIS, "min_loss_scale": matrix.MINIMUM,
        }  # fmt: skip
    if cell.precision == "bf16 summed in fp32":
        value["data_types"] = {"grad_accum_dtype": "fp32"}
    if cell.stage == 3:
        value["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if cell.offload:
        value["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        value["zero_force_ds_cpu_optimizer"] = False
    return value


def falling_rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda applied: 1 - 0.03 * applied)


def run_window(engine: Engine, cell: Cell, step: int) -> dict[str, Any]:
    for k in range(cell.accumulation):
        x = torch.tensor(matrix.inputs(cell, step)[RANK % cell.ranks, k], dtype=torch.float32)
        engine.backward(engine(x.to(engine.device)))
        result = engine.step()
    assert result is not None
    weights = [value for p in engine.module.parameters() for value in master(p)]
    return {
        "lr": result.lr, "scale": result.loss_scale, "loss": result.loss, "skipped": result.skipped,
        "norm": result.grad_norm, "clipped": result.grad_norm_clipped, "weights": weights,
    }  # fmt: skip


def run_cell(cell: Cell) -> dict[str, Any]:
    """The whole course; ``error``: how it stopped. ``state``: what a checkpoint must not have lost."""
    assert cell.ranks == WORLD_SIZE, "a cell runs on as many ranks as it says"
    records: list[dict[str, Any]] = []
    error = None
    with ExitStack() as stack:
        engine = _engine(stack, cell)
        for step in range(matrix.STEPS):
            if step == matrix.TURN and cell.course != "straight":
                engine = _turn(stack, engine, cell)
            try:
                records.append(run_window(engine, cell, step))
            except Diverged as caught:
                error = caught.verdict
                break
        return {"steps": records, "error": error, "skipped": engine.skipped_steps,
                "trained_samples": engine.trained_samples, "global_step": engine.global_step}  # fmt: skip


def _engine(stack: ExitStack, cell: Cell) -> Engine:
    model = TwoWeights(matrix.start(cell))
    return stack.enter_context(engine_for(model, settings(cell), lr_scheduler=falling_rate))


def _turn(stack: ExitStack, engine: Engine, cell: Cell) -> Engine:
    """Save, and go on from there: in a new engine, or in this one after steps that are thrown away."""
    folder = shared_folder()
    engine.deepspeed.save_checkpoint(folder, tag="turn")
    if cell.course == "resumed":
        engine = _engine(stack, cell)
    else:
        for step in (2, 3):
            run_window(engine, cell, step)
    loaded, _ = engine.deepspeed.load_checkpoint(folder, tag="turn")
    assert loaded is not None
    torch.distributed.barrier()
    if RANK == 0:
        shutil.rmtree(folder)
    return engine


def run_bare(cell: Cell) -> dict[str, Any]:
    """The same course on DeepSpeed's engine without a cure, up to the step after the first growth."""
    records = []
    model = TwoWeights(matrix.start(cell))
    with bare_deepspeed(model, settings(cell), lr_scheduler=falling_rate) as ds:
        for step in range(matrix.TURN + 2):
            for k in range(cell.accumulation):
                x = torch.tensor(matrix.inputs(cell, step)[RANK % cell.ranks, k], dtype=torch.float32)
                ds.backward(ds(x))
                ds.step()
            records.append([value for p in ds.module.parameters() for value in master(p)])
    return {"weights": records}


def cases_of(cells: list[Cell]) -> dict[str, Case]:
    return {f"matrix/{c.name}": lambda c=c: run_cell(c) for c in cells if c.ranks == WORLD_SIZE}  # type: ignore[misc]


BARE = Cell("fp16 dynamic", 2, 1, 0.0, False, "SGD", "straight", 2)


def all_cases() -> dict[str, Case]:
    cases = cases_of([*matrix.pairwise_cells(), *matrix.further_cells()])
    if WORLD_SIZE == BARE.ranks:
        cases["matrix-bare"] = lambda: run_bare(BARE)
        cases["matrix-bare-offload"] = lambda: run_bare(matrix.further_cells()[0])
    return cases


def main(out_dir: Path, names: list[str]) -> None:
    """The named cells, or all of this number of ranks. For benchmarks/numerics.py."""
    from tests.train.rank_cases import run_cases

    every = [*matrix.all_cells(), *(cell for kind in matrix.COMPILED for cell in matrix.compiled_cells(kind))]
    cells = [cell for cell in every if not names or cell.name in names]
    run_cases(cases_of(cells), out_dir, RANK)


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]), sys.argv[2:])
