"""Run by the one rank of test_gpu.py: the engine, the replay and 4-bit weights, in one process.

Run as ``python -m tests.gpu.ranks_gpu OUT_DIR SMALL_MODEL LARGE_MODEL``. On a CPU all but ``memory`` runs
too, with another optimizer than the fused one.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dslaunch.config.memory.model import load_model_facts
from dslaunch.config.memory.of_run import setup_of_run
from dslaunch.config.memory.planner import plan_memory
from dslaunch.core.plan import ModelPlan, QuantizationPlan
from dslaunch.train.dist import init_world
from dslaunch.train.model import load_base_model
from dslaunch.train.quantization import dequantised
from dslaunch.train.stopping import StopRequest
from dslaunch.train.worker import train_rank
from tests.gpu.cells import CELLS, FUSED, MEMORY, REPLAYED
from tests.support.plans import make_plan, save_plan, write_questions
from tests.train.engine import cases_matrix, matrix
from tests.train.engine.matrix import Cell
from tests.train.rank_cases import RANK, Case, engine_for, run_cases
from tests.train.replay.plants import PLANTS
from tests.train.replay.ranks_replay import trace

NF4 = QuantizationPlan(load_in_4bit=True)


def run_fused(cell: Cell) -> dict[str, Any]:
    """The course with what DeepSpeed makes of ``AdamW`` on its own account."""
    settings = cases_matrix.settings(cell)
    del settings["optimizer"]["params"]["torch_adam"]
    records = []
    with ExitStack() as stack:
        model = cases_matrix.TwoWeights(matrix.start(cell))
        engine = stack.enter_context(engine_for(model, settings, lr_scheduler=cases_matrix.falling_rate))
        for step in range(len(matrix.expected(cell))):
            records.append(cases_matrix.run_window(engine, cell, step))
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        return {"steps": records, "optimizer": type(inner).__name__}


def logits_of_4_bit(model_dir: Path, dtype: torch.dtype) -> dict[str, Any]:
    """How far the logits are from those of what the codes stand for, and from those of the whole weights."""
    device = init_world().device
    ids = torch.arange(40, device=device).unsqueeze(0)

    def plan(quantization: QuantizationPlan | None) -> ModelPlan:
        return ModelPlan(path=str(model_dir), kind="directory", quantization_config=quantization)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.to(device).train()(input_ids=ids).logits.float()
        return found

    found = logits(load_base_model(plan(NF4), dtype))
    return {
        "device": found.device.type,
        "from_codes": largest(found - logits(dequantised(load_base_model(plan(NF4), dtype), torch.float32))),
        "from_whole": largest(found - logits(load_base_model(plan(None), torch.float32))),
    }


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


def memory(model_dir: Path, out_dir: Path, name: str) -> dict[str, Any]:
    """The highest point of a run, as torch's allocator saw it, and as it was planned."""
    data = write_questions(out_dir / "memory.jsonl", 600)
    plan = make_plan(
        out_dir / name.replace(", ", "-"), model_dir, data, world_size=1, max_steps=3, precision="bf16",
        packing=True, max_length=1024, **MEMORY[name],
    )  # fmt: skip
    plan = replace(plan, launch=replace(plan.launch, device_type="cuda"))
    save_plan(plan)
    planned = plan_memory(setup_of_run(plan, load_model_facts(model_dir)))
    world = init_world()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_rank(plan, world, StopRequest(), resume=False)
    return {
        "measured": torch.cuda.max_memory_allocated() - before,
        "planned": planned.peak_bytes,
        "binds": planned.binds,
        "reserved": torch.cuda.max_memory_reserved(),
    }


def all_cases(out_dir: Path, small: Path, large: Path) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in MEMORY:  # before others leave something behind
        cases[f"memory/{name}"] = lambda n=name: memory(large, out_dir, n)  # type: ignore[misc]
    cases |= cases_matrix.cases_of(CELLS)
    for name in REPLAYED:
        cases[f"replay/{name}"] = lambda n=name: trace(PLANTS[n])  # type: ignore[misc]
    for dtype in (torch.float32, torch.bfloat16):
        cases[f"nf4/{dtype}"] = lambda d=dtype: logits_of_4_bit(small, d)  # type: ignore[misc]
    for cell in FUSED:  # last, since the first of them compiles
        cases[f"fused/{cell.name}"] = lambda c=cell: run_fused(c)  # type: ignore[misc]
    return cases


if __name__ == "__main__":
    OUT, *MODELS = map(Path, sys.argv[1:])
    run_cases(all_cases(OUT, *MODELS), OUT, RANK)
