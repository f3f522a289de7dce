"""Run by the ranks of the tests beside it: every plant in one set of processes.

Run as ``python -m tests.train.replay.ranks_replay OUT_DIR``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from dslaunch.train.corpus import Corpus
from dslaunch.train.data.sampler import BatchSchedule
from dslaunch.train.dist import init_world
from dslaunch.train.engine import TorchEngine, TorchSettings, initialize_torch
from dslaunch.train.fp32_modules import Fp32Modules, set_dtypes
from dslaunch.train.model import DTYPES
from dslaunch.train.objectives.sft import SftObjective
from dslaunch.train.replay.describe import describe
from dslaunch.train.replay.passes import Passes
from dslaunch.train.replay.recent import RecentSteps
from dslaunch.train.replay.trace import Trace
from dslaunch.train.replay.window import Window, build_window, take_rng
from tests.train.rank_cases import RANK, WORLD_SIZE, Case, config, engine_for, run_cases
from tests.train.replay.planted import LargeForWeight, NanForOneDraw, PlantedLM, make_corpus
from tests.train.replay.plants import ALONE, PLANTS, SOUND, Plant, planted_lm

ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
MICRO, ACCUMULATION = 2, 2


def window_of(corpus: Corpus, loss_scale: float) -> Window:
    schedule = BatchSchedule(
        num_units=len(corpus), train_batch_size=MICRO * ACCUMULATION * WORLD_SIZE,
        train_micro_batch_size_per_gpu=MICRO, gradient_accumulation_steps=ACCUMULATION,
        world_size=WORLD_SIZE, seed=0, max_steps=1, shuffle=False,
    )  # fmt: skip
    return build_window(
        1,
        corpus=corpus,
        micro_batches=schedule.micro_batches(0, RANK),
        num_tokens=corpus.count_supervised(schedule.window_units(0)),
        loss_scale=loss_scale,
        rng=take_rng(),
    )


def trace(plant: Plant, **options: Any) -> dict[str, Any]:
    settings = config(plant.stage, plant.precision, micro=MICRO, accumulation=ACCUMULATION, optimizer=ADAM)
    window = window_of(
        make_corpus(plant.num_samples, plant.triggers, packing=plant.packing), plant.loss_scale
    )
    model: Any = plant.build()
    if plant.engine == "torch":
        return trace_engine(torch_engine(model, plant.precision), window, **options)
    if not plant.fp32_modules:
        with engine_for(model, settings) as engine:
            return trace_engine(engine, window, **options)
    fp32 = Fp32Modules(model, plant.fp32_modules)
    fp32.add_borders(DTYPES[plant.precision])
    set_dtypes(model, DTYPES[plant.precision], fp32.parameters)
    groups = fp32.groups(list(model.parameters()))
    with fp32.admitted(), engine_for(model, settings, model_parameters=groups) as engine:
        return trace_engine(engine, window, **options)


def torch_engine(model: torch.nn.Module, precision: Any) -> TorchEngine:
    init_world()
    return initialize_torch(
        model,
        TorchSettings(precision=precision, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=1.0),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        torch.device("cpu"),
        allow_emulated_fp16=True,
    )


def trace_engine(engine: Any, window: Window, **options: Any) -> dict[str, Any]:
    before = count_hooks(engine.module)
    passes = Passes(engine, SftObjective(engine, engine.module, engine.device))
    report = Trace(passes, window, rank=RANK).run(**options)
    after = count_hooks(engine.module)
    return {**report, "text": describe(report), "hooks_before": before, "hooks_left": after}


def count_hooks(module: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def planted(plant: Plant) -> Case:
    return lambda: trace(plant)


def same_draws() -> dict[str, Any]:
    """A fault that only one random number sets off is found with the state that was kept, and only so."""
    torch.manual_seed(5)
    settings = config(1, "bf16", micro=MICRO, accumulation=ACCUMULATION, optimizer=ADAM)
    with engine_for(PlantedLM(NanForOneDraw()), settings) as engine:
        torch.manual_seed(5 if RANK == 0 else 6)
        window = window_of(make_corpus(8, ()), 1.0)
        torch.manual_seed(7)
        return trace_engine(engine, window)


def off() -> dict[str, Any]:
    """What a step leaves behind that went well: no hook on a module or a parameter."""
    settings = config(2, "bf16", micro=MICRO, accumulation=1, optimizer=ADAM)
    recent = RecentSteps()
    with engine_for(PlantedLM(), settings) as engine:
        objective = SftObjective(engine, engine.module, engine.device)
        before = count_hooks(engine.module), count_parameter_hooks(engine.module)
        recent.begin(0, engine.loss_scale)
        window = window_of(make_corpus(8, ()), 1.0)
        engine.backward_token_sum(objective.token_loss(window.batches[0]).sum, num_tokens=20)
        result = engine.step()
        assert result is not None
        recent.end(result)
        after = count_hooks(engine.module), count_parameter_hooks(engine.module)
    return {"before": before, "after": after, "suspect": recent.suspect(None)}


def count_parameter_hooks(module: torch.nn.Module) -> int:
    return sum(len(p._backward_hooks or ()) for p in module.parameters())


def gradients_in_sum() -> dict[str, Any]:
    """40000 from each of the four micro-batches."""
    return trace(Plant(planted_lm(LargeForWeight), 1, "fp16", {}, triggers=(0, 2, 4, 6)))


def anomaly(name: str) -> Case:
    return lambda: trace(PLANTS[f"nan behind a where in the backward, {name}"], detect_anomaly=True)


if __name__ == "__main__":
    chosen = {**PLANTS, **SOUND}
    if sys.argv[2:] == ["alone"]:
        run_cases({name: planted(chosen[name]) for name in ALONE}, Path(sys.argv[1]), RANK)
        sys.exit()
    cases = {name: planted(plant) for name, plant in chosen.items()}
    cases |= {"off": off, "sum": gradients_in_sum, "same draws": same_draws}
    cases |= {"anomaly 2": anomaly("stage 2 fp16"), "anomaly 3": anomaly("stage 3 bf16")}
    run_cases(cases, Path(sys.argv[1]), RANK)
